"""The planner's laws: every query row meets every key it sees once, and the work is spread."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedcore_kernels.cuda.attention.work_lists import Visibility, WorkLists, make_work_lists
from pagedcore_kernels.cuda.shapes import DECODE_ROWS, PREFILL_ROWS, SEGMENT_SHIFT, segment_shift
from pagedcore_kernels.step_plan import StepPlan

BLOCK = 16
LENGTHS = st.tuples(st.integers(1, 90), st.one_of(st.integers(0, 100), st.integers(0, 9000)))


def step_plan(lengths: list[tuple[int, int]]) -> StepPlan:
    """A checked plan of rows of (tokens, positions before them); every table entry is block 0."""
    tokens = np.array([n for n, _ in lengths], np.int64)
    kv_lens = tokens + np.array([past for _, past in lengths], np.int64)
    batch = SimpleNamespace(
        slot_mapping=np.full(int(tokens.sum()), -1, np.int64),
        query_start=np.concatenate([[0], np.cumsum(tokens)]).astype(np.int64),
        kv_lens=kv_lens, block_tables=np.zeros((len(lengths), -(-int(kv_lens.max()) // BLOCK)), np.int32),
    )
    return StepPlan(batch, 1, BLOCK)


def covered(plan: StepPlan, visibility: Visibility, lists: WorkLists) -> dict[tuple[int, int], list[int]]:
    """The segments that each packed query row of each batch row is computed over."""
    found: dict[tuple[int, int], list[int]] = {}
    packed = plan.query_lens * visibility.group
    for row, first in lists.prefill.tolist():
        for r in range(first, min(first + PREFILL_ROWS, int(packed[row]))):
            found.setdefault((row, r), []).append(-1)
    for row, first, low, high, *_ in lists.decode.tolist():
        for r in range(first, min(first + DECODE_ROWS, int(packed[row]))):
            found.setdefault((row, r), []).extend(range(low, high))
    return found


@settings(max_examples=150)
@given(
    lengths=st.lists(LENGTHS, min_size=1, max_size=12), group=st.integers(1, 20), window=st.sampled_from([0, 1, 700]),
    chunk=st.sampled_from([0, 600]), num_ctas=st.sampled_from([1, 8, 264]), kv_heads=st.sampled_from([1, 8]),
)
def test_every_row_meets_every_key_once(
    lengths: list[tuple[int, int]], group: int, window: int, chunk: int, num_ctas: int, kv_heads: int
) -> None:
    """Each packed row is in one prefill item, or in decode items over all segments it sees, none of them twice."""
    plan, visibility = step_plan(lengths), Visibility(group, window, chunk)
    found = covered(plan, visibility, make_work_lists(plan, visibility, kv_heads, num_ctas))
    assert set(found) == {(row, r) for row, (n, _) in enumerate(lengths) for r in range(n * group)}
    for (row, r), segments in found.items():
        if segments != [-1]:
            position = lengths[row][1] + r // group
            first = int(visibility.first_visible(np.array([position]))[0])
            needed = set(range(first >> segment_shift(kv_heads), (position >> segment_shift(kv_heads)) + 1))
            assert needed <= set(segments)
            assert len(segments) == len(set(segments))


@settings(max_examples=100)
@given(lengths=st.lists(LENGTHS, min_size=1, max_size=12), group=st.integers(1, 8), num_ctas=st.sampled_from([8, 264]))
def test_partial_results_do_not_meet(lengths: list[tuple[int, int]], group: int, num_ctas: int) -> None:
    """Every partial result has a slot of its own, in the order of the segments, and every slot is used."""
    plan = step_plan(lengths)
    lists = make_work_lists(plan, Visibility(group), 1, num_ctas)
    sets: dict[int, list[list[int]]] = {}
    for item in lists.decode.tolist():
        if item[4] >= 0:
            sets.setdefault(item[5], []).append(item)
    used: list[int] = []
    for first_slot, items in sets.items():
        items.sort(key=lambda item: item[2])
        assert items[0][4] == first_slot
        assert {(item[6], item[7]) for item in items} == {(items[0][6], len(items))}
        slots = [first_slot]
        for item in items[1:]:
            slots += range(item[4], item[4] + item[3] - item[2])
        assert slots == list(range(first_slot, first_slot + items[0][6]))
        used += slots
    assert sorted(used) == list(range(lists.num_partials))


@settings(max_examples=100)
@given(lengths=st.lists(st.tuples(st.just(1), st.integers(0, 60000)), min_size=1, max_size=40))
def test_decode_work_is_spread(lengths: list[tuple[int, int]]) -> None:
    """No decode item is longer than an even share of all segments, rounded up; the longest come first."""
    lists = make_work_lists(step_plan(lengths), Visibility(4), 8, 264)
    sizes = lists.decode[:, 3] - lists.decode[:, 2]
    share = -(-int(sizes.sum()) // (264 // 8))
    assert sizes.min() >= 1
    assert sizes.max() <= share
    assert (np.diff(sizes) <= 0).all()


@pytest.mark.parametrize(("kv_heads", "items"), [(8, 16), (4, 32), (1, 32)])
def test_layers_of_few_heads_have_shorter_segments(kv_heads: int, items: int) -> None:
    """One context of 8,192 tokens becomes twice as many items where fewer than 8 KV heads share the GPU with it."""
    assert len(make_work_lists(step_plan([(1, 8191)]), Visibility(4), kv_heads, 264).decode) == items


def test_short_contexts_are_not_split() -> None:
    """A context of one segment is one item that writes its result at once, however empty the GPU is."""
    lists = make_work_lists(step_plan([(1, (1 << SEGMENT_SHIFT) - 1), (1, 3)]), Visibility(4), 8, 264)
    assert lists.decode[:, 4].tolist() == [-1, -1]
    assert lists.num_partials == 0


@pytest.mark.parametrize("tokens", [1, 4, 5])
def test_few_rows_decode_and_many_prefill(tokens: int) -> None:
    """Up to 16 packed rows go to the decode kernel; more go to prefill unless the context is long."""
    lists = make_work_lists(step_plan([(tokens, 100)]), Visibility(4), 1, 264)
    assert (len(lists.decode), len(lists.prefill)) == ((1, 0) if tokens <= 4 else (0, 1))
    assert not len(make_work_lists(step_plan([(tokens, 5000)]), Visibility(4), 1, 264).prefill)


def test_an_empty_batch_has_no_work() -> None:
    """Padding alone makes empty lists."""
    batch = SimpleNamespace(slot_mapping=np.full(2, -1, np.int64), query_start=np.zeros(1, np.int64),
                            kv_lens=np.zeros(0, np.int64), block_tables=np.zeros((0, 3), np.int32))
    lists = make_work_lists(StepPlan(batch, 1, BLOCK), Visibility(1), 1, 264)
    assert (len(lists.decode), len(lists.prefill), lists.num_partials) == (0, 0, 0)
