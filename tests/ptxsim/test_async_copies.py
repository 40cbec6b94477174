"""cp.async: data arrives at the wait and not before, and every way of using it early is found."""

from __future__ import annotations

import numpy as np
import pytest

from pagedcore_ptxsim import AsyncCopyFault, MemoryFault, PtxFault, RaceFault
from ptxsim.ptx_texts import run

TILE = ".shared .align 16 .b8 tile[2048];"
HEAD = """
    mad.wide.u32 %rd12, %r1, 16, %rd1; mad.wide.u32 %rd13, %r1, 16, %rd2;
    shl.b32 %r2, %r1, 4; mov.u32 %r3, tile; add.u32 %r3, %r3, %r2;
"""
TAIL = "ld.shared.v4.u32 {%r4,%r5,%r6,%r7}, [%r3]; st.global.v4.u32 [%rd13], {%r4,%r5,%r6,%r7};"
COPY = "cp.async.cg.shared.global.L2::128B [%r3], [%rd12], 16;"
COMMIT = "cp.async.commit_group;"


def source() -> np.ndarray:
    """16 bytes for each of 64 threads."""
    return np.random.default_rng(0).integers(0, 2**32, (64, 4), np.uint32)


@pytest.mark.parametrize("wait", ["cp.async.commit_group; cp.async.wait_group 0;", "cp.async.wait_all;",
                                  "cp.async.commit_group; cp.async.wait_all;"])
def test_copies_arrive_at_the_wait(wait: str) -> None:
    """A thread reads its own copies after its wait, committed or not with wait_all."""
    data, out = source(), np.zeros((64, 4), np.uint32)
    run(HEAD + COPY + wait + TAIL, data, out, block=64, module=TILE)
    assert (out == data).all()


@pytest.mark.parametrize("size", [4, 8, 16])
def test_short_sources_are_filled_with_zeros(size: int) -> None:
    """A source size below the copy size reads only so many bytes, none for 0, and zeros the rest."""
    data, out = source(), np.zeros((64, 4), np.uint32)
    level = "cg" if size == 16 else "ca"
    text = HEAD + f"""
    and.b32 %r8, %r1, 3; mul.lo.u32 %r8, %r8, {size // 4}; setp.lt.u32 %p1, %r1, 8; selp.u32 %r8, %r8, 0, %p1;
    cp.async.{level}.shared.global [%r3], [%rd12], {size}, %r8; cp.async.wait_all;
    """ + "".join(f"ld.shared.u32 %r4, [%r3+{4 * i}]; st.global.u32 [%rd13+{4 * i}], %r4;" for i in range(size // 4))
    run(text, data[:8], out, block=64, module=TILE)
    want = np.zeros((64, 16), np.uint8)
    for lane in range(8):
        length = lane % 4 * (size // 4)
        want[lane, :length] = data.view(np.uint8)[lane, :length]
    assert (out.view(np.uint8) == want).all()


def test_newer_groups_stay_open() -> None:
    """wait_group 1 delivers all groups but the newest, whose data stays out of reach."""
    data, out = source(), np.zeros((64, 4), np.uint32)
    two = HEAD + COPY + COMMIT + "cp.async.ca.shared.global [%r3+1024], [%rd12], 16;" + COMMIT
    run(two + "cp.async.wait_group 1;" + TAIL + "cp.async.wait_all;", data, out, block=64, module=TILE)
    assert (out == data).all()
    late = TAIL.replace("[%r3]", "[%r3+1024]")
    with pytest.raises(AsyncCopyFault, match="has not delivered"):
        run(two + "cp.async.wait_group 1;" + late + "cp.async.wait_all;", data, out, block=64, module=TILE)
    run(two + "cp.async.wait_group 0;" + late, data, out, block=64, module=TILE)


@pytest.mark.parametrize(("text", "fault", "message"), [
    (COPY + COMMIT + TAIL, AsyncCopyFault, "read of bytes that a cp.async has not delivered"),
    (COPY + "cp.async.wait_group 0;" + TAIL, AsyncCopyFault, "read of bytes"),
    (COPY + COMMIT + "st.shared.u32 [%r3], %r1; cp.async.wait_all;", AsyncCopyFault, "write of bytes"),
    (COPY + COPY + "cp.async.wait_all;", AsyncCopyFault, "cp.async of bytes"),
    (COPY + COMMIT, AsyncCopyFault, "never waited for"),
    (COPY + "cp.async.wait_all; xor.b32 %r3, %r3, 16;" + TAIL, RaceFault, "no barrier"),
    (COPY + "cp.async.wait_all; bar.warp.sync -1; xor.b32 %r3, %r3, 512;" + TAIL, RaceFault, "no barrier"),
    (COPY + "bar.sync 0; cp.async.wait_all; xor.b32 %r3, %r3, 16;" + TAIL, RaceFault, "no barrier"),
    (COPY + "cp.async.wait_all;" + TAIL + "bar.warp.sync -1; xor.b32 %r3, %r3, 512;" + COPY + "cp.async.wait_all;",
     RaceFault, "no barrier"),
    ("cp.async.cg.shared.global [%r3], [%rd12+1], 16; cp.async.wait_all;", MemoryFault, "no multiple of 16"),
    ("cp.async.cg.shared.global [%r3+4], [%rd12], 16; cp.async.wait_all;", MemoryFault, "no multiple of 16"),
    ("cp.async.cg.shared.global [%r3], [%rd12+1024], 16; cp.async.wait_all;", MemoryFault, "past the end of argument"),
    ("cp.async.cg.shared.global [%r3+2048], [%rd12], 16; cp.async.wait_all;", MemoryFault, "has 2048 bytes"),
    ("mov.u32 %r8, 17; cp.async.cg.shared.global [%r3], [%rd12], 16, %r8;", PtxFault, "source size above"),
])
def test_misuse_is_found(text: str, fault: type[PtxFault], message: str) -> None:
    """Early reads, overwriting, forgotten waits, waits without a barrier, and wrong addresses are faults."""
    with pytest.raises(fault, match=message):
        run(HEAD + text, source(), np.zeros((64, 4), np.uint32), block=64, module=TILE)


def test_other_threads_read_after_wait_and_barrier() -> None:
    """A wait and then a barrier make a copy visible to the warp or to the block."""
    data, out = source(), np.zeros((64, 4), np.uint32)
    near = HEAD + COPY + "cp.async.wait_all; bar.warp.sync -1; xor.b32 %r3, %r3, 16;" + TAIL
    run(near, data, out, block=64, module=TILE)
    assert (out == data[np.arange(64) ^ 1]).all()
    far = HEAD + COPY + "cp.async.wait_all; bar.sync 0; xor.b32 %r3, %r3, 512;" + TAIL
    run(far, data, out, block=64, module=TILE)
    assert (out == data[np.arange(64) ^ 32]).all()
