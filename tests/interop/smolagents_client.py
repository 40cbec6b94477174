"""Calls the door through smolagents, in an environment of its own: texts, agents with a tool, an object, refusals.

    python smolagents_client.py BASE_URL API_KEY RESULTS
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool
from smolagents.monitoring import LogLevel

QUESTION = [{"role": "user", "content": [{"type": "text", "text": "What is 2 + 3?"}]}]
EMPTY = {"initial_plan": "", "update_plan_pre_messages": "", "update_plan_post_messages": ""}
SHORT: Any = {"system_prompt": "Use tools.", "planning": EMPTY, "managed_agent": {"task": "", "report": ""},
              "final_answer": {"pre_messages": "", "post_messages": "{{task}}"}}
"""Its own prompts are longer than the context of the demo model."""
CODE = {"type": "object", "properties": {name: {"type": "string", "maxLength": 9} for name in ("thought", "code")},
        "required": ["thought", "code"], "additionalProperties": False}


@tool
def calculator(expression: str) -> int:
    """Adds or subtracts.

    Args:
        expression: Two numbers with a sign between them.
    """
    first, sign, second = expression.split()
    return int(first) + int(sign + second)


def main(base_url: str, api_key: str, results: str) -> None:
    """Call and write what came back."""

    def model(**fields: Any) -> OpenAIServerModel:
        common = {"model_id": "demo", "api_base": base_url, "api_key": api_key, "temperature": 0, "max_tokens": 100,
                  "client_kwargs": {"max_retries": 0}}
        return OpenAIServerModel(**{**common, **fields})

    whole, chunks = model().generate(QUESTION), list(model().generate_stream(QUESTION))
    usage = [[one.input_tokens, one.output_tokens] for one in (whole.token_usage, chunks[-1].token_usage)]
    told: dict[str, Any] = {"whole": whole.content, "stream": "".join([one.content or "" for one in chunks]),
                            "usage": usage, "flat": model(flatten_messages_as_text=True).generate(QUESTION).content,
                            "stopped": model().generate(QUESTION, stop_sequences=["= "]).content}
    form: Any = {"type": "json_schema", "json_schema": {"name": "Code", "strict": True, "schema": CODE}}
    told["object"] = json.loads(model().generate(QUESTION, response_format=form).content)
    told["calls"] = [[call.function.name, json.loads(call.function.arguments)]
                     for call in model().generate(QUESTION, tools_to_call_from=[calculator]).tool_calls]
    told["cut"] = model(max_tokens=12).generate(QUESTION, response_format=form).raw.choices[0].finish_reason
    for name, kind, streams in (("ToolCallingAgent", ToolCallingAgent, False), ("streamed", ToolCallingAgent, True),
                                ("CodeAgent", CodeAgent, False)):
        agent = kind(tools=[calculator], model=model(), max_steps=2, verbosity_level=LogLevel.OFF,
                     prompt_templates=SHORT, stream_outputs=streams)
        answer = agent.run("What is 12 + 7?")
        calls = [call.arguments for step in agent.memory.steps for call in getattr(step, "tool_calls", None) or ()]
        told[name] = {"answer": answer, "calls": calls, "steps": [type(step).__name__ for step in agent.memory.steps]}
    told["errors"] = {name: outcome(lambda fields=fields, prompt=prompt: model(**fields).generate(prompt))
                      for name, (fields, prompt) in {
        "temperature": ({"temperature": 99}, QUESTION), "model": ({"model_id": "other"}, QUESTION),
        "key": ({"api_key": "a-key-of-nobody"}, QUESTION),
        "length": ({}, [{"role": "user", "content": "2 " * 1100}]),
    }.items()}
    Path(results).write_text(json.dumps(told, default=str), "utf-8")


def outcome(call: Callable[[], Any]) -> Any:
    """Return what a call gives, or the name of its error."""
    try:
        return call()
    except Exception as error:
        return type(error).__name__


if __name__ == "__main__":
    main(*sys.argv[1:])
