"""What the public calls do with a time or an id that makes no sense: an error that says so, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from pagedcore.engine.engine import Engine
from pagedcore.errors import InvalidConfig, InvalidRequest
from pagedcore.requests.request import Request
from pagedcore.serving.async_engine import AsyncEngine
from support.async_helpers import params
from support.doubles import toy_answer
from support.engine_builders import make_engine

NO_TEXT = [None, True, 0, 10**400, float("nan"), 1j, b"id", [], {}, (), object()]
NO_TIME = [True, "1", -1, -0.5, 10**400, -(10**400), 2**63, float("nan"), float("inf"), np.float32(1), 1j, [], {}]
NO_INDEX = [None, True, "0", -1, 1, 10**400, 0.0, float("nan"), [], {}]


class Doors:
    """An engine, an engine on a thread of its own, and a finished request."""

    def __init__(self) -> None:
        self.engine, self.served = make_engine(), AsyncEngine(make_engine())
        self.request: Request = self.engine.add_request([1], params(1))
        self.engine.step()


@pytest.fixture(scope="module")
def doors() -> Iterator[Doors]:
    """The same ones for all calls, as none of them changes anything."""
    doors = Doors()
    yield doors
    doors.engine.close()
    doors.served.close()


def turn(doors: Doors, **limits: Any) -> list[Any]:
    return list(doors.served.generate_sync([1], params(1), **limits))


def park(doors: Doors, value: Any) -> object:
    with doors.engine.session() as session:
        return session.park("host", value)


CALLS: dict[str, tuple[Callable[[Doors, Any], object], list[Any]]] = {
    "abort_request": (lambda doors, value: doors.engine.abort_request(value), NO_TEXT),
    "explain": (lambda doors, value: doors.engine.explain(value), NO_TEXT),
    "AsyncEngine.explain": (lambda doors, value: asyncio.run(doors.served.explain(value)), NO_TEXT),
    "take_new_tokens": (lambda doors, value: doors.request.take_new_tokens(value), NO_INDEX),
    "request_id": (lambda doors, value: doors.engine.add_request([1], request_id=value), [*NO_TEXT[1:], ""]),
    "health": (lambda doors, value: doors.served.health(degraded_after_s=value), [None, *NO_TIME]),
    "stats": (lambda doors, value: doors.served.stats(value), [None, *NO_TIME]),
    "close": (lambda doors, value: doors.served.close(value), NO_TIME),
    "aclose": (lambda doors, value: asyncio.run(doors.served.aclose(value)), NO_TIME),
    "generate_sync": (lambda doors, value: turn(doors, timeout_s=value), [0, *NO_TIME]),
    "deadline_s": (lambda doors, value: doors.engine.add_request([1], deadline_s=value), [0, *NO_TIME]),
    "park": (park, [0, *NO_TIME]),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_time_or_an_id_that_makes_no_sense_is_refused(name: str, doors: Doors) -> None:
    """Each with an InvalidRequest that names the argument, and the engines go on; nothing is closed or accepted."""
    call, values = CALLS[name]
    for value in values:
        with pytest.raises(InvalidRequest, match=r"(_s|request_id|index): got .*, allowed is ") as raised:
            call(doors, value)
        assert len(str(raised.value)) < 300
    assert [token for delta in turn(doors) for token in delta.token_ids] == toy_answer([1], 1)
    assert not doors.engine.has_pending_requests()


@pytest.mark.parametrize("value", NO_TIME)
def test_an_engine_is_not_begun_with_times_that_make_no_sense(value: Any) -> None:
    """The limits of an engine on a thread are settings, and refused as such."""
    for name in ("stream_interval_s", "dead_after_s"):
        with pytest.raises(InvalidConfig, match=f"{name}: got "):
            AsyncEngine.from_pretrained("no-such-model", **{name: value})
    with pytest.raises(InvalidConfig, match="max_wait_ms: got "):
        Engine.from_pretrained("no-such-model", max_wait_ms=value)
