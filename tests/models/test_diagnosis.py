"""What ``pagedcore doctor MODEL`` says is what an engine then does."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedcore import Engine
from pagedcore.cli.doctor import diagnosis
from pagedcore.config.memory_budget import format_memory
from pagedcore.models.checkpoints import pretrained
from pagedcore.models.decoders.fused import FusedDecoder
from pagedcore.models.diagnosis import diagnose
from support.families import tiny_model

#: Architecture, changes of its configuration, whether its files are read without transformers, and by fused kernels.
CASES: dict[str, tuple[str, dict[str, Any], bool, bool]] = {
    "quick": ("llama", {}, True, True),
    "window": ("mistral", {}, True, True),
    "other family": ("helium", {}, False, False),
    "convolutions as linears": ("gpt2", {}, False, False),
    "experts": ("mixtral", {}, True, True),
    "experts of another family": ("qwen2_moe", {}, False, False),
    "multipliers": ("granite", {}, True, True),
    "unknown experts": ("dbrx", {}, False, False),
    "fused, but for its activation": ("llama", {"hidden_act": "gelu"}, False, False),
}


@pytest.mark.parametrize("name", CASES)
def test_the_diagnosis_is_what_an_engine_does(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Path, decoder and promise agree with those of an engine, and no weight is read to know them."""
    family, changes, is_quick, is_fused = CASES[name]
    tiny_model(family, **changes).save_pretrained(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.Module, "load_state_dict", lambda *_: pytest.fail("weights were read"))
        patch.setattr("transformers.PreTrainedModel.from_pretrained", lambda *_: pytest.fail("weights were read"))
        patch.setattr("pagedcore.models.checkpoints.pretrained.read_model", lambda *_: pytest.fail("weights were read"))
        facts = diagnose(tmp_path)
    assert facts["files"].startswith("read without transformers") == is_quick
    assert facts["decoder"].startswith("fused kernels") == is_fused
    with Engine.from_pretrained(tmp_path, num_kv_blocks=4) as engine:
        backend: Any = engine._runner.backend
    assert isinstance(backend._decoder, FusedDecoder) == is_fused
    assert facts["schedule"].startswith("results are the same bits") == backend.is_schedule_invariant
    assert facts["speculation"].startswith("none") != backend.is_schedule_invariant
    assert all(kind in facts["schedule"] for kind in backend._decoder.other_matrices)
    assert facts["number format"].startswith(str(backend.dtype).removeprefix("torch."))


def test_reasons_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why transformers loads a model, what becomes of its format, and who reads its tokenizer are said."""
    tiny_model("llama", dtype=torch.float16).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "something_new": 1}))
    machine = type("M", (), {"default_dtype": "bfloat16"})
    monkeypatch.setattr(pretrained, "this_machine", lambda: machine)
    facts = diagnose(tmp_path)
    assert "something_new" in facts["files"]
    assert "the files have float16: rounded" in facts["number format"]
    assert facts["tokenizer"] == "none: prompts are token ids"
    assert facts["quantisation"] == "none"
    assert facts["sampling"].endswith(": nothing")
    settings = {"top_p": 0.8, "suppress_tokens": [7], "min_length": 3}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    told = diagnose(tmp_path)["sampling"]
    assert told.endswith(": top_p 0.8, suppress_tokens (7,); not applied: min_length (not supported)")


@pytest.mark.parametrize(("family", "changes", "reason"), [
    ("helium", {}, "the fused kernels know llama, mistral"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv bounds"),
    ("granite", {"hidden_act": "gelu"}, "its activation is 'gelu'"),
    ("gemma2", {"intermediate_size": 100}, "its sizes"),
])
def test_why_a_model_keeps_its_own_modules(tmp_path: Path, family: str, changes: dict[str, Any], reason: str) -> None:
    """The decoder's fact says what the fused kernels do not know."""
    tiny_model(family, **changes).save_pretrained(tmp_path)
    decoder = diagnose(tmp_path)["decoder"]
    assert decoder.startswith("transformers' modules with packed products: ")
    assert reason in decoder


def test_the_demo_and_a_model_that_cannot_run(tmp_path: Path) -> None:
    """The command answers for a name, and gives the reason of a refusal as a fact."""
    facts = diagnosis("demo")
    assert facts["runs here"] == "yes"
    assert facts["files"] == facts["tokenizer"] == "read without transformers"
    assert facts["decoder"] == "fused kernels"
    with Engine.from_pretrained("demo", num_kv_blocks=4) as engine:
        stats, form = engine.stats(), engine.chat_format
    assert facts["context"] == f"{stats.max_model_len:,} tokens"
    of_sequence = stats.kv_bytes // 4 * -(-stats.max_model_len // stats.block_size)
    assert f"of a sequence of {stats.max_model_len:,} tokens {format_memory(of_sequence)};" in facts["memory"]
    assert facts["tool calls"] == "hermes" == type(form.tools).__name__.removesuffix("Format").lower()
    assert (facts["reasoning"], form.reasoning) == ("none is known", None)
    assert facts["refused"].startswith("nothing")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "rwkv"}))
    assert "'rwkv'" in diagnosis(str(tmp_path))["runs here"]


def test_what_a_model_refuses_is_said_before_a_weight_is_read(tmp_path: Path) -> None:
    """Files of which only the heads are left tell the context, the memory, and what cannot be asked."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "rope_theta": 1e4}
    tiny_model("phi3", original_max_position_embeddings=64, rope_parameters=rope).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    data = file.read_bytes()
    os.truncate(file, 8 + int.from_bytes(data[:8], "little"))
    facts = diagnosis(str(tmp_path))
    assert facts["context"] == "256 tokens; with its 65th token a sequence is computed again, by the long factors"
    assert "of a sequence of 256 tokens" in facts["memory"]
    assert facts["refused"] == "text and chats, as there is no tokenizer"
    assert facts["tool calls"].startswith("in no format")
