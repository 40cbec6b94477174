"""When output is due: a first delta at once, the rest together and not too often."""

from __future__ import annotations

from pagedcore.request_options import RequestOptions
from pagedcore.requests.output_text import PendingOutput
from pagedcore.requests.request import Request
from pagedcore.sampling_params import SamplingParams
from pagedcore.sequence import Sequence
from pagedcore.serving.stream import Stream
from pagedcore.serving.stream_flusher import READERS_PER_INTERVAL, StreamFlusher
from support.doubles import FakeClock


def request_of(num_answers: int = 1) -> Request:
    params = SamplingParams()
    completions = [Sequence(index, [1], params, max_tokens=9, seed=0) for index in range(num_answers)]
    return Request("r", completions, params, RequestOptions(), owner=None)  # type: ignore[arg-type]


def pending_of(request: Request) -> list[PendingOutput]:
    return [PendingOutput(request, sequence, index, None) for index, sequence in enumerate(request.sequences)]


def expected(flusher: StreamFlusher, num_answers: int = 1) -> tuple[Stream, list[PendingOutput]]:
    """A new request with a reader, and its pending output."""
    request, stream = request_of(num_answers), Stream()
    flusher.expect(request, stream)
    return stream, pending_of(request)


def test_first_output_is_due_at_once_and_later_output_at_intervals() -> None:
    """Later output waits for the end of the interval; then it is due once, even if nothing was added since."""
    clock = FakeClock()
    flusher = StreamFlusher(1.0, clock)
    stream, pending = expected(flusher)
    flusher.add(pending)
    assert flusher.take_due() == {stream: pending}
    flusher.add(pending)
    clock.advance(0.5)
    assert flusher.take_due() == {}
    flusher.add(pending)
    clock.advance(0.5)
    assert flusher.take_due() == {stream: pending}
    clock.advance(5.0)
    assert flusher.take_due() == {}


def test_requests_that_began_apart_are_due_together() -> None:
    """The event loop of their readers wakes once for all of them; only the first output of a request never waits."""
    clock = FakeClock()
    flusher = StreamFlusher(1.0, clock)
    (early, its_pending), (late, other_pending) = expected(flusher), expected(flusher)
    flusher.add(its_pending)
    assert list(flusher.take_due()) == [early]
    clock.advance(0.75)
    flusher.add([*its_pending, *other_pending])
    assert list(flusher.take_due()) == [late]
    flusher.add(other_pending)
    clock.advance(0.25)
    assert list(flusher.take_due()) == [early, late]


def test_with_many_readers_the_interval_is_longer() -> None:
    """With twice as many readers as an interval is meant for, the next output is due after two intervals."""
    clock = FakeClock()
    flusher = StreamFlusher(1.0, clock)
    all_pending = [expected(flusher)[1] for _ in range(2 * READERS_PER_INTERVAL)]
    due_after = []
    for seconds in (0.0, 1.0, 0.9, 0.2):
        clock.advance(seconds)
        for pending in all_pending:
            flusher.add(pending)
        due_after.append(len(flusher.take_due()))
    assert due_after == [len(all_pending), 0, 0, len(all_pending)]


def test_each_completion_with_pending_output_is_due() -> None:
    """Of several completions of a request, those are due that something was added to."""
    clock = FakeClock()
    flusher = StreamFlusher(1.0, clock)
    stream, (first, second, third) = expected(flusher, 3)
    flusher.add([first, third])
    assert flusher.take_due() == {stream: [first, third]}
    flusher.add([second])
    flusher.add([first, second])
    clock.advance(1.0)
    assert flusher.take_due() == {stream: [second, first]}


def test_the_last_output_of_a_request_is_in_order() -> None:
    """What is pending at the end is taken by index, so that the usage comes with the last completion; then none is."""
    flusher = StreamFlusher(1.0, FakeClock())
    _, (first, second, third) = expected(flusher, 3)
    flusher.add([third, first])
    flusher.add([second])
    assert flusher.take(first.request) == [first, second, third]
    assert flusher.take(first.request) == []
    assert flusher.take_due() == {}


def test_pending_output_of_a_request_can_be_taken_out_of_turn() -> None:
    """A request that ends takes its pending output along; nothing of it is due later, and no more is expected."""
    clock = FakeClock()
    flusher = StreamFlusher(1.0, clock)
    (_, pending), (other, its_pending) = expected(flusher), expected(flusher)
    request = pending[0].request
    flusher.add([*pending, *its_pending])
    assert (flusher.take(request), flusher.take(request)) == (pending, [])
    assert flusher.take_due() == {other: its_pending}
    flusher.add(pending)
    clock.advance(2.0)
    assert flusher.take_due() == {}


def test_output_without_a_reader_is_not_due() -> None:
    """It does not count as a reader, and it is not kept for a later one."""
    clock = FakeClock()
    flusher = StreamFlusher(1.0, clock)
    unread = [one for _ in range(9 * READERS_PER_INTERVAL) for one in pending_of(request_of())]
    flusher.add(unread)
    stream, pending = expected(flusher)
    assert flusher.take_due() == {}
    clock.advance(1.0)
    flusher.add([*unread, *pending])
    assert flusher.take_due() == {stream: pending}
    clock.advance(1.0)
    flusher.add([*unread, *pending])
    assert flusher.take_due() == {stream: pending}


def test_without_an_interval_output_is_due_after_every_step() -> None:
    """An interval of 0 holds nothing back."""
    flusher = StreamFlusher(0.0, FakeClock())
    stream, pending = expected(flusher)
    for _ in range(3):
        flusher.add(pending)
        assert flusher.take_due() == {stream: pending}
