"""The static search for operations of a whole warp that part of a warp may reach."""

from __future__ import annotations

import numpy as np
import pytest

from pagedcore_ptxsim import DivergenceFault, UnsupportedPtx, divided_operations
from ptxsim.ptx_texts import kernel, pointers, run

VOTE = "redux.sync.add.u32 %r20, %r20, 0xffffffff;"
LANE = "and.b32 %r2, %r1, 31; setp.lt.u32 %p1, %r2, 16;"
# What CPython 3.12 and later make of `return vote(x if lane < 16 else 0)`: the end of the function, once for each way.
DUPLICATED = f"""
    {LANE}
    @%p1 bra KEEP;
    mov.u32 %r4, 0;
    redux.sync.add.u32 %r3, %r4, 0xffffffff;
    bra.uni JOIN;
KEEP:
    redux.sync.add.u32 %r3, %r2, 0xffffffff;
JOIN:
"""


def found(body: str) -> list[str]:
    """The divided operations of a body whose parameter is an address, as texts."""
    return [str(each) for each in divided_operations(kernel(pointers(1) + body, ["u64"]))]


def behind(predicate: str) -> list[str]:
    """What is found where a vote is skipped by lanes with %p1, which ``predicate`` computes."""
    return found(f"{predicate}\n @%p1 bra SKIP; {VOTE}\nSKIP: bar.warp.sync 0xffffffff;")


def test_a_vote_that_was_compiled_twice_is_found() -> None:
    """Each half of the warp has its own copy of the vote: both are named with the branch, and it faults when run."""
    first, second = divided_operations(kernel(pointers(1) + DUPLICATED, ["u64"]))
    assert {first.operation.operands[1], second.operation.operands[1]} == {"%r4", "%r2"}
    assert first.branch == second.branch
    assert first.branch.text == "@%p1 bra KEEP;"
    assert f"line {first.operation.line}: redux.sync.add.u32" in str(first)
    with pytest.raises(DivergenceFault):
        run(DUPLICATED, np.zeros(32, np.uint32))


@pytest.mark.parametrize("predicate", [
    LANE,
    "setp.eq.u32 %p1, %r1, 0;",
    "mov.u32 %r2, %laneid; setp.eq.u32 %p1, %r2, 0;",
    "mov.u64 %rd5, %clock64; setp.eq.u64 %p1, %rd5, 0;",
    "add.s64 %rd5, %rd1, %rd10; ld.global.u32 %r2, [%rd5]; setp.eq.u32 %p1, %r2, 0;",
    "add.s64 %rd5, %rd1, %rd10; st.global.u32 [%rd5], 0; ld.global.u32 %r2, [%rd5]; setp.eq.u32 %p1, %r2, 0;",
    "ld.u32 %r2, [%rd1]; setp.eq.u32 %p1, %r2, 0;",
    "ld.volatile.global.u32 %r2, [%rd1]; setp.eq.u32 %p1, %r2, 0;",
    "atom.global.add.u32 %r2, [%rd1], 1; setp.eq.u32 %p1, %r2, 0;",
    "shfl.sync.up.b32 %r2|%p1, %r20, 1, 0, 0xffffffff;",
    "elect.sync %r2|%p1, 0xffffffff;",
    "mov.u32 %r2, 7; ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r3}, [%r2]; setp.eq.u32 %p1, %r3, 0;",
    # The bits of a lane, moved, carried or unpacked to where a shift by five leaves them.
    "shl.b32 %r2, %r1, 1; shr.u32 %r2, %r2, 5; setp.eq.u32 %p1, %r2, 0;",
    "add.u32 %r2, %r1, 7; shr.u32 %r2, %r2, 5; setp.eq.u32 %p1, %r2, 0;",
    "sub.s32 %r2, %r1, 3; shr.s32 %r2, %r2, 5; setp.eq.u32 %p1, %r2, 0;",
    "setp.lt.u32 %p1, %r1, 48;",
    "setp.gt.s32 %p1, %r1, 32;",
    "add.s64 %rd5, %rd1, %rd10; ld.global.u32 %r2, [%rd5]; setp.lt.s32 %p1, %r2, 0;",
    "shl.b32 %r2, %r1, 27; shr.s32 %r2, %r2, 5; shr.u32 %r2, %r2, 27; setp.eq.u32 %p1, %r2, 0;",
    "shl.b32 %r2, %r1, 27; cvt.s64.s32 %rd5, %r2; shr.u64 %rd5, %rd5, 40; setp.eq.u64 %p1, %rd5, 0;",
    "add.cc.u32 %r2, %r1, -1; addc.u32 %r2, 0, 0; setp.eq.u32 %p1, %r2, 0;",
    "mov.u32 %r2, 0; mov.b64 %rd5, {%r2, %r1}; shr.u64 %rd5, %rd5, 5; setp.eq.u64 %p1, %rd5, 0;",
    "cvt.rn.f32.u32 %f1, %r1; mov.b32 %r2, %f1; shr.u32 %r2, %r2, 5; setp.eq.u32 %p1, %r2, 0;",
    # A value that was chosen behind a branch by lane.
    f"mov.u32 %r3, 0; {LANE} @%p1 bra CHOSEN; mov.u32 %r3, 1;\nCHOSEN: setp.eq.u32 %p1, %r3, 0;",
    f"mov.u32 %r3, 0; {LANE} @%p1 mov.u32 %r3, 1; setp.eq.u32 %p1, %r3, 0;",
    "setp.eq.u64 %p2, %rd1, 0; mov.u32 %r3, %r1; @%p2 mov.u32 %r3, 0; setp.eq.u32 %p1, %r3, 0;",
])
def test_what_differs_between_lanes_divides(predicate: str) -> None:
    """Thread numbers, own memory, orders of lanes, and what is computed from them keep lanes from a vote."""
    (one,) = behind(predicate)
    assert "redux.sync.add.u32" in one
    assert one.endswith("@%p1 bra SKIP;")


@pytest.mark.parametrize("predicate", [
    "ld.param.u32 %r2, [p0]; setp.eq.u32 %p1, %r2, 0;",
    "mov.u32 %r2, %ctaid.x; setp.eq.u32 %p1, %r2, 0;",
    "shr.u32 %r2, %r1, 5; setp.eq.u32 %p1, %r2, 0;",
    "cvt.u64.u32 %rd5, %r1; shl.b64 %rd5, %rd5, 4; shr.u64 %rd5, %rd5, 9; setp.eq.u64 %p1, %rd5, 0;",
    "and.b32 %r2, %r1, -32; add.u32 %r2, %r2, 7; setp.eq.u32 %p1, %r2, 7;",
    "setp.lt.u32 %p1, %r1, 64;",
    "setp.gt.s32 %p1, %r1, 127;",
    "shr.u32 %r2, %r1, 5; mad.wide.u32 %rd5, %r2, 16, %rd1; ld.global.u32 %r3, [%rd5]; setp.eq.u32 %p1, %r3, 0;",
    "redux.sync.max.u32 %r2, %r1, 0xffffffff; setp.eq.u32 %p1, %r2, 0;",
    f"{LANE} vote.sync.any.pred %p1, %p1, 0xffffffff;",
    # The same register, written again: what it held before and what it holds later do not count.
    "mov.u32 %r3, %r1; mov.u32 %r3, 0; setp.eq.u32 %p1, %r3, 0;",
])
def test_what_is_the_same_for_a_warp_does_not_divide(predicate: str) -> None:
    """Numbers of warps, parameters, votes and loads from one address keep a warp together."""
    assert behind(predicate) == []


def test_a_warp_is_whole_again_where_all_ways_meet() -> None:
    """A vote behind a branch by lane, or behind a loop that lanes leave one by one, is reached by all."""
    assert found(f"{LANE} @%p1 bra JOIN; mov.u32 %r4, 0;\nJOIN: {VOTE}") == []
    assert found(f"AGAIN: sub.u32 %r1, %r1, 1; setp.gt.s32 %p1, %r1, 0; @%p1 bra AGAIN; {VOTE}") == []


@pytest.mark.parametrize("body", [
    f"AGAIN: {VOTE} sub.u32 %r1, %r1, 1; setp.gt.s32 %p1, %r1, 0; @%p1 bra AGAIN;",
    f"{LANE} @%p1 ret; {VOTE}",
    f"{LANE} @%p1 bra END; {VOTE} st.global.u32 [%rd1], %r20;\nEND: ret;",
    f"{LANE} @%p1 {VOTE}",
    f"{LANE} @%p1 bra END; ld.param.u32 %r5, [p0]; setp.eq.u32 %p2, %r5, 0; @%p2 bra END; {VOTE}\nEND:",
    f"{LANE} @%p1 bra END; bar.sync 0;\nEND:",
])
def test_ways_that_lanes_go_alone(body: str) -> None:
    """A loop left lane by lane, an early end, a guard and a uniform branch within a divided one are found."""
    assert len(found(body)) == 1


def test_what_is_not_analysed_is_refused() -> None:
    """Behind a jump by a table anything may lie."""
    with pytest.raises(UnsupportedPtx, match=r"brx.idx %r1, table"):
        found("brx.idx %r1, table;")
