"""Long prompts: tokenised on another thread, with the answers, refusals and ends that short ones have."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import aclosing
from typing import Any

import pytest

from pagedcore.errors import EngineClosed, EngineOverloaded, InvalidText, PromptTooLong, RequestTimeout
from pagedcore.protocols import ChatMessage
from pagedcore.sampling_params import SamplingParams
from pagedcore.serving.async_engine import AsyncEngine
from pagedcore.serving.long_prompts import LONG_CHAT, LONG_IDS, LONG_TEXT, NUM_THREADS, is_long
from support.doubles import toy_answer
from support.engine_builders import make_engine
from support.letters import WritesLetters

LONG = "x" * (LONG_TEXT + 1)
TOKENS = [1, 2]
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)
ANSWER = toy_answer(TOKENS, 4)


class GatedTokenizer(WritesLetters):
    """Takes every text for two tokens, once ``gate`` is set."""

    def __init__(self) -> None:
        self.gate, self.is_entered = threading.Event(), threading.Event()
        self.threads, self.texts = list[str](), list[str]()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Wait for the gate; a text that ends in "?" is as long as none may be."""
        self.threads.append(threading.current_thread().name)
        self.texts.append(text)
        self.is_entered.set()
        assert self.gate.wait(30)
        return [1] * 10_000 if text.endswith("?") else list(TOKENS)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Do the same."""
        return self.encode("")

    def encode_chat_turn(self, messages: Sequence[ChatMessage], known_token_ids: Sequence[int]) -> list[int]:
        """Do the same."""
        return self.encode("")


@pytest.fixture
def tokenizer() -> GatedTokenizer:
    """A tokenizer that waits."""
    return GatedTokenizer()


@pytest.fixture
def engine(tokenizer: GatedTokenizer) -> Iterator[AsyncEngine]:
    """An engine with that tokenizer, in which two requests may wait."""
    with AsyncEngine(make_engine(tokenizer=tokenizer, max_model_len=512, num_kv_blocks=256,
                                 max_num_waiting=2)) as engine:
        yield engine
        tokenizer.gate.set()


async def tokens_of(deltas: AsyncIterator[Any]) -> list[int]:
    return [token_id async for delta in deltas for token_id in delta.token_ids]


@pytest.mark.parametrize("prompt", [
    LONG, [{"role": "user", "content": LONG}], [{"role": "user", "content": "x"}] * (LONG_CHAT + 1),
    [{"role": LONG, "content": "x"}], [{"role": "user", "content": "x", "documents": [LONG]}],
])
async def test_the_loop_runs_while_a_long_prompt_is_tokenised(
    engine: AsyncEngine, tokenizer: GatedTokenizer, prompt: Any
) -> None:
    """The gate is opened by the very loop that asked; a short prompt is answered on its own thread."""
    streamed = asyncio.create_task(tokens_of(engine.generate(prompt, PARAMS)))
    whole = engine.submit(prompt, PARAMS)
    while len(tokenizer.threads) < 2:
        await asyncio.sleep(0.001)
    assert not streamed.done()
    tokenizer.gate.set()
    assert await streamed == ANSWER
    assert list((await asyncio.wrap_future(whole)).outputs[0].token_ids) == ANSWER
    assert all(name.startswith("pagedcore-prompt") for name in tokenizer.threads)
    assert await tokens_of(engine.generate("short", PARAMS)) == ANSWER
    assert tokenizer.threads[2:] == [threading.current_thread().name]


async def test_a_long_turn_of_a_conversation_leaves_the_loop_alone(
    engine: AsyncEngine, tokenizer: GatedTokenizer
) -> None:
    """A session tokenises a long turn on another thread too."""
    async with engine.session(PARAMS) as session:
        turn = asyncio.create_task(session.ask(LONG))
        while not tokenizer.is_entered.is_set():
            await asyncio.sleep(0.001)
        tokenizer.gate.set()
        assert list((await turn).outputs[0].token_ids) == ANSWER
    assert tokenizer.threads != [threading.current_thread().name]


async def test_a_refusal_is_told_as_that_of_a_short_prompt(engine: AsyncEngine, tokenizer: GatedTokenizer) -> None:
    """What only tokenising shows, and what is seen before, raise the same errors as ever."""
    tokenizer.gate.set()
    for prompt, error in ((LONG + "?", PromptTooLong), (LONG + "\ud800", InvalidText)):
        with pytest.raises(error):
            await tokens_of(engine.generate(prompt, PARAMS))
        with pytest.raises(error):
            await asyncio.wrap_future(engine.submit(prompt, PARAMS))
        with pytest.raises(error):
            list(engine.generate_sync(prompt, PARAMS))


async def test_who_leaves_before_the_prompt_is_tokenised_costs_nothing(
    engine: AsyncEngine, tokenizer: GatedTokenizer
) -> None:
    """Neither a stream nor a future that was left becomes a request, and what had not begun is not tokenised."""
    others = [engine.submit(LONG, PARAMS), engine.submit(LONG, PARAMS)]
    while len(tokenizer.threads) < 2:
        await asyncio.sleep(0.001)
    waiting = engine.submit(LONG, PARAMS, wait_for_room=True)
    for future in (*others, waiting):
        assert future.cancel()
    with pytest.raises(RequestTimeout):
        await tokens_of(engine.generate(LONG, PARAMS, timeout_s=0.01, wait_for_room=True))
    tokenizer.gate.set()
    assert await tokens_of(engine.generate(LONG, PARAMS, wait_for_room=True)) == ANSWER
    assert len(tokenizer.threads) == 3
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocks_used) == (0, 0, 0)
    with pytest.raises(CancelledError):
        waiting.result()


async def test_as_many_wait_as_the_queue_holds(engine: AsyncEngine, tokenizer: GatedTokenizer) -> None:
    """A caller that must not wait gets the error at once; the limit is that of waiting requests."""
    accepted = [engine.submit(LONG, PARAMS, wait_for_room=True) for _ in range(2)]
    with pytest.raises(EngineOverloaded):
        engine.submit(LONG, PARAMS)
    with pytest.raises(EngineOverloaded):
        await tokens_of(engine.generate(LONG, PARAMS))
    patient = engine.submit(LONG, PARAMS, wait_for_room=True)
    tokenizer.gate.set()
    for future in (*accepted, patient):
        assert list((await asyncio.wrap_future(future)).outputs[0].token_ids) == ANSWER


@pytest.mark.parametrize("begun", [True, False])
async def test_the_end_of_the_engine_ends_long_prompts(
    engine: AsyncEngine, tokenizer: GatedTokenizer, begun: bool
) -> None:
    """One that is being tokenised, or waits for that, ends as every other: with ``EngineClosed``."""
    busy = [engine.submit(LONG, PARAMS), engine.submit(LONG, PARAMS)]
    while len(tokenizer.threads) < 2:
        await asyncio.sleep(0.001)
    late = busy[0] if begun else engine.submit(LONG, PARAMS, wait_for_room=True)
    async with aclosing(engine.generate(LONG, PARAMS, wait_for_room=True)) as deltas:
        reading = asyncio.create_task(anext(deltas))
        await asyncio.sleep(0)
        engine.close()
        tokenizer.gate.set()
        with pytest.raises(EngineClosed):
            await asyncio.wrap_future(late)
        with pytest.raises(EngineClosed):
            await reading
    with pytest.raises(EngineClosed):
        engine.submit(LONG, PARAMS)
    assert len(tokenizer.threads) == 2


async def test_a_flood_of_long_prompts_hurts_nobody_else(engine: AsyncEngine, tokenizer: GatedTokenizer) -> None:
    """Most of two hundred leave, some are refused; short ones get their answers, and every place is free afterwards."""
    flood = [asyncio.create_task(tokens_of(engine.generate(LONG + "?" * (number % 3 == 0), PARAMS,
                                                           wait_for_room=number % 2 == 0))) for number in range(200)]
    await asyncio.sleep(0)
    tokenizer.gate.set()
    for number, task in enumerate(flood):
        if number % 4:
            task.cancel()
    short = [tokens_of(engine.generate("short", PARAMS, wait_for_room=True)) for _ in range(10)]
    assert await asyncio.gather(*short) == [ANSWER] * 10
    for number, end in enumerate(await asyncio.gather(*flood, return_exceptions=True)):
        allowed = asyncio.CancelledError, EngineOverloaded, PromptTooLong if number % 3 == 0 else asyncio.CancelledError
        assert end == ANSWER or isinstance(end, allowed), end
        assert number % 4 or number % 3 == 0 or end == ANSWER
    async with asyncio.timeout(60):
        # Why: who left is forgotten where prompts are prepared.
        while engine._commands.places.sinks():
            await asyncio.sleep(0.001)
    assert await tokens_of(engine.generate(LONG, PARAMS)) == ANSWER
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocks_used) == (0, 0, 0)


async def test_long_prompts_of_one_salt_leave_a_thread_to_others(
    engine: AsyncEngine, tokenizer: GatedTokenizer
) -> None:
    """One tenant's are prepared on all threads but one, in order; another's does not wait for them."""
    flood = [engine.submit(f"{LONG} {number}", PARAMS, cache_salt="one", wait_for_room=True) for number in range(5)]
    other = engine.submit(f"{LONG} other", PARAMS, cache_salt="two", wait_for_room=True)
    while len(tokenizer.texts) < NUM_THREADS:
        await asyncio.sleep(0.001)
    assert {text[len(LONG) :] for text in tokenizer.texts} == {" 0", " 1", " other"}
    tokenizer.gate.set()
    async with asyncio.timeout(20):
        for future in (*flood, other):
            assert list((await asyncio.wrap_future(future)).outputs[0].token_ids) == ANSWER
    assert len(tokenizer.texts) == 6


def test_what_is_long() -> None:
    """By characters, messages and ids; what will be refused anyway is short."""
    assert is_long([1] * (LONG_IDS + 1))
    for prompt in ("x" * LONG_TEXT, [1] * LONG_IDS, [], None, 5, [None] * 3, [{"content": None}], {"a": 1}):
        assert not is_long(prompt), prompt
