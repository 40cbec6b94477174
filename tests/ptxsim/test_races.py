"""Shared memory between threads: what is ordered runs, what is not is a race."""

from __future__ import annotations

import numpy as np
import pytest

from pagedcore_ptxsim import RaceFault
from ptxsim.ptx_texts import run

TILE = ".shared .align 16 .b8 tile[1024];"
HEAD = """
    shl.b32 %r2, %r1, 2; mov.u32 %r3, tile; add.u32 %r3, %r3, %r2;
    xor.b32 %r4, %r3, 4; xor.b32 %r5, %r3, 128;
"""
NEAR, FAR, MINE = "[%r4]", "[%r5]", "[%r3]"


def program(*steps: str, **options: bool) -> None:
    """Run steps for two warps: ``w X`` stores to X, ``r`` loads, ``a`` adds; ``b`` and ``s`` are barriers."""
    words = {"w": "st.shared.u32 {}, %r1;", "r": "ld.shared.u32 %r6, {};", "a": "red.shared.add.u32 {}, %r1;",
             "b": "bar.sync 0;", "s": "bar.warp.sync -1;"}
    body = "\n".join(words[step[0]].format(step[2:]) for step in steps)
    run(HEAD + body, np.zeros(1), block=64, module=TILE, **options)


@pytest.mark.parametrize("steps", [
    (f"w {MINE}", f"r {MINE}", f"w {MINE}"),
    (f"w {MINE}", "s", f"r {NEAR}", "s", f"w {MINE}", f"r {MINE}"),
    (f"w {MINE}", "b", f"r {FAR}", "b", f"w {MINE}"),
    (f"w {MINE}", "s", f"r {NEAR}", f"r {MINE}", "s", f"r {MINE}", f"w {MINE}"),
    (f"w {MINE}", "b", f"r {NEAR}", f"r {FAR}", f"r {MINE}", "b", f"a {FAR}", f"a {NEAR}", "b", f"r {MINE}"),
    (f"w {MINE}", "b", "a [tile]", "a [tile]", "b", "r [tile]", "b", "a [tile]"),
    (f"w {MINE}", "b", "r [tile]", "b", f"w {MINE}"),
])
def test_ordered_accesses_pass(steps: tuple[str, ...]) -> None:
    """A thread's own accesses, a warp's around a warp barrier, a block's around a block barrier, and atomics."""
    program(*steps)


@pytest.mark.parametrize("steps", [
    (f"w {MINE}", f"r {NEAR}"),
    (f"w {MINE}", "s", f"r {FAR}"),
    (f"w {MINE}", "b", f"r {NEAR}", f"w {MINE}"),
    (f"w {MINE}", "b", f"r {FAR}", "s", f"w {MINE}"),
    (f"w {MINE}", f"w {NEAR}"),
    (f"w {MINE}", "s", f"w {FAR}"),
    (f"w {MINE}", f"a {NEAR}"),
    (f"w {MINE}", "b", f"r {FAR}", f"a {MINE}"),
    (f"w {MINE}", "b", f"a {FAR}", f"r {MINE}"),
    (f"w {MINE}", "b", "r [tile]", f"w {MINE}"),
    (f"w {MINE}", "b", "r [tile]", "s", f"w {MINE}"),
    (f"w {MINE}", "b", "a [tile]", "s", "r [tile]"),
])
def test_unordered_accesses_are_races(steps: tuple[str, ...]) -> None:
    """Each of the programs above with a barrier taken away, or one too weak, is a race, unless the check is off."""
    with pytest.raises(RaceFault, match="race"):
        program(*steps)
    program(*steps, check_races=False)


def test_neighbouring_bytes_do_not_race() -> None:
    """Threads that store to bytes or halves next to each other do not touch the same memory."""
    for size in (1, 2):
        run(f"mul.lo.u32 %r2, %r1, {size}; mov.u32 %r3, tile; add.u32 %r3, %r3, %r2; cvt.u16.u32 %rs1, %r1;"
            f"st.shared.b{8 * size} [%r3], %rs1; ld.shared.b{8 * size} %rs2, [%r3];",
            np.zeros(1), block=64, module=TILE)


def test_blocks_do_not_share() -> None:
    """The shared memory of blocks that run together is apart."""
    run(HEAD + "st.shared.u32 [%r3], %r1; bar.sync 0; ld.shared.u32 %r6, [%r5];",
        np.zeros(1), block=64, grid=5, module=TILE)


def test_a_barrier_of_half_a_warp_orders_nothing() -> None:
    """bar.warp.sync for some lanes is no barrier of the warp: what it orders for them is not credited."""
    with pytest.raises(RaceFault):
        run(HEAD + "st.shared.u32 [%r3], %r1; setp.lt.u32 %p1, %r1, 16; @%p1 bar.warp.sync 0xffff;"
            "ld.shared.u32 %r6, [%r4];", np.zeros(1), block=32, module=TILE)
