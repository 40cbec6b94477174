"""Divergence, reconvergence, block barriers, deadlock: what threads do when they part."""

from __future__ import annotations

import numpy as np
import pytest

from pagedcore_ptxsim import BarrierFault, PtxFault
from ptxsim.ptx_texts import run

STORE = "add.s64 %rd6, %rd1, %rd10; st.global.u32 [%rd6], %r2;"
TILE = ".shared .align 16 .b8 tile[1024];"


def test_branches_part_and_join() -> None:
    """Both sides of a branch run, for their own threads, and all run what follows."""
    out = np.zeros(64, np.uint32)
    report = run(f"""
    and.b32 %r3, %r1, 1; setp.eq.u32 %p1, %r3, 0;
    @%p1 bra EVEN;
    mul.lo.u32 %r2, %r1, 3;
    bra JOIN;
EVEN:
    add.u32 %r2, %r1, 1000;
JOIN:
    add.u32 %r2, %r2, 1;
    {STORE}
    """, out, block=64)
    lanes = np.arange(64)
    assert (out == np.where(lanes % 2, lanes * 3, lanes + 1000) + 1).all()
    assert report.opcodes["st.global.u32"] == 1


def test_loops_of_different_length_join() -> None:
    """Threads leave a loop one by one and continue together."""
    out = np.zeros(96, np.uint32)
    report = run(f"""
    mov.u32 %r2, 0; mov.u32 %r3, %r1;
LOOP:
    setp.eq.u32 %p1, %r3, 0;
    @%p1 bra DONE;
    add.u32 %r2, %r2, %r3; sub.u32 %r3, %r3, 1;
    bra.uni LOOP;
DONE:
    {STORE}
    """, out, block=96)
    lanes = np.arange(96)
    assert (out == lanes * (lanes + 1) // 2).all()
    assert report.opcodes["st.global.u32"] == 1


def test_nested_divergence() -> None:
    """A branch inside a branch inside a loop gives each thread its own result."""
    out = np.zeros(128, np.uint32)
    run(f"""
    mov.u32 %r2, 0; mov.u32 %r3, 0;
LOOP:
    xor.b32 %r4, %r1, %r3; and.b32 %r5, %r4, 1; setp.eq.u32 %p1, %r5, 0;
    @%p1 bra ELSE;
    and.b32 %r5, %r4, 2; setp.ne.u32 %p2, %r5, 0;
    @!%p2 bra NEXT;
    add.u32 %r2, %r2, 10;
    bra NEXT;
ELSE:
    add.u32 %r2, %r2, 1;
NEXT:
    add.u32 %r3, %r3, 1; setp.lt.u32 %p3, %r3, 7;
    @%p3 bra LOOP;
    {STORE}
    """, out, block=128)
    want = [sum(1 if (t ^ i) % 2 == 0 else 10 if (t ^ i) & 2 else 0 for i in range(7)) for t in range(128)]
    assert out.tolist() == want


def test_early_exits() -> None:
    """Threads that return early do nothing more, and a barrier does not wait for them."""
    out = np.zeros(64, np.uint32)
    report = run(f"""
    setp.ge.u32 %p1, %r1, 40;
    @%p1 ret;
    shl.b32 %r3, %r1, 2; mov.u32 %r4, tile; add.u32 %r4, %r4, %r3; st.shared.u32 [%r4], %r1;
    bar.sync 0;
    xor.b32 %r5, %r3, 4; mov.u32 %r4, tile; add.u32 %r4, %r4, %r5; ld.shared.u32 %r2, [%r4];
    {STORE}
    """, out, block=64, module=TILE)
    assert out.tolist() == [t ^ 1 for t in range(40)] + [0] * 24
    assert report.opcodes["setp.ge.u32"] == 1


def test_blocks_of_no_whole_warps() -> None:
    """A block of 40 threads has a warp of 8, whose absent threads no barrier waits for."""
    out = np.zeros(120, np.uint32)
    run("""
    mov.u32 %r3, %ctaid.x; mad.lo.u32 %r4, %r3, 40, %r1;
    bar.sync 0; bar.warp.sync -1; shfl.sync.idx.b32 %r2, %r4, 0, 31, -1;
    mad.wide.u32 %rd6, %r4, 4, %rd1; st.global.u32 [%rd6], %r2;
    """, out, block=40, grid=3)
    assert out.tolist() == [block * 40 + thread // 32 * 32 for block in range(3) for thread in range(40)]


def test_barriers_count_and_combine() -> None:
    """bar.red gives every thread of a block the count, the conjunction and the disjunction of its predicates."""
    out = np.zeros((3, 128), np.uint32)
    run("""
    mov.u32 %r3, %ctaid.x; mad.lo.u32 %r4, %r3, 64, %r1; setp.lt.u32 %p1, %r4, 70;
    bar.red.popc.u32 %r5, 0, %p1;
    bar.red.and.pred %p2, 0, %p1; bar.red.or.pred %p3, 0, !%p1;
    selp.u32 %r6, 1, 0, %p2; selp.u32 %r7, 1, 0, %p3;
    mad.wide.u32 %rd6, %r4, 4, %rd1;
    st.global.u32 [%rd6], %r5; st.global.u32 [%rd6+512], %r6; st.global.u32 [%rd6+1024], %r7;
    """, out, block=64, grid=2)
    assert (out[:, :64] == [[64], [1], [0]]).all()
    assert (out[:, 64:] == [[6], [0], [1]]).all()


def test_named_barriers() -> None:
    """A named barrier with a count opens when so many threads have arrived, wherever they wait."""
    out = np.zeros(64, np.uint32)
    report = run(f"""
    setp.lt.u32 %p1, %r1, 32;
    @%p1 bra FIRST;
    mov.u32 %r2, 2;
    bar.sync 1, 64;
    bra JOIN;
FIRST:
    mov.u32 %r2, 1;
    bar.arrive 1, 64;
    bar.sync 2, 32;
JOIN:
    {STORE}
    """, out, block=64)
    assert out.tolist() == [1] * 32 + [2] * 32
    assert report.barriers == 2


@pytest.mark.parametrize(("text", "message"), [
    ("setp.lt.u32 %p1, %r1, 32; @%p1 bra L; bar.sync 0; ret; L: bar.sync 0;", "wait at different barriers"),
    ("setp.lt.u32 %p1, %r1, 32; @%p1 bra L; bar.sync 0; ret; L: bar.sync 1;", "deadlock"),
    ("setp.lt.u32 %p1, %r1, 32; @%p1 bar.sync 0; bar.sync 0;", "different barriers"),
    ("bar.sync 1, 96;", "deadlock"),
    ("mov.u32 %r2, 16; bar.sync %r2;", "barriers 0 to 15"),
])
def test_barriers_that_cannot_open(text: str, message: str) -> None:
    """Threads that wait at different barriers, or for ever, are a fault that says how many wait where."""
    with pytest.raises(BarrierFault, match=message) as caught:
        run(text, np.zeros(1), block=64)
    if "0 to 15" not in message:
        assert "threads at line" in str(caught.value)


def test_traps_and_missing_ends() -> None:
    """A trap is a fault that names the thread."""
    with pytest.raises(PtxFault, match=r"(?s)trapped.*thread \(5, 0, 0\) of block \(1, 0, 0\)"):
        run("mov.u32 %r2, %ctaid.x; setp.eq.u32 %p1, %r2, 1; setp.eq.and.u32 %p2, %r1, 5, %p1; @%p2 trap;",
            np.zeros(1), grid=2)
