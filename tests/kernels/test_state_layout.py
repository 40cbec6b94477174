"""Where states lie: every element its own bytes, every state one contiguous run; which ones a step reads and writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.state_cases import StateRows
from pagedcore.errors import InternalError, InvalidConfig
from pagedcore_kernels.layout import ALIGNMENT
from pagedcore_kernels.state_layout import StateLayout, StatePart
from pagedcore_kernels.state_plan import StatePlan

PARTS = st.builds(
    StatePart, st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)  # fmt: skip
LAYOUTS = st.builds(
    StateLayout, st.lists(st.lists(PARTS, max_size=3).map(tuple), min_size=1, max_size=4).filter(any).map(tuple)
)


@settings(max_examples=50)
@given(LAYOUTS)
def test_parts_are_disjoint_ordered_and_inside_the_state(layout: StateLayout) -> None:
    """Parts of all layers follow each other on cache lines without overlap and end inside the state."""
    end = 0
    for layer, parts in enumerate(layout.layers):
        for number, part in enumerate(parts):
            offset = layout.offset(layer, number)
            assert offset % ALIGNMENT == 0
            assert 0 <= offset - end < ALIGNMENT
            end = offset + part.num_bytes
    assert 0 <= layout.state_bytes - end < ALIGNMENT


@settings(max_examples=50)
@given(LAYOUTS)
def test_views_reach_every_element_once(layout: StateLayout) -> None:
    """Counting up the bytes of the views of all parts marks as many different bytes as they have."""
    pool = layout.allocate(3).zero_()
    for layer, parts in enumerate(layout.layers):
        for number, part in enumerate(parts):
            view = layout.view(pool, layer, number)
            assert view.shape == (3, *part.shape)
            assert view.dtype == part.dtype
            view.view(torch.uint8).add_(1)
    num_bytes = 3 * sum(part.num_bytes for parts in layout.layers for part in parts)
    assert int((pool == 1).sum()) == num_bytes
    assert int((pool == 0).sum()) == pool.numel() - num_bytes


@pytest.mark.parametrize("num_states", [1, 7])
def test_states_start_on_cache_lines(num_states: int) -> None:
    """Each row of a pool is aligned, and the pool is contiguous."""
    pool = StateLayout(((StatePart((3, 5), torch.bfloat16),),)).allocate(num_states)
    assert pool.shape == (num_states, 64)
    assert pool.data_ptr() % ALIGNMENT == 0
    assert pool.is_contiguous()


def test_a_state_of_a_gated_delta_net_has_the_bytes_of_its_matrices() -> None:
    """A layer of 32 heads of 128 x 128 takes 2 MiB and its convolution of 4 taps three rows of inputs."""
    parts = StatePart((3, 8192), torch.bfloat16), StatePart((32, 128, 128), torch.float32)
    assert StateLayout((parts,) * 24).state_bytes == 24 * (2**21 + 3 * 8192 * 2)


@pytest.mark.parametrize(("make", "name"), [
    (lambda: StatePart((), torch.float32), "shape"),
    (lambda: StatePart((4, 0), torch.float32), "shape"),
    (lambda: StatePart((4,), torch.int8), "dtype"),
    (lambda: StateLayout(()), "layers"),
    (lambda: StateLayout(((), ())), "layers"),
    (lambda: StateLayout(((StatePart((4,), torch.float32),),)).allocate(0), "num_states"),
])  # fmt: skip
def test_impossible_layouts_are_refused(make: Any, name: str) -> None:
    """A size that is no positive number is refused by name."""
    with pytest.raises(InvalidConfig, match=name):
        make()


def test_rows_may_share_what_they_read_and_leave_nothing() -> None:
    """Forks begin from one state, the first rows of sequences from none, and a row may write nowhere."""
    plan = StatePlan(StateRows([2, 0, 1, 4], [3, -1, 3, -1], [4, -1, -1, 0], padding=2), 5)
    assert (plan.num_rows, plan.num_tokens, plan.num_computed) == (4, 9, 7)
    assert plan.query_lens.tolist() == [2, 0, 1, 4]


@pytest.mark.parametrize(("rows", "name"), [
    (StateRows([1, 1], [0, 5], [1, 2]), "state_reads"),
    (StateRows([1, 1], [0, -2], [1, 2]), "state_reads"),
    (StateRows([1, 1], [0, 0], [1, 5]), "state_writes"),
    (StateRows([1, 1], [0, -1], [1, 1]), "state_writes.*twice"),
    (StateRows([1, 1], [0, -1], [1, 0]), "state_writes.*state_reads"),
    (StateRows([1, 1], [0, -1], [0, 1]), "state_writes.*state_reads"),
    (StateRows([1, 0], [0, 0], [1, 2]), "without tokens"),
    (StateRows([1, 1], [0], [1, 2]), "R"),
    (StateRows([1, 1], [0, 0], [1]), "R"),
    (StateRows([1, -1], [0, 0], [1, 2]), "query_start"),
    (StateRows([3, 2], [0, 0], [1, 2], padding=-1), "query_start"),
])  # fmt: skip
def test_steps_that_break_the_laws_are_refused(rows: StateRows, name: str) -> None:
    """A state out of range, or one that is written twice or while it is read, reaches no kernel."""
    with pytest.raises(InternalError, match=name):
        StatePlan(rows, 5)


def test_a_step_of_a_model_without_states_is_refused() -> None:
    """Who asks for states is told that the step names none."""
    rows = StateRows([1], [0], [1])
    rows.state_reads = None
    with pytest.raises(InternalError, match="no states"):
        StatePlan(rows, 5)
