"""Shows what came of simulations: a table for people, plain data for programs, pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from pagedcore.analysis.load_simulation.results import Latencies, SimulationResult, Summary, Targets
from pagedcore.errors import MissingDependency

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

_MOST_POINTS: Final = 4000
"""Of one curve: more are not seen, and make pictures slow."""


def _mean(which: Callable[[Summary], Latencies]) -> Callable[[Summary], str]:
    return lambda summary: f"{1e3 * which(summary).mean_s:.1f} ms"


def _shares(which: Callable[[Summary], Latencies]) -> Callable[[Summary], str]:
    def cell(summary: Summary) -> str:
        one = which(summary)
        return " / ".join(f"{1e3 * value:.1f}" for value in (one.p50_s, one.p90_s, one.p99_s))
    return cell


_ROWS: Final[tuple[tuple[str, Callable[[Summary], str]], ...]] = (
    ("requests completed", lambda s: f"{s.num_completed} of {s.num_requests}"),
    ("refused", lambda s: ", ".join(f"{count} {reason}" for reason, count in s.refusals.items()) or "none"),
    ("duration", lambda s: f"{s.duration_s:.1f} s"),
    ("requests/s", lambda s: f"{s.requests_per_s:.2f}"),
    ("generated tokens/s", lambda s: f"{s.output_tokens_per_s:.0f}"),
    ("all tokens/s", lambda s: f"{s.total_tokens_per_s:.0f}"),
    ("time to first token, mean", _mean(lambda s: s.ttft)),
    ("  p50 / p90 / p99, ms", _shares(lambda s: s.ttft)),
    ("between tokens, mean", _mean(lambda s: s.token_interval)),
    ("  p50 / p90 / p99, ms", _shares(lambda s: s.token_interval)),
    ("whole request, mean", _mean(lambda s: s.latency)),
    ("  p50 / p90 / p99, ms", _shares(lambda s: s.latency)),
    ("goodput, requests/s", lambda s: f"{s.goodput_per_s:.2f} ({s.goodput_share:.1%})"),
    ("steps", lambda s: f"{s.num_steps}"),
    ("time in steps", lambda s: f"{s.busy_share:.0%}"),
    ("slots in use", lambda s: f"{s.slot_utilisation:.0%}"),
    ("KV pool in use", lambda s: f"{s.kv_utilisation:.0%}"),
    ("blocks held, most", lambda s: f"{s.most_blocks}" + (f", {s.most_windows} window blocks" * bool(s.most_windows))),
    ("prompt tokens from the cache", lambda s: f"{s.cached_share:.0%}"),
    ("preemptions", lambda s: f"{s.num_preemptions}"),
)


def as_table(title: str, summary: Summary) -> Table:
    """Lay out one simulation, a row for each number."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title)
    table.add_column("replicas")
    table.add_column(str(summary.num_replicas), justify="right")
    for label, cell in _ROWS:
        table.add_row(label, cell(summary))
    for name, one in summary.tenants.items():
        table.add_row(f"tenant {escape(name) or '(none)'}", f"{one.num_completed} of {one.num_requests}, "
                      f"{one.computed_tokens_per_s:.0f} tokens/s, first token {1e3 * one.ttft.mean_s:.1f} ms")
    return table


def as_search(summaries: Iterable[Summary]) -> Table:
    """Lay out what was tried to find the number of replicas, a row for each number."""
    from rich.table import Table

    table = Table(title="how many replicas")
    for name in ("replicas", "in time", "refused", "tokens/s", "first token p99", "between tokens p99", "slots"):
        table.add_column(name, justify="right")
    for one in summaries:
        table.add_row(
            str(one.num_replicas), f"{one.goodput_share:.1%}", str(sum(one.refusals.values())),
            f"{one.output_tokens_per_s:.0f}", f"{1e3 * one.ttft.p99_s:.0f} ms",
            f"{1e3 * one.token_interval.p99_s:.1f} ms", f"{one.slot_utilisation:.0%}",
        )
    return table


def as_data(result: SimulationResult, targets: Targets, **context: Any) -> dict[str, Any]:
    """Return everything as JSON-ready data, with ``context`` beside it; equal simulations give equal data."""
    return {**context, "targets": asdict(targets), "summary": asdict(result.summary(targets)),
            "requests": result.requests()}


def new_figure(width: float, height: float) -> Figure:
    """Return an empty picture of so many inches. Raises ``MissingDependency`` if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependency("--plot needs matplotlib. Install pagedcore[plot].") from error
    return Figure(figsize=(width, height), layout="constrained")


def save_plot(path: Path, result: SimulationResult, targets: Targets) -> None:
    """Draw rows and queue over time, and how the two latencies are distributed, into an image file.

    Raises:
        MissingDependency: matplotlib is not installed.
    """
    figure = new_figure(11, 7)
    summary = result.summary(targets)
    (rows, waiting), (ttft, interval) = figure.subplots(2, 2)
    for number, line in enumerate(result.timelines):
        stride = max(1, len(line.end_s) // _MOST_POINTS)
        label = f"replica {number}" if len(result.timelines) <= 8 else None
        rows.step(line.end_s[::stride], line.num_rows[::stride], where="pre", linewidth=0.8, label=label)
        waiting.step(line.end_s[::stride], line.num_waiting[::stride], where="pre", linewidth=0.8, label=label)
    if 1 < len(result.timelines) <= 8:
        rows.legend(fontsize="small")
    rows.set(title=f"rows of a step, of {result.max_num_seqs}", xlabel="seconds", ylim=(0, None))
    waiting.set(title="requests that wait", xlabel="seconds", ylim=(0, None))
    times = [one.ttft_s for one in result.outcomes if one.ttft_s is not None]
    _distribution(ttft, "time to first token", times, targets.ttft_ms)
    means = [one.tpot_s for one in result.outcomes if one.tpot_s is not None and one.num_output > 1]
    _distribution(interval, "mean time between tokens of a request", means, targets.tpot_ms)
    figure.suptitle(f"replicas: {summary.num_replicas}; requests: {summary.num_requests}; "
                    f"{summary.output_tokens_per_s:.0f} tokens/s, {summary.goodput_share:.1%} of requests in time")
    figure.savefig(path)


def _distribution(axes: Any, title: str, seconds: list[float], target_ms: float | None) -> None:
    times_ms = 1e3 * np.sort(seconds)
    axes.step(times_ms, 100 * np.arange(1, len(times_ms) + 1) / max(1, len(times_ms)), where="post")
    if target_ms is not None:
        axes.axvline(target_ms, color="tab:red", linestyle="--", label=f"target {target_ms:g} ms")
        axes.legend(fontsize="small")
    axes.set(title=title, xlabel="ms", ylabel="% of requests", ylim=(0, 101), xlim=(0, None))
    axes.grid(alpha=0.3)
