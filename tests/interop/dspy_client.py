"""Calls the door through DSPy, in an environment of its own: signatures with each adapter, tools, a cut, refusals.

    python dspy_client.py BASE_URL API_KEY RESULTS
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "DSPY_CACHEDIR": tempfile.mkdtemp()}

import dspy
from dspy import lm15
from pydantic import BaseModel, Field

QUESTION = "What is 2 + 3?"


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=8)
    kind: Literal["big", "small"]


class Described(dspy.Signature):
    """Answer."""

    question: str = dspy.InputField()
    city: City = dspy.OutputField()
    is_true: bool = dspy.OutputField()


class Calling(dspy.Signature):
    """Call."""

    question: str = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    calls: dspy.ToolCalls = dspy.OutputField()


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


def main(base_url: str, api_key: str, results: str) -> None:
    """Call and write what came back."""
    access = lm15.AccessPolicy(provider="pagedcore", base_url=base_url, env_keys=("OPENAI_API_KEY",))
    lm15.register_provider(lm15.ProviderDefinition.chat(access, compat=lm15.OpenAIChatCompat()),
                           supports=lm15.ModelSupport(function_calling=True, response_schema=True))

    def model(name: str = "pagedcore/demo", **fields: Any) -> dspy.LM:
        common = {"api_base": base_url, "api_key": api_key, "temperature": 0, "max_tokens": 160, "num_retries": 0,
                  "cache": False}
        return dspy.LM(name, **{**common, **fields})

    plain = [("openai/demo", "chat"), ("openai/demo", "responses"), ("pagedcore/demo", "chat")]
    told: dict[str, Any] = {"plain": [text_of(model(name, model_type=kind)(QUESTION)) for name, kind in plain]}
    told["text"] = text_of(model("text-completion-openai/demo", model_type="text", max_tokens=16)(QUESTION))
    told["litellm"] = text_of(model("openai/demo", engine="litellm")(QUESTION))
    dspy.configure(lm=model(), track_usage=True)
    for adapter in (dspy.JSONAdapter(), dspy.ChatAdapter()):
        with dspy.context(adapter=adapter):
            answer = dspy.Predict(Described)(question=QUESTION)
            told[type(adapter).__name__] = [answer.city.model_dump(), answer.is_true]
    with dspy.context(adapter=dspy.JSONAdapter()):
        thought = dspy.ChainOfThought("thing -> kind: Literal['big', 'small']")(thing="city")
        told["thought"], told["usage"] = thought.kind, thought.get_lm_usage()["pagedcore/demo"]
        told["cut"] = error_of(lambda: dspy.Predict(Described)(question=QUESTION, config={"max_tokens": 12}))
    with dspy.context(adapter=dspy.ChatAdapter(use_native_function_calling=True)):
        called = dspy.Predict(Calling)(question=QUESTION, tools=[dspy.Tool(add)], config={"tool_choice": "required"})
        told["calls"] = [[call.name, sorted(call.args)] for call in called.calls.tool_calls]
    told["errors"] = {name: error_of(lambda fields=fields, prompt=prompt: model(**fields)(prompt))
                      for name, (fields, prompt) in {
        "temperature": ({"temperature": 99}, "a"), "model": ({"name": "openai/other"}, "a"),
        "key": ({"api_key": "a-key-of-nobody"}, "a"), "length": ({}, "2 " * 1100),
        "room": ({"max_tokens": 2040}, QUESTION),
    }.items()}
    Path(results).write_text(json.dumps(told), "utf-8")


def text_of(answers: list[Any]) -> str:
    """Return the text of the one answer."""
    (answer,) = answers
    return str(answer["text"] if isinstance(answer, dict) else answer)


def error_of(call: Callable[[], Any]) -> str:
    """Return the name of the error that a call raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return "none"


if __name__ == "__main__":
    main(*sys.argv[1:])
