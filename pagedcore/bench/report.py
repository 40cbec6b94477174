"""Shows measurements of ``throughput.py`` side by side: a table for people, plain data for programs, a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedcore.simulation.report import new_figure

if TYPE_CHECKING:
    from rich.table import Table

    from pagedcore.bench.throughput import Measurement
    from pagedcore.bench.workloads import Workload

_ROWS: tuple[tuple[str, Callable[[Measurement], str]], ...] = (
    ("wall time", lambda m: f"{m.wall_s:.2f} s"),
    ("generated tokens/s", lambda m: f"{m.output_tokens_per_s:.0f}"),
    ("all tokens/s", lambda m: f"{m.total_tokens_per_s:.0f}"),
    ("steps", lambda m: f"{m.num_steps}"),
    ("useful slots", lambda m: f"{m.slot_utilisation:.0%}"),
    ("time to first token, mean", lambda m: f"{m.ttft_mean_s * 1e3:.0f} ms"),
    ("time to first token, p50", lambda m: f"{m.ttft_p50_s * 1e3:.0f} ms"),
    ("time to first token, p95", lambda m: f"{m.ttft_p95_s * 1e3:.0f} ms"),
    ("between tokens, p50", lambda m: f"{m.token_interval_p50_s * 1e3:.1f} ms"),
    ("preemptions", lambda m: f"{m.num_preemptions}"),
    ("positions recomputed", lambda m: f"{m.num_recomputed_tokens}"),
)


def as_table(workload: Workload, measurements: Sequence[Measurement]) -> Table:
    """Lay measurements out in one column per policy."""
    from rich.table import Table

    num_slots = measurements[0].num_slots
    title = (f"{workload.name}: {len(workload.prompts)} requests, {workload.num_prompt_tokens} prompt tokens, "
             f"{workload.num_output_tokens} to generate, {num_slots} slots")
    waste = workload.padding_waste(num_slots)
    caption = f"Padded to rectangles, static batches would be {waste:.0%} padding; here nothing is padded."
    table = Table(title=title, caption=caption)
    table.add_column("")
    for measurement in measurements:
        table.add_column(measurement.policy, justify="right")
    for label, cell in _ROWS:
        table.add_row(label, *map(cell, measurements))
    return table


def as_data(workload: Workload, measurements: Sequence[Measurement], **context: Any) -> dict[str, Any]:
    """Return everything as JSON-ready data, with ``context`` (versions, model, machine) beside it."""
    return {
        **context,
        "workload": workload.name,
        "padding_waste": workload.padding_waste(measurements[0].num_slots),
        "measurements": [asdict(m) for m in measurements],
    }


def save_plot(path: Path, workload: Workload, measurements: Sequence[Measurement]) -> None:
    """Draw how many slots worked in each step, one curve per policy, into an image file.

    Raises:
        MissingDependency: matplotlib is not installed.
    """
    figure = new_figure(8, 4)
    axes = figure.subplots()
    for m in measurements:
        label = f"{m.policy}: {m.slot_utilisation:.0%} of slots useful, {m.output_tokens_per_s:.0f} tokens/s"
        axes.step(range(m.num_steps), m.rows_per_step, where="post", label=label)
    axes.set(xlabel="step", ylabel=f"slots at work, of {measurements[0].num_slots}", title=f"workload {workload.name}")
    axes.legend()
    figure.savefig(path)
