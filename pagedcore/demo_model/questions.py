"""Questions with known answers, to check an engine that runs the demo model.

Owns the choice of questions from ``questions.json`` and the verdict on a completion; it never runs a model. How the
questions were made is in `examples/demo_model/`.

    for question in demo_questions(8):
        text = generate(question.prompt)          # a plain prompt, without any template
        print(is_correct(question, text))
"""

import json
from dataclasses import dataclass
from functools import cache
from itertools import chain, cycle, islice
from pathlib import Path
from random import Random
from typing import Literal

__all__ = ["CHECKED_TASKS", "DemoQuestion", "demo_questions", "is_correct"]

Split = Literal["train", "held_out", "any"]
"""Which questions to choose from: those used in training, those kept out of it, or both."""

CHECKED_TASKS: tuple[str, ...] = (
    "add", "subtract", "capital", "country", "count", "reverse", "sort", "spell", "spell_backwards", "day", "month",
    "month_length", "explain", "talk")
"""The tasks that the questions come from."""

_SPECIAL_TOKENS = ("<|im_end|>", "<|endoftext|>")


@dataclass(frozen=True)
class DemoQuestion:
    """A question, the exact answer the demo model should give, and the name of its task."""

    prompt: str
    answer: str
    task: str


def demo_questions(count: int, seed: int = 0, split: Split = "any") -> list[DemoQuestion]:
    """Choose `count` questions in which every task has the same share, give or take one.

    The same `count` and `seed` give the same questions on every machine, and a larger `count` continues a smaller
    one; after the last question the first one follows again. `split` "held_out" chooses only questions that training
    never used (small talk apart, which is all trained).

    Raises `ValueError` when `count` is negative.
    """
    if count < 0:
        raise ValueError(f"count is {count}; it must be 0 or more, ask for at least one question")
    rounds = list(_rounds(split))
    if seed:
        Random(seed).shuffle(rounds)
    return list(islice(cycle(chain.from_iterable(rounds)), count))


def is_correct(question: DemoQuestion, text: str) -> bool:
    """Whether `text`, as generated, is the answer of `question`.

    White space, case, the closing full stop and special tokens do not count; every word does.
    """
    return _essence(text) == _essence(question.answer)


@cache
def _rounds(split: Split) -> list[list[DemoQuestion]]:
    """Groups of one question of every task."""
    stored = json.loads(Path(__file__).with_name("questions.json").read_text(encoding="utf-8"))[split]
    return [[DemoQuestion(prompt, answer, task) for task, prompt, answer in questions] for questions in stored]


def _essence(text: str) -> str:
    for token in _SPECIAL_TOKENS:
        text = text.replace(token, " ")
    return " ".join(text.casefold().split()).removesuffix(".")
