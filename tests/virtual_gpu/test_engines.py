"""The whole engine on virtual GPUs: what it computes there is what transformers, or the engine on a CPU, computes."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from itertools import pairwise
from typing import Any
from unittest.mock import PropertyMock, patch

import pytest
import torch

from pagedcore.demo_model.questions import demo_questions, is_correct
from pagedcore.engine.engine import Engine
from pagedcore.errors import EngineClosed, InvalidConfig
from pagedcore.execution.devices import Device
from pagedcore.execution.model_runner import ModelRunner
from pagedcore.models.decoders import step_numbers
from pagedcore.protocols import MonotonicClock
from pagedcore.requests.observers import EngineObserver
from pagedcore.sampling_params import SamplingParams
from pagedcore.scheduler.plan import SchedulePlan
from pagedcore.scheduler.scheduler import Scheduler
from pagedcore.serving.async_engine import AsyncEngine
from pagedcore_kernels.cuda.build.toolchain import missing_compiler_parts
from support.engine_builders import assert_all_free, run
from support.families import FAMILIES, HYBRIDS, tiny_model
from support.generate_oracle import NUM_TOKENS, generate_alone, make_prompts
from virtual_gpu.backends import on_gpu, shipped_kernels
from virtual_gpu.machine import Event, Machine
from virtual_gpu.torch_cuda import virtual_gpus

REPRESENTATIVES = ("llama", "gemma2", "llama4_text")


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": NUM_TOKENS, **more})


@pytest.mark.skipif(bool(missing_compiler_parts()), reason="needs pagedcore[cuda] to compile kernels")
@pytest.mark.parametrize(("count", "preemption"), [
    (3, "auto"), pytest.param(6, "swap", marks=pytest.mark.kernels),
    pytest.param(6, "recompute", marks=pytest.mark.kernels),
])
def test_the_demo_model_answers_on_the_kernels_that_ship(count: int, preemption: str, gpus: Machine) -> None:
    """Prompts in chunks, preempted requests and recorded decode steps: every answer is right, most decode steps are
    launched as a whole, all of which were recorded at the start, and a step is one copy to the GPU; the last one may
    have been launched in vain."""
    questions = demo_questions(count, seed=5)
    with shipped_kernels(gpus) as api, Engine.from_pretrained(
        "demo", device="cuda", max_num_batched_tokens=24, max_num_seqs=4, block_size=4,
        num_kv_blocks=14 if count > 3 else 40, host_kv_memory="1MiB", preemption=preemption,
    ) as engine:
        requests = [engine.add_request(question.prompt, greedy(max_tokens=32)) for question in questions]
        before = gpus.counts.copy()
        run(engine)
        answers = [request.output().outputs[0].text for request in requests]
        assert [(q.prompt, a) for q, a in zip(questions, answers, strict=True) if not is_correct(q, a)] == []
        assert count <= 3 or engine.stats().num_preemptions > 0
        found, num_steps = gpus.counts - before, engine.stats().num_steps
    assert count > 3 or found["copies to the device"] in (num_steps, num_steps + 1)
    assert (before["graphs recorded"], found["graphs recorded"]) == (3, 0)
    assert found["graph launches"] > num_steps // 2
    assert {name.partition("-")[0] for name in api.launched} == {
        "norm", "rotate", "decode", "prefill", "gated", "sample"}


@pytest.mark.parametrize(("family", "preemption"), [
    ("gemma2", "swap"),
    *(pytest.param(family, "recompute", marks=pytest.mark.kernels) for family in REPRESENTATIVES),
    *(pytest.param(family, "swap", marks=pytest.mark.kernels) for family in FAMILIES
      if family not in ("gemma2", *HYBRIDS)),
])
def test_tokens_on_a_gpu_are_those_of_generate(family: str, preemption: str, gpus: Machine) -> None:
    """Chunked, in company and preempted, with blocks that arrive late from the host, tokens are ``generate``'s."""
    model, prompts = tiny_model(family), make_prompts()
    model.set_attn_implementation("eager")
    expected = [generate_alone(model, prompt) for prompt in prompts]
    with on_gpu(model, attention="queued", preemption=preemption, host_kv_memory="1MiB", num_kv_blocks=12) as engine:
        requests = [engine.add_request(prompt, greedy()) for prompt in prompts]
        run(engine)
        assert [list(request.output().outputs[0].token_ids) for request in requests] == expected
        stats = engine.stats()
        assert not stats.is_schedule_invariant
        assert stats.num_preemptions > 0 or any(len(answer) < NUM_TOKENS for answer in expected)
        for _ in range(3):  # asks after the transfers that were still on their way when the last answer ended
            engine.step()
        assert_all_free(engine)


OPTIONS: dict[str, dict[str, Any]] = {
    "several": {"n": 2, "temperature": 0.8, "seed": 3},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.5, "logit_bias": {7: 2.0}, "min_tokens": 5},
    "logprobs": {"logprobs": 2, "prompt_logprobs": 2},
    "masked": {"allowed_token_ids": list(range(5, 30)), "top_k": 4, "temperature": 1.0, "seed": 8},
    "processed": {"logits_processor": lambda output_token_ids, logits: logits * 3, "temperature": 0.9, "seed": 2},
    "seen": {"logprobs": 1, "return_logits": True},
}


def asked(engine: Engine) -> list[Any]:
    """What an engine answers to every kind of request at once."""
    requests = [engine.add_request(prompt, greedy(**options))
                for prompt, options in zip(make_prompts() * 2, OPTIONS.values(), strict=False)]
    run(engine)
    return [request.output() for request in requests]


def test_options_mean_the_same_on_a_gpu(gpus: Machine, caplog: pytest.LogCaptureFixture) -> None:
    """Several completions, penalties, masks, a caller's own code and probabilities of prompts are those of the engine
    on a CPU, and no step waits more than once for a GPU."""
    with on_gpu(tiny_model("llama"), device="auto", attention="reference", dtype="float32") as engine:
        expected = asked(engine)
    with on_gpu(tiny_model("llama"), device="cuda:1") as engine:
        gpus.counts.clear()
        found, num_steps = asked(engine), engine.stats().num_steps
        assert gpus.counts["waits"] <= num_steps + 3 * gpus.counts["graphs recorded"]
        assert gpus.counts["pageable copies to the device"] == 0
    assert torch.cuda.current_device() == 0
    # What was found of products is said when the engine is made.
    assert "1 to 512 rows, powers of two, on this GPU" in caplog.text
    assert "the same bits in each company" in caplog.text
    for output, wanted in zip(found, expected, strict=True):
        assert [one.token_ids for one in output.outputs] == [one.token_ids for one in wanted.outputs]
    for mine, other in zip(found[2].prompt_logprobs, expected[2].prompt_logprobs, strict=True):
        assert (mine is None) == (other is None)
        assert mine is None or (mine.token_id, mine.logprob) == (other.token_id, pytest.approx(other.logprob, abs=1e-4))


def test_sessions_and_threads_on_a_gpu(gpus: Machine) -> None:
    """A conversation that was parked on the host goes on as it would have, and an engine in a thread of its own has the
    same answers."""
    prompts, model = make_prompts(), tiny_model("llama")
    with on_gpu(model, host_kv_memory="1MiB", num_kv_blocks=40) as engine:
        with engine.session(greedy()) as session, engine.session(greedy()) as other:
            expected = [session.ask(prompts[1]).outputs[0].token_ids, session.ask(prompts[2]).outputs[0].token_ids]
            found = [other.ask(prompts[1]).outputs[0].token_ids]
            other.park("host")
            engine.generate([[9] * 60], greedy(), show_progress=False)
            assert [*found, other.ask(prompts[2]).outputs[0].token_ids] == expected
        alone = [one.outputs[0].token_ids for one in engine.generate(prompts, greedy(), show_progress=False)]

        async def main() -> list[Any]:
            async with AsyncEngine(engine) as served:
                async def last(prompt: list[int]) -> Any:
                    return tuple([token async for one in served.generate(prompt, greedy()) for token in one.token_ids])

                return await asyncio.gather(*map(last, prompts))

        assert asyncio.run(main()) == alone


DROPPED: dict[str, tuple[Any, str, Any]] = {
    "the host does not wait for tokens": (Event, "synchronize", lambda self: None),
    "tokens are not looked up on the GPU": (step_numbers, "look_up", lambda token_ids, latest: token_ids.clamp(min=0)),
    "copies are over before they are made": (Event, "query", lambda self: True),
    "copies are made from memory that is used again": (Device, "send", lambda self, numbers: used_again(self, numbers)),
}


def used_again(device: Device, numbers: Any) -> torch.Tensor:
    """Pinned memory that the host writes to before the copy out of it was waited for."""
    staged = torch.from_numpy(numbers).pin_memory()
    there = staged.to(device.torch_device, non_blocking=True)
    staged.zero_()
    return there


@pytest.mark.parametrize("edge", DROPPED)
def test_an_edge_that_is_missing_shows(edge: str, gpus: Machine) -> None:
    """Each way in which an engine orders host, copies and computation is needed: without it tokens are others, or
    requests end with an error."""
    model, prompts = tiny_model("llama"), make_prompts()
    expected = [generate_alone(model, prompt) for prompt in prompts]
    with on_gpu(model, attention="queued", preemption="swap", host_kv_memory="1MiB", num_kv_blocks=12) as engine:
        requests = [engine.add_request(prompt, greedy()) for prompt in prompts]
        # Why suppressed: what is read too early may be no token, which a GPU does not survive.
        with patch.object(*DROPPED[edge]), suppress(EngineClosed):
            for _ in range(100):
                engine.step()
        answers = [request.output().outputs for request in requests]
    assert [[list(one.token_ids) for one in each] for each in answers] != [[tokens] for tokens in expected]


def test_steps_come_under_any_stream_and_device(gpus: Machine) -> None:
    """Who steps an engine under one stream after another, with another GPU current, gets the same tokens, and finds its
    own GPU and stream current afterwards; the engine computes on a stream of its own."""
    model, prompts = tiny_model("llama"), make_prompts()
    expected = [generate_alone(model, prompt) for prompt in prompts]
    streams = [torch.cuda.Stream("cuda:1") for _ in range(3)]
    with on_gpu(model, device="cuda:1", preemption="swap", host_kv_memory="1MiB", num_kv_blocks=12) as engine:
        requests = [engine.add_request(prompt, greedy()) for prompt in prompts]
        for step in range(100):
            with torch.cuda.stream(streams[step % 3]):
                torch.cuda.set_device(0)
                engine.step()
                assert torch.cuda.current_device() == 0
                assert torch.cuda.current_stream("cuda:1") is streams[step % 3]
        assert [list(request.output().outputs[0].token_ids) for request in requests] == expected
    assert [stream.launched for stream in (*streams, gpus.default_stream(1))] == [0] * 4


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_gpu_that_has_failed_ends_its_engine(gpus: Machine) -> None:
    """An error that no later call survives closes the engine, whose health is "dead"; every request is told to restart
    the process, and closing frees what it has."""
    engine, has_failed = AsyncEngine(on_gpu(tiny_model("llama"), host_kv_memory="1MiB")), threading.Event()
    # Why held: else all may have been answered before the GPU fails.
    held = engine.send(lambda _: has_failed.wait(60))
    futures = [engine.submit(prompt, greedy(max_tokens=40)) for prompt in make_prompts()]
    gpus.failure = "CUDA error: an illegal memory access was encountered"
    has_failed.set()
    assert held.result(60)
    for future in futures:
        with pytest.raises(EngineClosed) as caught:
            future.result(60)
        assert "restart the process" in str(caught.value) + str(caught.value.__cause__)
    engine._thread.join(60)
    assert engine.health().status == "dead"
    engine.close()


class StepTimes(EngineObserver):
    """The seconds that each step is said to have taken."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def step_timed(self, plan: SchedulePlan, seconds: float) -> None:
        self.seconds.append(seconds)


def test_a_step_takes_what_its_work_takes() -> None:
    """What policies, quotes and promises learn of a step is the time in which a GPU, whose operations take thousands of
    times longer than to queue them, has done its work: of a chunk, of which nothing is read, and of a recorded step.
    What is launched behind it counts for the next."""
    times, ends = StepTimes(), list[float]()
    with virtual_gpus(Machine(device_seconds=lambda name: 1e-3, host_seconds=1e-6)) as gpus:
        with patch.object(MonotonicClock, "now", lambda clock: gpus.now), on_gpu(tiny_model("llama")) as engine:
            engine.add_observer(times)
            engine.add_request(make_prompts()[1], greedy(max_tokens=6))
            num_launched = sum(stream.launched for stream in gpus.streams)
            while engine.has_pending_requests():
                ends.append(gpus.now)
                engine.step()
            ends.append(gpus.now)
            num_launched = sum(stream.launched for stream in gpus.streams) - num_launched
        assert gpus.counts["graph launches"] > 2
    # The first call launches and waits for nothing.
    expected = [end - begin for begin, end in pairwise(ends[1:])]
    assert len(expected) > 7
    assert times.seconds == pytest.approx(expected, rel=0.02)
    assert min(expected) > 0.05
    assert sum(times.seconds) == pytest.approx(num_launched * 1e-3, rel=0.02)


def test_a_step_takes_the_longer_of_host_and_gpu() -> None:
    """On the virtual clock: what the host does for a step (plan, queue, read) and what the GPU does for it take as long
    as the longer of the two, whichever it is; taken one by one, they take their sum."""
    costs, schedule = {"plan": 0.0}, Scheduler.schedule
    with virtual_gpus(Machine(device_seconds=lambda name: 0.0, host_seconds=0.0)) as gpus:
        def planned(self: Scheduler, most_tokens: int | None = None) -> SchedulePlan:
            gpus.now += costs["plan"]
            return schedule(self, most_tokens)

        now, slowly = patch.object(MonotonicClock, "now", lambda clock: gpus.now), patch.object(
            Scheduler, "schedule", planned)
        with now, slowly, on_gpu(tiny_model("llama"), max_num_batched_tokens=16, num_kv_blocks=80) as engine:
            for prompt in make_prompts():
                engine.add_request(prompt, greedy(max_tokens=80, ignore_eos=True))
            for _ in range(6):
                engine.step()

            def seconds_of_a_step(host_s: float, device_s: float, plan_s: float) -> float:
                costs["plan"], gpus.host_seconds, gpus.device_seconds = plan_s, host_s, lambda name: device_s
                for _ in range(3):
                    engine.step()
                begin_s, num_graphs = gpus.now, gpus.counts["graph launches"]
                for _ in range(4):
                    engine.step()
                assert gpus.counts["graph launches"] == num_graphs + 4
                return (gpus.now - begin_s) / 4

            for device_s in (1e-4, 3e-4):
                host, gpu = seconds_of_a_step(1e-4, 0.0, 2e-2), seconds_of_a_step(0.0, device_s, 0.0)
                assert seconds_of_a_step(1e-4, device_s, 2e-2) == pytest.approx(max(host, gpu), rel=0.1)
                with patch.object(ModelRunner, "can_launch", PropertyMock(return_value=False)):
                    assert seconds_of_a_step(1e-4, device_s, 2e-2) == pytest.approx(host + gpu, rel=0.1)
                assert min(host, gpu) > 0.25 * max(host, gpu)
            assert len(engine.scheduler.running) == 3


@pytest.mark.parametrize(("tokens", "fits"), [(256, True), (16384, False), (65536, False)])
def test_the_pool_leaves_room_for_the_largest_step(tokens: int, fits: bool) -> None:
    """Nine tenths of a GPU are for weights, the largest step, which is computed once to see what it takes, and the
    pool, which gets the rest; a step that has no room, or whose own blocks have none, is refused with what to lower."""
    model = tiny_model("llama", max_position_embeddings=8192)
    width: dict[str, Any] = {"num_kv_blocks": None, "max_num_seqs": 16, "max_num_batched_tokens": tokens}
    with virtual_gpus(Machine(memory_bytes=2 << 20)):
        if not fits:
            with pytest.raises(InvalidConfig, match=f"max_num_batched_tokens: got {tokens} tokens of up to 16 seq"):
                on_gpu(model, **width)
            return
        with on_gpu(model, **width) as engine:
            assert 0.7 < engine.stats().kv_bytes / 2**20 < 0.8
            outputs = engine.generate([[n] * 16 for n in range(3, 35)], greedy(max_tokens=5), show_progress=False)
            assert {output.outputs[0].finish_reason for output in outputs} <= {"length", "stop"}
