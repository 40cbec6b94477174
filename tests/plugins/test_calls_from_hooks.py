"""Every call that what an engine calls may make of it: it works as it does elsewhere, or is refused by name."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from pagedcore import AsyncEngine, SamplingParams
from pagedcore.demo_model import DEMO_MODEL_DIR
from pagedcore.engine.engine import Engine
from pagedcore.errors import CalledFromHook, EngineClosed, EngineInUse, ProcessorFailed
from pagedcore.plugins.hookspecs import hookimpl
from pagedcore.requests.observers import EngineObserver
from pagedcore.requests.request import Request
from pagedcore.scheduler.policies import Policy
from support.adapters import AdaptedBackend, write_adapter
from support.ahead import launched_ahead
from support.doubles import toy_answer
from support.engine_builders import assert_all_free, make_engine

PROMPTS = [[1, 2, 3], [4, 5, 6, 7]]
NUM_TOKENS = 6
BETWEEN = ["completion_ended", "request_accepted", "request_ended", "step_ended",
           *(pytest.param(one, marks=pytest.mark.slow) for one in ("step_timed", "pagedcore_step",
                                                                   "pagedcore_request_finished"))]
WITHIN = ["request_comes", "logits_processor", "order", "forward"]


def greedy(max_tokens: int = NUM_TOKENS, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **options)


class World:
    """An engine in which one hook makes calls, one in each round, while one request runs and another comes."""

    latest: World | None = None
    """For the policy, which is made by its name."""

    def __init__(self, tmp_path: Path, hook: str, backend: type[Any]) -> None:
        self.hook, self.path = hook, tmp_path
        World.latest = self
        self.is_armed, self.calls = False, dict[str, Callable[[World], Any]]()
        self.outcomes: dict[str, BaseException | None] = {}
        self.engine: Engine = make_engine(
            calling(backend)(self), plugins=[Plugin(self)], max_adapters=2, num_kv_blocks=64,
            flight_recorder="on", scheduling_policy="calling")
        self.engine.add_observer(Watching(self))
        self.kept = self.engine.add_request([8], greedy(2))
        self.engine.load_adapter("known", write_adapter(tmp_path / "known", 1))
        self.session, self.other = self.engine.session(greedy(2)), self.engine.session(greedy(2))
        self.session.ask([3, 3])
        self.other.ask([4, 4])
        self.session.export(tmp_path / "before")
        while self.engine.has_pending_requests():
            self.engine.step()
        self.requests: list[tuple[Request, list[int]]] = []

    def fire(self, hook: str) -> None:
        """Make the calls if this is the hook."""
        if self.is_armed and hook == self.hook:
            self.is_armed = False
            self.make()

    def make(self) -> None:
        """Make the calls, and note how they end."""
        for name, call in self.calls.items():
            try:
                call(self)
                self.outcomes[name] = None
            except BaseException as error:
                self.outcomes[name] = error

    def live(self, *names: str) -> None:
        """Run two requests to their ends, and what else the calls have brought."""
        self.requests, self.calls = [], {name: CALLS[name] for name in names}
        self.requests.append((self.engine.add_request(PROMPTS[0], greedy()), PROMPTS[0]))
        self.engine.step()
        self.is_armed = True
        # Why only there: such a row is chosen on the host, and keeps steps from overlapping.
        steered = greedy(logits_processor=self.process if self.hook == "logits_processor" else None)
        with suppress(EngineClosed) if "close" in names else nullcontext():
            self.requests.append((self.engine.add_request(PROMPTS[1], steered), PROMPTS[1]))
            if not self.hook:
                self.make()
            while self.engine.has_pending_requests():
                self.engine.step()
        for request, prompt in self.requests:
            completion, whole = request.output().outputs[0], toy_answer(prompt, NUM_TOKENS)
            may_abort = not {"abort", "close"}.isdisjoint(names)
            assert completion.finish_reason in (("length", "abort") if may_abort else ("length",))
            assert list(completion.token_ids) == whole[: len(completion.token_ids)]
            assert completion.finish_reason == "abort" or len(completion.token_ids) == NUM_TOKENS

    def process(self, output_token_ids: list[int], logits: Any) -> Any:
        self.fire("logits_processor")
        return logits

    def order(self, sequence: Any, view: Any) -> tuple[int]:
        self.fire("order")
        return (sequence.arrival,)

    def require_nothing_left(self) -> None:
        for session in self.engine.sessions:
            session.close()
        assert_all_free(self.engine)


def calling(kind: type[Any]) -> type[Any]:
    """A backend whose forward is a hook too."""
    class Calling(kind):  # type: ignore[misc]
        def __init__(self, world: World) -> None:
            super().__init__()
            self._world = world

        def forward(self, batch: Any) -> Any:
            self._world.fire("forward")
            return super().forward(batch)

    return Calling


def calling_policy() -> Policy:
    assert World.latest is not None
    return Policy("calling", World.latest.order, is_dynamic=True)


class Plugin:
    def __init__(self, world: World) -> None:
        self._world = world

    @hookimpl
    def pagedcore_register(self, registry: Any) -> None:
        registry.schedulers.add("calling", f"{__name__}:calling_policy")

    @hookimpl
    def pagedcore_step(self, stats: object) -> None:
        self._world.fire("pagedcore_step")

    @hookimpl
    def pagedcore_request_finished(self, request: object) -> None:
        self._world.fire("pagedcore_request_finished")


class Watching(EngineObserver):
    def __init__(self, world: World) -> None:
        self._world = world

    def step_timed(self, plan: object, seconds: float) -> None:
        self._world.fire("step_timed")

    def completion_ended(self, sequence: object) -> None:
        self._world.fire("completion_ended")

    def request_comes(self, request: object) -> None:
        self._world.fire("request_comes")

    def request_accepted(self, request: object) -> None:
        self._world.fire("request_accepted")

    def request_ended(self, request: object) -> None:
        self._world.fire("request_ended")

    def step_ended(self) -> None:
        self._world.fire("step_ended")


def add(world: World) -> None:
    world.requests.append((world.engine.add_request([9, 8], greedy()), [9, 8]))


def generate(world: World) -> None:
    (output,) = world.engine.generate([[9, 8]], greedy(3), show_progress=False)
    assert list(output.outputs[0].token_ids) == toy_answer([9, 8], 3)


def ask(world: World) -> None:
    known = list(world.session.token_ids)
    assert list(world.session.ask([5]).outputs[0].token_ids) == toy_answer([*known, 5], 2)


def take_weights(world: World) -> None:
    with world.engine.new_weights() as weights:
        weights.load({})


CALLS: dict[str, Callable[[World], Any]] = {
    "step": lambda world: world.engine.step(),
    "add_request": add,
    "generate": generate,
    "quote": lambda world: world.engine.quote([1], greedy()),
    "quote exactly": lambda world: world.engine.quote([1], greedy(), exact=True),
    "explain": lambda world: world.engine.explain(world.requests[0][0].request_id),
    "abort": lambda world: world.requests[0][0].abort(),
    "extend": lambda world: world.kept.extend([5], greedy(2)),
    "remove": lambda world: world.kept.remove(),
    "ask": ask,
    "fork": lambda world: world.session.fork(),
    "park": lambda world: world.session.park("disk"),
    "resume": lambda world: world.session.resume(),
    "export": lambda world: world.session.export(world.path / "exported"),
    "import_session": lambda world: world.engine.import_session(world.path / "before"),
    "close a session": lambda world: world.other.close(),
    "sleep": lambda world: world.engine.sleep(),
    "wake": lambda world: world.engine.wake(),
    "load_adapter": lambda world: world.engine.load_adapter("new", world.path / "known"),
    "unload_adapter": lambda world: world.engine.unload_adapter("known"),
    "new_weights": take_weights,
    "dump_recording": lambda world: world.engine.dump_recording(world.path / "recording.gz"),
    "stats": lambda world: world.engine.stats(),
    "idle": lambda world: world.engine.idle(),
    "close": lambda world: world.engine.close(),
}
ALWAYS = {"abort", "stats", "dump_recording"}
"""What may be called anywhere."""
NAMES = {"quote exactly": "quote", "close a session": "close"}
FUNCTIONS = {("forward", "overlapping"): "forward_there", ("logits_processor", "plain"): "process",
             ("logits_processor", "overlapping"): "process"}
KINDS = {"plain": AdaptedBackend, "overlapping": launched_ahead(AdaptedBackend)}


@cache
def outcomes_alone(path: Path, kind: str) -> dict[str, type[BaseException] | None]:
    """How each call ends that is made outside of all hooks."""
    world = World(path, "", KINDS[kind])
    for name in CALLS:
        world.live(name)
    return {name: error and type(error) for name, error in world.outcomes.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hook", BETWEEN)
def test_what_is_told_between_two_changes_may_call_anything(
    hook: str, kind: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each call ends as it does outside of all hooks, and the engine goes on."""
    world, alone = World(tmp_path, hook, KINDS[kind]), outcomes_alone(tmp_path_factory.getbasetemp() / kind, kind)
    for name in CALLS:
        world.live(name)
        error = world.outcomes[name]
        assert (name, error and type(error)) == (name, alone[name]), error
    world.require_nothing_left()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hook", WITHIN)
def test_what_is_called_within_a_change_may_abort_and_nothing_else(hook: str, kind: str, tmp_path: Path) -> None:
    """All that changes the engine or needs it at rest is refused by the names of call and hook, and the engine goes
    on."""
    world = World(tmp_path, hook, KINDS[kind])
    world.live(*CALLS)
    for name, error in world.outcomes.items():
        if name in ALWAYS:
            assert error is None
            continue
        assert isinstance(error, CalledFromHook), (name, error)
        assert error.call == NAMES.get(name, name)
        assert error.hook.rpartition(".")[2] == FUNCTIONS.get((hook, kind), hook)
        assert "between two changes" in str(error)
    assert world.requests[0][0].was_aborted
    assert not world.requests[1][0].was_aborted
    world.other.ask([5])
    world.require_nothing_left()


def test_a_refusal_that_a_hook_passes_on_ends_its_own_request_alone() -> None:
    """A processor that calls the engine and does not catch what that raises fails; its neighbour does not."""
    with make_engine() as engine:
        def process(output_token_ids: list[int], logits: Any) -> Any:
            engine.add_request([1])
            return logits

        failing = engine.add_request(PROMPTS[0], greedy(logits_processor=process))
        other = engine.add_request(PROMPTS[1], greedy())
        while engine.has_pending_requests():
            engine.step()
        assert isinstance(failing.error, ProcessorFailed)
        assert isinstance(failing.error.__cause__, CalledFromHook)
        assert list(other.output().outputs[0].token_ids) == toy_answer(PROMPTS[1], NUM_TOKENS)


def test_another_thread_is_refused_while_an_observer_is_told() -> None:
    """It is told within the engine's call, so that nobody changes what it looks at."""
    engine, refused = make_engine(), list[bool]()

    class Asking(EngineObserver):
        def step_ended(self) -> None:
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()

    def ask() -> None:
        try:
            engine.idle()
        except EngineInUse:
            refused.append(True)

    engine.add_observer(Asking())
    request = engine.add_request([1], greedy())
    for number in range(NUM_TOKENS):
        engine.step()
        assert len(refused) == number + 1
    assert request.take_new_tokens() == toy_answer([1], NUM_TOKENS)


def test_an_engine_closes_whatever_observers_raise() -> None:
    """They are told when everything has ended, and nothing that the first of them raises is left for a second close."""
    class Raising(EngineObserver):
        def request_ended(self, request: Request) -> None:
            raise LookupError

    engine = make_engine()
    engine.add_observer(Raising())
    requests = [engine.add_request(prompt, greedy()) for prompt in PROMPTS]
    engine.step()
    with pytest.raises(LookupError):
        engine.close()
    assert all(request.was_aborted for request in requests)
    assert_all_free(engine)


def test_an_observer_may_put_its_engine_to_sleep_and_take_weights() -> None:
    """At the end of a request, and when weights were taken; what it brings and what others have asked for is
    answered."""
    tensors, added = load_file(DEMO_MODEL_DIR / "model.safetensors"), list[Request]()
    with Engine.from_pretrained("demo", num_kv_blocks=64, check_invariants=True) as engine:
        class Changing(EngineObserver):
            def request_ended(self, request: Request) -> None:
                # Why: it is told again when the request is removed.
                if request is first and not added:
                    engine.sleep()
                    engine.wake()
                    with engine.new_weights(version="2", running="keep") as weights:
                        weights.load(tensors)

            def weights_taken(self) -> None:
                added.append(engine.add_request("What is 2 + 3?", greedy(4)))

        expected = [one.outputs[0].token_ids for one in engine.generate(["1 + 1", "What is 2 + 3?"], greedy(4))]
        engine.add_observer(Changing())
        first, second = engine.add_request("1 + 1", greedy(4)), engine.add_request("What is 2 + 3?", greedy(4))
        while engine.has_pending_requests():
            engine.step()
        assert engine.weights.label == "2"
        outputs = [one.output().outputs[0].token_ids for one in (first, second, *added)]
        assert outputs == [*expected, expected[1]]


def test_the_end_is_told_to_all_whatever_an_observer_raises() -> None:
    """Each observer is told of each request that ``close`` ends, though the first one raises every time; its first
    error comes out, and nothing is left."""
    told = list[Request]()

    class Raising(EngineObserver):
        def request_ended(self, request: Request) -> None:
            engine.add_request([1])

    class Listening(EngineObserver):
        def request_ended(self, request: Request) -> None:
            told.append(request)

    engine = make_engine()
    requests = [engine.add_request(prompt, greedy()) for prompt in PROMPTS]
    engine.step()
    for one in (Raising(), Listening()):
        engine.add_observer(one)
    with pytest.raises(EngineClosed):
        engine.close()
    assert set(told) == {*requests}
    assert_all_free(engine)


WAITING: dict[str, Callable[[AsyncEngine], Any]] = {
    "result": lambda engine: engine.submit([7], greedy(2)).result(),
    "generate_sync": lambda engine: list(engine.generate_sync([7])),
    "stats": lambda engine: engine.stats(),
    "complete": lambda engine: asyncio.run(engine.complete([7])),  # type: ignore[arg-type]
    "aclose": lambda engine: asyncio.run(engine.aclose()),  # type: ignore[arg-type]
}
"""Calls of an ``AsyncEngine`` that wait for its thread."""


@pytest.mark.parametrize("kind", KINDS)
def test_on_the_thread_of_an_engine_nothing_waits_for_it(kind: str) -> None:
    """A call that would is refused by name, one that does not wait works, also the engine's end; every reader has its
    own."""
    errors, later = dict[str, BaseException | None](), list[Any]()

    class Hook:
        @hookimpl
        def pagedcore_request_finished(self, request: Any) -> None:
            if request.prompt_token_ids != tuple(PROMPTS[0]):
                return
            for name, call in WAITING.items():
                try:
                    call(engine)
                except CalledFromHook as error:
                    errors[name] = error
            later.append(engine.submit([9], greedy()))

    engine = AsyncEngine(make_engine(KINDS[kind](), plugins=[Hook()]))
    first, second = (engine.submit(prompt, greedy()) for prompt in PROMPTS)
    for future, prompt in ((first, PROMPTS[0]), (second, PROMPTS[1])):
        assert list(future.result(60).outputs[0].token_ids) == toy_answer(prompt, NUM_TOKENS)
    assert list(later[0].result(60).outputs[0].token_ids) == toy_answer([9], NUM_TOKENS)
    assert {name: getattr(error, "call", None) for name, error in errors.items()} == {name: name for name in WAITING}
    assert all("pagedcore_request_finished" in str(error) for error in errors.values())
    last = engine.submit([6], SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))
    engine.send(lambda _: engine.close()).result(60)
    with pytest.raises(EngineClosed):
        last.result(60)
