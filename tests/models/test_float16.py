"""Weights of float16 on a CPU: computed in float32, exactly; and what "auto" says about other formats."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedcore import Engine, SamplingParams
from pagedcore.cli.size import size_model
from pagedcore.errors import InvalidConfig
from pagedcore.models.checkpoints.pretrained import load_pretrained
from support.families import tiny_model

PROMPT = [5, 7, 11, 13, 17, 19]
GREEDY = SamplingParams(max_tokens=6, logprobs=1, ignore_eos=True)


def save(directory: Path, family: str, dtype: torch.dtype) -> Path:
    """Save a tiny model in a number format."""
    tiny_model(family, dtype=dtype).save_pretrained(directory)
    return directory


def answer(model: Any, **settings: Any) -> Any:
    """Return tokens and log-probabilities of a greedy completion, alone and in company."""
    with Engine.from_pretrained(model, num_kv_blocks=16, **settings) as engine:
        assert engine._runner.backend.is_schedule_invariant  # type: ignore[attr-defined]
        assert engine._runner.backend.dtype == torch.float32  # type: ignore[attr-defined]
        alone = engine.generate([PROMPT], GREEDY, show_progress=False)[0].outputs[0]
        mixed = engine.generate([PROMPT[:2], PROMPT, [3] * 9], GREEDY, show_progress=False)[1].outputs[0]
    assert (alone.token_ids, alone.logprobs) == (mixed.token_ids, mixed.logprobs)
    return alone.token_ids, alone.logprobs


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_float16_is_computed_in_float32_exactly(tmp_path: Path, family: str) -> None:
    """Tokens and bits are those of the same checkpoint in float32, whatever the company, by the quick path, by
    transformers' and for a loaded model; and the tokens are those of transformers' own forward in float32.
    """
    save(tmp_path, family, torch.float16)
    expected = answer(tmp_path, dtype="float32")
    assert answer(tmp_path, dtype="float16") == expected
    half = load_pretrained(tmp_path, dtype="float16")
    assert half.dtype == torch.float16
    assert answer(half) == expected
    plain, ids = load_pretrained(tmp_path, dtype="float32"), list(PROMPT)
    for token_id in expected[0]:
        with torch.inference_mode():
            assert int(plain(torch.tensor([ids])).logits[0, -1].argmax()) == token_id
        ids.append(token_id)


def test_weights_of_other_formats_are_rounded_to_float16_first(tmp_path: Path) -> None:
    """What is asked for is what is computed with: float32 weights lose the bits that float16 does not have."""
    save(tmp_path, "llama", torch.float32)
    rounded = tiny_model("llama")
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.copy_(parameter.half())
    assert answer(tmp_path, dtype="float16") == answer(rounded)


@pytest.mark.parametrize("value", [1e5, float("inf"), float("nan")])
def test_weights_that_float16_does_not_have_are_refused(tmp_path: Path, value: float) -> None:
    """They would be infinite; the message names the weight, the limit and what to take."""
    path = save(tmp_path, "llama", torch.float32) / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = value
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(InvalidConfig, match=r"layers\.1\.mlp\.up_proj\.weight .* 65504.* float32"):
        Engine.from_pretrained(tmp_path, dtype="float16", num_kv_blocks=4)


def test_the_size_is_that_of_float32(tmp_path: Path) -> None:
    """``pagedcore size`` counts what an engine allocates."""
    save(tmp_path, "llama", torch.float16)
    sizes = [size_model(tmp_path, dtype=dtype, memory="1GiB") for dtype in ("float16", "float32")]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(("stored", "chosen", "words"), [
    ("float16", "bfloat16", "WARNING .*'auto': weights of float16 are rounded to bfloat16.*dtype='float16' keeps"),
    ("float32", "bfloat16", "WARNING .*'auto': weights of float32 are rounded to bfloat16.*dtype='float32' keeps"),
    ("float16", "float32", "INFO .*'auto': weights of float16 are computed in float32, exactly"),
    ("bfloat16", "bfloat16", ""),
])
def test_auto_says_once_what_becomes_of_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    family: str, stored: str, chosen: str, words: str,
) -> None:
    """A warning where bits are lost, a remark where not, nothing where the formats are one; nothing if it was asked."""
    save(tmp_path, family, getattr(torch, stored))
    caplog.set_level(logging.INFO, "pagedcore")
    for asked in (False, True):
        caplog.clear()
        load_pretrained(tmp_path, dtype=chosen, is_quick=True, is_chosen=asked)
        lines = [f"{record.levelname} {record.getMessage()}" for record in caplog.records]
        assert len(lines) == (bool(words) and not asked)
        if lines:
            assert re.match(words, lines[0])


def test_an_engine_tells_whether_the_format_was_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of the setting it is "auto" alone that is explained."""
    save(tmp_path, "llama", torch.float16)
    caplog.set_level(logging.INFO, "pagedcore")
    for dtype, count in (("auto", 1), ("bfloat16", 0)):
        caplog.clear()
        Engine.from_pretrained(tmp_path, dtype=dtype, num_kv_blocks=4).close()
        assert len([record for record in caplog.records if "'auto'" in record.getMessage()]) == count
