from __future__ import annotations

import random
from typing import Any

import pytest

from pagedcore.tokenizer.disguise import Disguise, seeing, seen

TAGS = frozenset("<>")
LETTERS = "<>ab \n"


def disguise() -> Disguise:
    return Disguise([LETTERS], TAGS.intersection)


CALLS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "split": ((), (None,), ("<",), (">a", 1), (None, 1)), "rsplit": ((), ("<",), (">a", 1), (None, 1)),
    "partition": (("<",), ("a>",)), "rpartition": (("<",), ("a>",)), "splitlines": ((), (True,)),
    "strip": ((), ("<a",)), "lstrip": ((), ("<a",), (">",)), "rstrip": ((), ("> ",)), "removeprefix": (("<",),),
    "removesuffix": ((">",),), "replace": (("<", ""), ("a>", "x", 1), ("", "-", 2)), "find": (("<a",),),
    "count": ((">",),), "startswith": ((("<", "a"),),), "endswith": ((">",),), "upper": ((),),
}


@pytest.mark.parametrize("name", CALLS)
def test_methods_look_through_a_disguise_and_keep_it(name: str) -> None:
    """A template finds and cuts what it would in the text itself, of which some characters are disguised, and each
    piece has the disguise of the characters that it is made of."""
    worn, rng = disguise(), random.Random(name)
    for args in CALLS[name] * 40:
        shown = "".join(rng.choices(LETTERS, k=rng.randrange(12)))
        mixed = "".join(worn.hide(one) if rng.random() < 0.6 else one for one in shown)
        with worn.worn():
            found = seeing(getattr(mixed, name))(*args)
            assert seen(found) == getattr(shown, name)(*args)
        if name.endswith("split"):
            assert all(piece in mixed for piece in found)


def test_a_cut_keeps_its_own_place() -> None:
    """Of equal pieces, each has the characters that stood there, not those of the first one."""
    worn = disguise()
    hidden = worn.hide("<")
    with worn.worn():
        assert seeing(f"<a{hidden}".split)("a") == ["<", hidden]
        assert seeing(f"<<{hidden}".removeprefix)("<") == f"<{hidden}"
        assert seeing(f"<><{hidden}>".split)("><") == ["<", f"{hidden}>"] == seeing(f"<><{hidden}>".rsplit)("><", 1)
        assert seeing(f"<a{hidden}b<".replace)("a", "") == f"<{hidden}b<"
        assert seeing(f"{hidden}\n<".splitlines)() == [hidden, "<"]
        assert seeing(f"<{hidden}".lstrip)("<") == ""


def test_without_a_disguise_methods_are_the_texts_own() -> None:
    """Ordinary renderings call Python's methods."""
    method = "a".split
    assert seeing(method) is method
    assert seen(value := ["a", {"b": 1}]) is value


def test_what_is_compared_has_no_disguise() -> None:
    """Texts, and those in lists and the names of members, are compared as they are."""
    worn = disguise()
    with worn.worn():
        assert seen(worn.hide(("<a>", ["<"], {"<b>": ">"}))) == ("<a>", ["<"], {"<b>": worn.hide(">")})
        assert seen(7) == 7
