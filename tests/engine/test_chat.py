"""``chat()`` and what else a program in plain Python looks for on an engine."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from pagedcore import AsyncEngine, Chat, Engine, SamplingParams
from pagedcore.errors import InvalidPrompt, InvalidRequest, NotPicklable, PagedcoreError, PromptEmpty, UnknownParameter
from support.doubles import ToyBackend
from support.engine_builders import make_engine
from support.scripted_model import TEMPLATES, scripted_engine

QUESTION: Any = [{"role": "user", "content": "What is 2 + 3?"}]
PARAMS = SamplingParams(max_tokens=32)
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.from_pretrained("demo") as engine:
        yield engine


def test_a_chat_says_what_its_prompt_completes_to(engine: Engine) -> None:
    """``chat``, ``generate`` with one list of messages, with a ``Chat``, and the step loop give the same tokens."""
    request = engine.add_request(QUESTION, PARAMS)
    while not request.is_done:
        engine.step()
    wanted = request.output().outputs[0]
    request.remove()
    reply = engine.chat(QUESTION, PARAMS)
    assert (reply.content, reply.finish_reason, reply.output.outputs[0].token_ids) == (
        wanted.text, wanted.finish_reason, wanted.token_ids)
    for prompts in (QUESTION, tuple(QUESTION), Chat(QUESTION), [QUESTION]):
        (output,) = engine.generate(prompts, PARAMS)
        assert output.outputs[0].token_ids == wanted.token_ids
    assert len(engine.generate([QUESTION, QUESTION], PARAMS)) == 2
    assert not engine.has_pending_requests()
    assert engine.stats().num_blocks_used == 0


def test_text_parts_are_a_content(engine: Engine) -> None:
    """OpenAI's form of a content has the tokens of its text, in every method that takes a chat."""
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "2 + 3?"}]}]
    wanted = engine.encode(QUESTION)
    assert [engine.encode(prompt) for prompt in (parts, Chat(parts))] == [wanted, wanted]
    assert engine.chat(parts, PARAMS).content == engine.chat(QUESTION, PARAMS).content


async def test_a_conversation_goes_on_with_messages_and_calls() -> None:
    """A reply is a message of the next call, with its calls; both engines read it alike, and know the same words."""
    def script(prompt: str) -> str:
        return "It is 7." if "<|im_start|>tool" in prompt else f"<think>\nHm.\n</think>\n\nLook: {CALL}"

    async with scripted_engine(script, "{#- </think> #}" + TEMPLATES["hermes"]) as engine:
        reply = await engine.chat(QUESTION, SamplingParams(max_tokens=100), tools=[ADD])
        (call,) = reply.tool_calls
        assert (reply.reasoning, reply.content, call.name, call.arguments) == ("Hm.", "Look:", "add", '{"a": 1}')
        messages = [*QUESTION, reply.message, {"role": "tool", "tool_call_id": call.id, "content": "7"}]
        last = await engine.chat(messages, SamplingParams(max_tokens=100), tools=[ADD])
        assert (last.content, last.message) == ("It is 7.", {"role": "assistant", "content": "It is 7."})
        cut = await engine.chat(QUESTION, SamplingParams(max_tokens=28), tools=[ADD])
        assert (cut.finish_reason, "tool_calls" in cut.message) == ("length", False)


@pytest.mark.parametrize(("messages", "options", "error"), [
    ("What is 2 + 3?", {}, InvalidPrompt), ([], {}, PromptEmpty), (QUESTION, {"tool_choice": "all"}, InvalidRequest),
    (QUESTION, {"parallel_tool_calls": 1}, InvalidRequest), (QUESTION, {"temperature": 1}, UnknownParameter),
    (QUESTION, {"template_arguments": {"not_read": 1}}, InvalidPrompt), (QUESTION, {"params": {}}, InvalidRequest),
    (QUESTION, {"reasoning_effort": "much"}, InvalidRequest), (Chat(QUESTION), {"tools": [ADD]}, InvalidRequest),
])
async def test_a_chat_that_is_none_is_refused(
    engine: Engine, messages: Any, options: Any, error: type[PagedcoreError]
) -> None:
    """Both engines refuse it with the same typed error before anything runs."""
    with pytest.raises(error) as refused:
        engine.chat(messages, **options)
    async with scripted_engine("") as other:
        with pytest.raises(error) as again:
            await other.chat(messages, **options)
    assert str(refused.value).partition("(")[0][:40] == str(again.value).partition("(")[0][:40]


def test_the_tokenizer_and_the_template_can_be_reached(engine: Engine) -> None:
    """A chat's text, its tokens and back, on engines of both kinds; one without a tokenizer says so."""
    text = engine.apply_chat_template(QUESTION)
    assert text.endswith("assistant\n")
    assert engine.tokenizer is not None
    assert engine.encode(QUESTION) == engine.tokenizer.encode(text, add_special_tokens=False)
    assert engine.decode(engine.tokenizer.encode("two words")) == "two words"
    said = [*QUESTION, {"role": "assistant", "content": "Thr"}]
    assert engine.apply_chat_template(said, continue_final_message=True).endswith("assistant\nThr")
    with scripted_engine("", TEMPLATES["hermes"] + "{{ mood }}") as other:
        assert other.apply_chat_template(QUESTION, mood="glad").endswith("assistant\nglad")
        with pytest.raises(InvalidPrompt, match=r"template_arguments\.chat_template"):
            other.apply_chat_template(QUESTION, chat_template="x")
    with make_engine(ToyBackend()) as plain:
        assert plain.tokenizer is None
        with pytest.raises(InvalidPrompt):
            plain.apply_chat_template(QUESTION)


def test_an_engine_goes_to_no_other_process(engine: Engine) -> None:
    """Pickling and copying say what to do; the engine is as it was."""
    with scripted_engine("") as other:
        for one in (engine, other):
            for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(NotPicklable, match="build an engine where it is used"):
                    attempt(one)
        assert isinstance(other, AsyncEngine)
        assert other.is_alive


def test_a_request_is_aborted_by_either_of_its_names(engine: Engine) -> None:
    """The engine's id, or the caller's label under the caller's own salt; anybody else's is not found."""
    one = engine.add_request(QUESTION, PARAMS, request_id="mine", cache_salt="a")
    two = engine.add_request(QUESTION, PARAMS)
    assert [engine.abort("mine"), engine.abort("mine", cache_salt="b"), engine.abort("other")] == [False] * 3
    assert engine.abort("mine", cache_salt="a")
    assert one.is_done
    assert not two.is_done
    assert engine.abort(two.request_id)
    assert not engine.abort(two.request_id)
    assert [request.output().outputs[0].finish_reason for request in (one, two)] == ["abort", "abort"]
    for request in (one, two):
        request.remove()
    with pytest.raises(InvalidRequest):
        engine.abort(5)  # type: ignore[arg-type]


def test_outputs_fit_a_notebook(engine: Engine) -> None:
    """A line for the request and one for each completion, whatever it has: no ids, log-probabilities or times."""
    params = SamplingParams(max_tokens=200, ignore_eos=True, logprobs=5, n=2, temperature=1.0, seed=1)
    shown = repr(engine.generate([QUESTION], params)[0])
    head, *lines = shown.splitlines()
    assert head.endswith("cached, finished,")
    assert [line.count("200 tokens, 'length'") for line in lines] == [1, 1]
    assert max(map(len, lines)) < 2 * 160
    reply = engine.chat(QUESTION, PARAMS)
    assert repr(reply.content) in repr(reply.output)
