"""A tokenizer's vocabulary as the grammar library takes it, compared token by token with what decoding gives."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from pagedcore.errors import InvalidGrammar
from pagedcore.protocols import HasVocabulary, Int32Array

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_WHAT: Final = "structured"
_SECRET: Final = secrets.token_hex(16)
"""What the names of special tokens begin with for the library, so that no text of a grammar is one of them."""
_CHANGING: Final = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt", "Precompiled", "BertNormalizer")
"""Normalizers that give other characters than they got."""
_PROBES: Final = ("cafe\u0301", "\u212b\u2126", "\u1112\u1161\u11ab", "\uf900 \u0958", "\ufb01 \u2160 \uff21",
                  "ABC def", "  a  b ", "\u00a0\u3000", '{"name": "x", "n": 12}\n')
"""Texts that some tokenizers change."""


class Vocabulary:
    """The tokens of one model: their bytes, and which of them end a completion."""

    def __init__(self, tokenizer: object, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """Read a tokenizer, which takes seconds for a large vocabulary.

        Raises:
            InvalidGrammar: it does not say what its tokens are, or no token ends a completion.
        """
        text = tokenizer.to_json() if isinstance(tokenizer, HasVocabulary) else None
        if text is None or not isinstance(tokenizer, HasVocabulary):
            raise InvalidGrammar(_WHAT, type(tokenizer), "None with this tokenizer",
                                 "It needs one of the tokenizers library, with a vocabulary.")
        ends = sorted(token_id for token_id in eos_token_ids if token_id < vocab_size)
        if not ends:
            raise InvalidGrammar(_WHAT, "a model without end tokens", "None with this model", is_described=True)
        names = _special_names(text)
        tokens = _library_tokens(_byte_for_byte(text, names), vocab_size, ends)
        is_renamed = tokens is not None and _are_named(tokens, names)
        if not is_renamed:
            tokens = _library_tokens(text, vocab_size, ends)
        if tokens is None:
            raise InvalidGrammar(_WHAT, type(tokenizer), "None with this tokenizer",
                                 "It is neither byte-level nor has it byte fallback.")
        self.tokens: LLTokenizer = tokens
        self.can_force = is_renamed and all(map(self._is_kept, (*_PROBES, *names.values())))
        """Whether the tokens of a text that is the only one possible are exactly this text, so that they may be forced.
        The library tokenises as the model does, which reads special tokens and changes characters."""
        self.size, self.num_words = vocab_size, (vocab_size + 31) // 32
        self.special = {
            token_id: self.tokens.decode_bytes([token_id]).decode(errors="replace").removeprefix(_SECRET)
            for token_id in range(vocab_size) if token_id in ends or self.tokens.is_special_token(token_id)
        }
        """The texts of the special tokens, as grammars name them; end tokens are among them."""
        self.known = _known(self.tokens, tokenizer, vocab_size)
        """Shape [num_words]: a bit for each token that may be chosen."""

    def adapted(self, grammars: str) -> str:
        """Return grammars, the library's JSON of them, with the ids of special tokens instead of their names; where
        texts cannot be forced, such that none is.
        """
        if self.can_force and not ("<" in grammars and "lark_grammar" in grammars):
            return grammars
        given = json.loads(grammars)
        given["grammars"] = [self._adapted(one) for one in given["grammars"]]
        return json.dumps(given)

    def _adapted(self, grammar: dict[str, Any]) -> dict[str, Any]:
        lark = grammar.get("lark_grammar")
        if lark is None:
            schema = json.dumps(grammar["json_schema"])
            return grammar if self.can_force else {"lark_grammar": f"{_FREE}start: %json {schema}"}
        ids = {name: token_id for token_id, name in self.special.items()}
        lark = _IN_LARK.sub(lambda found: f"<[{ids[found[1]]}]>" if found[1] in ids else found[0], lark)
        return {**grammar, "lark_grammar": lark if self.can_force else _FREE + lark}

    def _is_kept(self, text: str) -> bool:
        token_ids, rest = self.tokens.tokenize_partial(text.encode())
        return bool(self.tokens.decode_bytes(token_ids) + bytes(rest) == text.encode())


_FREE: Final = '%llguidance {"no_forcing": true}\n'
_IN_LARK: Final = re.compile(r'"(?:\\.|[^"\\\n])*"|(?://|\#)[^\n]*|/(?:\\.|[^/\\])+/|(<[^<>\s\[]+>)', re.DOTALL)
"""What may have the name of a token in it without being one, and the name of a token."""


def _special_names(text: str) -> dict[int, str]:
    """Return the names of a tokenizer's special tokens."""
    return {one["id"]: one["content"] for one in _member(text, "added_tokens")[0] or () if one.get("special")}


def _byte_for_byte(text: str, names: Mapping[int, str]) -> str:
    """Return a tokenizer that reads no special token in any text, and changes no character as far as that is known."""
    for name, change in (("added_tokens", _renamed), ("normalizer", _without_changes)):
        value, start, end = _member(text, name)
        if value is not None:
            text = text[:start] + json.dumps(change(value), ensure_ascii=False, separators=(",", ":")) + text[end:]
    for token_id, name in names.items():
        # Why by text: the vocabulary has megabytes, which would be read in one piece, and other threads would wait.
        old, new = (json.dumps(one, ensure_ascii=False) for one in (name, _SECRET + name))
        if f"{old}:{token_id}" in text:
            for after in ",}":
                text = text.replace(f"{old}:{token_id}{after}", f"{new}:{token_id}{after}")
            text = text.replace(f'"unk_token":{old}', f'"unk_token":{new}')
    return text


def _member(text: str, name: str) -> tuple[Any, int, int]:
    """Return a member of a tokenizer's JSON, which the tokenizers library wrote, and where it is."""
    start = text.find(f'"{name}":')
    if start < 0:
        return None, 0, 0
    start += len(name) + 3
    value, end = json.JSONDecoder().raw_decode(text, start)
    return value, start, end


def _renamed(tokens: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**one, "content": _SECRET + one["content"]} if one.get("special") else one for one in tokens]


def _without_changes(normalizer: dict[str, Any]) -> dict[str, Any] | None:
    if normalizer.get("type") == "Sequence":
        return {**normalizer, "normalizers": [one for one in normalizer["normalizers"] if _without_changes(one)]}
    return None if normalizer.get("type") in _CHANGING else normalizer


def _library_tokens(text: str, vocab_size: int, ends: list[int]) -> LLTokenizer | None:
    from llguidance import LLTokenizer

    try:
        return LLTokenizer(text, n_vocab=vocab_size, eos_token=ends)
    except ValueError:
        return None


def _are_named(tokens: LLTokenizer, names: Mapping[int, str]) -> bool:
    """Whether the special tokens are where they were: a name that is not found where it was gets another id."""
    return all(tokens.is_special_token(token_id) and tokens.decode_bytes([token_id]) == f"{_SECRET}{name}".encode()
               for token_id, name in names.items() if token_id < tokens.vocab_size)


def _known(tokens: Any, tokenizer: HasVocabulary, vocab_size: int) -> Int32Array:
    """Return the tokens whose bytes for the grammar are those that they add to the text; special ones have none."""
    bits = np.zeros((vocab_size + 31) // 32 * 32, np.uint8)
    for token_id in range(vocab_size):
        bits[token_id] = tokens.is_special_token(token_id) or (
            tokens.decode_bytes([token_id]) == (tokenizer.token_text(token_id).utf8 or b"")
        )
    return np.packbits(bits, bitorder="little").view(np.int32)
