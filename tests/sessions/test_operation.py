"""Operations without I/O: driven by hand here, so that anything can happen while their work runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pagedcore.errors import SessionStateError
from pagedcore.sessions.operation import Operation, run
from pagedcore.sessions.session import Session
from support.toy_sessions import PARAMS, ask, flood, make


def parked_session() -> Session:
    """A session whose KV is in a file and nowhere else."""
    engine = make()
    session = engine.session(PARAMS)
    ask(session, 1, 2, 3)
    session.park("disk")
    flood(engine)
    return session


def test_an_operation_is_sent_what_its_work_returned() -> None:
    """Work runs one after the other on the caller's thread, and what the generator returns is the result."""

    def operation() -> Operation[str]:
        return (yield lambda: "a") + (yield lambda: "b")

    assert run(operation()) == "ab"


def test_what_fails_in_its_work_closes_an_operation() -> None:
    """Whatever is raised leaves the driver, after the operation has tidied up."""
    seen: list[str] = []

    def fail() -> None:
        raise KeyboardInterrupt

    def operation() -> Operation[None]:
        try:
            yield fail
        finally:
            seen.append("tidied up")

    held = operation()
    with pytest.raises(KeyboardInterrupt):
        run(held)
    assert seen == ["tidied up"]


@pytest.mark.parametrize("start", [
    lambda session: session.resume_operation(), lambda session: session.park_operation("host", None),
    lambda session: session.turn_operation([5], None), lambda session: session.export_operation("x", True),
], ids=["resume", "park", "turn", "export"])
def test_a_session_that_was_closed_meanwhile(start: Callable[[Session], Operation[object]]) -> None:
    """An operation whose session is closed while its file is read is refused, and leaves nothing behind."""
    session = parked_session()
    operation = start(session)
    result = next(operation)()
    session.close()
    with pytest.raises(SessionStateError, match="closed"):
        operation.send(result)


@pytest.mark.parametrize("start", [
    lambda session: session.resume_operation(), lambda session: session.park_operation("host", None),
], ids=["resume", "park"])
def test_a_session_that_was_asked_meanwhile(start: Callable[[Session], Operation[object]]) -> None:
    """An operation on an idle session is refused if a turn has begun while its file was read."""
    session = parked_session()
    operation = start(session)
    result = next(operation)()
    session.extend([5])
    with pytest.raises(SessionStateError, match="answering"):
        operation.send(result)


def test_a_file_that_was_replaced_meanwhile_stays() -> None:
    """A session that went on and was parked again while its older file was read keeps the newer one."""
    session = parked_session()
    operation = session.resume_operation()
    result = next(operation)()
    ask(session, 5)
    state = session.park("disk")
    with pytest.raises(StopIteration):
        operation.send(result)
    assert session.parked == state


def test_a_session_that_was_asked_while_its_file_is_written() -> None:
    """A file that is complete after its session was asked on is removed while the turn runs; no session has it."""
    engine = make()
    session = engine.session(PARAMS)
    ask(session, 1, 2, 3)
    operation = session.park_operation("disk", None)
    is_written = next(operation)()
    session.extend([5])
    with pytest.raises(StopIteration) as end:
        operation.send(is_written)
    assert (end.value.value.tier, session.parked, len(engine.sessions.parking._directory)) == ("tokens", None, 0)


def test_an_operation_touches_no_file_itself(tmp_path: Path) -> None:
    """Between its works an export reads and writes nothing: the driver decides where and when."""
    session = parked_session()
    operation = session.export_operation(tmp_path / "chat.json", include_kv=True)
    write = operation.send(next(operation)())
    assert list(tmp_path.iterdir()) == []
    write()
    assert len(list(tmp_path.iterdir())) == 2
