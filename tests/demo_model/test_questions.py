"""Laws of the questions with known answers; no model is loaded here."""

import subprocess
import sys
from random import Random

import pytest

from pagedcore.demo_model.facts import CAPITALS, DAYS, MONTH_DAYS, OTHER_NAMES
from pagedcore.demo_model.questions import CHECKED_TASKS, DemoQuestion, demo_questions, is_correct
from pagedcore.demo_model.tasks import TASKS, draw, is_held_out
from pagedcore.demo_model.words import WORDS


def test_same_seed_gives_same_questions_and_more_continue_fewer() -> None:
    """A count and a seed name one list of questions, and a longer list starts with the shorter one."""
    assert demo_questions(20, seed=3) == demo_questions(50, seed=3)[:20]
    assert demo_questions(20, seed=3) != demo_questions(20, seed=4)


def test_every_task_has_its_share() -> None:
    """Among any number of questions no task occurs more than once oftener than another."""
    tasks = [question.task for question in demo_questions(5 * len(CHECKED_TASKS) + 3)]
    counts = [tasks.count(name) for name in CHECKED_TASKS]
    assert max(counts) - min(counts) <= 1


def test_prompts_differ_as_long_as_tasks_have_new_ones() -> None:
    """The first hundred prompts are all different."""
    prompts = [question.prompt for question in demo_questions(100)]
    assert len(set(prompts)) == len(prompts)


def test_negative_count_is_refused_and_zero_gives_none() -> None:
    """A count below zero is an error that names the value; zero is an empty list."""
    assert demo_questions(0) == []
    with pytest.raises(ValueError, match="count is -1"):
        demo_questions(-1)


@pytest.mark.parametrize("text", ["\n2 + 3 = 5.", " 2 + 3 = 5<|im_end|>", "2 + 3 =  5.\n<|endoftext|>"])
def test_verdict_ignores_only_white_space_stop_and_special_tokens(text: str) -> None:
    """The right words are accepted however they are set."""
    assert is_correct(DemoQuestion("What is 2 + 3?", "2 + 3 = 5.", "add"), text)


@pytest.mark.parametrize("text", ["", "5", "2 + 3 = 6.", "2 + 3 = 5. And", "2 + 4 = 5.", "2 + 3 = 55."])
def test_verdict_refuses_any_other_words(text: str) -> None:
    """A missing, wrong or further word makes an answer wrong."""
    assert not is_correct(DemoQuestion("What is 2 + 3?", "2 + 3 = 5.", "add"), text)


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


def test_questions_need_no_torch() -> None:
    """The modules of the questions themselves bring in neither torch nor transformers."""
    code = (
        "import sys, types; package = types.ModuleType('pagedcore'); package.__path__ = ['pagedcore'];"
        "sys.modules['pagedcore'] = package; import pagedcore.demo_model.questions;"
        "sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _listed(text: str) -> list[str]:
    """Words of the comma-separated list at the end of a prompt or an answer."""
    parts = text.rstrip(".").split(", ")
    return [parts[0].split()[-1], *parts[1:]]
