"""The async generator: what its deltas carry, which loop it needs (any), and how abandoned requests end."""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress

import pytest

from pagedcore import AsyncEngine, Delta, SamplingParams, Usage, expose
from pagedcore.demo_model.questions import demo_questions, is_correct
from pagedcore.engine.engine import Engine
from pagedcore.errors import RequestTimeout
from pagedcore_asyncgen import AsyncTextGenerator, create
from support.async_helpers import SlowBackend
from support.doubles import ToyBackend, toy_answer
from support.engine_builders import make_engine

LONG = SamplingParams(max_tokens=500, ignore_eos=True)


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


@pytest.fixture(scope="module")
def demo() -> Iterator[AsyncTextGenerator]:
    """The adapter around the demo model, with few enough blocks that a hundred requests have to take turns."""
    settings = {"num_kv_blocks": 96, "block_size": 4, "max_num_waiting": 256}
    with expose("async-generator", model="demo", **settings) as generate:
        yield generate


async def read(deltas: AsyncGenerator[Delta, None]) -> str:
    return "".join([delta.text async for delta in deltas])


async def test_a_delta_carries_text_tokens_reason_usage_and_logprobs(demo: AsyncTextGenerator) -> None:
    """Together the deltas are the offline answer, with its tokens, log-probabilities, reason and cost."""
    wanted = SamplingParams(max_tokens=24, logprobs=2)
    with Engine.from_pretrained("demo") as engine:
        offline = engine.generate(["What is 2 + 3?"], wanted)[0]
    deltas = [delta async for delta in demo("What is 2 + 3?", wanted)]
    assert "".join(delta.text for delta in deltas) == offline.outputs[0].text
    assert tuple(token for delta in deltas for token in delta.token_ids) == offline.outputs[0].token_ids
    assert tuple(scored for delta in deltas for scored in delta.logprobs or ()) == offline.outputs[0].logprobs
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [offline.outputs[0].finish_reason]
    usage = deltas[-1].usage
    assert usage is not None
    assert usage.num_prompt_tokens == len(offline.prompt_token_ids)
    assert usage.num_output_tokens == len(offline.outputs[0].token_ids)


async def test_the_log_probabilities_of_a_prompt_come_at_the_end(demo: AsyncTextGenerator) -> None:
    """The last delta has an entry for each token of the prompt but the first, and ``complete`` returns the same."""
    wanted = SamplingParams(max_tokens=4, prompt_logprobs=1)
    *others, last = [delta async for delta in demo("What is 2 + 3?", wanted)]
    assert {delta.prompt_logprobs for delta in others} <= {None}
    assert len(last.prompt_logprobs or ()) == last.num_prompt_tokens
    assert (await demo.complete("What is 2 + 3?", wanted)).prompt_logprobs == last.prompt_logprobs


async def test_without_asking_there_are_no_logprobs(demo: AsyncTextGenerator) -> None:
    """Log-probabilities cost something, so they come only on request."""
    assert {delta.logprobs async for delta in demo("What is 2 + 3?")} == {None}


async def test_complete_returns_every_answer_whole() -> None:
    """The call without a stream returns the answers of a request in order, with what was asked for."""
    with create(make_async()) as generate:
        (only,) = (await generate.complete([1, 2], params(5))).outputs
        assert (list(only.token_ids), only.finish_reason, only.logprobs) == (toy_answer([1, 2], 5), "length", None)
        several = SamplingParams(max_tokens=4, n=3, logprobs=1, temperature=1.0, ignore_eos=True)
        answers = (await generate.complete([1, 2], several)).outputs
        assert [answer.index for answer in answers] == [0, 1, 2]
        for answer in answers:
            assert [scored.token_id for scored in answer.logprobs or ()] == list(answer.token_ids)


def make_async(backend: ToyBackend | None = None, **settings: int) -> AsyncEngine:
    return AsyncEngine(make_engine(backend, num_kv_blocks=200, **settings), stream_interval_s=0)


async def test_an_engine_of_somebody_else_stays_open() -> None:
    """Closing the adapter closes only an engine that it made."""
    with make_async() as engine:
        async with create(engine) as generate:
            assert inspect.isasyncgen(generate([1], params(1)))
        assert engine.is_alive


async def test_a_hundred_streams_are_right_and_none_is_mixed_or_lost(demo: AsyncTextGenerator) -> None:
    """A hundred questions at once: every stream ends, with the answer to its own question."""
    questions = demo_questions(100, seed=3)
    texts = await asyncio.gather(*(read(demo(question.prompt, SamplingParams(max_tokens=64)))
                                   for question in questions))
    wrong = [(q.prompt, text) for q, text in zip(questions, texts, strict=True) if not is_correct(q, text)]
    assert wrong == []
    stats = await asyncio.to_thread(demo.engine.stats)
    assert stats.num_preemptions > 0
    assert (stats.num_running, stats.num_waiting, stats.num_blocks_used) == (0, 0, 0)


def test_loops_in_several_threads_and_no_loop_at_all(demo: AsyncTextGenerator) -> None:
    """Three event loops, each with several readers, and a thread without any share one batch."""
    questions = demo_questions(16, seed=3)
    texts: dict[str, str] = {}

    async def ask_all(prompts: list[str]) -> None:
        answers = await asyncio.gather(*(read(demo(prompt)) for prompt in prompts))
        texts.update(zip(prompts, answers, strict=True))

    def ask_without_a_loop(prompts: list[str]) -> None:
        texts.update({prompt: "".join(delta.text for delta in demo.sync(prompt)) for prompt in prompts})

    prompts = [question.prompt for question in questions]
    threads = [threading.Thread(target=asyncio.run, args=(ask_all(prompts[i::4]),)) for i in range(3)]
    threads.append(threading.Thread(target=ask_without_a_loop, args=(prompts[3::4],)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [q.prompt for q in questions if not is_correct(q, texts[q.prompt])] == []


class Gate(ToyBackend):
    """A toy whose steps are let through one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.is_open = False
        self._entered, self._allowed = threading.Semaphore(0), threading.Semaphore(0)

    def forward(self, batch):  # type: ignore[no-untyped-def]
        self._entered.release()
        assert self.is_open or self._allowed.acquire(timeout=20), "no test let this step through"
        return super().forward(batch)

    def let_through(self, num_steps: int) -> None:
        """Let steps finish, and return when the one after them has begun; the first call waits for the first."""
        for _ in range(num_steps):
            self._allowed.release()
        for _ in range(num_steps if self.num_steps else num_steps + 1):
            assert self._entered.acquire(timeout=20), "no step began"

    def release(self) -> None:
        """Let the step in flight finish."""
        self._allowed.release()

    def open(self) -> None:
        """Let everything through from now on."""
        self.is_open = True
        self._allowed.release()


@contextmanager
def gated_engine(**settings: int) -> Iterator[tuple[Gate, AsyncEngine]]:
    """An engine whose steps are let through one by one, until the end."""
    gate = Gate()
    with make_async(gate, **settings) as engine:
        try:
            yield gate, engine
        finally:
            gate.open()


class Leaving:
    """One way of leaving a stream, on a loop of its own: ``start`` reading, then ``leave``."""

    def __init__(self, generate: AsyncTextGenerator) -> None:
        self.generate = generate
        self.loop = asyncio.new_event_loop()
        self.seen: list[Delta] = []

    async def _read(self, deltas: AsyncGenerator[Delta, None]) -> None:
        async for delta in deltas:
            self.seen.append(delta)

    def _tick(self) -> None:
        for _ in range(4):
            self.loop.run_until_complete(asyncio.sleep(0.001))

    async def _wait_for_a_delta(self) -> None:
        async with asyncio.timeout(20):
            while not self.seen:
                await asyncio.sleep(0.001)

    def reach_mid_stream(self) -> None:
        """Return when a delta has been read."""
        self.loop.run_until_complete(self._wait_for_a_delta())

    def start(self) -> None:
        self.task = self.loop.create_task(self._read(self.generate([1], LONG)))
        self._tick()

    def leave(self) -> None:
        self._tick()
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            self.loop.run_until_complete(self.task)


class CancelledTask(Leaving):
    """The task that reads the stream is cancelled."""


class CancelledComplete(Leaving):
    """The task that waits for the whole answer is cancelled."""

    def start(self) -> None:
        self.task = self.loop.create_task(self.generate.complete([1], LONG))  # type: ignore[arg-type]
        self._tick()

    def reach_mid_stream(self) -> None:
        """Do nothing: there is nothing to read before the end."""


class LoopClosed(Leaving):
    """The event loop is closed under its reader, which is then collected."""

    def leave(self) -> None:
        self._tick()
        self.loop.close()
        del self.task
        gc.collect()


class TimedOut(Leaving):
    """The caller's patience ends."""

    async def _read(self, deltas: AsyncGenerator[Delta, None]) -> None:
        async with asyncio.timeout(None) as self.limit:
            await super()._read(deltas)

    def leave(self) -> None:
        self.loop.call_soon(self.limit.reschedule, self.loop.time())
        with suppress(TimeoutError):
            self.loop.run_until_complete(self.task)


class Closed(Leaving):
    """The generator is closed between two deltas."""

    def start(self) -> None:
        self.deltas = self.generate([1], LONG)
        self.task = self.loop.create_task(anext(self.deltas))  # type: ignore[arg-type]
        self._tick()

    def reach_mid_stream(self) -> None:
        """Return when the first delta has been read; no reader waits for the next one."""
        self.seen.append(self.loop.run_until_complete(self.task))  # type: ignore[func-returns-value, arg-type]

    def leave(self) -> None:
        self.loop.run_until_complete(self.deltas.aclose())


class Collected(Closed):
    """The generator is dropped between two deltas and collected."""

    def leave(self) -> None:
        del self.deltas, self.task
        gc.collect()
        self._tick()


class CollectedAfterItsLoop(Closed):
    """The generator outlives its event loop and is collected then."""

    def leave(self) -> None:
        self.loop.close()
        del self.deltas, self.task
        gc.collect()


BEFORE_ANY_TOKEN = [CancelledTask, CancelledComplete, LoopClosed, TimedOut]
MID_STREAM = [CancelledTask, CancelledComplete, LoopClosed, Closed, Collected, CollectedAfterItsLoop]


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("way", "num_steps"), [*((way, 0) for way in BEFORE_ANY_TOKEN), *((way, 3) for way in MID_STREAM)]
)
def test_blocks_are_back_after_the_step_in_flight(way: type[Leaving], num_steps: int) -> None:
    """A reader leaves, in any way, before the first token or later: the next step does not compute for it."""
    with gated_engine() as (gate, engine):
        leaving = way(AsyncTextGenerator(engine))
        leaving.start()
        gate.let_through(num_steps)
        if num_steps:
            leaving.reach_mid_stream()
        leaving.leave()
        gate.release()
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_blocks_used) == (0, 0, 0)
        assert (stats.num_steps, stats.num_finished) == (num_steps + 1, 1)
        leaving.loop.close()


@pytest.mark.parametrize("is_collected", [False, True], ids=["closed", "collected"])
def test_a_plain_generator_gives_its_blocks_back_too(is_collected: bool) -> None:
    """Without an event loop the same holds."""
    with gated_engine() as (gate, engine):
        deltas = AsyncTextGenerator(engine).sync([1], LONG)
        gate.release()
        next(deltas)
        if is_collected:
            del deltas
            gc.collect()
        else:
            deltas.close()  # type: ignore[attr-defined]
        gate.release()
        stats = engine.stats()
        assert (stats.num_running, stats.num_blocks_used) == (0, 0)
        assert stats.num_steps <= 2


def test_a_request_that_still_waits_is_aborted_too() -> None:
    """One that leaves while a step runs takes nothing from the one that computes, and is never taken on."""
    with gated_engine(max_num_seqs=1) as (gate, engine):
        running = threading.Thread(target=lambda: list(engine.generate_sync([5], params(3))))
        running.start()
        gate.let_through(1)
        leaving = CancelledTask(AsyncTextGenerator(engine))
        leaving.start()
        leaving.leave()
        gate.release()
        gate.release()
        running.join(20)
        stats = engine.stats()
        assert (stats.num_waiting, stats.num_running, stats.num_blocks_used) == (0, 0, 0)
        assert (stats.num_steps, stats.num_finished) == (3, 1)
        leaving.loop.close()


def test_a_generator_that_was_never_started_asks_for_nothing() -> None:
    """Calling the adapter alone does not make a request, so that dropping the result leaves nothing behind."""
    with make_async() as engine:
        deltas = AsyncTextGenerator(engine)([1], LONG)
        asyncio.run(deltas.aclose())
        assert engine.stats().num_finished == 0


async def test_the_neighbours_of_a_leaver_do_not_notice() -> None:
    """Half of forty streams leave half-way; the others' answers are right and complete."""
    async def leave_half_way(generate: AsyncTextGenerator, prompt: list[int]) -> None:
        async with aclosing(generate(prompt, LONG)) as deltas:
            for _ in range(3):
                await anext(deltas)

    with make_async(SlowBackend(), max_num_waiting=64) as engine:
        generate = AsyncTextGenerator(engine)
        leavers = [asyncio.create_task(leave_half_way(generate, [i, 1])) for i in range(20)]
        whole = await asyncio.gather(*(generate.complete([i], params(20)) for i in range(20)))
        await asyncio.gather(*leavers)
        assert [list(output.outputs[0].token_ids) for output in whole] == [toy_answer([i], 20) for i in range(20)]
        stats = await asyncio.to_thread(engine.stats)
        assert (stats.num_running, stats.num_waiting, stats.num_blocks_used) == (0, 0, 0)
        assert stats.num_generated_tokens < 20 * (20 + 500)


@pytest.mark.parametrize(
    ("door", "behind"),
    [(AsyncTextGenerator.__call__, AsyncEngine.generate), (AsyncTextGenerator.sync, AsyncEngine.generate_sync),
     (AsyncTextGenerator.complete, AsyncEngine.complete)],
)
def test_every_door_takes_what_the_engine_takes(door: Callable[..., object], behind: Callable[..., object]) -> None:
    """What can be asked of the engine can be asked through the adapter, by the same names and defaults."""
    def arguments(call: Callable[..., object]) -> dict[str, object]:
        return {name: one.default for name, one in inspect.signature(call).parameters.items()}

    assert arguments(door) == arguments(behind)


async def test_time_limits_and_patience_are_handed_on() -> None:
    """A stream may wait for room, and ends when its time is up."""
    with gated_engine() as (_, engine), pytest.raises(RequestTimeout):
        await read(AsyncTextGenerator(engine)([1], LONG, timeout_s=0.05))
    with make_async(max_num_waiting=1, max_num_seqs=1) as engine:
        generate = AsyncTextGenerator(engine)
        outputs = await asyncio.gather(*(generate.complete([i], params(2), wait_for_room=True) for i in range(9)))
        assert [list(output.outputs[0].token_ids) for output in outputs] == [toy_answer([i], 2) for i in range(9)]


async def test_usage_counts_all_answers_once(demo: AsyncTextGenerator) -> None:
    """The prompt counts once however many answers it has."""
    several = SamplingParams(max_tokens=3, n=2, temperature=1.0, ignore_eos=True, seed=0)
    deltas = [delta async for delta in demo([5, 6, 7], several)]
    assert [delta.usage for delta in deltas if delta.usage is not None] == [Usage(3, 0, 6)]
