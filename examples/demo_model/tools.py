"""Questions asked beside a list of tools, with the call, the tool's result and the answer they lead to.

Owns the tools that training knows, how tools and calls are written (as the chat template in `tokenizer.py` writes
them), and which question needs which tool. Some tools have random names and arguments, so that the list has to be
read. It never loads a model. Read `conversations.py` next.
"""

import json
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from pagedcore.demo_model.questions import Split

from . import phrasings
from .facts import CAPITALS
from .tasks import TASKS, is_held_out
from .words import WORDS

CALL_START, CALL_END = "<tool_call>\n", "\n</tool_call>"


@dataclass(frozen=True)
class Tool:
    """A tool by its name and its arguments with their JSON types; `kind` names the entry of `KINDS` behind it."""

    kind: str
    name: str
    arguments: tuple[tuple[str, str], ...]

    def spec(self) -> dict[str, object]:
        """Return the tool as OpenAI's clients describe it."""
        function = {"name": self.name, "description": f"The tool {self.name}.", "parameters": self._parameters()}
        return {"type": "function", "function": function}

    def call_schema(self) -> dict[str, object]:
        """Return the JSON schema of a call of this tool."""
        return _object_schema({"name": {"const": self.name}, "arguments": self._parameters()})

    def _parameters(self) -> dict[str, object]:
        return _object_schema({name: {"type": kind} for name, kind in self.arguments})


def _object_schema(properties: dict[str, object]) -> dict[str, object]:
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


@dataclass(frozen=True)
class ToolDraft:
    """A question, the call it needs, what the tool returns and the answer that follows; see `Draft` for `key`."""

    prompt: str
    call: str
    result: str
    answer: str
    key: str | None


def tools_message(tools: Sequence[Tool], system: str = "") -> str:
    """Return the content of the system message that lists `tools`, as the chat template writes it."""
    lines = [json.dumps({"name": tool.name, "arguments": dict(tool.arguments)}) for tool in tools]
    return (system and f"{system}\n\n") + "\n".join(["# Tools", "<tools>", *lines, "</tools>"])


def call_text(name: str, arguments: dict[str, object]) -> str:
    """Return the assistant's message that calls a tool."""
    return f"{CALL_START}{json.dumps({'name': name, 'arguments': arguments})}{CALL_END}"


def draw_call(tool: Tool, rng: Random, split: Split = "any", again: bool = False) -> ToolDraft:
    """Write questions that need `tool` until one belongs to `split`; `again` asks shortly, after one of its kind."""
    while True:
        draft = KINDS[tool.kind].make(tool, rng, again)
        if split == "any" or draft.key is None or (split == "held_out") == is_held_out(draft.key):
            return draft


def draw_tools(rng: Random, *needed: str) -> list[Tool]:
    """Draw a list of one to three tools with different names, among them one of each kind in `needed`."""
    kinds = [*needed]
    size = max(len(kinds), rng.choice((1, 1, 2, 2, 3)))
    while len(kinds) < size:
        kind = rng.choice((*KINDS, "any", "any"))
        if kind == "any" or kind not in kinds:
            kinds.append(kind)
    rng.shuffle(kinds)
    tools = [KINDS[kind].tool(rng) for kind in kinds]
    return tools if len({tool.name for tool in tools}) == len(tools) else draw_tools(rng, *needed)


def call_instead(task: str, prompt: str, answer: str, tools: Sequence[Tool]) -> ToolDraft | None:
    """Return the call that a question of `tasks.py` needs in the presence of `tools`, if one of them serves it."""
    if TASKS[task].family == "sum":
        kind, (given, result) = "calculator", answer.rstrip(".").split(" = ")
    elif task == "capital":
        kind, (given, result) = "capital", answer.removeprefix("The capital of ").rstrip(".").split(" is ")
        given = given.removeprefix("the ")
    else:
        return None
    tool = next((tool for tool in tools if tool.kind == kind), None)
    return tool and ToolDraft(prompt, _call(tool, given), result, answer, None)


def _call(tool: Tool, *values: object) -> str:
    return call_text(tool.name, dict(zip((name for name, _ in tool.arguments), values, strict=True)))


# -- calculator ----------------------------------------------------------------------------------------


def _calculator(rng: Random) -> Tool:
    name = rng.choice((*["calculator"] * 7, "calculate", "calc", "compute"))
    return Tool("calculator", name, ((rng.choice((*["expression"] * 7, "expr", "formula")), "string"),))


def _number(rng: Random) -> int:
    return rng.randint(1, 10 ** rng.choice((1, 2, 2, 3, 3, 4)) - 1)


_OPERATORS: dict[str, Callable[[float, float], float]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv,
}  # fmt: skip


def _shown(value: float, rng: Random) -> str:
    """Write a value as a calculator does, rounded to four places."""
    value = round(value, 4)
    return str(int(value) if value == int(value) and rng.random() < 0.95 else value)


def _calculation(tool: Tool, rng: Random, again: bool) -> ToolDraft:
    a, b, op = _number(rng), _number(rng), rng.choice("+-**/")
    if op == "/" and rng.random() < 0.6:
        a = b * rng.randint(1, max(1, 9999 // b))
    elif op == "*" and len(f"{a}{b}") > 6:
        b = rng.randint(2, 99)
    expression = f"{a} {op} {b}"
    templates = phrasings.SUM_AGAIN if again else phrasings.OPERATIONS[op]
    prompt = rng.choice(templates).format(a=a, b=b, op=op, expression=expression)
    result = _shown(_OPERATORS[op](a, b), rng)
    shown = json.dumps({"result": result}) if rng.random() < 0.05 else result
    return ToolDraft(prompt, _call(tool, expression), shown, f"{expression} = {result}.", expression)


# -- capitals and weather ------------------------------------------------------------------------------


def _capital_tool(rng: Random) -> Tool:
    return Tool("capital", rng.choice(("capital_of", "capital_of", "get_capital")), (("country", "string"),))


def _capital(tool: Tool, rng: Random, again: bool) -> ToolDraft:
    country = rng.choice(tuple(CAPITALS))
    prompt = rng.choice(phrasings.CAPITAL_AGAIN if again else phrasings.CAPITAL).format(country=country)
    answer = f"The capital of {country} is {CAPITALS[country]}."
    return ToolDraft(prompt, _call(tool, country.removeprefix("the ")), CAPITALS[country], answer, prompt)


def _weather_tool(rng: Random) -> Tool:
    name = rng.choice(("get_weather", "get_weather", "weather"))
    return Tool("weather", name, ((rng.choice(("city", "city", "location")), "string"),))


def _weather(tool: Tool, rng: Random, again: bool) -> ToolDraft:
    city, sky = rng.choice(tuple(CAPITALS.values())), rng.choice(phrasings.SKIES)
    weather = rng.choice((sky, f"{rng.randint(-9, 39)} degrees", f"{sky}, {rng.randint(-9, 39)} degrees"))
    prompt = rng.choice(phrasings.WEATHER_AGAIN if again else phrasings.WEATHER).format(city=city)
    return ToolDraft(prompt, _call(tool, city), weather, f"The weather in {city} is {weather}.", prompt)


# -- tools of any name ---------------------------------------------------------------------------------


def _name(rng: Random) -> str:
    """A word of the list, or one made up."""
    if rng.random() < 0.5:
        return rng.choice(WORDS)
    return "".join(rng.choice("bcdfghklmnprstvw") + rng.choice("aeiou") for _ in range(rng.randint(1, 4)))


def _any_tool(rng: Random) -> Tool:
    names = {_name(rng): rng.choice(("integer", "integer", "string")) for _ in range(rng.choice((0, 1, 1, 1, 2)))}
    return Tool("any", "_".join(_name(rng) for _ in range(rng.choice((1, 2, 2)))), tuple(names.items()))


def _any(tool: Tool, rng: Random, again: bool) -> ToolDraft:
    values = [rng.randint(0, 999) if kind == "integer" else _name(rng) for _, kind in tool.arguments]
    pairs = [f"{name}={json.dumps(value)}" for (name, _), value in zip(tool.arguments, values, strict=True)]
    given = ", ".join(pairs if len(pairs) > 1 or rng.random() < 0.5 else map(json.dumps, values))
    prompt = rng.choice(phrasings.CALL_AGAIN if again else phrasings.CALL).format(call=f"{tool.name}({given})")
    result = rng.choice((str(rng.randint(0, 9999)), _name(rng)))
    # Why: a call without arguments has too few phrasings for two sides.
    key = prompt if values else None
    return ToolDraft(prompt, _call(tool, *values), result, f"The result is {result}.", key)


@dataclass(frozen=True)
class Kind:
    """Tools that serve one kind of question: `tool` draws one, `make` writes a question for it."""

    tool: Callable[[Random], Tool]
    make: Callable[[Tool, Random, bool], ToolDraft]


KINDS: dict[str, Kind] = {
    "calculator": Kind(_calculator, _calculation),
    "capital": Kind(_capital_tool, _capital),
    "weather": Kind(_weather_tool, _weather),
    "any": Kind(_any_tool, _any),
}
"""All kinds of tools by name."""
