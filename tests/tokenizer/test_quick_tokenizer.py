"""Tokenizers read without transformers: the same tokens and text as with it, or left to it."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from pagedcore.demo_model import DEMO_MODEL_DIR
from pagedcore.tokenizer.quick_tokenizer import QuickTokenizer, read_tokenizer
from pagedcore.tokenizer.tokenizer import HFTokenizer
from support.text_builders import BUILDERS, byte_level, make_fast

TEXTS = [
    "the quick dog </s><eos>, ok ? yes", "Größe 日本語 🙂 \uff46 e\u0301", "", "  1, 2, 34\n\n\tdon't <|im_end|>x",
]
CHAT = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}it: {% endif %}"
)


def save(directory: Path, backend: Tokenizer | None = None, **settings: Any) -> Path:
    """Save a tokenizer that is quick to read; ``settings`` change its configuration."""
    special = {"eos_token": "<|im_end|>", "pad_token": "<eos>"}
    PreTrainedTokenizerFast(tokenizer_object=backend or byte_level(), **special).save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": CHAT, **settings}))
    return directory


def of_qwen() -> Tokenizer:
    """A byte-level tokenizer with the steps of Qwen2."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def assert_same(directory: Path) -> None:
    """The tokenizer that is read here and that of transformers do the same."""
    quick, theirs = read_tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    assert quick is not None
    one, other = HFTokenizer(quick), HFTokenizer(theirs)
    for text in TEXTS:
        for adds in (True, False):
            assert one.encode(text, add_special_tokens=adds) == other.encode(text, add_special_tokens=adds)
        ids = other.encode(text)
        assert one.decode(ids) == other.decode(ids)
        assert [one.token_text(token_id) for token_id in ids] == [other.token_text(token_id) for token_id in ids]
    assert one.eos_token_ids == other.eos_token_ids
    assert quick.get_vocab() == theirs.get_vocab()
    assert quick.added_tokens_decoder.keys() == {*theirs.added_tokens_decoder, *theirs.all_special_ids}
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes", "name": None}]
    assert one.encode_chat(chat) == other.encode_chat(chat)
    assert one.encode_chat_turn(chat[:1], [2]) == other.encode_chat_turn(chat[:1], [2])


@pytest.mark.parametrize("kind", BUILDERS)
def test_a_quick_tokenizer_is_the_one_of_transformers(tmp_path: Path, kind: str) -> None:
    """Every kind that is saved in one file encodes, decodes and renders alike."""
    fast = deepcopy(make_fast(kind))
    fast.chat_template = CHAT
    fast.save_pretrained(tmp_path)
    assert_same(tmp_path)


def test_settings_of_lengths_and_padding_change_nothing(tmp_path: Path) -> None:
    """Padding and truncation of the file are off, and settings about them are known."""
    backend = byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    assert_same(save(tmp_path, backend, padding_side="left", model_max_length=10**30, add_bos_token=True))


def test_the_class_of_qwen_is_known(tmp_path: Path) -> None:
    """It builds its own steps: a file that has the same ones is read, any other one is left to it."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    settings = {"tokenizer_class": "Qwen2Tokenizer", "add_prefix_space": False, "errors": "replace"}
    assert_same(save(tmp_path, of_qwen(), **settings))
    for spoil in ("normalizer", "pre_tokenizer"):
        other = of_qwen()
        setattr(other, spoil, normalizers.NFKC() if spoil == "normalizer" else pre_tokenizers.ByteLevel(False))
        assert read_tokenizer(save(tmp_path, other, **settings)) is None
    assert read_tokenizer(save(tmp_path, byte_level(), **settings)) is None


def test_a_template_of_its_own_file_comes_first(tmp_path: Path) -> None:
    """As transformers has it."""
    save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(CHAT.replace(": ", " - "))
    assert_same(tmp_path)
    tokenizer = HFTokenizer.from_directory(tmp_path)
    assert tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "hello"}])) == "user - hello\nit - "


@pytest.mark.parametrize("settings", [
    {"tokenizer_class": "LlamaTokenizerFast"}, {"tokenizer_class": None}, {"tokenizer_class": ["TokenizersBackend"]},
    {"auto_map": {"AutoTokenizer": ["evil.T", None]}}, {"split_special_tokens": True}, {"add_prefix_space": True},
    {"eos_token": "the"}, {"eos_token": "<nowhere>"}, {"eos_token": 2}, {"eos_token": {"no": "content"}},
    {"image_token": "<image>"}, {"extra_special_tokens": {"image_token": "<image>"}},
    {"additional_special_tokens": ["<nowhere>"]}, {"extra_special_tokens": 7},
    {"chat_template": [{"name": "default", "template": "x"}]}, {"something_new": 1},
    {"added_tokens_decoder": {"0": {"content": "<nowhere>", "special": True}}}, {"added_tokens_decoder": 7},
    {"added_tokens_decoder": {"2": {"content": "<|im_end|>", "special": True, "lstrip": True}}},
], ids=str)
def test_settings_with_anything_unknown_are_left_to_transformers(tmp_path: Path, settings: dict[str, Any]) -> None:
    """A setting that may change tokens makes a tokenizer that is not read here; no error escapes."""
    assert read_tokenizer(save(tmp_path)) is not None
    assert read_tokenizer(save(tmp_path, **settings)) is None


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\x00", b"[" * 10**5, None], ids=repr)
def test_damaged_files_are_left_to_transformers(tmp_path: Path, name: str, content: bytes | None) -> None:
    """Its refusal is a typed error already."""
    path = save(tmp_path) / name
    path.unlink() if content is None else path.write_bytes(content)
    assert read_tokenizer(tmp_path) is None


def test_files_of_earlier_versions_are_left_to_transformers(tmp_path: Path) -> None:
    """Special tokens in files of their own are not read here, unless the settings list all added tokens."""
    save(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<eos>"}')
    assert read_tokenizer(tmp_path) is None
    added = {str(number): {"content": token.content, "special": token.special, "normalized": token.normalized}
             for number, token in byte_level().get_added_tokens_decoder().items()}
    assert_same(save(tmp_path, added_tokens_decoder=added))


def test_what_is_declared_to_be_all_is_all(tmp_path: Path) -> None:
    """transformers builds Qwen2's steps for a model of that type; the demo model was trained with those of its file."""
    ids = Tokenizer.from_file(str(DEMO_MODEL_DIR / "tokenizer.json")).encode("12, 13, 14.").ids
    assert HFTokenizer.from_directory(DEMO_MODEL_DIR).encode("12, 13, 14.") == ids
    for path in DEMO_MODEL_DIR.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "something_new": 1}))
    assert read_tokenizer(tmp_path) is None
    assert HFTokenizer.from_directory(tmp_path).encode("12, 13, 14.") == ids


def test_the_renderer_takes_no_part_in_tokens() -> None:
    """Special tokens keep their ids, whatever the template's renderer knows."""
    backend = byte_level()
    backend.add_tokens([AddedToken("<a>", special=True)])
    tokenizer = QuickTokenizer(backend, {"eos_token": "<a>"}, "{{ eos_token }}")
    hf = HFTokenizer(tokenizer)
    assert tokenizer.eos_token_id == backend.token_to_id("<a>")
    assert hf.encode_chat([{"role": "user", "content": "x"}]) == [tokenizer.eos_token_id]
