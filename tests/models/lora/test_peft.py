"""The same directories by PEFT itself, unmerged and merged, where it is installed."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from models.lora.test_adapted_models import LENGTHS, Adapted, error

peft = pytest.importorskip("peft", reason="the oracle of adapters")


@pytest.mark.parametrize("family", ["qwen2", "gpt2", *[
    pytest.param(one, marks=pytest.mark.slow)
    for one in ("llama", "phi3", "gemma3_text", "granite", "gpt_neox", "qwen3")]])
def test_rows_are_what_peft_computes(family: str, tmp_path: Path) -> None:
    """By the same two files, whose ranks and scales have patterns."""
    adapted = Adapted(family, tmp_path)
    found = adapted.in_company()
    for number, slot in enumerate(adapted.slots):
        if not slot:
            continue
        model = peft.PeftModel.from_pretrained(copy.deepcopy(adapted.model), tmp_path / str(slot))
        for is_merged in (False, True):
            whole = model.merge_and_unload() if is_merged else model
            with torch.inference_mode():
                expected = whole(adapted.sequences[number][None]).logits[0]
            assert error([found[number]], [expected]) < 1e-4, (LENGTHS[number], is_merged)


def test_a_directory_that_peft_has_saved_is_read(tmp_path: Path) -> None:
    """With all settings that its present version writes, an expression for layers, and matrices that it has begun."""
    adapted = Adapted("qwen2", tmp_path)
    config = peft.LoraConfig(
        r=6, lora_alpha=3, target_modules=r".*\.(q_proj|down_proj)", init_lora_weights=False, use_rslora=True,
        lora_dropout=0.1, task_type="CAUSAL_LM")
    model = peft.get_peft_model(copy.deepcopy(adapted.model), config).eval()
    model.save_pretrained(tmp_path / "saved")
    adapted.backend.drop_adapter(1)
    adapted.backend.put_adapter(1, adapted.backend.read_adapter(str(tmp_path / "saved")))
    with torch.inference_mode():
        expected = model(adapted.sequences[1][None]).logits[0]
    assert error([adapted.whole(1)], [expected]) < 1e-4
