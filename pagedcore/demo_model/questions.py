"""Questions with known answers, to check an engine that runs the demo model.

Owns the drawing of mixed questions and the verdict on an answer; it never runs a model. The kinds of
questions stand in `tasks.py`.

    for question in demo_questions(8):
        text = generate(question.prompt)          # a plain prompt, without any template
        print(is_correct(question, text))
"""

from random import Random

from .tasks import TASKS, DemoQuestion, Split, draw

__all__ = ["CHECKED_TASKS", "DemoQuestion", "demo_questions", "is_correct"]

CHECKED_TASKS: tuple[str, ...] = tuple(name for name in TASKS if not name.endswith("_three_digits"))
"""Tasks that `demo_questions` draws from, in the order of `tasks.TASKS`."""

_SPECIAL_TOKENS = ("<|im_end|>", "<|endoftext|>")
_TRIES_FOR_A_NEW_PROMPT = 50


def demo_questions(count: int, seed: int = 0, split: Split = "any") -> list[DemoQuestion]:
    """Draw `count` questions in which every task has the same share, give or take one.

    The same `count` and `seed` give the same questions on every machine, and a larger `count` continues
    a smaller one. Prompts differ from each other as long as the tasks have new ones to offer. `split`
    "held_out" draws only questions that training never used (small talk apart, which is all trained).

    Raises `ValueError` when `count` is negative.
    """
    if count < 0:
        raise ValueError(f"count is {count}; it must be 0 or more, ask for at least one question")
    rng = Random(seed)
    questions: list[DemoQuestion] = []
    seen: set[str] = set()
    while len(questions) < count:
        for name in rng.sample(CHECKED_TASKS, len(CHECKED_TASKS)):
            question = _new_question(name, rng, split, seen)
            seen.add(question.prompt)
            questions.append(question)
    return questions[:count]


def is_correct(question: DemoQuestion, text: str) -> bool:
    """Whether `text`, as generated, is the answer of `question`.

    White space, case, the closing full stop and special tokens do not count; every word does.
    """
    return _essence(text) == _essence(question.answer)


def _new_question(name: str, rng: Random, split: Split, seen: set[str]) -> DemoQuestion:
    for _ in range(_TRIES_FOR_A_NEW_PROMPT):
        draft = draw(TASKS[name].make, rng, split)
        if draft.prompt not in seen:
            break
    return DemoQuestion(draft.prompt, draft.answer, name)


def _essence(text: str) -> str:
    for token in _SPECIAL_TOKENS:
        text = text.replace(token, " ")
    return " ".join(text.casefold().split()).removesuffix(".")
