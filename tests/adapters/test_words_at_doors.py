"""Thinking on and off, messages that are continued, and words of vLLM's about tokens, at every door: the same words,
the same completions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import adapters.bentoml.home  # noqa: F401  # Why first: BentoML reads its home when it is imported.

pytest.importorskip("bentoml")
pytest.importorskip("langchain_core")
pytest.importorskip("uvicorn")

import httpx
from langchain_core.messages import AIMessage, HumanMessage

from adapters.bentoml.asgi_caller import serving as serving_bentoml
from adapters.openai.loopback import serving
from pagedcore import AsyncEngine, Chat
from pagedcore.errors import InvalidRequest
from pagedcore_langchain import ChatPagedCore
from pagedcore_openai import openai_app
from support.scripted_model import TEMPLATES, scripted_engine

SWITCH = ("{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}"
          "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}")
OFF: list[Any] = [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"},
                  {"chat_template_kwargs": {"enable_thinking": False, "other": None}, "reasoning_effort": "high"}]
ON: list[Any] = [{}, {"chat_template_kwargs": {"enable_thinking": True}}, {"reasoning_effort": "low"}]
REFUSED: list[Any] = [
    ({"chat_template_kwargs": {name: "x"}}, f"chat_template_kwargs.{name}")
    for name in ("messages", "tools", "chat_template", "tokenize", "add_generation_prompt", "eos_token", "not_read")
] + [({"chat_template_kwargs": {"enable_thinking": []}}, "chat_template_kwargs.enable_thinking"),
     ({"reasoning_effort": "much"}, "reasoning_effort")]


def script(prompt: str) -> str:
    """Begin as the prompt of the question does."""
    return f"<think>\n{'' if 'off' in prompt else 'Hm.'}\n</think>\n\nThree."


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    with scripted_engine(script, TEMPLATES["hermes"] + SWITCH) as engine:
        yield engine


@pytest.fixture(scope="module")
def post(engine: AsyncEngine) -> Iterator[Callable[..., httpx.Response]]:
    with serving(openai_app(engine, name="m")) as url, httpx.Client(base_url=url) as client:
        greedy = {"temperature": 0}
        yield lambda path, **body: client.post(path, json={**({} if path == "/tokenize" else greedy), **body})


def question(is_off: bool) -> list[Any]:
    return [{"role": "user", "content": "off" if is_off else "on"}]


@pytest.mark.parametrize(("words", "is_off"), [(one, True) for one in OFF] + [(one, False) for one in ON])
def test_thinking_is_a_matter_of_the_request(post: Any, engine: AsyncEngine, words: Any, is_off: bool) -> None:
    """OpenAI's chats and their tokens, BentoML's and LangChain's: the words mean the same, and reasoning is read so."""
    reasoning = None if is_off else "Hm."
    message = post("/v1/chat/completions", messages=question(is_off), **words).json()["choices"][0]["message"]
    assert (message["content"], message.get("reasoning_content")) == ("Three.", reasoning)
    kwargs = {name: value for name, value in words.items() if name == "chat_template_kwargs"}
    num_tokens = [post("/tokenize", messages=question(is_off), **one).json()["count"] for one in (kwargs, {})]
    assert (num_tokens[0] > num_tokens[1]) == (is_off and "chat_template_kwargs" in words)
    given = {**words, "chat_template_kwargs": {"enable_thinking": False}} if "other" in str(words) else words
    reply = ChatPagedCore.from_engine(engine).invoke([HumanMessage(question(is_off)[0]["content"])], **given)
    assert (reply.content, reply.additional_kwargs.get("reasoning_content")) == ("Three.", reasoning)


async def test_bentoml_has_the_words_too(engine: AsyncEngine) -> None:
    """Its endpoint for chats takes both, and refuses the same."""
    async with serving_bentoml(engine) as app:
        for words, is_off in [(OFF[0], True), (OFF[1], True), (ON[0], False)]:
            (output,) = json.loads((await app.call("/chat", {"messages": question(is_off), **words})).text)["outputs"]
            assert (output["text"], output["reasoning"]) == ("Three.", "" if is_off else "Hm.")
        for words, what in REFUSED:
            refused = await app.call("/chat", {"messages": question(True), **words})
            assert (refused.status, refused.error["what"]) == (400, what)


def test_responses_have_an_effort(post: Any) -> None:
    """Within ``reasoning``, which comes back as it was given; a summary is of no effect."""
    for effort, is_off in (("none", True), ("high", False)):
        body = post("/v1/responses", input=question(is_off), reasoning={"effort": effort, "summary": "auto"}).json()
        assert [item["type"] for item in body["output"]] == (["message"] if is_off else ["reasoning", "message"])
        assert body["reasoning"] == {"effort": effort, "summary": "auto"}
    assert post("/v1/responses", input="on", reasoning={"effort": "much"}).status_code == 400


@pytest.mark.parametrize(("words", "what"), [*REFUSED, ({"chat_template": "{{ 1 }}"}, "chat_template")])
def test_what_no_template_may_be_told_is_refused_by_name(
    post: Any, engine: AsyncEngine, words: Any, what: str
) -> None:
    """A template is a program and comes from the operator; no body brings one, nor what the chat has from elsewhere."""
    refused = post("/v1/chat/completions", messages=question(True), **words)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, what)
    if "chat_template" not in words:
        with pytest.raises(InvalidRequest, match=what):
            ChatPagedCore.from_engine(engine).invoke([HumanMessage("off")], **words)


@pytest.mark.parametrize("words", [
    {"continue_final_message": True}, {"prefix": True},
    {"continue_final_message": True, "add_generation_prompt": False},
])
def test_the_last_message_is_continued(post: Any, words: Any) -> None:
    """By vLLM's words or Mistral's, whole and in the count of its tokens."""
    begun = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nThr"}
    fields = {name: value for name, value in words.items() if name != "prefix"}
    messages = [*question(False), {**begun, **({"prefix": True} if "prefix" in words else {})}]
    message = post("/v1/chat/completions", messages=messages, **fields).json()["choices"][0]["message"]
    assert message["content"] == "ee."
    counts = [post("/tokenize", messages=one, **more).json()["count"]
              for one, more in ((messages, fields), ([*question(False), begun], {"add_generation_prompt": False}))]
    assert counts[0] == counts[1] - 2  # the end token and the line break behind it


BEGUN = [*[{"role": "user", "content": "on"}], {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nThr"}]


@pytest.mark.parametrize(("words", "text"), [
    ({"continue_final_message": True}, "ee."),
    ({"continue_final_message": True, "add_generation_prompt": False}, "ee."),
    ({"add_generation_prompt": True}, "Three."), ({"continue_final_message": False}, "Three."),
])
async def test_the_last_message_is_continued_by_keyword(post: Any, engine: AsyncEngine, words: Any, text: str) -> None:
    """Of LangChain's call, binding and stream and of BentoML's chat as of OpenAI's; a ``Chat`` says it in Python."""
    messages = [HumanMessage("on"), AIMessage(BEGUN[1]["content"])]
    chat = ChatPagedCore.from_engine(engine)
    whole = post("/v1/chat/completions", messages=BEGUN, **words).json()["choices"][0]["message"]["content"]
    texts = [whole, chat.invoke(messages, **words).content, (await chat.bind(**words).ainvoke(messages)).content,
             "".join(one.text for one in chat.stream(messages, **words))]
    async with serving_bentoml(engine) as app:
        texts.append(json.loads((await app.call("/chat", {"messages": BEGUN, **words})).text)["outputs"][0]["text"])
        if text == "ee.":
            prompt = Chat(BEGUN, **words)
            texts.append((await app.runner.complete(None, prompt)).outputs[0].text)
            texts.append("".join([one.text async for one in app.runner.deltas(None, prompt)]))
    assert texts == [text] * len(texts)


async def test_a_prompt_that_ends_behind_the_last_message_is_the_same_at_every_door(
    post: Any, engine: AsyncEngine
) -> None:
    """Without what begins an answer; its tokens are counted."""
    words, count = {"add_generation_prompt": False}, engine.encode(Chat(BEGUN, add_generation_prompt=False))
    usage = post("/v1/chat/completions", messages=BEGUN, max_tokens=1, **words).json()["usage"]
    reply = ChatPagedCore.from_engine(engine, max_tokens=1).invoke(
        [HumanMessage("on"), AIMessage(BEGUN[1]["content"])], **words)
    assert reply.usage_metadata is not None
    async with serving_bentoml(engine) as app:
        body = {"messages": BEGUN, "sampling": {"max_tokens": 1}, **words}
        told = json.loads((await app.call("/chat", body)).text)["usage"]
    assert [usage["prompt_tokens"], reply.usage_metadata["input_tokens"], told["num_prompt_tokens"]] == [len(count)] * 3


@pytest.mark.parametrize(("messages", "words", "what"), [
    (question(False), {"continue_final_message": True}, "continue_final_message"),
    (question(False), {"continue_final_message": 1}, "continue_final_message"),
    ([*question(False), {"role": "assistant", "content": "x"}],
     {"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
    ([*question(False), {"role": "assistant", "content": "x", "prefix": 1}], {}, "messages[1].prefix"),
    ([{"role": "user", "content": "x", "prefix": True}], {}, "messages[0].prefix"),
])
async def test_what_cannot_be_continued_is_refused_by_name(
    post: Any, engine: AsyncEngine, messages: Any, words: Any, what: str
) -> None:
    """Only the assistant's own last message can, and nothing begins behind it."""
    refused = post("/v1/chat/completions", messages=messages, **words)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, what)
    if words:
        kinds = {"user": HumanMessage, "assistant": AIMessage}
        with pytest.raises(InvalidRequest) as caught:
            ChatPagedCore.from_engine(engine).invoke([kinds[one["role"]](one["content"]) for one in messages], **words)
        async with serving_bentoml(engine) as app:
            told = await app.call("/chat", {"messages": messages, **words})
        assert (caught.value.what, told.status, told.error["what"]) == (what, 400, what)


@pytest.mark.parametrize(("words", "text"), [
    ({"bad_words": ["Three"]}, None), ({"allowed_token_ids": [7]}, None),
    ({"stop": "ee", "include_stop_str_in_output": True}, "Three"), ({"stop": "ee"}, "Thr"),
    ({"skip_special_tokens": False}, "Three.<|im_end|>"), ({"truncate_prompt_tokens": -1}, "Three."),
])
async def test_what_is_said_of_tokens_means_the_same_at_every_door(
    post: Any, engine: AsyncEngine, words: Any, text: str | None
) -> None:
    """OpenAI's three endpoints, LangChain's model and BentoML's, by the names that vLLM has."""
    greedy = {"max_tokens": 24, **words}
    thought = "<think>\n\n</think>\n\n"
    chat = post("/v1/chat/completions", messages=question(True), chat_template_kwargs={"enable_thinking": False},
                **greedy).json()["choices"][0]["message"]["content"]
    assert text is None or chat == text
    assert "Three" not in chat or "bad_words" not in words
    named = [{"role": one["role"], "content": one["content"]} for one in question(True)]
    prompt = engine.apply_chat_template(named, enable_thinking=False)
    assert prompt.endswith(thought)
    answer = post("/v1/completions", prompt=prompt, **greedy).json()["choices"][0]["text"]
    assert answer == chat
    model = ChatPagedCore.from_engine(engine, max_tokens=24)
    stop = [words["stop"]] if "stop" in words else None
    rest = {name: value for name, value in words.items() if name != "stop"}
    reply = await model.ainvoke([HumanMessage("off")], stop=stop, reasoning_effort="none", **rest)
    assert reply.content == chat
    async with serving_bentoml(engine) as app:
        body = {"messages": question(True), "sampling": greedy, "reasoning_effort": "none"}
        assert json.loads((await app.call("/chat", body)).text)["outputs"][0]["text"] == chat
    response = post("/v1/responses", input=question(True), reasoning={"effort": "none"}, max_output_tokens=24, **words)
    assert response.json()["output"][0]["content"][0]["text"] == chat
    refused = post("/v1/completions", prompt="x", echo=True, truncate_prompt_tokens=3)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "truncate_prompt_tokens")
