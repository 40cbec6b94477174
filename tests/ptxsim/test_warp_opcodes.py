"""Shuffles, votes, matches and reductions of a warp, lane by lane."""

from __future__ import annotations

import numpy as np
import pytest

from pagedcore_ptxsim import DivergenceFault
from ptxsim.number_tables import integers
from ptxsim.ptx_texts import run

LANES = np.arange(32)


def shuffled(mode: str, lane: int, by: int, clamp: int) -> tuple[int, bool]:
    """The lane that ``lane`` reads, as the PTX manual computes it."""
    by, limit, segment = by & 31, clamp & 31, clamp >> 8 & 31
    last, first = (lane & segment) | (limit & ~segment), lane & segment
    wanted = {"up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": first | (by & ~segment)}[mode]
    inside = wanted >= last if mode == "up" else wanted <= last
    return (wanted if inside else lane), inside


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("clamp", [0x1F, 0, 0x1C1F, 0x181F, 0x1C00, 0x1807])
def test_shuffles(mode: str, clamp: int) -> None:
    """Every mode, distance and segment reads the right lane and tells whether it was inside."""
    values = np.random.default_rng(0).integers(0, 2**32, 64, np.uint32)
    for by in (0, 1, 2, 5, 16, 31):
        out = np.zeros(128, np.uint32)
        run(f"""
        add.s64 %rd5, %rd1, %rd10; add.s64 %rd6, %rd2, %rd10;
        ld.global.u32 %r2, [%rd5];
        shfl.sync.{mode}.b32 %r3|%p1, %r2, {by}, {clamp}, 0xffffffff;
        selp.u32 %r4, 1, 0, %p1;
        st.global.u32 [%rd6], %r3; st.global.u32 [%rd6+256], %r4;
        """, values, out, block=64)
        for thread in range(64):
            source, inside = shuffled(mode, thread % 32, by, clamp)
            assert out[thread] == values[thread // 32 * 32 + source]
            assert out[64 + thread] == inside


def test_shuffles_by_register() -> None:
    """Each lane may name its own source."""
    out = np.zeros(32, np.uint32)
    run("sub.u32 %r2, 31, %r1; shfl.sync.idx.b32 %r3, %r1, %r2, 31, -1; add.s64 %rd6, %rd1, %rd10;"
        "st.global.u32 [%rd6], %r3;", out)
    assert (out == 31 - LANES).all()


def test_votes() -> None:
    """all, any, uni and ballot over a warp, also of a negated predicate."""
    for values in (np.zeros(32), np.ones(32), LANES == 7, LANES > 3):
        flags, out = values.astype(np.uint32), np.zeros((5, 32), np.uint32)
        run("""
        add.s64 %rd5, %rd1, %rd10; ld.global.u32 %r2, [%rd5]; setp.ne.u32 %p1, %r2, 0;
        vote.sync.all.pred %p2, %p1, -1; vote.sync.any.pred %p3, %p1, -1; vote.sync.uni.pred %p4, %p1, -1;
        vote.sync.ballot.b32 %r3, %p1, -1; vote.sync.ballot.b32 %r4, !%p1, 0xffffffff;
        selp.u32 %r5, 1, 0, %p2; selp.u32 %r6, 1, 0, %p3; selp.u32 %r7, 1, 0, %p4;
        add.s64 %rd6, %rd2, %rd10;
        st.global.u32 [%rd6], %r5; st.global.u32 [%rd6+128], %r6; st.global.u32 [%rd6+256], %r7;
        st.global.u32 [%rd6+384], %r3; st.global.u32 [%rd6+512], %r4;
        """, flags, out)
        bits = int((flags.astype(np.uint64) << LANES.astype(np.uint64)).sum())
        want = [flags.all(), flags.any(), flags.all() or not flags.any(), bits, 0xFFFFFFFF - bits]
        assert (out == np.array(want, np.uint32)[:, None]).all()


def test_matches() -> None:
    """match.any gives the lanes with one's own value, match.all the whole mask if all are equal."""
    values, out = (LANES % 5).astype(np.uint32), np.zeros((3, 32), np.uint32)
    body = """
    add.s64 %rd5, %rd1, %rd10; ld.global.u32 %r2, [%rd5];
    match.any.sync.b32 %r3, %r2, -1; match.all.sync.b32 %r4|%p1, %r2, -1; selp.u32 %r5, 1, 0, %p1;
    add.s64 %rd6, %rd2, %rd10;
    st.global.u32 [%rd6], %r3; st.global.u32 [%rd6+128], %r4; st.global.u32 [%rd6+256], %r5;
    """
    run(body, values, out)
    assert out[0].tolist() == [sum(1 << i for i in range(32) if i % 5 == lane % 5) for lane in LANES]
    assert not out[1:].any()
    run(body, np.full(32, 9, np.uint32), out)
    assert (out[:2] == 0xFFFFFFFF).all()
    assert (out[2] == 1).all()


@pytest.mark.parametrize(("name", "kind", "function"), [
    ("add.u32", "u4", np.add), ("add.s32", "i4", np.add), ("min.s32", "i4", np.minimum), ("max.u32", "u4", np.maximum),
    ("min.u32", "u4", np.minimum), ("and.b32", "u4", np.bitwise_and), ("or.b32", "u4", np.bitwise_or),
    ("xor.b32", "u4", np.bitwise_xor)])
def test_reductions(name: str, kind: str, function: np.ufunc) -> None:
    """redux folds the values of a warp."""
    values, out = integers(kind, 64)[-64:], np.zeros(64, kind)
    run(f"add.s64 %rd5, %rd1, %rd10; ld.global.u32 %r2, [%rd5]; redux.sync.{name} %r3, %r2, 0xffffffff;"
        "add.s64 %rd6, %rd2, %rd10; st.global.u32 [%rd6], %r3;", values, out, block=64)
    assert (out.reshape(2, 32) == function.reduce(values.reshape(2, 32), axis=1, dtype=kind)[:, None]).all()


def test_special_registers_of_lanes() -> None:
    """Lane numbers, warp numbers and lane masks."""
    names = ["laneid", "warpid", "lanemask_eq", "lanemask_lt", "lanemask_le", "lanemask_gt", "lanemask_ge"]
    out = np.zeros((len(names), 64), np.uint32)
    run("add.s64 %rd6, %rd1, %rd10;" + "".join(
        f"mov.u32 %r2, %{name}; st.global.u32 [%rd6+{256 * i}], %r2;" for i, name in enumerate(names)), out, block=64)
    for thread in range(64):
        lane = thread % 32
        below = (1 << lane) - 1
        assert out[:, thread].tolist() == [lane, thread // 32, 1 << lane, below, below | 1 << lane,
                                           0xFFFFFFFF ^ (below | 1 << lane), 0xFFFFFFFF ^ below]


def test_elections_and_active_masks() -> None:
    """elect picks the lowest lane; activemask names the threads that run together."""
    out = np.zeros((3, 32), np.uint32)
    run("""
    add.s64 %rd6, %rd1, %rd10;
    elect.sync %r2|%p1, -1; selp.u32 %r3, 1, 0, %p1; st.global.u32 [%rd6], %r2; st.global.u32 [%rd6+128], %r3;
    setp.lt.u32 %p2, %r1, 4;
    @%p2 activemask.b32 %r4;
    @%p2 st.global.u32 [%rd6+256], %r4;
    """, out)
    assert not out[0].any()
    assert out[1].tolist() == [1] + [0] * 31
    assert out[2].tolist() == [15] * 4 + [0] * 28


def test_half_a_warp_may_shuffle_alone() -> None:
    """A member mask names who takes part; the others may be elsewhere or gone."""
    out = np.zeros(32, np.uint32)
    run("""
    setp.ge.u32 %p1, %r1, 16;
    @%p1 ret;
    shfl.sync.bfly.b32 %r2, %r1, 1, 31, 0x0000ffff;
    add.s64 %rd6, %rd1, %rd10; st.global.u32 [%rd6], %r2;
    """, out)
    assert out.tolist() == [lane ^ 1 for lane in range(16)] + [0] * 16


@pytest.mark.parametrize(("text", "message"), [
    ("setp.lt.u32 %p1, %r1, 7; @%p1 bra L; ret; L: shfl.sync.bfly.b32 %r2, %r1, 16, 31, 0x7f;", "does not take part"),
    ("setp.lt.u32 %p1, %r1, 7; @!%p1 bra L; shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1; L: bar.warp.sync -1;",
     "never comes"),
    ("shfl.sync.idx.b32 %r2, %r1, 0, 31, 0xff;", "does not name it"),
    ("setp.eq.u32 %p1, %r1, 0; @%p1 vote.sync.any.pred %p2, %p1, -1;", "never comes"),
    ("setp.eq.u32 %p1, %r1, 0; @%p1 bar.warp.sync -1;", "never comes"),
])
def test_part_of_a_warp_faults(text: str, message: str) -> None:
    """A warp operation without some of the threads that it names is a fault, not a hang and not a wrong value."""
    with pytest.raises(DivergenceFault, match=message) as caught:
        run(text, np.zeros(1, np.uint32))
    assert ".sync" in caught.value.instruction


def test_threads_that_come_by_different_ways_meet() -> None:
    """A warp operation waits for threads on another path as long as they do come."""
    out = np.zeros(32, np.uint32)
    run("""
    mov.u32 %r4, 0; setp.lt.u32 %p1, %r1, 9;
    @%p1 bra LATE;
MEET:
    add.u32 %r4, %r4, 1;
    shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;
    add.s64 %rd6, %rd1, %rd10; add.u32 %r2, %r2, %r4; st.global.u32 [%rd6], %r2;
    ret;
LATE:
    mov.u32 %r4, 100;
    bra MEET;
    """, out)
    assert out.tolist() == [(lane ^ 1) + (101 if lane < 9 else 1) for lane in range(32)]
