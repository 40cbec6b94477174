"""Where ``Engine.generate`` shows how far it is, and what it accepts as many prompts."""

from __future__ import annotations

import sys
import types
from collections.abc import AsyncIterator
from typing import Any

import pytest
import tqdm.auto

from pagedcore.engine.engine import Engine
from pagedcore.errors import InvalidRequest
from pagedcore.sampling_params import SamplingParams
from support.doubles import toy_answer
from support.engine_builders import make_engine

PROMPTS = [[1], [2], [3]]
PARAMS = SamplingParams(max_tokens=2, ignore_eos=True)


@pytest.fixture
def engine() -> Engine:
    """An engine over the toy model."""
    return make_engine()


def test_a_notebook_has_a_bar(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a kernel, whose output is no terminal, there is a bar; ``show_progress=False`` hides it."""
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    engine.generate(PROMPTS, PARAMS, show_progress=False)
    assert capsys.readouterr().err == ""
    engine.generate(PROMPTS, PARAMS)
    assert "3/3" in capsys.readouterr().err


def test_the_bar_is_what_tqdm_chooses_for_the_place(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook with widgets gets tqdm's widget, which only ``tqdm.auto`` knows."""
    asked: list[Any] = []

    class Bar(tqdm.tqdm):
        def __init__(self, *given: Any, **settings: Any) -> None:
            asked.append(settings)
            super().__init__(*given, **settings)

    monkeypatch.setattr(tqdm.auto, "tqdm", Bar)
    engine.generate(PROMPTS, PARAMS)
    assert [(one["total"], one["disable"]) for one in asked] == [(3, None)]


def test_what_is_no_terminal_has_no_bar(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    """A log file gets no bar unless it is asked for."""
    engine.generate(PROMPTS, PARAMS)
    assert capsys.readouterr().err == ""
    engine.generate(PROMPTS, PARAMS, show_progress=True)
    assert "3/3" in capsys.readouterr().err


@pytest.mark.parametrize("make", [iter, tuple, lambda given: (one for one in given), lambda given: dict.fromkeys(
    map(tuple, given)).keys()])
def test_prompts_and_parameters_may_come_from_any_iterable(engine: Engine, make: Any) -> None:
    """Generators are read once, and outputs are in the order of what they gave."""
    each = iter([PARAMS] * 3)
    for params in (PARAMS, each):
        outputs = engine.generate(make(PROMPTS), params)
        assert [list(output.outputs[0].token_ids) for output in outputs] == [toy_answer(one, 2) for one in PROMPTS]
    with pytest.raises(InvalidRequest, match=r"one per prompt \(3\)"):
        engine.generate(make(PROMPTS), (PARAMS for _ in range(2)))


async def prompts_to_come() -> AsyncIterator[list[int]]:
    """Not what a blocking call can read."""
    yield [1]


def test_what_is_no_iterable_of_prompts_is_refused(engine: Engine) -> None:
    """One text, a mapping and an asynchronous generator are refused, and an error of a generator is the caller's."""
    for given in ("text", b"text", {1: 2}, prompts_to_come(), 5, None):
        with pytest.raises(InvalidRequest, match=r"^prompts: got"):
            engine.generate(given, PARAMS)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        engine.generate(([1 // zero] for zero in (1, 0)), PARAMS)
    assert not engine.has_pending_requests()
