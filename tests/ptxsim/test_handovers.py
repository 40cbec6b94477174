"""Data that one block leaves to another: found if nothing hands it over, in whatever order the blocks run."""

from __future__ import annotations

import numpy as np
import pytest

from pagedcore_ptxsim import RaceFault, launch

LAST_BLOCK_SUMS = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry last_sums(.param .u64 parts, .param .u64 counter, .param .u64 total)
{
    .shared .align 4 .b8 ticket[4];
    .reg .pred %p<3>; .reg .b32 %r<16>; .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [parts];
    ld.param.u64 %rd2, [counter];
    ld.param.u64 %rd3, [total];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mad.lo.u32 %r4, %r2, %r3, %r1;
    mul.wide.u32 %rd4, %r4, 4;
    add.s64 %rd5, %rd1, %rd4;
    add.u32 %r5, %r4, 1;
    st.global.u32 [%rd5], %r5;
    <fence before>
    <barrier>
    setp.ne.u32 %p1, %r1, 0;
    mov.u32 %r6, ticket;
    @%p1 bra WAIT;
    <atomic> %r7, [%rd2], 1;
    st.shared.u32 [%r6], %r7;
    <fence after>
WAIT:
    bar.sync 0;
    ld.shared.u32 %r8, [%r6];
    mov.u32 %r9, %nctaid.x;
    sub.u32 %r9, %r9, 1;
    setp.ne.u32 %p2, %r8, %r9;
    @%p2 bra DONE;
    mov.u32 %r10, 0;
    mov.u32 %r11, 0;
LOOP:
    mad.lo.u32 %r12, %r11, %r3, %r1;
    mul.wide.u32 %rd6, %r12, 4;
    add.s64 %rd7, %rd1, %rd6;
    ld.global.u32 %r13, [%rd7];
    add.u32 %r10, %r10, %r13;
    add.u32 %r11, %r11, 1;
    setp.le.u32 %p1, %r11, %r9;
    @%p1 bra LOOP;
    mul.wide.u32 %rd6, %r1, 4;
    add.s64 %rd7, %rd3, %rd6;
    st.global.u32 [%rd7], %r10;
DONE:
    ret;
}
"""
RIGHT = {"fence before": "membar.gl;", "barrier": "bar.sync 0;", "atomic": "atom.global.add.u32",
         "fence after": "membar.gl;"}
ORDERED = RIGHT | {"fence before": "", "atomic": "atom.acq_rel.gpu.global.add.u32", "fence after": ""}
BLOCKS, THREADS = 5, 64


def sums(parts: dict[str, str], **how: object) -> np.ndarray:
    """Run the kernel with these parts; the sums over all blocks, by thread."""
    text = LAST_BLOCK_SUMS
    for name, part in parts.items():
        text = text.replace(f"<{name}>", part)
    counter, total = np.zeros(1, np.uint32), np.zeros(THREADS, np.uint32)
    launch(text, None, BLOCKS, THREADS, [np.zeros(BLOCKS * THREADS, np.uint32), counter, total], **how)  # type: ignore[arg-type]
    return total


@pytest.mark.parametrize("parts", [RIGHT, ORDERED])
@pytest.mark.parametrize("at_once", [1, 2, 64])
def test_a_hand_over_is_no_race(parts: dict[str, str], at_once: int) -> None:
    """Fences around a relaxed atomic, or an ordered atomic behind a barrier: the last block may read everything."""
    expected = np.arange(1, BLOCKS * THREADS + 1, dtype=np.uint32).reshape(BLOCKS, THREADS).sum(0)
    order = np.random.default_rng(at_once).permutation(BLOCKS).tolist()
    assert np.array_equal(sums(parts, blocks_at_once=at_once, block_order=order), expected)


@pytest.mark.parametrize("broken", [
    {**RIGHT, "barrier": ""}, {**ORDERED, "barrier": ""}, {**RIGHT, "fence before": ""}, {**RIGHT, "fence after": ""},
    {**RIGHT, "fence before": "membar.cta;"}, {**ORDERED, "atomic": "atom.acquire.gpu.global.add.u32"},
    {**ORDERED, "atomic": "atom.release.gpu.global.add.u32"}, {**ORDERED, "atomic": "atom.acq_rel.cta.global.add.u32"},
])
def test_a_missing_part_of_a_hand_over_is_found(broken: dict[str, str]) -> None:
    """No barrier before the counter, no fence on one side, too narrow a scope: each is a race of the reading block."""
    with pytest.raises(RaceFault, match="nothing handed it over"):
        sums(broken)
    assert sums(broken, check_races=False).any()


FLAG = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry flag(.param .u64 data, .param .u64 ready)
{
    .reg .pred %p<2>; .reg .b32 %r<4>; .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [data];
    ld.param.u64 %rd2, [ready];
    mov.u32 %r1, %ctaid.x;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra READ;
    st.global.u32 [%rd1], 42;
    <store>.u32 [%rd2], 1;
    ret;
READ:
    <load>.u32 %r2, [%rd2];
    setp.eq.u32 %p1, %r2, 0;
    @%p1 bra READ;
    ld.global.u32 %r3, [%rd1];
    st.global.u32 [%rd1+4], %r3;
    ret;
}
"""


def read_after_flag(store: str, load: str) -> int:
    """What the second block reads once it has seen the first one's flag."""
    data = np.zeros(2, np.uint32)
    launch(FLAG.replace("<store>", store).replace("<load>", load), None, 2, 1, [data, np.zeros(1, np.uint32)])
    return int(data[1])


def test_a_flag_hands_over_what_its_own_thread_wrote() -> None:
    """A release store and an acquire load are a hand-over; relaxed ones are none."""
    assert read_after_flag("st.release.gpu.global", "ld.acquire.gpu.global") == 42
    for store, load in (("relaxed", "acquire"), ("release", "relaxed")):
        with pytest.raises(RaceFault, match="thread 0 of block 0"):
            read_after_flag(f"st.{store}.gpu.global", f"ld.{load}.gpu.global")


def test_what_was_there_before_the_launch_is_everybodys() -> None:
    """Only what a block wrote in this launch has to be handed over; its own it may always read."""
    text = FLAG[: FLAG.index("    mov.u32 %r1")] + "    ld.global.u32 %r2, [%rd1];\n    ret;\n}\n"
    launch(text, None, 8, 32, [np.ones(1, np.uint32), np.zeros(1, np.uint32)])
