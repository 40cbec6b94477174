"""What the benchmark measures, checked on a toy model where the right figures are known."""

from __future__ import annotations

import json

import pytest

from pagedcore.bench import report
from pagedcore.bench.throughput import Measurement, measure, percentile
from pagedcore.bench.workloads import Workload
from pagedcore.errors import InvalidConfig
from support.engine_builders import make_engine

FOUR = Workload("four", ((1,), (2,), (3,), (4,)), (2, 8, 2, 2))


def measured(policy: str, **settings: object) -> Measurement:
    settings = {"max_num_seqs": 2, "num_kv_blocks": 64} | settings
    return measure(make_engine(scheduling_policy=policy, **settings), FOUR, policy, lambda count: None)


def test_static_batches_hold_their_slots_to_the_end() -> None:
    """Four requests of 2, 8, 2 and 2 tokens in pairs: 8 steps for the first pair, 2 for the second, 14 rows."""
    static = measured("static")
    assert (static.num_steps, static.num_rows) == (10, 14)
    assert static.slot_utilisation == pytest.approx(14 / 20)
    assert static.rows_per_step == (2, 2, 1, 1, 1, 1, 1, 1, 2, 2)


def test_continuous_batching_fills_a_slot_as_soon_as_it_is_free() -> None:
    """The same four requests take 8 steps, because the short ones run beside the long one."""
    continuous = measured("fcfs")
    assert (continuous.num_steps, continuous.num_rows) == (8, 14)
    assert continuous.rows_per_step == (2, 2, 2, 2, 2, 2, 1, 1)


def test_counts_leave_the_warm_up_out() -> None:
    """Tokens and requests are those of the workload, not of what ran before it."""
    result = measured("fcfs")
    assert (result.num_requests, result.num_prompt_tokens, result.num_output_tokens) == (4, 4, 14)
    assert (result.num_preemptions, result.num_recomputed_tokens) == (0, 0)
    assert 0 < result.ttft_p50_s <= result.ttft_p95_s <= result.wall_s


def test_memory_pressure_shows_as_recomputed_positions() -> None:
    """With too few blocks for two long requests something is preempted and computed again."""
    long = Workload("long", ((1, 2), (3, 4)), (20, 20))
    engine = make_engine(max_num_seqs=2, num_kv_blocks=7)
    result = measure(engine, long, "fcfs", lambda count: None)
    assert result.num_preemptions > 0
    assert result.num_recomputed_tokens > 0
    assert result.num_output_tokens == 40


def test_progress_adds_up_to_every_token() -> None:
    """The progress callback receives each generated token once."""
    received: list[int] = []
    measure(make_engine(max_num_seqs=2), FOUR, "fcfs", received.append)
    assert sum(received) == FOUR.num_output_tokens


@pytest.mark.parametrize(("share", "expected"), [(0.5, 2.0), (0.95, 4.0), (0.25, 1.0), (1.0, 4.0)])
def test_percentile_is_one_of_the_values(share: float, expected: float) -> None:
    """A percentile is the smallest value that is at least as large as that share of all."""
    assert percentile([4.0, 1.0, 3.0, 2.0], share) == expected


def test_report_as_data_is_json_and_complete() -> None:
    """The JSON form has every measured field and the derived ones."""
    data = json.loads(json.dumps(report.as_data(FOUR, [measured("fcfs")], model="toy")))
    assert data["model"] == "toy"
    assert data["measurements"][0]["slot_utilisation"] == pytest.approx(14 / 16)
    assert data["measurements"][0]["policy"] == "fcfs"


def test_report_as_table_has_a_column_per_policy() -> None:
    """The table compares the policies side by side."""
    table = report.as_table(FOUR, [measured("static"), measured("fcfs")])
    assert [column.header for column in table.columns] == ["", "static", "fcfs"]
    assert table.row_count > 8


def test_plot_writes_an_image(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """The picture is an image file."""
    pytest.importorskip("matplotlib")
    report.save_plot(tmp_path / "slots.png", FOUR, [measured("static"), measured("fcfs")])
    assert (tmp_path / "slots.png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_shape_of_random_weights_is_refused() -> None:
    """The error lists the shapes there are."""
    from pagedcore.bench.workloads import random_model

    with pytest.raises(InvalidConfig, match="tiny, qwen05b"):
        random_model("huge", "float32")
