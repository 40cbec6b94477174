"""``pagedcore demo``: questions with known answers go through the demo model, and you watch the batch.

A live table on a terminal, one line per completion anywhere else, a page in the browser with ``--web``. It is also the
simplest complete example of the step loop: add requests, step, read what is new.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from pagedcore.cli.common import ConfigOption, DtypeOption, KVDtypeOption, QuantizationOption, console, open_engine
from pagedcore.cli.demo_web import demo_web

if TYPE_CHECKING:
    from pagedcore import Engine, Request
    from pagedcore.demo_model.questions import DemoQuestion

_MAX_TOKENS: Final = 64
_DEFAULTS: Final = {"num_kv_blocks": 16, "block_size": 16, "max_num_seqs": 12}
"""Not the engine's own: completions are short, and with few small blocks many of them run and are preempted."""
_WEB_PAUSE_S: Final = 0.05
"""Seconds after every step on the page, where a question then takes about one."""
_WEB_BLOCKS: Final = 24
"""Enough for most rows to be busy on the page, and too few for all of them."""
_FRAMES_PER_S: Final = 15
_FRAME_LINES: Final = 8
"""Lines of the terminal that are not rows: title, header, rules, counters."""
_COLOURS: Final = {"waiting": "dim", "prefill": "yellow", "decode": "cyan", "preempted": "magenta"}


@dataclass(slots=True)
class Line:
    """One question and its completion so far."""

    number: int
    question: DemoQuestion
    request: Request
    text: str = ""
    num_tokens: int = 0
    is_right: bool | None = None
    """``None`` until the completion has ended."""

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
        """Completions that were checked and found right."""
        return sum(line.is_right is True for line in self.lines)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first request was handed over."""
        return time.perf_counter() - self.started_s

    def steps(self) -> Iterator[list[Line]]:
        """Step until every request has ended; yield the lines that each step finished."""
        from pagedcore.demo_model.questions import is_correct

        by_id = {line.request.request_id: line for line in self.lines}
        while self.engine.has_pending_requests():
            finished = []
            for delta in self.engine.step():
                line = by_id[delta.request_id]
                line.text += delta.text
                line.num_tokens += len(delta.token_ids)
                if delta.finish_reason is not None:
                    line.is_right = is_correct(line.question, line.text)
                    finished.append(line)
            yield finished
            time.sleep(self.pause_s)


def demo(
    requests: Annotated[int, typer.Option(help="Questions to ask, all at once.", min=1, max=4096)] = 32,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Most sequences computed in one step.", min=1, show_default="12")
    ] = None,
    blocks: Annotated[
        int | None, typer.Option(help="KV blocks of the pool; few of them force preemptions.", show_default="16")
    ] = None,
    seed: Annotated[int, typer.Option(help="Draws other questions.")] = 0,
    slow: Annotated[
        float | None, typer.Option(help="Seconds to wait after every step, to watch it.", min=0,
                                   show_default="0, or 0.05 with --web")
    ] = None,
    web: Annotated[bool, typer.Option("--web", help="Watch it on a page in the browser instead.")] = False,
    opens: Annotated[bool, typer.Option("--open/--no-open", help="With --web: open the page.")] = True,
    port: Annotated[int, typer.Option(help="With --web: the port of the page; 0 is any free one.")] = 0,
    dtype: DtypeOption = None,
    kv_cache_dtype: KVDtypeOption = None,
    quantization: QuantizationOption = None,
    config: ConfigOption = None,
) -> None:
    """Watch continuous batching answer questions whose answers are known, in a memory too small for all of them."""
    settings = {"num_kv_blocks": blocks, "max_num_seqs": max_num_seqs, "dtype": dtype,
                "kv_cache_dtype": kv_cache_dtype, "quantization": quantization}
    if web:
        return demo_web(requests, pause_s=_WEB_PAUSE_S if slow is None else slow, port=port, opens=opens,
                        config=config, defaults={**_DEFAULTS, "num_kv_blocks": _WEB_BLOCKS}, **settings)
    with open_engine("demo", config, _DEFAULTS, max_num_waiting=requests, **settings) as engine:
        run = start(engine, requests, seed)
        run.pause_s = slow or 0.0
        show(run, console())
    if run.num_right < len(run.lines):
        raise typer.Exit(code=1)


def start(engine: Engine, num_requests: int, seed: int) -> Run:
    """Hand all questions to the engine at once."""
    from pagedcore import SamplingParams
    from pagedcore.demo_model.questions import demo_questions

    params = SamplingParams(max_tokens=_MAX_TOKENS)
    return Run(engine, [
        Line(number, question, engine.add_request(question.prompt, params))
        for number, question in enumerate(demo_questions(num_requests, seed), start=1)
    ])


def show(run: Run, console: Console) -> None:
    """Run the demo to its end, live on a terminal, as plain lines otherwise."""
    if console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            next_frame_s = 0.0
            for _ in run.steps():
                # Why: drawing costs more than a step of the demo model, so most steps are not drawn.
                if run.elapsed_s >= next_frame_s:
                    live.update(frame(run, console.height - _FRAME_LINES), refresh=True)
                    next_frame_s = run.elapsed_s + 1 / _FRAMES_PER_S
        console.print(_lines_table(run.lines))
    else:
        for line in chain.from_iterable(run.steps()):
            mark = "right" if line.is_right else f"WRONG, expected {line.question.answer!r}"
            console.print(f"{line.number:>4}  {line.num_tokens:>3} tokens  {line.question.prompt!r} -> "
                          f"{line.text.strip()!r}  {mark}", markup=False, soft_wrap=True)
    stats, seconds = run.engine.stats(), run.elapsed_s
    console.print(f"{run.num_right} of {len(run.lines)} answers right, {stats.num_generated_tokens} tokens in "
                  f"{stats.num_steps} steps and {seconds:.2f} s, {stats.num_preemptions} preemptions",
                  style="bold green" if run.num_right == len(run.lines) else "bold red")


def frame(run: Run, num_rows: int) -> RenderableType:
    """Draw one moment: what runs first, then what waits, then the latest completions, in at most ``num_rows`` rows."""
    running = [line for line in run.lines if line.state in ("prefill", "decode")]
    waiting = [line for line in run.lines if line.state in ("waiting", "preempted")]
    done = [line for line in run.lines if line.is_right is not None]
    visible = (running + waiting)[: max(1, num_rows)]
    room = max(0, num_rows - len(visible))
    stats = run.engine.stats()
    bars = Table.grid(padding=(0, 1))
    bars.add_row("blocks in use", ProgressBar(stats.num_blocks, stats.num_blocks_used, width=40),
                 f"{stats.num_blocks_used} of {stats.num_blocks}")
    bars.add_row("answered", ProgressBar(len(run.lines), len(done), width=40), f"{len(done)} of {len(run.lines)}")
    rate = stats.num_generated_tokens / max(run.elapsed_s, 1e-9)
    totals = (f"running {stats.num_running}   waiting {stats.num_waiting}   step {stats.num_steps}   "
              f"{rate:.0f} tokens/s   preemptions {stats.num_preemptions}")
    return Group(_lines_table(done[len(done) - min(room, len(done)):] + visible), bars, Text(totals))


def _lines_table(lines: list[Line]) -> Table:
    table = Table(
        Column("#", justify="right", width=4), Column("state", width=10), Column("tokens", justify="right", width=6),
        Column("question", ratio=2, no_wrap=True), Column("completion so far", ratio=3, no_wrap=True),
        expand=True, pad_edge=False,
    )
    for line in lines:
        if line.is_right is None:
            state = Text(line.state, style=_COLOURS[line.state])
        else:
            state = Text("right", style="green") if line.is_right else Text("wrong", style="bold red")
        texts = (Text(" ".join(text.split())) for text in (line.question.prompt, line.text))
        table.add_row(str(line.number), state, str(line.num_tokens), *texts)
    return table
