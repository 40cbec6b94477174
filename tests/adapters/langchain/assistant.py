"""What a model of these tests writes: it calls the tools of LangChain's suites as an obliging model would."""

from __future__ import annotations

import json
import re
from typing import Any, Final

JOKE: Final = {"setup": "Why do cats purr?", "punchline": "Because they can."}


def call(name: str, **arguments: Any) -> str:
    """Return a call as Hermes writes it."""
    made = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{made}\n</tool_call>"


def assistant(prompt: str) -> str:
    """Answer the last message of a prompt."""
    *_, last = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", prompt, flags=re.DOTALL)
    role, text = last
    tools = {json.loads(line[2:])["function"]["name"] for line in prompt.splitlines() if line.startswith("# {")}
    if role == "tool":
        return f"It is {text}."
    if found := re.search(r"magic_function\((\d+)\)", text):
        return call("magic_function", input=int(found[1]))
    if "magic_function_no_args" in text:
        return call("magic_function_no_args")
    if found := re.search(r"What is (\d+) \+ (\d+)", text):
        return call("my_adder_tool", a=int(found[1]), b=int(found[2]))
    if "greeting" in text:
        return call("greeting_generator", answer_style="pirate")
    if "weather" in text:
        return call("get_weather", location="San Francisco, CA")
    if found := re.search(r"customer named '(.*?)'", text):
        return call("unicode_customer", customer_name=found[1], description="A company.")
    if "joke" in text:
        return call("Joke", **JOKE) if "Joke" in tools else json.dumps(JOKE)
    return "Hello."
