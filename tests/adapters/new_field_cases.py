"""What has to hold of an option and of a sampling parameter that nobody has named but its dataclass.

``test_new_field.py`` runs these in processes whose source of one dataclass has a field more, without which they fail.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adapters.doors import (
    ASYNC_ENGINE,
    GENERATOR,
    HTTP,
    LANGCHAIN,
    Ask,
    House,
    Question,
    house,
    openai_body_of,
    raise_refusal,
)
from pagedcore.analysis.load_simulation.replica import SimulatedModel
from pagedcore.analysis.load_simulation.simulator import SimulatedEngine, simulate
from pagedcore.analysis.load_simulation.workload import SimulatedRequest, own_segment
from pagedcore.analysis.recorder.state import sequence_of
from pagedcore.config.engine_config import EngineConfig
from pagedcore.errors import InvalidRequest, UnknownParameter
from pagedcore.request_options import RequestOptions
from pagedcore.sampling_params import SamplingParams
from pagedcore.scheduler.scheduler import Scheduler
from pagedcore.scheduler.step_time import StepTimes
from pagedcore.sessions.session_file import params_as_mapping
from pagedcore_bentoml.wire import BatchInput, ChatInput, PromptInput
from support.accepted import note_accepted
from support.engine_builders import make_engine
from support.recordings import lines_of, toy_engine

COLOURED: Any = {"colour": 3}
MOODY: Any = {"mood": 3}


def openai_door(path: str) -> Ask:
    async def ask(opened: House, question: Question) -> list[int]:
        raise_refusal(await opened.openai.call(path, openai_body_of(question, path, is_stream=False)))
        return []

    ask.__name__ = path
    return ask


async def by_endpoint_of_a_subclass(opened: House, question: Question) -> list[int]:
    """The verb for endpoints of BentoML's users."""
    options: Any = question.options
    await type(opened.app.runner)().complete(None, question.prompt, question.sampling, **options)
    return []


async def by_endpoint_in_python(opened: House, question: Question) -> list[int]:
    """An endpoint of BentoML's, called in Python."""
    await type(opened.app.runner)().generate(question.prompt, question.sampling, **question.options)
    return []


async def by_session(opened: House, question: Question) -> list[int]:
    """A session's first turn."""
    options: Any = question.options
    async with opened.engine.session(question.params, **options) as session:
        await session.ask(question.prompt)
    return []


DOORS = (*ASYNC_ENGINE, *GENERATOR, *LANGCHAIN, *HTTP, by_endpoint_of_a_subclass, by_endpoint_in_python, by_session,
         *map(openai_door, ("/v1/chat/completions", "/v1/completions", "/v1/responses")))


@pytest.fixture
def accepted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What an engine accepts."""
    found = list[Any]()
    note_accepted(monkeypatch, found.append)
    return found


async def test_a_new_option_arrives(accepted: list[Any]) -> None:
    """Every door hands it to the engine."""
    async with house() as opened:
        for door in DOORS:
            accepted.clear()
            await door(opened, Question("a", {"max_tokens": 2}, COLOURED))
            assert {one.options.colour for one in accepted} == {3}, door


@pytest.mark.parametrize("spec", [PromptInput, ChatInput, BatchInput])
def test_a_new_option_is_in_the_schema(spec: Any) -> None:
    """A service's description has it as its field says it, and not what only the operator says."""
    properties = spec.model_json_schema()["properties"]
    assert (properties["colour"]["type"], properties["colour"]["default"]) == ("integer", 0)
    assert "shade" not in properties


def test_a_new_option_is_checked() -> None:
    """By the rule of its field, and by the policies that do not look at it."""
    with pytest.raises(InvalidRequest, match="colour"):
        RequestOptions(colour=True)
    with make_engine() as engine:
        with pytest.raises(InvalidRequest, match='scheduling_policy="priority"'):
            engine.add_request([1], shade="dark")
        with pytest.raises(UnknownParameter, match=r"Did you mean colour\?"):
            engine.add_request([1], color=3)
    with make_engine(scheduling_policy="priority") as engine:
        assert engine.add_request([1], shade="dark").options.shade == "dark"


def test_a_new_option_is_recorded(tmp_path: Path) -> None:
    """A recording has it, and a sequence that is made of its snapshot; an older snapshot asks nothing of it."""
    with toy_engine() as engine:
        request = engine.add_request([1, 2], SamplingParams(max_tokens=2), **COLOURED)
        described = request.sequences[0].snapshot()
        engine.step()
        engine.dump_recording(tmp_path / "one.gz")
    assert '"colour": 3' in json.dumps(lines_of(tmp_path / "one.gz"))
    assert sequence_of(described).options == RequestOptions(**COLOURED)
    del described["plain"]["colour"]
    assert sequence_of(described).options == RequestOptions()


def test_a_new_option_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler of a simulated load sees it."""
    seen, add = list[Any](), Scheduler.add_sequences

    def add_and_note(self: Scheduler, *sequences: Any) -> Any:
        seen.extend(one.options for one in sequences)
        return add(self, *sequences)

    monkeypatch.setattr(Scheduler, "add_sequences", add_and_note)
    engine = SimulatedEngine(times=StepTimes(0.004, 0.0005, 0.0005, 1e-5), config=EngineConfig(num_kv_blocks=24),
                             model=SimulatedModel(max_model_len=64, block_size=4))
    simulate(engine, [SimulatedRequest(1.0, (own_segment(0, 10),), 3, RequestOptions(**COLOURED))])
    assert seen == [RequestOptions(**COLOURED)]


async def test_a_new_parameter_arrives(accepted: list[Any]) -> None:
    """Every door hands it to the engine."""
    async with house() as opened:
        for door in DOORS:
            accepted.clear()
            await door(opened, Question("a", {"max_tokens": 2, **MOODY}))
            assert {one.params.mood for one in accepted} == {3}, door


def test_a_new_parameter_is_checked_and_kept() -> None:
    """By the rule of its field; a session's file has it."""
    with pytest.raises(InvalidRequest, match="mood"):
        SamplingParams(mood=10)
    with pytest.raises(UnknownParameter, match=r"Did you mean mood\?"):
        SamplingParams(moood=3)
    with pytest.raises(InvalidRequest, match="0 where beam_width is above 1"):
        SamplingParams(beam_width=2, **MOODY)
    assert SamplingParams.from_mapping(params_as_mapping(SamplingParams(**MOODY))) == SamplingParams(**MOODY)
