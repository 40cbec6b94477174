"""JSON that Python's decoder takes and the standard does not have is refused."""

from __future__ import annotations

import pytest

from pagedcore.config.strict_json import load_json


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", '{"a": -Infinity}', '{"a": 1, "a": 1}', '[{"b": {}, "b": {}}]'])
def test_what_two_readers_may_take_differently_is_refused(text: str) -> None:
    """A constant that JSON lacks, and two members of one name, at any depth."""
    with pytest.raises(ValueError, match=r"one name|NaN|Infinity"):
        load_json(text)


def test_a_reader_may_make_objects_otherwise() -> None:
    """With ``None`` the last member of a name counts; a function of the caller's gets the members in order."""
    assert load_json('{"a": 1, "a": 2}', None) == {"a": 2}
    assert load_json('{"a": 1, "a": 2}', lambda pairs: {"pairs": pairs}) == {"pairs": [("a", 1), ("a", 2)]}
    with pytest.raises(ValueError, match="NaN"):
        load_json("NaN", None)
