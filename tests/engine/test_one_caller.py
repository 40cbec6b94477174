"""An engine that several threads call at once says so, names them, and is as it was."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from pagedcore.engine.engine import Engine
from pagedcore.errors import EngineInUse, PromptEmpty
from support.async_helpers import params
from support.doubles import GatedBackend, ToyBackend, toy_answer
from support.engine_builders import assert_all_free, make_engine, run

CALLS: dict[str, Callable[[Engine], Any]] = {
    "step": lambda engine: engine.step(),
    "add_request": lambda engine: engine.add_request([2]),
    "accept": lambda engine: engine.accept(engine.prepare([2])),
    "generate": lambda engine: engine.generate([[2]], show_progress=False),
    "session": lambda engine: engine.session().ask([2]),
    "abort": lambda engine: next(iter(engine.requests)).abort(),
    "close": lambda engine: engine.close(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_beside_a_call_names_both_threads_and_changes_nothing(call: str) -> None:
    """The one that comes second is refused; the first one ends as if nothing had been."""
    backend = GatedBackend()
    engine, outputs = make_engine(backend), list[Any]()
    first = threading.Thread(
        target=lambda: outputs.extend(engine.generate([[1]], params(3), show_progress=False)), name="first"
    )
    first.start()
    assert backend.is_entered.wait(60)
    try:
        with pytest.raises(EngineInUse, match="AsyncEngine") as refused:
            CALLS[call](engine)
        assert (refused.value.owner, refused.value.caller) == ("first", threading.current_thread().name)
    finally:
        backend.gate.set()
        first.join()
    assert list(outputs[0].outputs[0].token_ids) == toy_answer([1], 3)
    assert_all_free(engine)
    assert engine.generate([[2]], params(3), show_progress=False)[0].outputs[0].token_ids == tuple(toy_answer([2], 3))


def test_an_engine_may_be_handed_from_thread_to_thread_between_calls() -> None:
    """Made here, filled there, stepped elsewhere, also after a call that raised."""
    engine = make_engine()
    requests: list[Any] = []

    def be_refused() -> None:
        with pytest.raises(PromptEmpty):
            engine.add_request([])

    for work in (lambda: requests.append(engine.add_request([1], params(3))), be_refused, lambda: run(engine)):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert requests[0].take_new_tokens() == toy_answer([1], 3)


def test_calls_from_within_a_call_are_the_same_threads() -> None:
    """A forward, a hook or a tokenizer may call the engine back."""
    class CallingBack(ToyBackend):
        def forward(self, batch):  # type: ignore[no-untyped-def]
            assert not engine.abort_request("nobody")
            return super().forward(batch)

    engine = make_engine(CallingBack())
    output = engine.generate([[1]], params(3), show_progress=False)[0]
    assert list(output.outputs[0].token_ids) == toy_answer([1], 3)
