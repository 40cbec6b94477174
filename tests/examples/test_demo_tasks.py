"""Laws of the generators behind the demo model's questions, and of the questions that are shipped."""

from random import Random

import pytest

from examples.demo_model.facts import CAPITALS, DAYS, MONTH_DAYS, OTHER_NAMES
from examples.demo_model.shipped_questions import NUM_ROUNDS, as_json, draw_questions
from examples.demo_model.tasks import TASKS, draw, is_held_out
from examples.demo_model.words import WORDS
from pagedcore.demo_model import DEMO_MODEL_DIR
from pagedcore.demo_model.questions import CHECKED_TASKS, Split, demo_questions


def test_the_shipped_questions_are_those_of_the_generators() -> None:
    """The data file is what the generators write, to the byte, and seed 0 gives its questions in their order."""
    assert (DEMO_MODEL_DIR / "questions.json").read_text(encoding="utf-8") == as_json()
    for split, num_rounds in NUM_ROUNDS.items():
        drawn = draw_questions(num_rounds, split)
        assert demo_questions(len(drawn), split=split) == drawn


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_shipped_splits_hold_only_their_side(split: Split) -> None:
    """A shipped held-out question was never trained, and a trained one is not held out; small talk is on both sides."""
    other: Split = "train" if split == "held_out" else "held_out"
    other_side = {question.prompt for question in draw_questions(60, other) if question.task != "talk"}
    own = demo_questions(NUM_ROUNDS[split] * len(CHECKED_TASKS), split=split)
    assert not other_side & {question.prompt for question in own}


def test_checked_tasks_are_all_but_the_large_sums() -> None:
    """The package's list of tasks is the generators', less the sums of three digits that the model gets wrong."""
    assert list(CHECKED_TASKS) == [name for name in TASKS if not name.endswith("_three_digits")]


@pytest.mark.parametrize("name", TASKS)
def test_train_and_held_out_never_share_a_key(name: str) -> None:
    """A question drawn for one split is not in the other, and both splits have questions."""
    for maker in filter(None, (TASKS[name].make, TASKS[name].follow_up)):
        rng = Random(1)
        trained = {draw(maker, rng, "train").key for _ in range(200)} - {None}
        kept_out = {draw(maker, rng, "held_out").key for _ in range(200)} - {None}
        assert not trained & kept_out
        assert all(key is not None and is_held_out(key) for key in kept_out)


def test_mirrored_addition_is_in_the_same_split() -> None:
    """Training on 45 + 27 while keeping 27 + 45 out would give the answer away."""
    rng = Random(2)
    keys = {draw(TASKS["add"].make, rng).key for _ in range(2000)}
    pairs = [key.split("+") for key in keys if key]
    assert all(int(low) <= int(high) for low, high in pairs)


@pytest.mark.parametrize("name", ["add", "subtract", "add_three_digits", "subtract_three_digits"])
def test_sums_are_right(name: str) -> None:
    """The answer of every sum agrees with integer arithmetic."""
    rng = Random(3)
    for _ in range(300):
        left, right = draw(TASKS[name].make, rng).answer.rstrip(".").split(" = ")
        a, op, b = left.split()
        assert int(right) == (int(a) + int(b) if op == "+" else int(a) - int(b))


def test_word_answers_are_right() -> None:
    """Sorting, reversing and spelling agree with what Python says about the words in the prompt."""
    rng = Random(4)
    for _ in range(200):
        given = _listed(draw(TASKS["sort"].make, rng).prompt)
        again = _listed(draw(TASKS["sort"].make, rng).answer)
        assert set(given) <= set(WORDS)
        assert again == sorted(again)
        assert draw(TASKS["spell"].make, rng).answer.replace(" ", "") in WORDS
        assert draw(TASKS["spell_backwards"].make, rng).answer.replace(" ", "")[::-1] in WORDS


def test_tables_are_whole() -> None:
    """There are 195 countries with 195 different capitals, 7 days, 12 months, and sorted words."""
    assert (len(CAPITALS), len(set(CAPITALS.values())), len(DAYS), len(MONTH_DAYS)) == (195, 195, 7, 12)
    assert set(OTHER_NAMES) <= set(CAPITALS)
    assert list(WORDS) == sorted(set(WORDS))


def _listed(text: str) -> list[str]:
    """Words of the comma-separated list at the end of a prompt or an answer."""
    parts = text.rstrip(".").split(", ")
    return [parts[0].split()[-1], *parts[1:]]
