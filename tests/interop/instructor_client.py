"""Calls the door through instructor, in an environment of its own: typed objects in its modes, retries, cuts, refusals.

    python instructor_client.py BASE_URL API_KEY RESULTS
"""

from __future__ import annotations

import asyncio
import enum
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import instructor
from instructor import Mode
from openai import OpenAI
from pydantic import BaseModel, Field, field_validator

QUESTION: Any = [{"role": "user", "content": "What is 2 + 3?"}]
GREEDY: Any = {"messages": QUESTION, "temperature": 0}
MODES = [Mode.TOOLS, Mode.TOOLS_STRICT, Mode.FUNCTIONS, Mode.JSON_SCHEMA, Mode.RESPONSES_TOOLS]
"""Those in which the door holds the model to the schema; JSON and MD_JSON ask for it in words."""

CUTS = (1, 12, 30, 50, 200)


class Color(enum.Enum):
    """A choice."""

    RED = "red"
    GREEN = "green"


class Address(BaseModel):
    """A nested object."""

    street: Annotated[str, Field(max_length=8)]
    kind: Literal["home", "work"]


class User(BaseModel):
    """A user."""

    name: Annotated[str, Field(max_length=10)]
    age: Annotated[int, Field(ge=0, le=120)]
    color: Color
    address: Address
    nick: Annotated[str, Field(max_length=5)] | None = None
    tags: Annotated[list[Literal["a", "b"]], Field(max_length=3)]


class Small(BaseModel):
    """Small."""

    amount: Annotated[int, Field(ge=0, le=99)]
    kind: Literal["a", "b"]


def picky(refused: list[int]) -> type[BaseModel]:
    """Return a model that refuses the first amount, and notes it."""

    class Picky(Small):
        @field_validator("amount")
        @classmethod
        def refuse_once(cls, amount: int) -> int:
            if not refused:
                refused.append(amount)
                raise ValueError("give another amount")
            return amount

    return Picky


def main(base_url: str, api_key: str, results: str) -> None:
    """Call and write what came back."""
    told: dict[str, Any] = {"typed": {}, "retried": {}, "cut": {}}
    openai = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    for mode in MODES:
        client, limit = instructor.from_openai(openai, mode=mode), limit_of(mode)
        create = client.chat.completions.create
        told["typed"][mode.name] = create(model="demo", response_model=User, **GREEDY).model_dump(mode="json")
        refused: list[int] = []
        retried = create(model="demo", response_model=picky(refused), max_retries=2, **GREEDY).model_dump()
        told["retried"][mode.name] = {**retried, "refused": refused}
        told["cut"][mode.name] = [outcome(lambda limit=limit, size=size, create=create: create(
            model="demo", response_model=Small, max_retries=0, **{limit: size}, **GREEDY)) for size in CUTS]
    for mode in (Mode.JSON, Mode.MD_JSON):
        create = instructor.from_openai(openai, mode=mode).chat.completions.create
        told["cut"][mode.name] = [outcome(lambda create=create: create(
            model="demo", response_model=Small, max_retries=0, max_tokens=8, **GREEDY))]
    client = instructor.from_provider("openai/demo", base_url=base_url, api_key=api_key)
    told["partial"] = [one.model_dump() for one in client.create_partial(response_model=Small, **GREEDY)][-1]
    small, completion = client.create_with_completion(response_model=Small, **GREEDY)
    told["usage"], told["whole"] = completion.usage.model_dump(), small.model_dump()
    told["literal"] = client.create(response_model=Literal["yes", "no"], **GREEDY)
    told["plain"] = client.create(response_model=None, **GREEDY).choices[0].message.content
    asynchronous = instructor.from_provider("openai/demo", base_url=base_url, api_key=api_key, async_client=True)
    told["asynchronous"] = asyncio.run(asynchronous.create(response_model=Small, **GREEDY)).model_dump()
    once: Any = {"response_model": Small, "max_retries": 0}
    told["errors"] = {
        "temperature": cause_of(lambda: client.create(messages=QUESTION, temperature=99, **once)),
        "model": cause_of(lambda: client.create(model="other", **GREEDY, **once)),
        "key": cause_of(lambda: instructor.from_openai(openai.with_options(api_key="a-key-of-nobody")).create(
            model="demo", **GREEDY, **once)),
        "length": cause_of(lambda: client.create(messages=[{"role": "user", "content": "2 " * 1100}], **once)),
    }
    Path(results).write_text(json.dumps(told), "utf-8")


def limit_of(mode: Mode) -> str:
    """Return how a call of the mode names the most tokens."""
    return "max_output_tokens" if mode is Mode.RESPONSES_TOOLS else "max_tokens"


def outcome(call: Callable[[], Any]) -> Any:
    """Return the object that a call gives, or the name of its error."""
    try:
        return call().model_dump()
    except Exception as error:
        return type(error).__name__


def cause_of(call: Callable[[], Any]) -> list[str]:
    """Return the names of the errors that a call raises and of what caused it."""
    try:
        call()
    except Exception as error:
        return [type(error).__name__, type(error.__cause__).__name__]
    return []


if __name__ == "__main__":
    main(*sys.argv[1:])
