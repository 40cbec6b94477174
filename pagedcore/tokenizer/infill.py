"""Fill in the middle: which tokens of a tokenizer mark the text before and behind a gap, and the prompt made of them.

Owns the table of the families. Texts are encoded so that no control token comes from them, as contents of chats are.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from pagedcore.errors import InvalidPrompt
from pagedcore.tokenizer.chat_contents import finds
from pagedcore.tokenizer.control_tokens import ControlTokens
from pagedcore.tokenizer.ordinary_text import OrdinaryText

_MARK: Final = "☺"
"""Text before a suffix whose tokens are taken off again, where a tokenizer puts a space before every text: CodeLlama
and Codestral were trained without that space."""
_SPACE: Final = "▁"


@dataclass(frozen=True, slots=True)
class _Family:
    prefix: str
    suffix: str
    middle: str | None
    """``None``: the suffix comes first, and the completion follows the prefix."""
    ends: tuple[str, ...] = ()
    """Further tokens that end a completion, as far as a tokenizer has them."""


_FAMILIES: Final = (
    # Qwen2.5-Coder, Qwen3-Coder, CodeGemma
    _Family("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>",
            ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|endoftext|>")),
    # StarCoder, StarCoder2, Granite
    _Family("<fim_prefix>", "<fim_suffix>", "<fim_middle>",
            ("<fim_pad>", "<repo_name>", "<reponame>", "<file_sep>", "<filename>", "<|endoftext|>")),
    # SantaCoder
    _Family("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<fim-pad>", "<|endoftext|>")),
    # DeepSeek-Coder, DeepSeek-V2 and later
    _Family("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ("<｜end▁of▁sentence｜>", "<|EOT|>")),
    # CodeLlama
    _Family("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),
    # GLM-4.5
    _Family("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", ("<|endoftext|>",)),
    # Codestral
    _Family("[PREFIX]", "[SUFFIX]", None, ("[MIDDLE]",)),
)


class InfillTokens:
    """The marks of one tokenizer, and its prompts with them; safe to use from several threads."""

    def __init__(
        self, added: Mapping[int, AddedToken], template: str, backend: Tokenizer | None,
        encode: Callable[..., list[int]],
    ) -> None:
        """Look for a family.

        Args:
            added: all added tokens by id; others are parts of text and mark nothing.
            template: the source of the chat template, whose tokens are control tokens too.
            backend: what tokenises in Rust, if anything does.
            encode: as of the tokenizer.
        """
        ids = {token.content: token_id for token_id, token in added.items()}
        self._ids = ids
        self._family = next((one for one in _FAMILIES if {one.prefix, one.suffix, one.middle} - {None} <= ids.keys()),
                            None)
        self._added, self._template, self._backend, self._encode = added, template, backend, encode

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end a completion: the marks themselves, and the family's others; empty without a family."""
        one = self._family
        texts = () if one is None else (one.prefix, one.suffix, one.middle, *one.ends)
        return frozenset(self._ids[text] for text in texts if text in self._ids)

    def prompt(self, prefix: str, suffix: str) -> list[int]:
        """Return the prompt that asks for the text between the two, with what a text begins with.

        Raises:
            InvalidPrompt: there are no such tokens, or a text has that of a control token, and this tokenizer reads
                such text in one way only.
        """
        one = self._family
        if one is None:
            raise InvalidPrompt("suffix", suffix, "none with this model, whose tokenizer has no fill-in-the-middle "
                                "tokens", "Give a model for code that has them, or leave the suffix out.")
        before, behind = self._ordinary_ids("prompt", prefix), self._suffix_ids(suffix)
        pieces = [self._ids[one.suffix], *behind]
        if one.middle is None:
            return [*self._opening, *pieces, self._ids[one.prefix], *before]
        return [*self._opening, self._ids[one.prefix], *before, *pieces, self._ids[one.middle]]

    @cached_property
    def _opening(self) -> list[int]:
        """What the tokenizer puts before a text."""
        bare, whole = self._encode("a", add_special_tokens=False), self._encode("a", add_special_tokens=True)
        return whole[: whole.index(bare[0])] if bare and bare[0] in whole else []

    @cached_property
    def _control(self) -> ControlTokens:
        # Why special: some tokenizers say so of the marks, and some do not.
        added = {token_id: AddedToken(one.content, special=True, normalized=one.normalized, lstrip=one.lstrip,
                                      rstrip=one.rstrip, single_word=one.single_word)
                 if token_id in self.end_ids else one for token_id, one in self._added.items()}
        backend = self._backend
        if backend is None:
            return ControlTokens(added, self._template, partial(unicodedata.normalize, "NFKC"), lambda *_: True)
        normalize = str if backend.normalizer is None else backend.normalizer.normalize_str
        return ControlTokens(added, self._template, normalize, partial(finds, backend.model))

    @cached_property
    def _ordinary(self) -> OrdinaryText | None:
        return None if self._backend is None else OrdinaryText(self._backend, self._control)

    @cached_property
    def _puts_space(self) -> bool:
        """Whether the tokenizer puts a space before every text."""
        first: Any = self._encode("a", add_special_tokens=False)[:1]
        if self._backend is None or not first:
            return False
        return str(self._backend.id_to_token(first[0])).startswith(_SPACE)

    def _suffix_ids(self, suffix: str) -> list[int]:
        if not self._puts_space or not suffix:
            return self._ordinary_ids("suffix", suffix)
        mark = self._encode(_MARK, add_special_tokens=False)
        marked = self._ordinary_ids("suffix", _MARK + suffix)
        return marked[len(mark):] if marked[: len(mark)] == mark else self._ordinary_ids("suffix", suffix)

    def _ordinary_ids(self, what: str, text: str) -> list[int]:
        if not text:
            return []
        if not self._control.suspects([text]):
            return self._encode(text, add_special_tokens=False)
        found: list[int] | None
        if self._ordinary is not None:
            found = self._ordinary.encode(text, ())
        else:
            ids = self._encode(text, add_special_tokens=False)
            found = None if self._control.texts.keys() & {*ids} else ids
        if found is None:
            raise InvalidPrompt(what, text, "text without that of control tokens, which this tokenizer cannot read as "
                                "other text beside a suffix")
        return found
