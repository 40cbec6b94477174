"""A tokenizer's vocabulary as the grammar library takes it, compared token by token with what decoding gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from pagedcore.errors import InvalidGrammar
from pagedcore.protocols import HasVocabulary, Int32Array

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_WHAT: Final = "structured"


class Vocabulary:
    """The tokens of one model: their bytes, and which of them end a completion."""

    def __init__(self, tokenizer: object, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """Read a tokenizer, which takes seconds for a large vocabulary.

        Raises:
            InvalidGrammar: it does not say what its tokens are, or no token ends a completion.
        """
        from llguidance import LLTokenizer

        text = tokenizer.to_json() if isinstance(tokenizer, HasVocabulary) else None
        if text is None or not isinstance(tokenizer, HasVocabulary):
            raise InvalidGrammar(_WHAT, type(tokenizer), "None with this tokenizer",
                                 "It needs one of the tokenizers library, with a vocabulary.")
        ends = sorted(token_id for token_id in eos_token_ids if token_id < vocab_size)
        if not ends:
            raise InvalidGrammar(_WHAT, "a model without end tokens", "None with this model", is_described=True)
        try:
            self.tokens: LLTokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=ends)
        except ValueError:
            self.tokens = None
        if self.tokens is None:
            raise InvalidGrammar(_WHAT, type(tokenizer), "None with this tokenizer",
                                 "It is neither byte-level nor has it byte fallback.")
        self.size, self.num_words = vocab_size, (vocab_size + 31) // 32
        self.special = {
            token_id: self.tokens.decode_bytes([token_id]).decode(errors="replace")
            for token_id in range(vocab_size) if token_id in ends or self.tokens.is_special_token(token_id)
        }
        """The texts of the special tokens, as grammars name them; end tokens are among them."""
        self.known = _known(self.tokens, tokenizer, vocab_size)
        """Shape [num_words]: a bit for each token that may be chosen."""


def _known(tokens: Any, tokenizer: HasVocabulary, vocab_size: int) -> Int32Array:
    """Return the tokens whose bytes for the grammar are those that they add to the text; special ones have none."""
    bits = np.zeros((vocab_size + 31) // 32 * 32, np.uint8)
    for token_id in range(vocab_size):
        bits[token_id] = tokens.is_special_token(token_id) or (
            tokens.decode_bytes([token_id]) == (tokenizer.token_text(token_id).utf8 or b"")
        )
    return np.packbits(bits, bitorder="little").view(np.int32)
