"""How the demo looks: a live table on a terminal, one line per answer anywhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from pagedcore.cli.demo import Line, Run

_FRAMES_PER_S: Final = 15
_FRAME_LINES: Final = 8
"""Lines of the terminal that are not rows: title, header, rules, counters."""
_COLOURS: Final = {"waiting": "dim", "prefill": "yellow", "decode": "cyan", "preempted": "magenta"}


def show(run: Run, console: Console) -> None:
    """Run the demo to its end, live on a terminal, as plain lines otherwise."""
    if console.is_terminal:
        _show_live(run, console)
    else:
        _show_plain(run, console)
    console.print(run.verdict, style="bold green" if run.num_right == len(run.lines) else "bold red")


def _show_live(run: Run, console: Console) -> None:
    with Live(console=console, auto_refresh=False, transient=True) as live:
        next_frame_s = 0.0
        for _ in run.steps():
            # Why: drawing costs more than a step of the demo model, so most steps are not drawn.
            if run.elapsed_s >= next_frame_s:
                live.update(frame(run, console.height - _FRAME_LINES), refresh=True)
                next_frame_s = run.elapsed_s + 1 / _FRAMES_PER_S
    console.print(_lines_table(run.lines))


def _show_plain(run: Run, console: Console) -> None:
    for finished in run.steps():
        for line in finished:
            mark = "right" if line.is_right else f"WRONG, expected {line.question.answer!r}"
            console.print(f"{line.number:>4}  {line.num_tokens:>3} tokens  {line.question.prompt!r} -> "
                          f"{line.text.strip()!r}  {mark}", markup=False, soft_wrap=True)


def frame(run: Run, num_rows: int) -> RenderableType:
    """Draw one moment: what runs first, then what waits, then the latest answers, in at most ``num_rows`` rows."""
    running = [line for line in run.lines if line.state in ("prefill", "decode")]
    waiting = [line for line in run.lines if line.state in ("waiting", "preempted")]
    done = [line for line in run.lines if line.is_right is not None]
    visible = (running + waiting)[: max(1, num_rows)]
    room = max(0, num_rows - len(visible))
    return Group(_lines_table(done[len(done) - min(room, len(done)):] + visible), _counters(run, len(done)))


def _lines_table(lines: list[Line]) -> Table:
    table = Table(expand=True, pad_edge=False)
    table.add_column("#", justify="right", width=4)
    table.add_column("state", width=10)
    table.add_column("tokens", justify="right", width=6)
    table.add_column("question", ratio=2, no_wrap=True)
    table.add_column("answer so far", ratio=3, no_wrap=True)
    for line in lines:
        table.add_row(str(line.number), _state(line), str(line.num_tokens),
        Text(_one_line(line.question.prompt)),
                      Text(_one_line(line.text)))
    return table


def _state(line: Line) -> Text:
    if line.is_right is None:
        return Text(line.state, style=_COLOURS[line.state])
    return Text("right", style="green") if line.is_right else Text("wrong", style="bold red")


def _counters(run: Run, num_done: int) -> RenderableType:
    stats = run.stats
    table = Table.grid(padding=(0, 1))
    table.add_row("blocks in use", ProgressBar(stats.num_blocks, stats.num_blocks_used, width=40),
                  f"{stats.num_blocks_used} of {stats.num_blocks}")
    table.add_row("answered", ProgressBar(len(run.lines), num_done, width=40), f"{num_done} of {len(run.lines)}")
    rate = stats.num_generated_tokens / max(run.elapsed_s, 1e-9)
    totals = (f"running {stats.num_running}   waiting {stats.num_waiting}   step {stats.num_steps}   "
              f"{rate:.0f} tokens/s   preemptions {stats.num_preemptions}")
    return Group(table, Text(totals))


def _one_line(text: str) -> str:
    return " ".join(text.split())
