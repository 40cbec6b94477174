"""Golden files: what they store, what they say of an answer that changed, and that nothing is lost in them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pagedcore_pytest.errors import GoldenChanged, GoldenFileInvalid, GoldenMissing, NothingToCompare
from pagedcore_pytest.goldens import Answer, Goldens

HERE = {"model": "toy", "CPU features": "avx2"}
THERE = {"model": "toy", "CPU features": "avx2 avx512f"}


class Letters:
    """Letters as tokens; the further down the alphabet, the less likely."""

    def logprobs_of(self, prompt: Sequence[int], token_ids: Sequence[int]) -> list[float]:
        """Return what a letter always has."""
        return [-token_id / 10 for token_id in token_ids]

    def name_of(self, token_id: int) -> str:
        """Return the letter."""
        return chr(97 + token_id)


def answer(prompt: str, text: str) -> Answer:
    return Answer(prompt, [ord(letter) - 97 for letter in prompt], text, [ord(one) - 97 for one in text], Letters())


def check(path: Path, name: str, *answers: Answer, is_updating: bool = False, where: Any = HERE, **sampling: Any,
          ) -> None:
    Goldens(path.parents[1], is_updating=is_updating).check(path, name, answers, sampling, where)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A golden file with one answer."""
    path = tmp_path / "__goldens__" / "test_it.json"
    check(path, "abc", answer("ab", "cdef"), is_updating=True)
    return path


def test_a_stored_answer_is_compared(path: Path) -> None:
    """The stored answer passes; the file has text, tokens, their log-probabilities, and where it was recorded; lists of
    numbers are on one line; and what is the same is not written again, on another machine neither."""
    check(path, "abc", answer("ab", "cdef"))
    text = path.read_text("utf-8")
    (stored,) = json.loads(text)["goldens"]["abc"]["calls"]
    assert stored == {"prompt": "ab", "text": "cdef", "prompt_token_ids": [0, 1], "token_ids": [2, 3, 4, 5],
                      "logprobs": [-0.2, -0.3, -0.4, -0.5]}
    assert list(json.loads(text)["environments"].values()) == [HERE]
    assert '"token_ids": [2, 3, 4, 5]' in text
    check(path, "abc", answer("ab", "cdef"), is_updating=True, where=THERE)
    assert path.read_text("utf-8") == text
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_changed_answer_names_the_token(path: Path) -> None:
    """Place, both tokens and their log-probabilities, when recorded and now; both answers; the way to accept it."""
    with pytest.raises(GoldenChanged) as changed:
        check(path, "abc", answer("ab", "cdxf"))
    message = str(changed.value)
    for part in ("'abc' of __goldens__/test_it.json: the answer changed at token 2",
                 "expected: 'e' (token id 4, log-probability -0.4000 when recorded, -0.4000 now)",
                 "got:      'x' (token id 23, log-probability -2.3000 now)", "'cdef'", "'cdxf'", "'ab'",
                 "the same model, CPU features", "pytest --update-goldens"):
        assert part in message, part


@pytest.mark.parametrize(("text", "expected", "got"), [
    ("cd", "'e' (token id 4", "got:      the end of the answer"), ("cdefg", "expected: the end of the answer", "'g' ("),
])
def test_an_answer_that_is_longer_or_shorter_ends_elsewhere(path: Path, text: str, expected: str, got: str) -> None:
    """The end of the shorter one is the difference."""
    with pytest.raises(GoldenChanged) as changed:
        check(path, "abc", answer("ab", text))
    assert expected in str(changed.value)
    assert got in str(changed.value)


def test_another_environment_is_said(path: Path) -> None:
    """What differs of model, kernels and CPU features is named, and only that; an equal answer passes there too."""
    check(path, "abc", answer("ab", "cdef"), where=THERE)
    with pytest.raises(GoldenChanged, match="recorded elsewhere") as changed:
        check(path, "abc", answer("ab", "cdxf"), where=THERE)
    assert "CPU features: avx2 when recorded, avx2 avx512f now" in str(changed.value)
    assert "toy when recorded" not in str(changed.value)


def test_changed_questions_are_said(path: Path) -> None:
    """Another prompt is a failure, with both prompts; changed parameters are said beside a changed answer."""
    with pytest.raises(GoldenChanged, match="the prompt changed at token 1") as changed:
        check(path, "abc", answer("ac", "cdef"))
    assert "prompt now:      'ac'" in str(changed.value)
    with pytest.raises(GoldenChanged, match=r"parameters changed: recorded with none, now \{'top_k': 3\}"):
        check(path, "abc", answer("ab", "cdxf"), top_k=3)
    with pytest.raises(GoldenChanged, match="another text"):
        check(path, "abc", Answer("ab", [0, 1], "CDEF", [2, 3, 4, 5], Letters()))


def test_of_several_calls_the_first_that_changed_is_named(path: Path) -> None:
    """An agent's second question follows from its first answer: the first answer is said. Calls that run side by side
    are the same in any order, and a missing one is counted."""
    calls = [answer("ab", "cd"), answer("abcde", "fg"), answer("abcdefgh", "i")]
    check(path, "agent", *calls, is_updating=True)
    check(path, "agent", *reversed(calls))
    with pytest.raises(GoldenChanged, match=r"token 1 .*\n.*'d'.*\n.*'x'"):
        check(path, "agent", answer("ab", "cx"), answer("abcxe", "fg"), answer("abcxefgh", "i"))
    with pytest.raises(GoldenChanged, match="expected 3 completions, got 2"):
        check(path, "agent", *calls[:2])
    with pytest.raises(GoldenChanged, match="the prompt changed at token 3"):
        check(path, "agent", calls[0], answer("abcxe", "fg"), answer("abcxefgh", "i"))


def test_a_missing_answer_says_how_to_record_it(path: Path) -> None:
    """Neither an unknown name nor a missing file passes, and nothing is stored."""
    for where in (path, path.with_name("test_other.json")):
        with pytest.raises(GoldenMissing, match=r"no golden answer 'other'.*pytest --update-goldens"):
            check(where, "other", answer("ab", "cd"))
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("content", [
    "", "{", "[]", "null", '{"format": 2, "environments": {}, "goldens": {}}', '{"format": 1, "goldens": {}}',
    '{"format": 1, "environments": {}, "goldens": {"abc": {}}}', '{"format": 1, "environments": {}, "goldens": []}',
    '{"format": 1, "environments": {}, "goldens": {"abc": {"environment": "a", "calls": [{"text": 1}]}}}',
    "<<<<<<< HEAD\n{}\n",
])
def test_a_damaged_file_is_refused_and_kept(path: Path, content: str) -> None:
    """A merge conflict and any other damage are said with what to do; recording does not write over it."""
    path.write_text(content, "utf-8")
    for is_updating in (False, True):
        with pytest.raises(GoldenFileInvalid, match=r"test_it.json is no file of golden answers"):
            check(path, "abc", answer("ab", "cd"), is_updating=is_updating)
    assert path.read_text("utf-8") == content


@pytest.mark.parametrize("name", ["", "a" * 201, 5, None])
def test_names_are_text(path: Path, name: Any) -> None:
    """A name is text of 1 to 200 characters."""
    with pytest.raises(NothingToCompare, match="1 to 200"):
        check(path, name, answer("ab", "cd"))


def test_two_questions_have_two_names(path: Path) -> None:
    """In one run a name belongs to one prompt; the same test run again may record it again."""
    goldens = Goldens(path.parents[1], is_updating=True)
    goldens.check(path, "same", [answer("ab", "cd")], {}, HERE)
    goldens.check(path, "same", [answer("ab", "ce")], {}, HERE)
    with pytest.raises(NothingToCompare, match="different prompts the name 'same'"):
        goldens.check(path, "same", [answer("ac", "cd")], {}, HERE)
    assert json.loads(path.read_text("utf-8"))["goldens"]["same"]["calls"][0]["text"] == "ce"


def test_recording_side_by_side_loses_nothing(path: Path) -> None:
    """Eight writers of one file: all answers are in it, and environments that no answer has are gone."""
    def record(number: int) -> None:
        for turn in range(10):
            check(path, f"{number}-{turn}", answer("ab", "cd"), is_updating=True, where={"model": str(number)})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(record, range(8)))
    content = json.loads(path.read_text("utf-8"))
    assert len(content["goldens"]) == 81
    check(path, "abc", answer("ab", "xy"), is_updating=True, where={"model": "0"})
    assert sorted(one["model"] for one in json.loads(path.read_text("utf-8"))["environments"].values()) == [
        *map(str, range(8))]
