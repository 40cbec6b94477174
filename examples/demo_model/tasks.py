"""Kinds of questions the demo model can answer, each able to write new questions with their answers.

Owns the phrasings, the right answers and the rule that keeps some questions out of training. It never
loads a model. The same tasks train the model (`examples/train_demo_model.py`) and check it
(`shipped_questions.py`, read that next).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal
from zlib import crc32

from pagedcore.demo_model.questions import Split

from . import phrasings
from .explanations import EXPLANATIONS, SMALL_TALK
from .facts import CAPITALS, DAYS, MONTH_DAYS, OTHER_NAMES
from .words import WORDS

_HELD_OUT_ONE_IN = 10


@dataclass(frozen=True)
class Draft:
    """A question before its split is known.

    Invariant: `key` names what the question is about, so that two questions with one key are either both
    used in training or both kept out. An empty key is always trained; None belongs to both sides.
    Of a `spelled` answer the strings are trained letter by letter.
    """

    prompt: str
    answer: str
    key: str | None
    spelled: bool = False


Maker = Callable[[Random], Draft]


@dataclass(frozen=True)
class Task:
    """A kind of question: `make` writes a full question, `follow_up` a short one ("And of Norway?").

    Invariant: a follow-up is understood after any question whose task has the same `family`.
    """

    name: str
    family: str
    make: Maker
    follow_up: Maker | None = None


def is_held_out(key: str) -> bool:
    """Whether questions with this key are kept out of training; the same on every machine."""
    return bool(key) and crc32(key.encode()) % _HELD_OUT_ONE_IN == 0


def draw(maker: Maker, rng: Random, split: Split = "any") -> Draft:
    """Write drafts until one belongs to `split`."""
    while True:
        draft = maker(rng)
        if split == "any" or draft.key is None or (split == "held_out") == is_held_out(draft.key):
            return draft


def _phrased(templates: Sequence[str], answer: str, rng: Random, **fields: object) -> Draft:
    """Fill one of `templates`; the question itself is the key, so every fact stays in training."""
    prompt = rng.choice(templates).format(**fields)
    prompt = prompt[0].upper() + prompt[1:]
    return Draft(prompt, answer, prompt)


# -- arithmetic ----------------------------------------------------------------------------------------


def operand(rng: Random, digits: int) -> int:
    """Draw a number of up to two digits, small ones more often than their share, or of exactly three."""
    if digits == 3:
        return rng.randint(100, 999)
    return rng.randint(0, 99 if rng.random() < 0.9 else 12)


def sum_key(a: int, op: str, b: int) -> str:
    """Return the key of a sum, or an empty one when both terms have one digit."""
    # Why: the table of one-digit sums is the alphabet of arithmetic, none of it is kept out. Swapping
    # the terms of an addition gives the same key, so that its mirror image gives nothing away.
    terms = sorted((a, b)) if op == "+" else (a, b)
    return f"{terms[0]}{op}{terms[1]}" if max(a, b) > 9 else ""


def _sum_maker(op: str, digits: int, templates: Sequence[str]) -> Maker:
    def make(rng: Random) -> Draft:
        a, b = operand(rng, digits), operand(rng, digits)
        answer = f"{a} {op} {b} = {a + b if op == '+' else a - b}."
        return Draft(rng.choice(templates).format(a=a, b=b, op=op), answer, sum_key(a, op, b))

    return make


def _sum_task(name: str, op: str, digits: int) -> Task:
    templates = phrasings.ADD if op == "+" else phrasings.SUBTRACT
    return Task(name, "sum", _sum_maker(op, digits, templates), _sum_maker(op, digits, phrasings.SUM_AGAIN))


# -- capitals ------------------------------------------------------------------------------------------

_COUNTRIES = tuple(CAPITALS)


def _capital_maker(templates: Sequence[str]) -> Maker:
    def make(rng: Random) -> Draft:
        country = rng.choice(_COUNTRIES)
        asked = rng.choice((country, country, country.removeprefix("the "), *OTHER_NAMES.get(country, ())))
        answer = f"The capital of {country} is {CAPITALS[country]}."
        return _phrased(templates, answer, rng, country=asked)

    return make


def _country_maker(templates: Sequence[str]) -> Maker:
    def make(rng: Random) -> Draft:
        country = rng.choice(_COUNTRIES)
        answer = f"{CAPITALS[country]} is the capital of {country}."
        return _phrased(templates, answer, rng, capital=CAPITALS[country])

    return make


# -- counting ------------------------------------------------------------------------------------------


def _count(rng: Random) -> Draft:
    low = rng.randint(0, 12) if rng.random() < 0.4 else rng.randint(0, 99)
    numbers = list(range(low, low + rng.randint(3, 12)))
    down = rng.random() < 0.4
    if down:
        numbers.reverse()
    templates = phrasings.COUNT_DOWN if down else phrasings.COUNT_UP
    prompt = rng.choice(templates).format(a=numbers[0], b=numbers[-1])
    return Draft(prompt, ", ".join(map(str, numbers)) + ".", f"{numbers[0]} to {numbers[-1]}")


# -- words ---------------------------------------------------------------------------------------------


def _pick_words(rng: Random) -> list[str]:
    """Two to five words, each beginning with another letter."""
    # Why: the model knows the order of words from their first letters; within a letter it often errs.
    while True:
        words = rng.sample(WORDS, rng.choice((2, 3, 3, 4, 4, 5)))
        if len({word[0] for word in words}) == len(words):
            return words


def _word_list_maker(templates: Sequence[str], lead: str, arrange: Callable[[list[str]], list[str]]) -> Maker:
    def make(rng: Random) -> Draft:
        words = _pick_words(rng)
        prompt = rng.choice(templates).format(words=", ".join(words))
        return Draft(prompt, f"{lead}: {', '.join(arrange(words))}.", lead + " ".join(sorted(words)))

    return make


def _spell_maker(templates: Sequence[str], step: Literal[1, -1]) -> Maker:
    def make(rng: Random) -> Draft:
        word = rng.choice(WORDS)
        return _phrased(templates, " ".join(word[::step]), rng, word=word)

    return make


# -- calendar ------------------------------------------------------------------------------------------


def _neighbour_maker(templates: Sequence[str], unit: str, names: Sequence[str]) -> Maker:
    def make(rng: Random) -> Draft:
        place, side = rng.randrange(len(names)), rng.choice(("after", "before"))
        other = names[(place + (1 if side == "after" else -1)) % len(names)]
        answer = f"The {unit} {side} {names[place]} is {other}."
        return _phrased(templates, answer, rng, unit=unit, side=side, name=names[place])

    return make


def _length_maker(templates: Sequence[str]) -> Maker:
    def make(rng: Random) -> Draft:
        name = rng.choice(tuple(MONTH_DAYS))
        return _phrased(templates, f"{name} has {MONTH_DAYS[name]}.", rng, name=name)

    return make


# -- explanations and small talk -----------------------------------------------------------------------


def _explain_maker(templates: Sequence[str]) -> Maker:
    def make(rng: Random) -> Draft:
        names = rng.choice(tuple(EXPLANATIONS))
        return _phrased(templates, EXPLANATIONS[names], rng, name=rng.choice(names))

    return make


def _talk(rng: Random) -> Draft:
    prompt = rng.choice(tuple(SMALL_TALK))
    return Draft(prompt, SMALL_TALK[prompt], None)


_MONTHS = tuple(MONTH_DAYS)
TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _sum_task("add", "+", 2),
        _sum_task("subtract", "-", 2),
        _sum_task("add_three_digits", "+", 3),
        _sum_task("subtract_three_digits", "-", 3),
        Task("capital", "capital", _capital_maker(phrasings.CAPITAL), _capital_maker(phrasings.CAPITAL_AGAIN)),
        Task("country", "country", _country_maker(phrasings.COUNTRY), _country_maker(phrasings.COUNTRY_AGAIN)),
        Task("count", "count", _count),
        Task("reverse", "reverse", _word_list_maker(phrasings.REVERSE, "Reversed", lambda words: words[::-1])),
        Task("sort", "sort", _word_list_maker(phrasings.SORT, "Sorted", sorted)),
        Task("spell", "spell", _spell_maker(phrasings.SPELL, 1), _spell_maker(phrasings.SPELL_AGAIN, 1)),
        Task("spell_backwards", "spell_backwards", _spell_maker(phrasings.BACKWARDS, -1)),
        Task(
            "day",
            "neighbour",
            _neighbour_maker(phrasings.NEIGHBOUR, "day", DAYS),
            _neighbour_maker(phrasings.NEIGHBOUR_AGAIN, "day", DAYS),
        ),
        Task(
            "month",
            "neighbour",
            _neighbour_maker(phrasings.NEIGHBOUR, "month", _MONTHS),
            _neighbour_maker(phrasings.NEIGHBOUR_AGAIN, "month", _MONTHS),
        ),
        Task(
            "month_length",
            "month_length",
            _length_maker(phrasings.LENGTH),
            _length_maker(phrasings.LENGTH_AGAIN),
        ),
        Task("explain", "explain", _explain_maker(phrasings.EXPLAIN), _explain_maker(phrasings.EXPLAIN_AGAIN)),
        Task("talk", "talk", _talk),
    )
}
"""All tasks by name."""
