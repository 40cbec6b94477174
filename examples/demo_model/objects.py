"""Questions whose answer is a small JSON object, as a schema with a few properties asks for it.

Owns the shapes of the objects, their spacing (that of `json.dumps`) and the ways to ask for JSON; facts, words and
phrasings of the questions themselves are those of `tasks.py`. Read `tools.py` next.
"""

import json
from collections.abc import Mapping
from random import Random

from . import phrasings
from .facts import CAPITALS, OTHER_NAMES
from .tasks import Draft, Task, operand, sum_key
from .words import WORDS

_AS_JSON = ("Answer as JSON.", "Answer in JSON.", "As JSON.", "Reply as JSON.", "Reply in JSON.", "Answer with JSON.")
_WITH_KEYS = ("Answer as JSON with {keys}.", "As JSON with {keys}.", "Reply in JSON with {keys}.")
_PERSON = (
    "{name} is {age} years old and lives in {city}.",
    "{name} is {age} and lives in {city}.",
    "{name}, {age}, lives in {city}.",
    "{name} lives in {city} and is {age} years old.",
    "{name} from {city} is {age} years old.",
)
_BACKWARDS = (*phrasings.BACKWARDS, "Reverse the word {word}.", "Reverse the letters of {word}.")
_NAMES_TEXT = """
Adam Alice Anna Anton Ben Carla Clara Daniel David Diana Emil Emma Eva Felix Frank Grace Hannah Henry Ida Ivan James
Jane John Julia Karl Kate Laura Leo Lily Lucy Maria Mark Max Mia Mona Nina Nora Oscar Paul Peter Rosa Sam Sara Simon
Sofia Thomas Tim Tom Vera Victor Zoe
"""
_NAMES = tuple(_NAMES_TEXT.split())


def _asked(prompt: str, fields: Mapping[str, object], rng: Random, key: str | None, spelled: bool = False) -> Draft:
    """Ask for `fields` as JSON: by the word alone in the order given, or with the keys named.

    Named keys come in any order, except those of a sum, whose result follows its numbers.
    """
    names, form = list(fields), rng.random()
    if form < 0.3:
        if "a" not in fields:
            rng.shuffle(names)
        keys = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
        prompt = f"{_closed(prompt)} {rng.choice(_WITH_KEYS).format(keys=keys)}"
    elif form < 0.5:
        prompt = f"{prompt.rstrip(' .?=')} as JSON{rng.choice(('', '.', '?'))}"
    else:
        prompt = f"{_closed(prompt)} {rng.choice(_AS_JSON)}"
    answer = json.dumps({name: fields[name] for name in names})
    prompt = prompt[0].upper() + prompt[1:]
    return Draft(prompt, answer, prompt if key is None else key, spelled)


def _closed(prompt: str) -> str:
    """End a question with a stop, if it has none, before another sentence follows."""
    prompt = prompt.rstrip(" =")
    return prompt if prompt.endswith((".", "?")) else f"{prompt}."


def _sum(rng: Random) -> Draft:
    a, b = operand(rng, 2), operand(rng, 2)
    draft = _asked(rng.choice(phrasings.ADD).format(a=a, b=b), {"a": a, "b": b, "sum": a + b}, rng, sum_key(a, "+", b))
    # Why: only a question that names its keys can have others than the usual ones.
    if not draft.prompt.endswith(" sum."):
        return draft
    name = rng.choice(("sum", "result", "total", "answer"))
    return Draft(f"{draft.prompt.removesuffix('sum.')}{name}.", draft.answer.replace("sum", name), draft.key)


def _capital(rng: Random) -> Draft:
    country = rng.choice(tuple(CAPITALS))
    fields = {"country": country.removeprefix("the "), "capital": CAPITALS[country]}
    if rng.random() < 0.3:
        return _asked(rng.choice(phrasings.COUNTRY).format(capital=CAPITALS[country]), fields, rng, None)
    asked = rng.choice((country, country, *OTHER_NAMES.get(country, ())))
    return _asked(rng.choice(phrasings.CAPITAL).format(country=asked), fields, rng, None)


def _word(rng: Random) -> Draft:
    word = rng.choice(WORDS)
    return _asked(rng.choice(_BACKWARDS).format(word=word), {"word": word, "reversed": word[::-1]}, rng, None, True)


def _person(rng: Random) -> Draft:
    fields = {"name": rng.choice(_NAMES), "age": rng.randint(1, 99), "city": rng.choice(tuple(CAPITALS.values()))}
    return _asked(rng.choice(_PERSON).format(**fields), fields, rng, f"{fields['name']} {fields['age']}")


def _count(rng: Random) -> Draft:
    low = rng.randint(0, 90)
    numbers = list(range(low, low + rng.randint(3, 8)))
    prompt = rng.choice(phrasings.COUNT_UP).format(a=numbers[0], b=numbers[-1])
    return _asked(prompt, {"numbers": numbers}, rng, f"{numbers[0]} to {numbers[-1]}")


OBJECT_TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("json_add", "json_add", _sum),
        Task("json_capital", "json_capital", _capital),
        Task("json_word", "json_word", _word),
        Task("json_person", "json_person", _person),
        Task("json_count", "json_count", _count),
    )
}
"""All tasks that answer with an object, by name."""

_STRING, _INTEGER = {"type": "string"}, {"type": "integer"}


def schema_of(answer: str) -> dict[str, object]:
    """Return the JSON schema that an answer fills: its properties in its order, all required, no other."""
    fields: dict[str, object] = json.loads(answer)
    properties = {name: _type_of(value) for name, value in fields.items()}
    return {"type": "object", "properties": properties, "required": list(fields), "additionalProperties": False}


def _type_of(value: object) -> dict[str, object]:
    if isinstance(value, list):
        return {"type": "array", "items": _INTEGER}
    return dict(_INTEGER if isinstance(value, int) else _STRING)
