"""Shows measurements of ``throughput.py`` side by side: a table, plain data, a picture, a page with both.

The picture shows who sat in which row when: a bar for each request, from its first step to its last. A row that a
static batch holds for nothing is empty there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from html import escape
from io import StringIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from pagedcore.analysis.load_simulation.report import new_figure

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
    ("useful slots while requests wait", lambda m: f"{m.saturated_utilisation:.0%}"),
    ("padding waste", lambda m: f"{m.padding_waste:.0%}"),
    ("time to first token, mean", lambda m: f"{m.ttft_mean_s * 1e3:.0f} ms"),
    ("time to first token, p50", lambda m: f"{m.ttft_p50_s * 1e3:.0f} ms"),
    ("time to first token, p95", lambda m: f"{m.ttft_p95_s * 1e3:.0f} ms"),
    ("latency, p50", lambda m: f"{m.latency_p50_s * 1e3:.0f} ms"),
    ("latency, p95", lambda m: f"{m.latency_p95_s * 1e3:.0f} ms"),
    ("between tokens, p50", lambda m: f"{m.token_interval_p50_s * 1e3:.1f} ms"),
    ("preemptions", lambda m: f"{m.num_preemptions}"),
    ("positions recomputed", lambda m: f"{m.num_recomputed_tokens}"),
)

_BARS: Final[tuple[tuple[str, Callable[[Measurement], float]], ...]] = (
    ("generated tokens/s", lambda m: m.output_tokens_per_s),
    ("useful slots while requests wait, %", lambda m: 100 * m.saturated_utilisation),
    ("latency p95, ms", lambda m: 1e3 * m.latency_p95_s),
)
_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font-family: system-ui, sans-serif; margin: 2em auto; max-width: 62em; padding: 0 1em; }}
table {{ border-collapse: collapse; }} td, th {{ padding: .2em 1em; border-bottom: 1px solid #ddd; text-align: right; }}
td:first-child {{ text-align: left; }} svg {{ width: 100%; height: auto; }}
</style></head><body><h1>Ways of batching</h1><p>{title}.</p>
<p>Each bar is a request, from the step in which it starts to the step of its last token; what is grey is idle.</p>
{svg}
<table><tr><th></th>{head}</tr>{rows}</table></body></html>
"""


def as_table(workload: Workload, measurements: Sequence[Measurement]) -> Table:
    """Lay measurements out in one column per way of batching."""
    from rich.table import Table

    caption = "Padding waste: what static batches would compute for nothing if they were rectangles; here none is."
    table = Table(title=_title(workload, measurements), caption=caption)
    table.add_column("")
    for measurement in measurements:
        table.add_column(measurement.mode, justify="right")
    for label, cell in _ROWS:
        table.add_row(label, *map(cell, measurements))
    return table


def _title(workload: Workload, measurements: Sequence[Measurement]) -> str:
    return (f"{workload.name}: {len(workload.prompts)} requests, {workload.num_prompt_tokens} prompt tokens, "
            f"{workload.num_output_tokens} to generate, {_num_slots(measurements)} slots")


def _num_slots(measurements: Sequence[Measurement]) -> int:
    return max(one.num_slots for one in measurements)


def as_data(workload: Workload, measurements: Sequence[Measurement], **context: Any) -> dict[str, Any]:
    """Return everything as JSON-ready data, with ``context`` (versions, model, machine) beside it."""
    return {
        **context,
        "workload": workload.name,
        "padding_waste": workload.padding_waste(_num_slots(measurements)),
        "measurements": [asdict(m) for m in measurements],
    }


def save_plot(target: Path | IO[str], workload: Workload, measurements: Sequence[Measurement], kind: str = "") -> None:
    """Draw the timeline of rows of each way of batching, and what came of it as bars, into an image file.

    Args:
        target: a file whose ending says which kind of image, or an open one.
        workload: what was measured.
        measurements: at least one.
        kind: of image, if ``target`` is no path: "svg", "png".

    Raises:
        MissingDependency: matplotlib is not installed.
    """
    figure = new_figure(10, 2.2 * len(measurements) + 2.6)
    grid = figure.add_gridspec(len(measurements) + 1, 3, height_ratios=[1.0] * len(measurements) + [1.1])
    # Why the shortest but one: one request at a time takes so many steps that all else would be too narrow to see.
    longest = sorted(one.num_steps for one in measurements)[-2 if len(measurements) > 2 else -1]
    for number, one in enumerate(measurements):
        _draw_rows(axes := figure.add_subplot(grid[number, :]), one, longest)
    axes.set_xlabel("step", fontsize=8)
    names = [one.mode for one in measurements]
    for column, (label, value) in enumerate(_BARS):
        axes = figure.add_subplot(grid[-1, column])
        axes.bar_label(axes.bar(names, [value(one) for one in measurements], color="tab:blue"), fmt="{:,.0f}")
        axes.set_title(label, fontsize=10)
        axes.margins(y=0.2)
    figure.suptitle(_title(workload, measurements), fontsize=11)
    figure.savefig(target, format=kind or None, dpi=110, metadata={"Date": None} if kind == "svg" else None)


def _draw_rows(axes: Any, one: Measurement, longest: int) -> None:
    for number, (row, (first, last)) in enumerate(zip(one.rows(), one.spans, strict=True)):
        axes.broken_barh([(first, last + 1 - first)], (row + 0.06, 0.88), facecolors=f"C{number % 10}", linewidth=0)
    axes.set(xlim=(0, longest), ylim=(one.num_slots, 0), ylabel="row")
    end = f"; the picture ends at step {longest}" if one.num_steps > longest else ""
    axes.set_title(f"{one.mode}: {one.slot_utilisation:.0%} of slots useful in {one.num_steps} steps{end}", fontsize=10)
    axes.axvspan(0, one.num_steps, facecolor="0.9", zorder=-1)
    axes.set_yticks(range(0, one.num_slots, max(1, one.num_slots // 4)))
    axes.tick_params(labelsize=8)


def save_page(path: Path, workload: Workload, measurements: Sequence[Measurement]) -> None:
    """Write table and picture as one HTML page that loads nothing from elsewhere. Raises as ``save_plot``."""
    drawing = StringIO()
    save_plot(drawing, workload, measurements, "svg")
    # Why cut: what comes before names a document type at another host.
    svg = drawing.getvalue()[drawing.getvalue().index("<svg") :]
    head = "".join(f"<th>{escape(one.mode)}</th>" for one in measurements)
    cells = ((label, "".join(f"<td>{escape(cell(one))}</td>" for one in measurements)) for label, cell in _ROWS)
    rows = "".join(f"<tr><td>{escape(label)}</td>{values}</tr>" for label, values in cells)
    title = escape(_title(workload, measurements))
    path.write_text(_PAGE.format(title=title, svg=svg, head=head, rows=rows), encoding="utf-8")
