"""When readers are told: a first delta at once, the rest together and not too often."""

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


def news_of(request: Request) -> list[PendingOutput]:
    return [PendingOutput(request, sequence, index, None) for index, sequence in enumerate(request.sequences)]


def expected(outbox: StreamFlusher, num_answers: int = 1) -> tuple[Stream, list[PendingOutput]]:
    """A new request that somebody reads, and its news."""
    request, stream = request_of(num_answers), Stream()
    outbox.expect(request, stream)
    return stream, news_of(request)


def test_a_request_is_told_its_first_news_at_once_and_then_all_that_came_at_intervals() -> None:
    """Later ones wait until the interval is over, and are told then even if nothing more came, once."""
    clock = FakeClock()
    outbox = StreamFlusher(1.0, clock)
    stream, news = expected(outbox)
    outbox.add(news)
    assert outbox.take_due() == {stream: news}
    outbox.add(news)
    clock.advance(0.5)
    assert outbox.take_due() == {}
    outbox.add(news)
    clock.advance(0.5)
    assert outbox.take_due() == {stream: news}
    clock.advance(5.0)
    assert outbox.take_due() == {}


def test_requests_that_began_apart_are_due_together() -> None:
    """So that the loop of their readers wakes once for all of them; only the first news never wait."""
    clock = FakeClock()
    outbox = StreamFlusher(1.0, clock)
    (early, its_news), (late, other_news) = expected(outbox), expected(outbox)
    outbox.add(its_news)
    assert list(outbox.take_due()) == [early]
    clock.advance(0.75)
    outbox.add([*its_news, *other_news])
    assert list(outbox.take_due()) == [late]
    outbox.add(other_news)
    clock.advance(0.25)
    assert list(outbox.take_due()) == [early, late]


def test_with_many_readers_the_interval_is_longer() -> None:
    """Telling twice as many as one interval is meant for takes twice as long, so the next time is two intervals off."""
    clock = FakeClock()
    outbox = StreamFlusher(1.0, clock)
    all_news = [expected(outbox)[1] for _ in range(2 * READERS_PER_INTERVAL)]
    due_after = []
    for seconds in (0.0, 1.0, 0.9, 0.2):
        clock.advance(seconds)
        for news in all_news:
            outbox.add(news)
        due_after.append(len(outbox.take_due()))
    assert due_after == [len(all_news), 0, 0, len(all_news)]


def test_each_answer_that_has_news_is_told_of() -> None:
    """Of several answers of a request those are due that something was added to."""
    clock = FakeClock()
    outbox = StreamFlusher(1.0, clock)
    stream, (first, second, third) = expected(outbox, 3)
    outbox.add([first, third])
    assert outbox.take_due() == {stream: [first, third]}
    outbox.add([second])
    outbox.add([first, second])
    clock.advance(1.0)
    assert outbox.take_due() == {stream: [second, first]}


def test_the_news_of_a_request_can_be_taken_out_of_turn() -> None:
    """A request that ends takes its news along; nothing of it is due any more, and nothing more is expected of it."""
    clock = FakeClock()
    outbox = StreamFlusher(1.0, clock)
    (_, news), (other, its_news) = expected(outbox), expected(outbox)
    request = news[0].request
    outbox.add([*news, *its_news])
    assert (outbox.take(request), outbox.take(request)) == (news, [])
    assert outbox.take_due() == {other: its_news}
    outbox.add(news)
    clock.advance(2.0)
    assert outbox.take_due() == {}


def test_what_nobody_reads_is_not_due() -> None:
    """Neither is it counted as somebody to tell, nor kept for whoever might come."""
    clock = FakeClock()
    outbox = StreamFlusher(1.0, clock)
    unread = [one for _ in range(9 * READERS_PER_INTERVAL) for one in news_of(request_of())]
    outbox.add(unread)
    stream, news = expected(outbox)
    assert outbox.take_due() == {}
    clock.advance(1.0)
    outbox.add([*unread, *news])
    assert outbox.take_due() == {stream: news}
    clock.advance(1.0)
    outbox.add([*unread, *news])
    assert outbox.take_due() == {stream: news}


def test_without_an_interval_every_step_is_told_of() -> None:
    """An interval of nought holds nothing back."""
    outbox = StreamFlusher(0.0, FakeClock())
    stream, news = expected(outbox)
    for _ in range(3):
        outbox.add(news)
        assert outbox.take_due() == {stream: news}
