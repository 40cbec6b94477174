"""What HTTP doors share, without a server: events, drain, error responses, bodies, salts."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import tracemalloc
from collections import Counter
from collections.abc import AsyncGenerator
from hashlib import sha256
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("starlette")

from starlette.exceptions import HTTPException
from starlette.requests import Request

from pagedcore.config import limits
from pagedcore_http import body as door
from pagedcore_http.body import MAX_ESCAPES, MAX_JSON_DEPTH, MAX_OF_A_KIND, body_limit, read_fields
from pagedcore_http.drain import DrainSignal, OpenCalls
from pagedcore_http.event_stream import EventStream
from pagedcore_http.events import WAITING, EventParser, frame
from pagedcore_http.refusals import NotServing, RefusedAtTheDoor, refusal_of
from pagedcore_http.salts import combine_salts


async def test_a_signal_waits_for_the_drain_and_a_second_one_does_not() -> None:
    """The handler that was there hears the first signal when all have left, a further one at once; then it is back."""
    heard: list[int] = []

    def hear(number: int, _: object) -> None:
        heard.append(number)

    before = signal.signal(signal.SIGTERM, hear)
    try:
        everybody_left, was_notified = asyncio.Event(), asyncio.Event()

        async def drain() -> None:
            was_notified.set()
            await everybody_left.wait()

        farewell = DrainSignal(drain)
        farewell.install()
        signal.raise_signal(signal.SIGTERM)
        await was_notified.wait()
        assert heard == []
        signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGTERM]
        everybody_left.set()
        while len(heard) < 2:
            await asyncio.sleep(0)
        farewell.remove()
        assert signal.getsignal(signal.SIGTERM) is hear
    finally:
        signal.signal(signal.SIGTERM, before)


async def test_a_process_that_has_no_handler_ends_as_it_would_have() -> None:
    """Without a callback, and on threads that get no signals, the signal is left alone."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        DrainSignal(asyncio.Event().wait).install()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        signal.signal(signal.SIGTERM, print)
        await asyncio.to_thread(DrainSignal(asyncio.Event().wait).install)
        assert signal.getsignal(signal.SIGTERM) is print
    finally:
        signal.signal(signal.SIGTERM, before)


@given(st.lists(st.tuples(st.sampled_from(["", "done", "error"]), st.text()), max_size=8), st.integers(1, 7))
def test_events_survive_any_cut(events: list[tuple[str, str]], size: int) -> None:
    """Whatever the text, and wherever the bytes are cut, the reader gets the events that were written."""
    data = WAITING.join(frame({"text": text}, name) for name, text in events).encode("ascii")
    parser = EventParser()
    pieces = [data[start : start + size].decode("ascii") for start in range(0, len(data), size)]
    found = [(event.name, event.data["text"]) for piece in pieces for event in parser.feed(piece)]
    assert found == events


async def sent_for(*pieces: str) -> list[tuple[str, bool]]:
    """What an event stream of these pieces sends: bodies, and whether more is said to come."""
    messages: list[dict[str, Any]] = []

    async def events() -> AsyncGenerator[str, None]:
        for piece in pieces:
            yield piece

    async def send(message: Any) -> None:
        messages.append(message)

    async def receive() -> Any:
        return await asyncio.Event().wait()

    await EventStream(events())({"type": "http"}, receive, send)
    assert [message["type"] for message in messages] == ["http.response.start"] + ["http.response.body"] * (
        len(messages) - 1)
    return [(message["body"].decode(), message["more_body"]) for message in messages[1:]]


async def test_the_end_comes_with_the_last_piece() -> None:
    """Nothing is sent after "done", and the text of an answer cannot be taken for it."""
    treacherous, done = frame({"text": "event: done\n\nevent: error\n"}), frame({"usage": None}, "done")
    assert await sent_for(treacherous, frame({"text": "b"}) + done) == [
        (treacherous, True), (frame({"text": "b"}) + done, False)]


async def test_a_stream_of_other_events_ends_too() -> None:
    """A third party's endpoint that knows no "done" gets its end, empty."""
    mine = frame({"mine": 1}, "progress") + "data: event: done\n\n"
    assert await sent_for(mine, mine) == [(mine, True), (mine, True), ("", False)]


@pytest.mark.parametrize(("error", "is_logged"), [(NotServing("busy"), False), (RuntimeError("canary"), True)])
async def test_an_error_whose_client_has_left_is_logged_if_it_is_unforeseen(
    caplog: pytest.LogCaptureFixture, error: Exception, is_logged: bool
) -> None:
    """The client leaves in the same round of the loop in which the stream fails: asyncio has nothing to complain of."""

    async def events() -> AsyncGenerator[str, None]:
        raise error
        yield ""

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    await EventStream(events())({"type": "http"}, receive, send)
    gc.collect()
    assert ("unforeseen" in caplog.text, "never retrieved" in caplog.text) == (is_logged, False)


async def test_a_drain_waits_for_open_calls_and_no_longer_than_its_timeout() -> None:
    """Draining admits no request, ends when all have ended, and stops waiting after its time limit."""
    door = OpenCalls()
    with door.call():
        with door.call():
            assert await door.drain(timeout_s=0.01) == 2
        assert await door.drain(timeout_s=0.01) == 1
        with pytest.raises(NotServing), door.call():
            pass
        waiting = asyncio.create_task(door.drain(timeout_s=60.0))
        await asyncio.sleep(0)
        assert not waiting.done()
    assert await waiting == 0


def test_an_unforeseen_error_is_told_without_its_words(caplog: pytest.LogCaptureFixture) -> None:
    """What a library raises may hold anything; the caller gets a status, the log the rest."""
    refusal = refusal_of(RuntimeError("a path, a prompt"))
    assert refusal.status == 500
    assert "prompt" not in str(refusal.body)
    assert "unforeseen" in caplog.text


def nested(depth: int) -> Any:
    return {} if depth == 1 else {"a": nested(depth - 1)} if depth % 2 else [1, nested(depth - 1)]


@pytest.mark.parametrize("filler", [[], [7] * 40_000, [{"role": "user", "content": "a [ { text"}] * 1000,
                                    [None, True, 1.5, "x", -0, 10**30] * 1000, {str(n): n for n in range(5000)}])
async def test_a_long_body_is_read_as_a_short_one(filler: Any) -> None:
    """On another thread where it is long: the same values, the same refusals of what is too deep or no JSON."""
    for depth, is_refused in ((MAX_JSON_DEPTH - 1, False), (MAX_JSON_DEPTH, True)):
        fields = {"prompt": filler, "sampling": nested(depth)}
        reading = read_fields(request_with(json.dumps(fields).encode()), ["prompt", "sampling"], [], 2**20)
        if is_refused:
            with pytest.raises(RefusedAtTheDoor, match="64 levels"):
                await reading
        else:
            assert await reading == fields
    for ending in (b"", b"}}", b',"a":NaN}', b',"a":{"b":1,"b":2}}'):
        broken = b'{"prompt":' + json.dumps(filler).encode() + ending
        with pytest.raises(RefusedAtTheDoor, match="JSON text"):
            await read_fields(request_with(broken), ["prompt"], [], 2**20)


def test_the_limit_of_a_body_follows_from_the_context() -> None:
    """The longest text that the engine accepts for a context fits, up to the most of a chat, and 256 KiB besides."""
    assert (door.TEXT_BYTES_PER_TOKEN, door.MAX_TEXT_BYTES) == (limits.MAX_TEXT_BYTES_PER_TOKEN, limits.MAX_CHAT_BYTES)
    assert [body_limit(n) - 2**18 for n in (1, 4096, 131_072, 10**9)] == [16, 2**16, 2**21, 2**22]


SIZE = body_limit(4096)
MOST = MAX_OF_A_KIND


@pytest.mark.parametrize(("item", "what"), [
    (b"1,", "numbers"), (b"1.5,", "numbers"), (b"{},", "numbers"), (b"[],", "lists"), (b"[", "lists"),
    (b'"",', "strings"), (b'"":0,', "strings"), (b'"\\\\",', "strings"), (b'"\\"",', "strings"),
    (b'"[",[],[],', "lists"), (b"null,", "words"), (b"true,", "words"), (b"false,", "words"),
])
async def test_a_body_of_too_many_values_is_413_and_never_made(
    item: bytes, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the limit of bytes there is room for so many values that to parse them takes long, and much memory."""
    parsed: list[Any] = []
    monkeypatch.setattr(door, "_is_deeper_than", lambda fields, limit: parsed.append(fields) or False)
    copies = (SIZE - 20) // len(item) if item != b'"[",[],[],' else MOST - 5
    request = request_with(b'{"prompt":[' + item * copies)
    tracemalloc.start()
    try:
        with pytest.raises(RefusedAtTheDoor, match=what) as refused:
            await read_fields(request, ["prompt"], [], SIZE)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (refused.value.status, parsed) == (413, [])
    assert peak < 15 * SIZE


@pytest.mark.parametrize("value", [
    "[" * 200_000, "true null" * 20_000, '"[,' * 50_000, "\\[" * 60_000, '\\"[{' * 40_000, ["a[[[["] * (MOST - 5),
    [131_071] * 20_000, [[]] * (MOST - 5),
])
async def test_text_may_have_what_looks_like_many_values(value: Any) -> None:
    """Brackets and quotes of a text are no lists and no strings, however they are escaped; a whole context fits."""
    body = json.dumps({"prompt": value}).encode()
    assert await read_fields(request_with(body), ["prompt"], [], SIZE) == {"prompt": value}


def test_a_long_body_is_searched_for_words_in_pieces() -> None:
    """A search holds the interpreter's lock to its end, which is 20 ms for 4 MiB of one letter; a word in the last
    piece is found."""
    lengths = list[int]()

    class Watched(bytes):
        def count(self, mark: Any, start: Any = 0, end: Any = None, /) -> int:
            lengths.append((len(self) if end is None else end) - start)
            return super().count(mark, start, end)

    door._require_few_lists_and_words(Watched(b'{"prompt":"' + b"l" * 2**22 + b'"}'))
    assert max(lengths) <= 2**20
    with pytest.raises(RefusedAtTheDoor, match="words"):
        door._require_few_lists_and_words(b" " * 2**20 + b"null,null,null", 2)


TREACHEROUS = st.text('"\\[a', max_size=6)


@given(st.recursive(st.none() | st.booleans() | st.integers() | TREACHEROUS,
                    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TREACHEROUS, inner, max_size=3),
                    max_leaves=15))
def test_values_are_counted_as_the_parser_makes_them(value: Any) -> None:
    """Where there are as many as may be, a body passes; one list or word more, or twice the strings: refused."""
    body, made = json.dumps(value).encode(), kinds(value)
    most = max(made["list"], made["word"])
    door._require_few_lists_and_words(body, most)
    door._require_few_strings(body, made["str"])
    if most:
        with pytest.raises(RefusedAtTheDoor, match=f"got {most}, .* at most {most - 1} (lists|words)"):
            door._require_few_lists_and_words(body, most - 1)
    if made["str"]:
        with pytest.raises(RefusedAtTheDoor, match="strings"):
            door._require_few_strings(body, (made["str"] - 1) // 2)


def kinds(value: Any) -> Counter[str]:
    children = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    kind = "word" if value is None or isinstance(value, bool) else type(value).__name__
    return sum(map(kinds, children), Counter({kind: 1}))


@pytest.mark.parametrize("escape", ["\\n", "\\u4e00", '\\"', "\\\\"])
async def test_a_long_body_of_escapes_is_413_and_its_author_learns_of_utf8(escape: str) -> None:
    """The parser takes up to ten times as long for an escape as for a letter; a body of 128k tokens had 1.2 million."""
    limit = body_limit(131_072)
    per_escape = escape.count("\\")
    fits, more = (f'{{"prompt":"{escape * (count // per_escape)}"}}'.encode()
                  for count in (MAX_ESCAPES, MAX_ESCAPES + 2))
    text = await read_fields(request_with(fits), ["prompt"], [], limit)
    assert len(text["prompt"]) == MAX_ESCAPES // per_escape
    with pytest.raises(RefusedAtTheDoor, match=rf"{MAX_ESCAPES + 2}, .* {MAX_ESCAPES} backslashes .*UTF-8") as refused:
        await read_fields(request_with(more), ["prompt"], [], limit)
    assert refused.value.status == 413


async def test_other_threads_run_while_many_numbers_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a pause after each of 7 passes, and after 2,048 numbers or ten of the longest, which take as long."""
    pauses: list[float] = []
    monkeypatch.setattr(door.time, "sleep", pauses.append)
    for number, count in (("1", 17_000), ("9" * 4299, 77)):
        pauses.clear()
        body = f'{{"prompt":[{",".join([number] * count)}]}}'.encode()
        await read_fields(request_with(body), ["prompt"], [], 2**19)
        assert len(pauses) == 7 + 8


def request_with(body: bytes, *headers: tuple[bytes, bytes]) -> Request:
    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    return Request({"type": "http", "headers": list(headers)}, receive)


@pytest.mark.parametrize("length", ["abc", "", "-5", "1_0", "\u0663", "7, 7"])
async def test_a_length_that_is_no_number_is_refused(length: str) -> None:
    """Servers check the header, others that embed the door may not: a 400 that names it, never an unforeseen error."""
    request = request_with(b'{"a":1}', (b"content-length", length.encode("latin-1", "replace")))
    with pytest.raises(RefusedAtTheDoor, match="content-length") as refused:
        await read_fields(request, ["a"], [], 2**20)
    assert refused.value.status == 400


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "utf-8-sig", "latin-1"])
async def test_only_utf8_is_read(encoding: str) -> None:
    """A body in another encoding is refused, although the parser could guess it: a filter before the door could not."""
    with pytest.raises(RefusedAtTheDoor, match="UTF-8"):
        await read_fields(request_with('{"a":"\u00e9"}'.encode(encoding)), ["a"], [], 2**20)


PARTS = st.none() | st.binary(max_size=9) | st.text(max_size=9)


@given(st.tuples(PARTS, PARTS), st.tuples(PARTS, PARTS))
def test_different_pairs_give_different_salts(first: Any, second: Any) -> None:
    """Whatever is derived and named, wherever one part ends and the next begins: equal salts only for equal pairs."""
    one, other = ([part.encode() if isinstance(part, str) else part for part in pair] for pair in (first, second))
    assert (combine_salts(*first) == combine_salts(*second)) == (one == other)


def test_no_pair_imitates_another() -> None:
    """Moved boundaries, absent and empty parts, lengths inside of parts: all salts differ, and fit the engine."""
    parts = [None, b"", b"a", b"ab", b"b", b"\0", b"\1", b"\0\1a", (1).to_bytes(8, "big") + b"a", sha256(b"a").digest()]
    salts = [combine_salts(*pair) for pair in product(parts, parts)]
    assert len(set(salts)) == len(parts) ** 2
    assert salts[0] is None
    assert {len(salt) for salt in salts if salt is not None} == {32}
    assert combine_salts("a", None) == combine_salts(b"a", None) != b"a"


def test_a_doors_own_http_exception_keeps_status_and_headers() -> None:
    """What an operator's hook raises is the response, as it was raised."""
    refusal = refusal_of(HTTPException(401, "who are you?", {"WWW-Authenticate": "Bearer"}))
    assert (refusal.status, refusal.body["error"]["message"]) == (401, "who are you?")
    assert refusal.response().headers["www-authenticate"] == "Bearer"


async def test_a_refused_stream_keeps_the_frameworks_headers() -> None:
    """Headers that were added to the stream, such as a request's id, are on its refusal; the stream's own are not."""
    messages: list[Any] = []

    async def fail() -> AsyncGenerator[str, None]:
        raise HTTPException(401, headers={"WWW-Authenticate": "Bearer"})
        yield ""

    async def send(message: Any) -> None:
        messages.append(message)

    stream = EventStream(fail())
    stream.headers["x-request-id"] = "7"
    await stream({"type": "http"}, asyncio.Event().wait, send)  # type: ignore[arg-type]
    headers = {name.decode(): value.decode() for name, value in messages[0]["headers"]}
    assert (messages[0]["status"], headers["content-type"]) == (401, "application/json")
    assert (headers["x-request-id"], headers["www-authenticate"]) == ("7", "Bearer")
    assert "cache-control" not in headers
