"""When tokens came: the time to the first one, and each interval after it."""

from __future__ import annotations

from itertools import groupby

import pytest

from pagedcore.engine.builder import build_components
from pagedcore.engine.engine import Engine
from pagedcore.protocols import FloatArray, RaggedRows
from pagedcore.sampling_params import SamplingParams
from pagedcore.serving.async_engine import AsyncEngine
from support.doubles import FakeClock, ToyBackend
from support.engine_builders import run

FOUR = SamplingParams(max_tokens=4, ignore_eos=True)


class TimedBackend(ToyBackend):
    """A step takes as many seconds as its number."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.clock = clock
        self.interrupt_on = 0

    def forward(self, batch: RaggedRows) -> FloatArray:
        """Compute, and let time pass."""
        logits = super().forward(batch)
        self.clock.advance(float(self.num_steps))
        if self.num_steps == self.interrupt_on:
            raise KeyboardInterrupt
        return logits


def make() -> tuple[Engine, TimedBackend]:
    """An engine whose steps take a known time."""
    clock = FakeClock(100.0)
    backend = TimedBackend(clock)
    return Engine(build_components(backend, num_kv_blocks=16, block_size=4), clock), backend


def test_an_output_has_the_time_to_its_first_token_and_every_interval() -> None:
    """ttft_s ends with the first token's step, and itl_s has one number for each token after it."""
    engine, backend = make()
    request = engine.add_request([1, 2], FOUR)
    assert (request.output().metrics.ttft_s, request.output().outputs[0].itl_s) == (None, ())
    assert request.output().metrics.queue_s is None
    backend.clock.advance(0.5)
    run(engine)
    output = request.output()
    assert (output.metrics.ttft_s, output.outputs[0].itl_s) == (1.5, (2.0, 3.0, 4.0))
    assert output.metrics.queue_s == 0.5
    request.extend([3], FOUR)
    run(engine)
    assert (request.output().metrics.ttft_s, request.output().outputs[0].itl_s) == (5.0, (6.0, 7.0, 8.0))


def test_an_interrupted_step_counts_for_the_interval_that_it_lengthened() -> None:
    """A step that was broken off has no token, and its time is that of the token after it."""
    engine, backend = make()
    request = engine.add_request([1, 2], FOUR)
    backend.interrupt_on = 2
    engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    run(engine)
    assert request.output().outputs[0].itl_s == (5.0, 4.0, 5.0)


@pytest.mark.parametrize("params", [
    SamplingParams(max_tokens=4, n=2, ignore_eos=True), SamplingParams(max_tokens=4, beam_width=2, ignore_eos=True),
    SamplingParams(max_tokens=4, best_of=2, temperature=1.0, seed=1, ignore_eos=True),
])
def test_each_completion_has_its_own_intervals_unless_it_was_chosen(params: SamplingParams) -> None:
    """Parallel completions have three intervals each; those that were chosen at the end came at once."""
    engine, _ = make()
    request = engine.add_request([1, 2, 3, 4, 5], params)
    run(engine)
    lengths = [len(one.itl_s) for one in request.output().outputs]
    assert lengths == [3 if params.n == 2 else 0] * len(lengths)


def test_the_last_delta_has_the_times() -> None:
    """A stream tells what the whole output does: the intervals of each completion, and the request's own times."""
    engine, _ = make()
    with AsyncEngine(engine, stream_interval_s=0.0) as serving:
        deltas = list(serving.generate_sync([1, 2], SamplingParams(max_tokens=4, n=2, ignore_eos=True)))
    ended = [one for one in deltas if one.finish_reason is not None]
    assert [one.itl_s for one in ended] == [(2.0, 3.0, 4.0)] * 2
    assert [one.itl_s for one in deltas if one.finish_reason is None] == [()] * (len(deltas) - 2)
    assert [one.metrics is None for one in deltas] == [True] * (len(deltas) - 1) + [False]
    assert deltas[-1].metrics is not None
    assert deltas[-1].metrics.ttft_s == 1.0


def test_a_request_says_where_its_completions_are() -> None:
    """They wait, compute the prompt in pieces, decode, wait again while others run in their place, and finish."""
    engine = Engine(build_components(ToyBackend(), num_kv_blocks=7, block_size=4, max_num_batched_tokens=8,
                                     max_num_seqs=4, check_invariants=True))
    first = engine.add_request(list(range(1, 13)), SamplingParams(max_tokens=8, ignore_eos=True))
    second = engine.add_request(list(range(10, 20)), SamplingParams(max_tokens=9, ignore_eos=True))
    seen = []
    while engine.has_pending_requests():
        seen.append((first.phases[0], second.phases[0]))
        engine.step()
    ways = [list(dict.fromkeys(way)) for way in zip(*seen, strict=True)]
    assert ways[0] == ["waiting", "prefill", "decode", "finished"]
    second_way = [one for one, _ in groupby(way for _, way in seen)]
    assert second_way[:4] == ["waiting", "prefill", "decode", "waiting"], "it was preempted once"
    assert (first.phases, second.phases) == (("finished",), ("finished",))
