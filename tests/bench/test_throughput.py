"""What the benchmark measures, checked on a toy model where the right figures are known."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from pagedcore.bench import report
from pagedcore.bench.throughput import MODES, Measurement, measure, percentile
from pagedcore.bench.workloads import Workload, make_workload
from pagedcore.errors import InvalidConfig
from support.engine_builders import make_engine

FOUR = Workload("four", ((1,), (2,), (3,), (4,)), (2, 8, 2, 2))


def measured(mode: str, workload: Workload = FOUR, num_slots: int = 2, **more: Any) -> Measurement:
    settings = {"num_kv_blocks": 64, "max_num_seqs": num_slots, "max_num_waiting": 400, **more, **MODES[mode]}
    return measure(make_engine(**settings), workload, mode, lambda count: None, num_slots)


def shifted(workload: Workload) -> Workload:
    """The same lengths in the toy's vocabulary."""
    prompts = tuple(tuple(1 + token % 30 for token in prompt) for prompt in workload.prompts)
    return Workload(workload.name, prompts, workload.num_outputs)


def test_static_batches_hold_their_slots_to_the_end() -> None:
    """Four requests of 2, 8, 2 and 2 tokens in pairs: 8 steps for the first pair, 2 for the second, 14 rows."""
    static = measured("static")
    assert static.spans == ((0, 1), (0, 7), (8, 9), (8, 9))
    assert static.rows() == [0, 1, 0, 1]
    assert static.padding_waste == pytest.approx(1 - 18 / (2 * 9 + 2 * 3))
    assert (static.num_steps, static.num_rows) == (10, 14)
    assert static.slot_utilisation == pytest.approx(14 / 20)
    assert static.rows_per_step == (2, 2, 1, 1, 1, 1, 1, 1, 2, 2)


def test_continuous_batching_fills_a_slot_as_soon_as_it_is_free() -> None:
    """The same four requests take 8 steps, because the short ones run beside the long one."""
    continuous = measured("continuous")
    assert (continuous.num_steps, continuous.num_rows) == (8, 14)
    assert continuous.rows_per_step == (2, 2, 2, 2, 2, 2, 1, 1)
    assert continuous.spans == ((0, 1), (0, 7), (2, 3), (4, 5))
    assert continuous.rows() == [0, 1, 0, 0]
    assert (continuous.saturated_utilisation, continuous.padding_waste) == (1.0, 0.0)


def test_a_row_has_one_request_at_a_time() -> None:
    """A request takes the first row whose last request ended in an earlier step."""
    spans = ((0, 3), (3, 5), (4, 4), (5, 9))
    assert replace(measured("continuous"), spans=spans).rows() == [0, 1, 0, 0]


def test_without_batching_one_row_works() -> None:
    """The same four requests one at a time take 14 steps, in each of which one of the two rows is idle."""
    none = measured("none")
    assert (none.num_steps, none.num_rows, none.slot_utilisation) == (14, 14, 0.5)
    assert none.spans == ((0, 1), (2, 9), (10, 11), (12, 13))
    assert none.rows() == [0, 0, 0, 0]


def test_the_example_of_three_slots() -> None:
    """Requests of 4, 12 and 8 tokens in three slots: static batching uses 24 of 36, two thirds. Continuous batching
    fills the slots with what waits: 34 of 36 with further requests of 4, 4 and 2 tokens."""
    static = measured("static", Workload("three", ((1,), (2,), (3,)), (4, 12, 8)), 3)
    assert (static.num_steps, static.num_rows) == (12, 24)
    assert static.slot_utilisation == pytest.approx(2 / 3)
    six = Workload("six", ((1,), (2,), (3,), (4,), (5,), (6,)), (4, 12, 8, 4, 4, 2))
    continuous = measured("continuous", six, 3)
    assert (continuous.num_steps, continuous.num_rows) == (12, 34)
    assert round(continuous.slot_utilisation, 2) == 0.94


def test_heavy_tails_are_what_continuous_batching_is_for() -> None:
    """With a few long completions among many short ones, 95 of 100 slots are useful as long as requests wait, and it
    takes less than half the steps of static batches; with equal lengths static batches lose nothing."""
    heavy, uniform = (shifted(make_workload(name, 128)) for name in ("heavy-tailed", "uniform"))
    many = {"max_num_batched_tokens": 256, "check_invariants": False, "num_kv_blocks": 512}
    static, continuous = (measured(mode, heavy, 16, **many) for mode in ("static", "continuous"))
    assert continuous.saturated_utilisation >= 0.95
    assert 2 * continuous.num_steps < static.num_steps
    assert static.slot_utilisation < 0.4
    equal = measured("static", uniform, 16, **many)
    assert equal.num_steps == measured("continuous", uniform, 16, **many).num_steps
    assert equal.slot_utilisation == 1.0


def test_counts_leave_the_warm_up_out() -> None:
    """Tokens and requests are those of the workload, not of what ran before it."""
    result = measured("continuous")
    assert (result.num_requests, result.num_prompt_tokens, result.num_output_tokens) == (4, 4, 14)
    assert (result.num_preemptions, result.num_recomputed_tokens) == (0, 0)
    assert 0 < result.ttft_p50_s <= result.ttft_p95_s <= result.wall_s


def test_memory_pressure_shows_as_recomputed_positions() -> None:
    """With too few blocks for two long requests something is preempted and computed again."""
    long = Workload("long", ((1, 2), (3, 4)), (20, 20))
    engine = make_engine(max_num_seqs=2, num_kv_blocks=7)
    result = measure(engine, long, "continuous", lambda count: None)
    assert result.num_preemptions > 0
    assert result.num_recomputed_tokens > 0
    assert result.num_output_tokens == 40


def test_progress_adds_up_to_every_token() -> None:
    """The progress callback receives each generated token once."""
    received: list[int] = []
    measure(make_engine(max_num_seqs=2), FOUR, "continuous", received.append)
    assert sum(received) == FOUR.num_output_tokens


@pytest.mark.parametrize(("share", "expected"), [(0.5, 2.0), (0.95, 4.0), (0.25, 1.0), (1.0, 4.0)])
def test_percentile_is_one_of_the_values(share: float, expected: float) -> None:
    """A percentile is the smallest value that is at least as large as that share of all."""
    assert percentile([4.0, 1.0, 3.0, 2.0], share) == expected


def test_report_as_data_is_json_and_complete() -> None:
    """The JSON form has every measured field and the derived ones."""
    data = json.loads(json.dumps(report.as_data(FOUR, [measured("continuous")], model="toy")))
    assert data["model"] == "toy"
    assert data["measurements"][0]["slot_utilisation"] == pytest.approx(14 / 16)
    assert data["measurements"][0]["mode"] == "continuous"


def test_report_as_table_has_a_column_per_mode() -> None:
    """The table compares the ways of batching side by side."""
    table = report.as_table(FOUR, [measured("static"), measured("continuous")])
    assert [column.header for column in table.columns] == ["", "static", "continuous"]
    assert table.row_count > 8


def test_plot_writes_an_image(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """The picture is an image file."""
    pytest.importorskip("matplotlib")
    report.save_plot(tmp_path / "slots.png", FOUR, [measured("none"), measured("static"), measured("continuous")])
    assert (tmp_path / "slots.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_is_whole(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """One HTML file has picture and table, loads nothing from another host, runs nothing, and escapes names."""
    pytest.importorskip("matplotlib")
    named = Workload("<script>", FOUR.prompts, FOUR.num_outputs)
    report.save_page(tmp_path / "page.html", named, [measured("static"), measured("continuous")])
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<svg" in page
    assert "useful slots" in page
    assert "<script" not in page
    assert not re.findall(r"""(?:src|href)=["'](?!#)|url\((?!#)|@import|<!DOCTYPE svg""", page)


def test_an_unknown_shape_of_random_weights_is_refused() -> None:
    """The error lists the shapes there are."""
    from pagedcore.bench.workloads import random_model

    with pytest.raises(InvalidConfig, match="tiny, qwen05b"):
        random_model("huge", "float32")
