"""Laws of the questions with known answers; no model is loaded here."""

import subprocess
import sys

import pytest

from pagedcore.demo_model.questions import CHECKED_TASKS, DemoQuestion, demo_questions, is_correct


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


def test_questions_begin_again_after_the_last() -> None:
    """More questions than there are repeat the list."""
    some = demo_questions(2000)
    num_different = next(i for i in range(500, 2000) if some[i : i + 14] == some[:14])
    assert some == (some[:num_different] * 4)[:2000]


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


def test_questions_need_no_torch() -> None:
    """The module of the questions itself brings in neither torch nor transformers."""
    code = (
        "import sys, types; package = types.ModuleType('pagedcore'); package.__path__ = ['pagedcore'];"
        "sys.modules['pagedcore'] = package; import pagedcore.demo_model.questions;"
        "sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
