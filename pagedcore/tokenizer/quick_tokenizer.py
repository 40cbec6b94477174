"""Reads a tokenizer from ``tokenizer.json`` without transformers, whose import takes half a second.

Owns the decision for which directories that gives the tokenizer of transformers, and the members of it that
``HFTokenizer`` uses. Those are directories that say that ``tokenizer.json`` is all there is, or name the class of
Qwen2, which builds a tokenizer of its own, and have the same in ``tokenizer.json``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, models

PLAIN_CLASSES: Final = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Classes of transformers that take ``tokenizer.json`` as it is."""
_QWEN_CLASSES: Final = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
_NAMED: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_NEUTRAL: Final = frozenset({
    "add_bos_token", "add_eos_token", "backend", "clean_up_tokenization_spaces", "errors", "is_local", "legacy",
    "max_length", "model_input_names", "model_max_length", "name_or_path", "pad_to_multiple_of", "pad_token_type_id",
    "padding_side", "stride", "tokenizer_class", "truncation_side", "truncation_strategy",
})
"""Settings that change nothing: those of padding, of lengths, and those that ``tokenizer.json`` has instead."""
QWEN_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""What the class of Qwen2 builds; vocabulary, merges and added tokens are the file's."""
_QWEN_END: Final = "<|endoftext|>"


class QuickTokenizer:
    """A tokenizer by the ``tokenizers`` library, with the members of transformers' that ``HFTokenizer`` uses."""

    def __init__(self, backend: Tokenizer, special_tokens: Mapping[str, str], chat_template: str | None) -> None:
        """Take a tokenizer over; its truncation and padding are switched off.

        Args:
            backend: has all the special tokens.
            special_tokens: by name, such as ``eos_token``.
            chat_template: in Jinja.
        """
        backend.no_truncation()
        backend.no_padding()
        self.backend, self.chat_template, self.special_tokens_map = backend, chat_template, dict(special_tokens)
        self.added_tokens_decoder: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        end = self.special_tokens_map.get("eos_token")
        self.eos_token_id = None if end is None else backend.token_to_id(end)
        self.all_special_ids = [backend.token_to_id(token) for token in self.special_tokens_map.values()]

    def get_vocab(self) -> dict[str, int]:
        """Return all tokens, added ones included, and their ids."""
        vocabulary: dict[str, int] = self.backend.get_vocab(with_added_tokens=True)
        return vocabulary

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        """Decode at once; spaces are never cleaned up."""
        text: str = self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        """Return a token's name."""
        name: str | None = self.backend.id_to_token(token_id)
        return name

    def save(self, directory: Path) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json``, of which ``read_tokenizer`` makes an equal one.

        Raises:
            OSError: they cannot be written.
        """
        template = {} if self.chat_template is None else {"chat_template": self.chat_template}
        settings = {"tokenizer_class": PLAIN_CLASSES[-1], "clean_up_tokenization_spaces": False,
                    **self.special_tokens_map, **template}  # fmt: skip
        (directory / "tokenizer.json").write_text(self.backend.to_str(), encoding="utf-8")
        text = json.dumps(settings, indent=2, ensure_ascii=False)
        (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def read_tokenizer(directory: Path) -> QuickTokenizer | None:
    """Read a tokenizer, or return ``None`` if transformers might read the directory in another way, or not at all."""
    try:
        return _read(directory)
    except Exception:  # Why any: the library of tokenizers raises the bare Exception, and transformers will say more.
        return None


def _read(directory: Path) -> QuickTokenizer | None:
    settings = json.loads((directory / "tokenizer_config.json").read_bytes())
    if not _is_plain(directory, settings):
        return None
    backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    template = directory / "chat_template.jinja"
    chat_template = template.read_text(encoding="utf-8") if template.exists() else settings.get("chat_template")
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    named = {name: _content(value) for name in _NAMED if (value := settings.get(name)) is not None}
    others = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    special = {*named.values(), *(_content(token) for token in others)}
    if settings["tokenizer_class"] in _QWEN_CLASSES:
        special.add(_QWEN_END)
        if "eos_token" not in named or not _is_of_qwen(backend):
            return None
    listed = [AddedToken(**token) for token in settings.get("added_tokens_decoder", {}).values()]
    # Why: transformers adds those that are not there.
    has_special = all(token in added and added[token].special for token in special)
    has_listed = all(added.get(token.content) == token for token in listed)
    return QuickTokenizer(backend, named, chat_template) if has_special and has_listed else None


def _is_plain(directory: Path, settings: Mapping[str, Any]) -> bool:
    """Whether settings and files are such that nothing but ``tokenizer.json`` decides on tokens."""
    known = {*_NEUTRAL, *_NAMED, "added_tokens_decoder", "additional_special_tokens", "chat_template",
             "extra_special_tokens", "add_prefix_space", "split_special_tokens"}
    # Why: without added tokens in the settings, transformers reads those of earlier versions.
    older = () if "added_tokens_decoder" in settings else ("special_tokens_map.json", "added_tokens.json")
    template = settings.get("chat_template")
    return (
        settings.get("tokenizer_class") in (*PLAIN_CLASSES, *_QWEN_CLASSES)
        and settings.keys() <= known
        and not settings.get("add_prefix_space") and not settings.get("split_special_tokens")
        and (template is None or isinstance(template, str))
        and isinstance(settings.get("extra_special_tokens") or [], list)
        and not any((directory / name).exists() for name in (*older, "additional_chat_templates"))
    )


def _content(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _is_of_qwen(backend: Tokenizer) -> bool:
    """Whether a tokenizer is what the class of Qwen2 makes of its vocabulary."""
    model, described = backend.model, {}
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        part = getattr(backend, name)
        described[name] = None if part is None else json.loads(part.__getstate__())
    steps = (described["pre_tokenizer"] or {}).get("pretokenizers", [])
    split = {"type": "Split", "pattern": {"Regex": QWEN_SPLIT}, "behavior": "Isolated", "invert": False}
    return (
        isinstance(model, models.BPE) and not any((
            model.dropout, model.unk_token, model.continuing_subword_prefix, model.end_of_word_suffix, model.fuse_unk,
            model.byte_fallback, model.ignore_merges,
        ))
        and described["normalizer"] == {"type": "NFC"}
        and (described["decoder"] or {}).get("type") == "ByteLevel"
        and len(steps) == 2 and steps[0] == split
        and (steps[1]["type"], steps[1]["add_prefix_space"], steps[1]["use_regex"]) == ("ByteLevel", False, False)
    )
