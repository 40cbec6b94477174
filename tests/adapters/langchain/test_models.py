"""The two LangChain models: answers, batches, metadata, errors and what they refuse, over the demo model."""

from __future__ import annotations

import asyncio
import json
import pickle
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler, get_usage_metadata_callback
from langchain_core.exceptions import (
    ContextOverflowError,
    ModelInvalidRequestError,
    ModelRateLimitError,
    ModelTimeoutError,
)
from langchain_core.load import dumps
from langchain_core.messages import AIMessage, ChatMessage, FunctionMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import ConfigurableField, RunnableLambda

from pagedcore import AsyncEngine, CompletionOutput, RequestOutput, SamplingParams, TokenLogprobs, TokenText, expose
from pagedcore.demo_model.questions import demo_questions, is_correct
from pagedcore.errors import (
    EngineClosed,
    EngineOverloaded,
    InvalidPrompt,
    InvalidRequest,
    InvalidSampling,
    MissingDependency,
    PromptEmpty,
    PromptTooLong,
    RequestTimeout,
    StepFailed,
    TooManySequences,
    UnknownParameter,
)
from pagedcore.execution.model_runner import ModelRunner
from pagedcore.outputs import RequestMetrics
from pagedcore.tool_calls.chat_format import ChatFormat
from pagedcore_langchain import ChatPagedCore, PagedCoreLLM
from pagedcore_langchain.background import BACKGROUND
from pagedcore_langchain.results import chat_result
from support.paused_steps import LIMIT_S, Pause, paused_after, slowed

QUESTIONS = demo_questions(40)
PROMPTS = [question.prompt for question in QUESTIONS]
MODELS = [ChatPagedCore, PagedCoreLLM]


def build(kind: Any, engine: AsyncEngine, **fields: Any) -> Any:
    return kind.from_engine(engine, **{"model": "demo", "max_tokens": 96, **fields})


def texts(answers: list[Any]) -> list[str]:
    return [answer if isinstance(answer, str) else answer.content for answer in answers]


def all_right(answers: list[Any]) -> bool:
    return [is_correct(*pair) for pair in zip(QUESTIONS, texts(answers), strict=True)] == [True] * len(QUESTIONS)


def steps_of(engine: AsyncEngine, call: Any) -> int:
    """How many steps the engine took for ``call``."""
    before = engine.stats().num_steps
    call()
    return engine.stats().num_steps - before


class Log(BaseCallbackHandler):
    """Writes down what a model tells its callbacks."""

    def __init__(self, pause: Pause | None = None) -> None:
        self.tokens: list[str] = []
        self.errors: list[BaseException] = []
        self.ends: list[Any] = []
        self.pause = pause

    def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
        self.tokens.append(token)
        if self.pause is not None:
            self.pause.end()

    def on_llm_error(self, error: BaseException, **kwargs: Any) -> None:
        self.errors.append(error)

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        self.ends.append(response)


@pytest.mark.parametrize("kind", MODELS)
def test_every_way_of_asking_gives_the_right_answers(engine: AsyncEngine, kind: Any) -> None:
    """Batch, abatch, generate, agenerate and threads: every question is answered right, in order."""
    model = build(kind, engine)
    inputs = PROMPTS if kind is PagedCoreLLM else [[HumanMessage(prompt)] for prompt in PROMPTS]
    assert all_right(model.batch(PROMPTS))
    assert all_right(asyncio.run(model.abatch(PROMPTS)))
    assert all_right([one[0].text for one in model.generate(inputs).generations])
    assert all_right([one[0].text for one in asyncio.run(model.agenerate(inputs)).generations])
    assert all_right([model.invoke(prompt) for prompt in PROMPTS])


@pytest.mark.parametrize("kind", MODELS)
def test_whole_batches_are_in_flight_together(engine: AsyncEngine, kind: Any) -> None:
    """Sixteen prompts at once take about as many steps as one of them, whichever call brings them."""
    model = build(kind, engine, max_tokens=24, sampling={"ignore_eos": True})
    inputs = PROMPTS[:16] if kind is PagedCoreLLM else [[HumanMessage(prompt)] for prompt in PROMPTS[:16]]
    chain = RunnableLambda(lambda text: text) | model | StrOutputParser()
    calls = [
        lambda: model.batch(PROMPTS[:16]), lambda: asyncio.run(model.abatch(PROMPTS[:16])),
        lambda: model.generate(inputs), lambda: asyncio.run(model.agenerate(inputs)),
        lambda: chain.batch(PROMPTS[:16]), lambda: asyncio.run(chain.abatch(PROMPTS[:16])),
    ]
    for call in calls:
        assert steps_of(engine, call) < 3 * 24


def test_a_batch_may_be_larger_than_the_queue() -> None:
    """Forty prompts pass through a queue of two; the model that must not wait raises EngineOverloaded, which is
    LangChain's to retry."""
    with AsyncEngine.from_pretrained("demo", num_kv_blocks=64, max_num_seqs=2, max_num_waiting=2) as engine:
        assert all_right(build(ChatPagedCore, engine).batch(PROMPTS))
        with pytest.raises(EngineOverloaded) as refused:
            build(ChatPagedCore, engine, wait_for_room=False).batch(PROMPTS)
        assert isinstance(refused.value, ModelRateLimitError)


def test_threads_share_one_engine_on_one_thread(engine: AsyncEngine) -> None:
    """Callers on eight threads get their own answers, and no second engine thread appears."""
    chat = build(ChatPagedCore, engine)
    answers: dict[int, str] = {}

    def ask(index: int) -> None:
        answers[index] = chat.invoke(PROMPTS[index]).content

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    names = [thread.name for thread in threading.enumerate()]
    for thread in threads:
        thread.join()
    assert names.count("pagedcore-engine") == 1
    assert [is_correct(QUESTIONS[index], answers[index]) for index in range(8)] == [True] * 8


def test_a_lazily_built_engine_is_shared_by_copies_and_closed_once() -> None:
    """Copies, bindings and reconfigured variants use the engine of the original, and close() ends it for all."""
    chat = ChatPagedCore(model="demo", max_tokens=32, engine_settings={"num_kv_blocks": 16})
    variant = chat.configurable_fields(max_tokens=ConfigurableField(id="length"))
    copies = [chat.model_copy(), chat.model_copy(deep=True)]
    assert variant.invoke("What is 2 + 3?", {"configurable": {"length": 3}}).usage_metadata["output_tokens"] == 3
    assert [copy.engine for copy in copies] == [chat.engine] * 2
    assert chat.engine.stats().num_blocks == 16
    asyncio.run(chat.aclose())
    with pytest.raises(EngineClosed):
        copies[0].invoke("What is 2 + 3?")


def test_an_engine_of_somebody_else_stays_open(engine: AsyncEngine) -> None:
    """``close`` of a model closes only what the model built."""
    build(ChatPagedCore, engine).close()
    assert engine.is_alive


def test_expose_makes_both_models_by_name() -> None:
    """Names of the model are its fields, all others go to the engine; unknown ones are refused at once."""
    chat = expose("langchain", model="demo", max_tokens=32, num_kv_blocks=16)
    llm = expose("langchain-llm", model=chat.engine, max_tokens=32)
    assert (type(chat), type(llm)) == (ChatPagedCore, PagedCoreLLM)
    assert chat.invoke("What is 2 + 3?").content == llm.invoke("What is 2 + 3?").strip() == "2 + 3 = 5."
    assert llm.engine is chat.engine
    assert chat.engine.stats().num_blocks == 16
    chat.close()
    with pytest.raises(ValueError, match="max_tokenz"):
        expose("langchain", model="demo", max_tokenz=3)
    with pytest.raises(ValueError, match="max_tokenz"):
        ChatPagedCore(model="demo", max_tokenz=3)


def test_what_only_remote_models_need_is_not_kept(engine: AsyncEngine) -> None:
    """A key that LangChain hands to every model is accepted and appears nowhere in this one."""
    chat = build(ChatPagedCore, engine, api_key="canary", max_retries=2)
    assert "canary" not in repr(chat) + repr(vars(chat)) + str(chat.asdict())


def test_a_missing_langchain_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without LangChain the error says what to install."""
    monkeypatch.delitem(sys.modules, "pagedcore_langchain.chat")
    monkeypatch.setitem(sys.modules, "langchain_core.callbacks", None)
    with pytest.raises(MissingDependency, match=r"pagedcore\[langchain\]"):
        expose("langchain", model="demo")


@pytest.mark.parametrize("kind", MODELS)
def test_streams_say_what_invoke_says(engine: AsyncEngine, kind: Any) -> None:
    """Chunks of both kinds of stream add up to the answer, and come while it is written."""
    model = build(kind, engine)
    whole = texts([model.invoke(PROMPTS[0])])[0]

    def read(pause: Pause) -> list[Any]:
        stream = model.stream(PROMPTS[0])
        first = next(stream)
        pause.end()
        return [first, *stream]

    async def read_on_loop(pause: Pause) -> list[Any]:
        stream = model.astream(PROMPTS[0])
        first = await anext(stream)
        pause.end()
        return [first, *[chunk async for chunk in stream]]

    for way in (read, lambda pause: asyncio.run(read_on_loop(pause))):
        with paused_after(engine, 4) as pause:
            assert "".join(texts(way(pause))) == whole


def test_usage_and_metadata_are_the_same_on_every_path(engine: AsyncEngine) -> None:
    """Tokens, cached tokens, finish reason, model and log-probabilities: the sum of a stream says what invoke says."""
    chat = build(ChatPagedCore, engine).bind(logprobs=True, top_logprobs=2)
    whole = chat.invoke("What is 2 + 3?")
    first, *rest = list(chat.stream("What is 2 + 3?"))
    total = sum(rest, first)
    num_prompt_tokens = len(engine.encode([{"role": "user", "content": "What is 2 + 3?"}]))
    assert whole.usage_metadata["input_tokens"] == total.usage_metadata["input_tokens"] == num_prompt_tokens
    assert 0 < total.usage_metadata["input_token_details"]["cache_read"] < num_prompt_tokens
    for name in ("finish_reason", "model_name", "model_provider", "logprobs"):
        assert whole.response_metadata[name] == total.response_metadata[name], name
    assert whole.response_metadata["finish_reason"] == "stop"
    content = whole.response_metadata["logprobs"]["content"]
    assert len(content) == whole.usage_metadata["output_tokens"] == total.usage_metadata["output_tokens"]
    assert all(token["logprob"] <= 0 and len(token["top_logprobs"]) == 2 for token in content)


def test_logprobs_are_in_openais_format(engine: AsyncEngine) -> None:
    """Each token has its text and bytes, which together are the answer, and so has each alternative."""
    answer = build(ChatPagedCore, engine).bind(logprobs=True, top_logprobs=2).invoke("What is 2 + 3?")
    content = answer.response_metadata["logprobs"]["content"]
    assert set(content[0]) == {"token", "bytes", "logprob", "token_id", "top_logprobs"}
    assert bytes(byte for token in content for byte in token["bytes"] or ()).decode() == answer.content
    assert "".join(token["token"] for token in content if token["bytes"] is not None) == answer.content
    assert (content[-1]["bytes"], bool(content[-1]["token"])) == (None, True)
    for token in content:
        best = token["top_logprobs"][0]
        assert set(best) == set(token) - {"top_logprobs"}
        assert (best["token"], best["logprob"]) == (token["token"], token["logprob"])
    assert json.loads(json.dumps(content)) == content


def test_impossible_tokens_stay_within_json() -> None:
    """A log-probability of minus infinity is written as OpenAI writes it."""
    output = RequestOutput("", (1, 2), [CompletionOutput(0, "", ())], True, 0, RequestMetrics(0.0),
                           (None, TokenLogprobs(2, float("-inf"))))
    turn = ChatFormat(None, lambda _: None, lambda _: None).turn([], SamplingParams())
    result = chat_result(output, "toy", lambda _: TokenText("x", b"x"), turn)
    assert (result.generations[0].generation_info or {})["prompt_logprobs"] == [
        None, {"token": "x", "bytes": [120], "logprob": -9999.0, "token_id": 2, "top_logprobs": []},
    ]


@pytest.mark.parametrize("kind", MODELS)
def test_prompt_logprobs_are_told_once_and_a_prompt_counts_once(engine: AsyncEngine, kind: Any) -> None:
    """The first of several generations and the sum of a stream have the prompt's tokens; usage counts them once."""
    model = build(kind, engine, temperature=1.0, sampling={"prompt_logprobs": 1})
    prompt = "What is 2 + 3?"
    result = model.generate([[HumanMessage(prompt)] if kind is ChatPagedCore else prompt], n=3)
    first, *others = result.generations[0]
    entries = first.generation_info["prompt_logprobs"]
    assert ["prompt_logprobs" in one.generation_info for one in others] == [False, False]
    assert entries[0] is None
    usage = first.message.usage_metadata if kind is ChatPagedCore else first.generation_info["usage_metadata"]
    assert usage["input_tokens"] == len(entries)
    text = "".join(one["token"] for one in entries[1:])
    assert prompt[1:] in text if kind is ChatPagedCore else prompt.endswith(text)
    chunks = list(model.stream(prompt)) if kind is ChatPagedCore else []
    if chunks:
        assert sum(chunks[1:], chunks[0]).response_metadata["prompt_logprobs"] == entries


def test_completions_carry_usage_and_logprobs(engine: AsyncEngine) -> None:
    """``generation_info`` of a completion, and the sum over a batch in ``llm_output``."""
    result = build(PagedCoreLLM, engine, logprobs=0).generate(["What is 2 + 3?", "What is 9 - 5?"])
    infos = [one[0].generation_info for one in result.generations]
    for info in infos:
        assert info["finish_reason"] == "stop"
        assert len(info["logprobs"]["content"]) == info["usage_metadata"]["output_tokens"]
    total = sum(info["usage_metadata"]["total_tokens"] for info in infos)
    assert result.llm_output["token_usage"]["total_tokens"] == total


def test_stop_seed_and_temperature_reach_the_engine(engine: AsyncEngine) -> None:
    """A stop text cuts, a call's own one wins over the field, and a seed fixes a sampled answer."""
    chat = build(ChatPagedCore, engine, stop=["="])
    assert chat.invoke("What is 2 + 3?").content == "2 + 3 "
    assert chat.invoke("What is 2 + 3?", stop=["+"]).content == "2 "
    assert "".join(texts(list(chat.stream("What is 2 + 3?", stop=["+"])))) == "2 "
    wild = build(ChatPagedCore, engine, temperature=5.0, max_tokens=20)
    assert texts(wild.batch([PROMPTS[0]] * 4, seed=7)) == texts([wild.invoke(PROMPTS[0], seed=7)]) * 4
    assert len(set(texts(wild.batch([PROMPTS[0]] * 4)))) > 1


def test_several_answers_to_one_prompt(engine: AsyncEngine) -> None:
    """``n`` gives as many generations; a stream has one answer and says so."""
    chat = build(ChatPagedCore, engine, temperature=5.0, max_tokens=20, sampling={"n": 3})
    (generations,) = chat.generate([[HumanMessage(PROMPTS[0])]]).generations
    assert len({generation.text for generation in generations}) == 3
    with pytest.raises(TooManySequences):
        list(chat.stream(PROMPTS[0]))


@pytest.mark.parametrize("kind", MODELS)
def test_callbacks_hear_every_chunk_and_the_end(engine: AsyncEngine, kind: Any) -> None:
    """Run managers get each piece of a stream, once, sync and async."""
    for is_async in (False, True):
        log, model = Log(), build(kind, engine)

        async def read(log: Log = log, model: Any = model) -> list[Any]:
            return [chunk async for chunk in model.astream(PROMPTS[0], {"callbacks": [log]})]

        chunks = asyncio.run(read()) if is_async else list(model.stream(PROMPTS[0], {"callbacks": [log]}))
        assert log.tokens == texts(chunks)
        assert len(log.ends) == 1


def test_streaming_tells_callbacks_also_in_a_batch(engine: AsyncEngine) -> None:
    """With ``streaming=True`` the callbacks hear tokens although the caller waits for whole answers."""
    chat = build(ChatPagedCore, engine, streaming=True)
    with paused_after(engine, 12) as pause:
        log = Log(pause)
        answers = chat.batch(PROMPTS[:3], {"callbacks": [log]})
    assert sorted("".join(log.tokens)) == sorted("".join(texts(answers)))


def test_context_of_the_caller_reaches_a_blocking_batch(engine: AsyncEngine) -> None:
    """A usage callback kept in a context variable counts what ran on the background loop."""
    with get_usage_metadata_callback() as usage:
        answers = build(ChatPagedCore, engine).batch(PROMPTS[:5])
    counted = sum(answer.usage_metadata["total_tokens"] for answer in answers)
    assert usage.usage_metadata["demo"]["total_tokens"] == counted


def test_a_blocking_batch_on_the_background_loop_itself_does_not_hang(engine: AsyncEngine) -> None:
    """Called where waiting for the loop would never end, a batch falls back to threads."""
    chat = build(ChatPagedCore, engine)

    async def inside() -> list[Any]:
        return chat.batch(PROMPTS)

    assert all_right(BACKGROUND.run(inside()))


@pytest.mark.parametrize("kind", MODELS)
def test_one_bad_input_of_a_batch(engine: AsyncEngine, kind: Any) -> None:
    """It is raised with its type and takes the others with it, or comes back in its own place."""
    model = build(kind, engine)
    inputs = [PROMPTS[0], "word " * 9000, PROMPTS[1]]
    with pytest.raises(InvalidRequest):
        model.batch(inputs)
    first, bad, last = model.batch(inputs, return_exceptions=True)
    assert isinstance(bad, InvalidRequest)
    assert [is_correct(QUESTIONS[i], text) for i, text in enumerate(texts([first, last]))] == [True, True]
    with pytest.raises(InvalidRequest):
        asyncio.run(model.abatch(inputs))


async def test_the_others_of_a_failed_batch_are_aborted(engine: AsyncEngine) -> None:
    """An error leaves no task behind whose result is of no use."""
    chat = build(ChatPagedCore, engine, max_tokens=200, sampling={"ignore_eos": True})
    with pytest.raises(InvalidRequest):
        await chat.abatch([*PROMPTS[:4], "word " * 9000])
    for _ in range(10):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_max_concurrency_is_kept(engine: AsyncEngine) -> None:
    """With at most two at a time, sixteen prompts take several times the steps."""
    chat = build(ChatPagedCore, engine, max_tokens=10, sampling={"ignore_eos": True})
    assert steps_of(engine, lambda: chat.batch(PROMPTS[:16], {"max_concurrency": 2})) >= 8 * 10


@pytest.mark.parametrize("kind", MODELS)
def test_errors_keep_their_types(engine: AsyncEngine, kind: Any) -> None:
    """What pagedcore refuses is raised as it is, from every way of asking, and callbacks hear it."""
    log, model = Log(), build(kind, engine)
    for call in (model.invoke, lambda *a, **k: list(model.stream(*a, **k))):
        with pytest.raises(PromptTooLong):
            call("a b " * 2000, {"callbacks": [log]})
        with pytest.raises(UnknownParameter):
            call(PROMPTS[0], toolz=[{"name": "x"}])
        with pytest.raises(InvalidRequest, match="model"):
            call(PROMPTS[0], model="another")
        for timeout in (-1, 1e10, 10**400):
            with pytest.raises(InvalidRequest, match="timeout"):
                call(PROMPTS[0], timeout=timeout)
    assert [isinstance(error, PromptTooLong) for error in log.errors] == [True] * 2


def every_call(model: Any, prompt: str = PROMPTS[0], **keywords: Any) -> list[Callable[[], Any]]:
    """All ways of asking, blocking and not, whole and streamed."""

    async def read() -> None:
        async for _ in model.astream(prompt, **keywords):
            pass

    return [
        lambda: model.invoke(prompt, **keywords), lambda: model.batch([prompt, *PROMPTS[1:4]], **keywords),
        lambda: list(model.stream(prompt, **keywords)), lambda: asyncio.run(model.ainvoke(prompt, **keywords)),
        lambda: asyncio.run(read()),
    ]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("prompt", "keywords", "ours", "theirs", "is_retryable"), [
    ("a b " * 2000, {}, PromptTooLong, ContextOverflowError, False),
    (PROMPTS[0], {"temperature": 99}, InvalidSampling, ModelInvalidRequestError, False),
    (PROMPTS[0], {"timeout": 1e-6}, RequestTimeout, ModelTimeoutError, True),
])
def test_refusals_are_langchains_errors_as_well(
    engine: AsyncEngine, kind: Any, prompt: str, keywords: Any, ours: Any, theirs: Any, is_retryable: bool
) -> None:
    """From every way of asking, with the same message and name, and after a pickle; agents shorten a conversation for
    one of them, and retry another."""
    for call in every_call(build(kind, engine), prompt, **keywords):
        # Why: no completion is there before its time is over.
        with slowed(engine, LIMIT_S), pytest.raises(ours) as refused:
            call()
        for error in (refused.value, pickle.loads(pickle.dumps(refused.value))):
            assert isinstance(error, ours)
            assert isinstance(error, theirs)
            assert error.is_retryable is is_retryable
            assert (type(error).__name__, str(error)) == (ours.__name__, str(refused.value))


@pytest.mark.parametrize("kind", MODELS)
def test_a_failed_step_is_raised_by_every_path(
    engine: AsyncEngine, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of an answer that ended with "error" reaches the caller; the next call is answered."""
    failures: list[Exception] = []
    execute = ModelRunner.execute

    def execute_or_fail(self: ModelRunner, *args: Any) -> Any:
        if failures:
            raise failures.pop()
        return execute(self, *args)

    monkeypatch.setattr(ModelRunner, "execute", execute_or_fail)
    model = build(kind, engine)
    for call in every_call(model):
        failures.append(RuntimeError("the device is gone"))
        with pytest.raises(StepFailed):
            call()
        assert is_correct(QUESTIONS[0], texts([model.invoke(PROMPTS[0])])[0])


@pytest.mark.parametrize("kind", MODELS)
def test_time_limits_end_every_kind_of_call(engine: AsyncEngine, kind: Any) -> None:
    """RequestTimeout, from a field or a call, and nothing of the request is left in the engine."""
    model = build(kind, engine, max_tokens=2000, sampling={"ignore_eos": True}, timeout=0.05)
    for call in every_call(model):
        with slowed(engine, LIMIT_S), pytest.raises(RequestTimeout, match=r"0\.05"):
            call()
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_blocks_used) == (0, 0, 0)
    assert build(kind, engine).invoke(PROMPTS[0], timeout=60)


def test_chat_messages_of_all_kinds(engine: AsyncEngine) -> None:
    """System, human, ai and custom roles, plain or as text parts, are counted as the engine's own chat door does."""
    chat = build(ChatPagedCore, engine)
    messages = [
        SystemMessage("Be brief."), HumanMessage([{"type": "text", "text": "Hi"}, "!"], name="ann"),
        AIMessage("Hello."), ChatMessage(role="critic", content="Hm."), HumanMessage("What is 2 + 3?"),
    ]
    plain = [
        {"role": role, "content": content} for role, content in (
            ("system", "Be brief."), ("user", "Hi!"), ("assistant", "Hello."), ("critic", "Hm."),
            ("user", "What is 2 + 3?"),
        )
    ]
    expected = len(engine.encode(plain))
    assert chat.invoke(messages).usage_metadata["input_tokens"] == expected
    assert chat.get_num_tokens_from_messages(messages) == expected
    assert chat.get_num_tokens("2 + 3") == len(engine.encode("2 + 3"))


@pytest.mark.parametrize("message", [
    HumanMessage([{"type": "image_url", "image_url": {"url": "http://localhost/secret.png"}}]),
    HumanMessage([{"type": "text", "text": "What is this?"}, {"type": "audio", "base64": "AAAA"}]),
    ToolMessage([{"type": "image_url", "image_url": {"url": "http://localhost/secret.png"}}], tool_call_id="1"),
    FunctionMessage("5", name="f"),
])
def test_what_is_no_text_is_refused_without_network(
    engine: AsyncEngine, message: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images, audio and messages of a retired kind are InvalidPrompt, counting tokens included; no socket is opened."""
    chat, opened = build(ChatPagedCore, engine), list[Any]()
    for owner, name in ((socket.socket, "connect"), (socket, "getaddrinfo")):
        monkeypatch.setattr(owner, name, lambda *where, **_: opened.append(where))
    for call in (lambda: chat.invoke([message]), lambda: list(chat.stream([message])),
                 lambda: chat.get_num_tokens_from_messages([message])):
        with pytest.raises(InvalidPrompt) as refused:
            call()
        assert "secret" not in str(refused.value)
    assert opened == []


@pytest.mark.parametrize("ask", ["invoke", "stream"])
def test_a_chat_without_messages_is_refused_by_its_name(engine: AsyncEngine, ask: str) -> None:
    """An empty list is about messages, not about tokens."""
    with pytest.raises(PromptEmpty, match=r"^messages: got 0, allowed is at least 1 message\."):
        list(getattr(build(ChatPagedCore, engine), ask)([]))


def test_no_tools_are_as_good_as_none_bound(engine: AsyncEngine) -> None:
    """An agent without tools binds an empty list."""
    assert is_correct(QUESTIONS[0], build(ChatPagedCore, engine).bind_tools([]).invoke(PROMPTS[0]).content)


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_is_not_serialised(engine: AsyncEngine, kind: Any) -> None:
    """``dumps`` writes a note that it cannot, and nothing of the engine."""
    written = json.loads(dumps(build(kind, engine)))
    assert written["type"] == "not_implemented"
    assert "host" not in repr(build(kind, engine))


def test_a_chain_of_template_model_and_parser(engine: AsyncEngine) -> None:
    """The usual chain, blocking and streaming."""
    template = ChatPromptTemplate.from_messages([("human", "{question}")])
    chain = template | build(ChatPagedCore, engine) | StrOutputParser()
    assert all_right(chain.batch([{"question": prompt} for prompt in PROMPTS]))
    assert is_correct(QUESTIONS[0], "".join(chain.stream({"question": PROMPTS[0]})))
