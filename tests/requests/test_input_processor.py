"""How text becomes the tokens of a request, or of a further turn."""

from __future__ import annotations

import pytest

from pagedcore.errors import InvalidPrompt
from pagedcore.request_options import RequestOptions
from pagedcore.requests.input_processor import InputProcessor

BEGIN = 9


class BeginningTokenizer:
    """A token for each character, and one that begins a document."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text."""
        return [BEGIN] * add_special_tokens + [ord(character) % 8 for character in text]


@pytest.mark.parametrize(("known", "expected"), [(None, [BEGIN, 1, 2]), ([BEGIN, 4], [1, 2])])
def test_only_the_first_turn_begins_a_document(known: list[int] | None, expected: list[int]) -> None:
    """A further turn continues the text before it."""
    inputs = InputProcessor(BeginningTokenizer(), 10, 64, 256, 8, frozenset())  # type: ignore[arg-type]
    assert inputs.process("12", None, RequestOptions(), known).token_ids == expected


def test_what_needs_a_tokenizer_is_called_by_its_kind() -> None:
    """Without one a text is refused as text, and nothing of it is measured or repeated."""
    inputs = InputProcessor(None, 10, 64, 256, 8, frozenset())
    with pytest.raises(InvalidPrompt, match=r"^prompt: got text, allowed is token ids\. This engine has no tokenizer"):
        inputs.process("12", None, RequestOptions())
