"""A law over all doors: every field is kept, or refused by its name, or listed as one without effect.

What a field does is seen in the request that the engine accepts and in the response. The fields are those that each
door itself knows, so that a new one is in the law from its first day.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest

import adapters.bentoml.home  # noqa: F401  # Why first: BentoML reads its home when it is imported.

pytest.importorskip("bentoml")
pytest.importorskip("langchain_core")
pytest.importorskip("llguidance")

from langchain_core.language_models import BaseChatModel
from langchain_core.language_models.llms import BaseLLM
from langchain_core.messages import AIMessage, HumanMessage
from pydantic import ValidationError

from adapters.bentoml.asgi_caller import App
from adapters.bentoml.asgi_caller import serving as serving_bentoml
from pagedcore import AsyncEngine, SamplingParams
from pagedcore.errors import PagedcoreError
from pagedcore.request_options import OptionKeywords
from pagedcore_bentoml.wire import BatchInput, ChatInput, PromptInput
from pagedcore_langchain import ChatPagedCore, PagedCoreLLM
from pagedcore_langchain.settings import OF_REMOTE_MODELS as OF_OTHER_MODELS
from pagedcore_langchain.tools import OF_TOOLS
from pagedcore_openai import fields as openai_fields
from pagedcore_openai import openai_app
from support.accepted import note_accepted
from support.scripted_model import TEMPLATES, scripted_engine

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTION = {"name": "pay", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "An"}]
SWITCH = "{%- if enable_thinking is defined and enable_thinking is false %}{{- 'Off.' }}{%- endif %}"
UNKNOWN = "no_such_field"
SAMPLING: dict[str, Any] = {
    "max_tokens": 3, "min_tokens": 2, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.5,
    "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.5,
    "logit_bias": {"7": 1.0}, "stop": ["zz"], "stop_outside": ["a", "b"], "stop_token_ids": [7],
    "ignore_eos": True, "seed": 3, "n": 2, "best_of": 2,
    "beam_width": 2, "length_penalty": 0.5, "early_stopping": True, "logprobs": 1, "prompt_logprobs": 1,
    "structured": {"json_schema": SCHEMA}, "logits_processor": "code", "bad_words": ["word"], "bad_words_ids": [[7, 8]],
    "allowed_token_ids": [7, 8], "include_stop_str_in_output": True, "skip_special_tokens": False,
    "truncate_prompt_tokens": 3, "suppress_tokens": [7], "begin_suppress_tokens": [7], "no_repeat_ngram_size": 2,
    "forced_eos_token_id": 7, "return_logits": True, "logprobs_mode": "processed",
}
POLICIES = ("deadline_s", "ttft_ms", "tpot_ms", "timeout_s", "lora")
OPTIONS: dict[str, Any] = {
    "priority": 2, "cache_salt": "salt", "request_id": "label", "tenant": "tenant", "weight": 2.0, "deadline_s": 5.0,
    "ttft_ms": 5.0, "tpot_ms": 5.0, "timeout_s": 1e-9, "speculate": False, "lora": "none",
}
"""Under a policy that has priorities, so that what other policies have is refused by its name; no adapter is loaded."""
WORDS: dict[str, Any] = {
    "tools": TOOLS, "tool_choice": "none", "parallel_tool_calls": False, "reasoning_effort": "none",
    "chat_template_kwargs": {"enable_thinking": False}, "add_generation_prompt": False, "continue_final_message": True,
    "response_format": FORMAT,
}
NEEDS: dict[str, dict[str, Any]] = {
    "tool_choice": {"tools": TOOLS}, "parallel_tool_calls": {"tools": TOOLS},
    "function_call": {"functions": [FUNCTION]},
    "stream_options": {"stream": True}, "include_stop_str_in_output": {"stop": ["zz"]},
}
"""Fields that mean nothing by themselves, and what they are given with."""


@dataclass
class House:
    """One engine, its doors, and the requests that it accepts."""

    engine: AsyncEngine
    app: App
    openai: App
    accepted: list[Any]

    def take(self) -> list[Any]:
        """The requests since the last time, without labels that a door makes of random numbers."""
        taken, self.accepted[:] = [
            (one.token_ids, one.params, replace(one.options, request_id=plain(one.options.request_id or "none")))
            for one in self.accepted], []
        return taken


@pytest.fixture
def accepted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What an engine accepts."""
    found = list[Any]()
    note_accepted(monkeypatch, found.append)
    return found


@asynccontextmanager
async def house(accepted: list[Any]) -> AsyncIterator[House]:
    with scripted_engine("An answer.", TEMPLATES["hermes"] + SWITCH, scheduling_policy="priority",
                         enable_prefix_caching=False) as engine:
        async with serving_bentoml(engine) as app:
            openai: Any = App(openai_app(engine, name="m"), app.runner, engine)
            yield House(engine, app, openai, accepted)


def plain(text: str) -> str:
    """Text without what is another one each time."""
    text = re.sub(r"[0-9a-f]{32}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "ID", text)
    text = re.sub(r"'(queue_s|ttft_s|itl_s)': (\[[^]]*\]|[^,}]*)", "", text)
    return re.sub(r'"(created|created_at)":\d+', "", text)


Post = Callable[[dict[str, Any]], Awaitable[tuple[int, str, str]]]
"""Sends a body; returns the status, the response, and what a refusal says."""


async def verdict(
    opened: House, post: Post, base: Mapping[str, Any], given: Mapping[str, Any],
    needs: Mapping[str, Mapping[str, Any]] = NEEDS,
) -> str:
    """Say what a door does with fields: "kept", "refused as ...", or "nothing"."""
    (name,) = given
    with_others = {**base, **needs.get(name, {})}
    status, text, _ = await post(dict(with_others))
    assert status == 200, (name, text)
    before = opened.take(), text
    status, text, told = await post({**with_others, **given})
    after = opened.take(), text
    if status != 200:
        # Why the second: a limit of time is named by what it limits.
        return "refused" if name in told or name.removesuffix("_s") in told else f"refused without its name: {told}"
    return "nothing" if after == before else "kept"


def post_to(app: App, path: str) -> Post:
    async def post(body: dict[str, Any]) -> tuple[int, str, str]:
        exchange = await app.call(path, body)
        # Why not of a stream: of two equal ones the chunks may differ.
        text = "" if path == "/stream" else plain(exchange.text)
        return exchange.status, text, "" if exchange.status == 200 else exchange.error["message"]

    return post


OPENAI: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "/v1/chat/completions": (openai_fields.CHAT, {"messages": CHAT, "temperature": 0}, {
        "messages": CHAT[:1], "logprobs": True, "max_completion_tokens": 3, "functions": [FUNCTION],
        "function_call": "none"}),
    "/v1/completions": (openai_fields.COMPLETION, {"prompt": "Hello there", "max_tokens": 8, "temperature": 0}, {
        "prompt": "Bye", "suffix": "x", "echo": True}),
    "/v1/responses": (openai_fields.RESPONSE, {"input": "Hello", "max_output_tokens": 8, "temperature": 0}, {
        "input": "Bye", "instructions": "Be brief.", "max_output_tokens": 3, "previous_response_id": "resp_none",
        "reasoning": {"effort": "none"}, "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
        "include": ["message.output_text.logprobs"], "truncation": "auto", "metadata": {"a": "b"}, "store": False,
        "tools": [{"type": "function", **FUNCTION}]}),
}
"""Of each path its form, a body that is accepted, and values of its own fields that ask for something."""
OF_OPENAI: dict[str, Any] = {
    **SAMPLING, **OPTIONS, **WORDS, "model": "another", "stream": True, "stream_options": {"include_usage": True},
    "return_token_ids": True, "top_logprobs": 2, "use_beam_search": True,
    "structured_outputs": {"json": SCHEMA}, "guided_json": SCHEMA, "guided_regex": "a+", "guided_choice": ["a", "b"],
    "guided_grammar": 'start: "a"',
}
"""Values for every path."""


_OF_TOOLS = ("tool_choice", "parallel_tool_calls")
BEAMS = {"use_beam_search": True, "n": 2}
REFUSED = {
    "/v1/chat/completions": {"model", *POLICIES},
    "/v1/completions": {"model", "suffix", *POLICIES},
    "/v1/responses": {"model", "previous_response_id", *POLICIES},
}
"""What is read and cannot be kept by this engine."""


@pytest.mark.parametrize("path", OPENAI)
async def test_of_openai(path: str, accepted: list[Any]) -> None:
    """What the form of a path reads is kept; what it does not support is refused; what it ignores changes nothing."""
    form, base, own = OPENAI[path]
    async with house(accepted) as opened:
        post = post_to(opened.openai, path)
        values = {**OF_OPENAI, **own}
        needs = {**NEEDS, **{name: {other: values[other] for other in NEEDS.get(name, {})} for name in _OF_TOOLS},
                 "use_beam_search": {"n": 2}, "length_penalty": BEAMS, "early_stopping": BEAMS,
                 "top_logprobs": {"include": own["include"]} if "include" in own else {"logprobs": True}}
        read = {name: await verdict(opened, post, base, {name: values[name]}, needs) for name in form.reads}
        neutral = {name: await verdict(opened, post, base, {name: {"asks": "something"}}, {}) for name in form.neutral}
        ignored = {name: await verdict(opened, post, base, {name: "any"}, {}) for name in form.ignored - form.reads}
        unknown = await verdict(opened, post, base, {UNKNOWN: 1})
    if path == "/v1/responses":
        # Why: without effect there; and of two equal streams the chunks may differ.
        del read["stream_options"]
    assert {name for name, told in read.items() if told == "nothing"} == set()
    assert {name for name, told in read.items() if told == "refused"} == REFUSED[path]
    assert {*neutral.values(), unknown} == {"refused"}
    assert {*ignored.values()} == {"nothing"}, ignored


BENTOML: dict[str, tuple[Any, dict[str, Any]]] = {
    "/generate": (PromptInput, {"prompt": "Hello"}), "/stream": (PromptInput, {"prompt": "Hello"}),
    "/chat": (ChatInput, {"messages": CHAT}), "/batch": (BatchInput, {"prompts": ["Hello"]}),
}
OF_BENTOML: dict[str, Any] = {
    **OPTIONS, **WORDS, "prompt": "Bye", "messages": CHAT[:1], "prompts": ["Bye"], "sampling": {"max_tokens": 3},
    "suffix": "x",
}


@pytest.mark.parametrize("path", BENTOML)
async def test_of_bentoml(path: str, accepted: list[Any]) -> None:
    """Every field of an endpoint, every field of its sampling parameters, and unknown ones of both."""
    kind, needed = BENTOML[path]
    base = {**needed, "sampling": {"max_tokens": 8}}
    async with house(accepted) as opened:
        post = post_to(opened.app, path)
        values = {**OF_BENTOML, "request_id": ["label"] if path == "/batch" else "label", UNKNOWN: 1}
        found = {name: await verdict(opened, post, base, {name: values[name]})
                 for name in (*kind.model_fields, UNKNOWN)}

        async def post_sampling(sampling: dict[str, Any]) -> tuple[int, str, str]:
            return await post({**base, "sampling": sampling})

        names = {field.name for field in fields(SamplingParams)}
        values = {**SAMPLING, UNKNOWN: 1}
        sampling = {name: await verdict(opened, post_sampling, {"max_tokens": 8}, {name: values[name]})
                    for name in (*names, UNKNOWN)}
    assert {*found.values(), *sampling.values()} == {"kept", "refused"}
    refused = {UNKNOWN, *POLICIES, *(("suffix",) if "suffix" in found else ())}
    assert {name for name, told in found.items() if told == "refused"} == refused
    assert {name for name, told in sampling.items() if told == "refused"} == {
        UNKNOWN, "logits_processor", "return_logits"}


TOKENIZE = {"messages": CHAT}
OF_TOKENIZE = {"messages": CHAT[:1], "prompt": "Hello", "model": "another", "return_token_strs": True, **WORDS}


async def test_of_tokenize(accepted: list[Any]) -> None:
    """What the form of counting tokens reads is kept; a model that is not there and two prompts are refused."""
    form = openai_fields.TOKENIZE
    async with house(accepted) as opened:
        post = post_to(opened.openai, "/tokenize")
        read = {name: await verdict(opened, post, TOKENIZE, {name: OF_TOKENIZE[name]}, {}) for name in form.reads}
        others = {name: await verdict(opened, post, TOKENIZE, {name: {"asks": "something"}}, {})
                  for name in (*form.neutral, UNKNOWN)}
    assert {name for name, told in read.items() if told != "kept"} == {"prompt", "model"}
    assert {*others.values()} == {read["prompt"], read["model"]} == {"refused"}


OF_LANGCHAIN: dict[str, Any] = {
    **{name: value for name, value in SAMPLING.items() if name != "structured"}, **OPTIONS, **WORDS,
    "structured": {"json_schema": SCHEMA}, "timeout": 1e-9, "top_logprobs": 2, "max_completion_tokens": 3,
    "stop_sequences": ["zz"], "model": "another", "suffix": "x", "streaming": True,
    "stream": True, "ls_structured_output_format": {"kwargs": {}, "schema": SCHEMA},
    "logits_processor": lambda token_ids, logits: logits,
}
LANGCHAIN_WITHOUT_EFFECT = {ChatPagedCore: {"ls_structured_output_format"}, PagedCoreLLM: {"stream"}}
"""Keywords of a call that are for tracers, or that LangChain adds to other models' calls."""


def shown(result: Any) -> str:
    told = [(one.text, one.generation_info, getattr(one, "message", None)) for one in result.generations[0]]
    return plain(repr((told, result.llm_output)))


async def verdict_of_call(
    opened: House, model: Any, prompt: Any, keywords: Mapping[str, Any], needs: Mapping[str, Any]
) -> str:
    """Say what a model does with a keyword of a call."""

    async def post(given: dict[str, Any]) -> tuple[int, str, str]:
        try:
            result = await model.agenerate(prompt, **given)
        except (PagedcoreError, TypeError) as error:
            return 400, "", str(error)
        return 200, shown(result), ""

    return await verdict(opened, post, {"max_tokens": 8}, keywords, needs)


@pytest.mark.parametrize("kind", [ChatPagedCore, PagedCoreLLM])
async def test_of_a_call_of_langchain(kind: Any, accepted: list[Any]) -> None:
    """Every sampling parameter, option and word of chats, by keyword of a call."""
    names = {*(field.name for field in fields(SamplingParams)), *OptionKeywords.__annotations__, "timeout",
             "top_logprobs", "max_completion_tokens", "stop_sequences", "model", "stream", UNKNOWN}
    is_chat = kind is ChatPagedCore
    names |= {*OF_TOOLS, "response_format"} if is_chat else {"suffix"}
    needs = {**NEEDS, "top_logprobs": {"logprobs": True}}
    async with house(accepted) as opened:
        model = kind.from_engine(opened.engine)
        prompt = [[HumanMessage("Hello"), AIMessage("An")]] if is_chat else ["Hello there"]
        found = {name: await verdict_of_call(opened, model, prompt, {name: {**OF_LANGCHAIN, UNKNOWN: 1}[name]}, needs)
                 for name in names}
    ignored = {name for name, told in found.items() if told == "nothing"}
    refused = {name for name, told in found.items() if told == "refused"}
    assert ignored == LANGCHAIN_WITHOUT_EFFECT[kind]
    assert refused == {"model", "timeout", "return_logits", "weight", "deadline_s", "ttft_ms", "tpot_ms", "lora",
                       UNKNOWN, *names & {"suffix"}}
    assert found.keys() - ignored - refused == {name for name, told in found.items() if told == "kept"}


OF_FIELDS: dict[str, Any] = {
    **OF_LANGCHAIN, "logprobs": 1, "sampling": {"n": 2}, "model": "another", "engine_settings": {"seed": 1},
    "wait_for_room": False, "timeout": 1e-9,
}
ABOUT_THE_ENGINE = {"engine_settings", "host", "wait_for_room"}
"""They say which engine it is, and what happens where its queue is full."""


@pytest.mark.parametrize("kind", [ChatPagedCore, PagedCoreLLM])
async def test_of_a_model_of_langchain(kind: Any, accepted: list[Any]) -> None:
    """Every field of a model that is not LangChain's own, and names that other models have for what is not here."""
    parent = BaseChatModel if kind is ChatPagedCore else BaseLLM
    names = {*kind.model_fields} - {*parent.model_fields} - ABOUT_THE_ENGINE
    is_chat = kind is ChatPagedCore
    prompt = [[HumanMessage("Hello"), AIMessage("An")]] if is_chat else ["Hello there"]
    async with house(accepted) as opened:
        async def post(given: dict[str, Any]) -> tuple[int, str, str]:
            try:
                result = await kind.from_engine(opened.engine, **given).agenerate(prompt)
            except (PagedcoreError, ValidationError) as error:
                return 400, "", str(error)
            return 200, shown(result), ""

        found = {name: await verdict(opened, post, {"max_tokens": 8}, {name: OF_FIELDS[name]}, {}) for name in names}
        others = {name: await verdict(opened, post, {"max_tokens": 8}, {name: 1}, {})
                  for name in (*OF_OTHER_MODELS, "base_url", "model_kwargs", UNKNOWN)}
    assert {name for name, told in found.items() if told == "nothing"} == set()
    assert {name for name, told in found.items() if told != "kept"} == {
        "timeout", "weight", "deadline_s", "ttft_ms", "tpot_ms", "lora", *names & {"suffix"}}
    assert {name for name, told in others.items() if told == "nothing"} == OF_OTHER_MODELS
    assert {name for name, told in others.items() if told == "refused"} == others.keys() - OF_OTHER_MODELS
