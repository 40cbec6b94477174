"""A whole engine on the compiled kernels: the PTX interpreter is the GPU, everything above it is what ships."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.cuda import simulated_driver
from pagedcore.demo_model.questions import demo_questions, is_correct
from pagedcore.engine.engine import Engine
from pagedcore.sampling_params import SamplingParams
from pagedcore_kernels.cuda.build.toolchain import missing_compiler_parts
from support.device_stand_in import Repeats, StandInBackends, use_stand_in
from support.engine_builders import run

pytestmark = pytest.mark.skipif(bool(missing_compiler_parts()), reason="needs pagedcore[cuda] to compile kernels")

PARAMS = SamplingParams(max_tokens=32)


def launched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the launches of each family from now on."""
    families: Counter[str] = Counter()
    inner = simulated_driver.SimulatedDriver.launch

    def counted(self, name, num_ctas, arguments):  # type: ignore[no-untyped-def]
        families[name.partition("-")[0]] += 1
        inner(self, name, num_ctas, arguments)

    monkeypatch.setattr(simulated_driver.SimulatedDriver, "launch", counted)
    return families


@pytest.mark.parametrize(("count", "preemption"), [
    (1, "auto"), pytest.param(2, "auto", marks=pytest.mark.kernels), pytest.param(6, "swap", marks=pytest.mark.kernels),
    pytest.param(6, "recompute", marks=pytest.mark.kernels),
])
def test_the_demo_model_answers_on_the_compiled_kernels(
    count: int, preemption: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks, decode rows and preempted requests in one batch: every answer is right, on every kernel."""
    use_stand_in(monkeypatch)
    families = launched(monkeypatch)
    questions = demo_questions(count, seed=5)
    with Engine.from_pretrained(
        "demo", device="cuda", attention_backend="simulated", plugins=[StandInBackends()], max_num_batched_tokens=24,
        max_num_seqs=4, block_size=4, num_kv_blocks=14 if count > 2 else 40, host_kv_memory="1MiB",
        preemption=preemption,
    ) as engine:
        requests = [engine.add_request(question.prompt, PARAMS) for question in questions]
        run(engine)
        answers = [request.output().outputs[0].text for request in requests]
        assert [(q.prompt, a) for q, a in zip(questions, answers, strict=True) if not is_correct(q, a)] == []
        assert count <= 2 or engine.stats().num_preemptions > 0
    assert set(families) >= {"write", "decode", "prefill"}


class Watched(Repeats):
    """Repeats functions, and compares what they launch with what they launched when they were recorded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.launches: list[tuple[Any, ...]] = []
        inner = simulated_driver.SimulatedDriver.launch

        def noted(driver, name, num_ctas, arguments):  # type: ignore[no-untyped-def]
            is_number = [isinstance(one, torch.Tensor) and one.dtype == torch.int32 for one in arguments]
            told = [one.data_ptr() if is_known else one if not isinstance(one, torch.Tensor) else None
                    for one, is_known in zip(arguments, is_number, strict=True)]
            self.launches.append((name, num_ctas, *told))
            inner(driver, name, num_ctas, arguments)

        monkeypatch.setattr(simulated_driver.SimulatedDriver, "launch", noted)

    def record(self, compute: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        self.launches.clear()
        repeat, result = super().record(compute)
        expected = self.launches.copy()

        def compared() -> None:
            self.launches.clear()
            repeat()
            assert self.launches == expected

        return compared, result


def test_recorded_decode_steps_launch_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """With steps recorded by size, every launch of a later step has the grid and the addresses that were recorded, and
    all answers are right; contexts that are split among CTAs and rows that end in between are among them."""
    graphs = Watched(monkeypatch)
    use_stand_in(monkeypatch, graphs)
    questions = demo_questions(3, seed=5)
    with Engine.from_pretrained(
        "demo", device="cuda", attention_backend="simulated", plugins=[StandInBackends()], max_num_batched_tokens=24,
        max_num_seqs=4, block_size=4, num_kv_blocks=40,
    ) as engine:
        requests = [engine.add_request(question.prompt, PARAMS) for question in questions]
        run(engine)
        answers = [request.output().outputs[0].text for request in requests]
    assert [(q.prompt, a) for q, a in zip(questions, answers, strict=True) if not is_correct(q, a)] == []
    assert graphs.num_repeated > 3 * graphs.num_recorded > 0
