"""Tokenizers in other files than ``tokenizer.json``: read, or what to install."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from pagedcore import EngineConfig
from pagedcore.errors import MissingDependency
from pagedcore.models.diagnosis import diagnose
from pagedcore.models.loading import load_tokenizer
from pagedcore.tokenizer import other_files
from pagedcore.tokenizer.tokenizer import HFTokenizer
from support.families import config_of, tiny_model
from support.text_builders import byte_level

TEXT = "hello world 123, where are you?"


def test_vocabulary_and_merges_are_a_tokenizer(tmp_path: Path) -> None:
    """Two files, and the architecture that says how text is split."""
    own = json.loads((backend := byte_level()).to_str())["model"]
    merges = [one if isinstance(one, str) else " ".join(one) for one in own["merges"]]
    (tmp_path / "vocab.json").write_text(json.dumps(own["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    config_of("gpt2").save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path, EngineConfig())
    assert tokenizer is not None
    assert tokenizer.encode(TEXT) == backend.encode(TEXT).ids
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_tekken_is_a_tokenizer(tmp_path: Path) -> None:
    """Special tokens come first, then the bytes and what they are merged to, by rank."""
    words = [*(bytes([one]) for one in range(256)), b"he", b"ll", b"hell", b"hello"]
    vocabulary = [{"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": None}
                  for rank, word in enumerate(words)]
    special = [{"rank": rank, "token_str": name, "is_control": True}
               for rank, name in enumerate(["<unk>", "<s>", "</s>"])]
    settings = {"pattern": r"\s+|\w+|[^\s\w]+", "num_vocab_tokens": len(words), "default_vocab_size": len(words) + 10,
                "default_num_special_tokens": 10, "version": "v3"}  # fmt: skip
    content = {"config": settings, "vocab": vocabulary, "special_tokens": special}
    (tmp_path / "tekken.json").write_text(json.dumps(content))
    config_of("mistral").save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path, EngineConfig())
    assert tokenizer is not None
    assert tokenizer.encode("hello é", add_special_tokens=False) == [269, 42, *(one + 10 for one in "é".encode())]
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


@pytest.mark.parametrize(("name", "packages"), [
    ("qwen.tiktoken", "tiktoken"), ("tokenizer.model", "sentencepiece and protobuf"),
])
def test_what_has_to_be_installed_is_said(
    name: str, packages: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the error, by doctor, and where a model used to run with token ids alone by the log."""
    monkeypatch.setattr(other_files, "_is_installed", lambda package: False)
    tiny_model("llama").save_pretrained(tmp_path)
    (tmp_path / name).write_bytes(b"not text")
    with pytest.raises(MissingDependency, match=rf"tokenizer: it is in {name}, for which {packages} must be installed"):
        HFTokenizer.from_directory(tmp_path)
    assert diagnose(tmp_path)["tokenizer"] == f"none: {name} takes {packages}, and prompts are token ids"
    if name != "tokenizer.model":
        assert load_tokenizer(tmp_path, EngineConfig()) is None
        assert f"it is in {name}" in caplog.text
