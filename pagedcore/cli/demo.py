"""``pagedcore demo``: questions with known answers go through the demo model, and you watch the batch.

Owns the run and the verdicts; how they look is in ``demo_view.py``. It is also the simplest complete example
of the step loop: add requests, step, read what is new.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from pagedcore.cli.common import BlocksOption, DtypeOption, console, open_engine

if TYPE_CHECKING:
    from pagedcore.demo_model.questions import DemoQuestion
    from pagedcore.engine.engine import Engine
    from pagedcore.outputs import Delta
    from pagedcore.requests.request import Request
    from pagedcore.requests.stats import EngineStats

_MAX_ANSWER_TOKENS = 64
_BLOCK_SIZE = 16
"""Why not the backend's own: answers are short, and with small blocks more of them run side by side."""


@dataclass(slots=True)
class Line:
    """One question on its way to an answer."""

    number: int
    question: DemoQuestion
    request: Request
    text: str = ""
    num_tokens: int = 0
    is_right: bool | None = None
    """``None`` until the answer is complete."""

    @property
    def state(self) -> str:
        """Where the request is, in one word."""
        sequence = self.request.sequences[0]
        if sequence.finish_reason is not None:
            return sequence.finish_reason
        if sequence.status.value == "waiting":
            return "preempted" if sequence.num_preemptions else "waiting"
        return "decode" if self.num_tokens else "prefill"


@dataclass(slots=True)
class Run:
    """All lines of one demo, and its clock."""

    engine: Engine
    lines: list[Line]
    pause_s: float = 0.0
    """Seconds to wait after every step, so that eyes can follow."""
    started_s: float = field(default_factory=time.perf_counter)

    @property
    def num_right(self) -> int:
        """Answers that were checked and found right."""
        return sum(line.is_right is True for line in self.lines)

    @property
    def stats(self) -> EngineStats:
        """The engine's counters now."""
        return self.engine.stats()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first request was handed over."""
        return time.perf_counter() - self.started_s

    @property
    def verdict(self) -> str:
        """The last line of the demo."""
        stats, seconds = self.stats, self.elapsed_s
        return (f"{self.num_right} of {len(self.lines)} answers right, {stats.num_generated_tokens} tokens in "
                f"{stats.num_steps} steps and {seconds:.2f} s, {stats.num_preemptions} preemptions")

    def steps(self) -> Iterator[list[Line]]:
        """Step until everything is answered; yield the lines that each step finished."""
        by_id = {line.request.request_id: line for line in self.lines}
        while self.engine.has_pending_requests():
            advanced = [_advance(by_id[delta.request_id], delta) for delta in self.engine.step()]
            yield [line for line in advanced if line.is_right is not None]
            time.sleep(self.pause_s)


def demo(
    requests: Annotated[int, typer.Option(help="Questions to ask, all at once.", min=1, max=4096)] = 32,
    max_num_seqs: Annotated[int, typer.Option(help="Most sequences computed in one step.", min=1)] = 12,
    blocks: BlocksOption = 16,
    seed: Annotated[int, typer.Option(help="Draws other questions.")] = 0,
    slow: Annotated[float, typer.Option(help="Seconds to wait after every step, to watch it.", min=0)] = 0.0,
    dtype: DtypeOption = "auto",
) -> None:
    """Watch continuous batching answer questions whose answers are known, in a memory too small for all of them."""
    from pagedcore.cli.demo_view import show

    with open_engine("demo", num_kv_blocks=blocks, block_size=_BLOCK_SIZE, max_num_seqs=max_num_seqs,
                     max_num_waiting=requests, dtype=dtype) as engine:
        run = start(engine, requests, seed)
        run.pause_s = slow
        show(run, console())
    if run.num_right < len(run.lines):
        raise typer.Exit(code=1)


def start(engine: Engine, num_requests: int, seed: int) -> Run:
    """Hand all questions to the engine at once."""
    from pagedcore import SamplingParams
    from pagedcore.demo_model.questions import demo_questions

    params = SamplingParams(max_tokens=_MAX_ANSWER_TOKENS)
    return Run(engine, [
        Line(number, question, engine.add_request(question.prompt, params))
        for number, question in enumerate(demo_questions(num_requests, seed), start=1)
    ])


def _advance(line: Line, delta: Delta) -> Line:
    from pagedcore.demo_model.questions import is_correct

    line.text += delta.text
    line.num_tokens += len(delta.token_ids)
    if delta.finish_reason is not None:
        line.is_right = is_correct(line.question, line.text)
    return line
