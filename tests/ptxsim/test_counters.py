"""What a launch is counted to ask of a GPU, against numbers that follow from the addresses by hand."""

from __future__ import annotations

import numpy as np
import pytest

from pagedcore_ptxsim import CLASSES, Work
from ptxsim.ptx_texts import run

SHARED = ".shared .align 16 .b8 tile[8192];"
AT = "mov.u32 %r3, tile; mad.lo.u32 %r2, %r1, {stride}, %r3;"


def counted(body: str, *args: np.ndarray, **options: object) -> dict[str, Work]:
    """What a body did, by class."""
    return dict(run(body, *args, module=SHARED, count=True, **options).work)


def totals(work: Work) -> tuple[int, ...]:
    """Instructions, bytes, sectors, wavefronts and conflicts of all warps."""
    return tuple(int(each.sum()) for each in (
        work.instructions, work.bytes, work.sectors, work.wavefronts, work.conflicts))


@pytest.mark.parametrize(("store", "stride", "expected"), [
    ("u32 [%r2], %r1", 4, (1, 128, 0, 1, 0)),                        # 32 words in 32 banks
    ("u32 [%r2], %r1", 32, (1, 128, 0, 8, 7)),                       # 4 banks, 8 words of each
    ("u32 [%r2], %r1", 128, (1, 128, 0, 32, 31)),                    # one bank
    ("u32 [%r2], %r1", 132, (1, 128, 0, 1, 0)),                      # padded by a word
    ("u32 [%r2], %r1", 0, (1, 128, 0, 1, 0)),                        # one word for all
    ("u8 [%r2], %r1", 1, (1, 32, 0, 1, 0)),                          # 8 words, each for 4 lanes
    ("v2.u32 [%r2], {%r1,%r1}", 8, (1, 256, 0, 2, 0)),               # two phases of 16 lanes
    ("v2.u32 [%r2], {%r1,%r1}", 128, (1, 256, 0, 32, 30)),           # of each, 16 words in each of two banks
    ("v4.u32 [%r2], {%r1,%r1,%r1,%r1}", 16, (1, 512, 0, 4, 0)),      # four phases of 8 lanes
    ("v4.u32 [%r2], {%r1,%r1,%r1,%r1}", 144, (1, 512, 0, 4, 0)),     # rows of 128 bytes, padded by 16
    ("v4.u32 [%r2], {%r1,%r1,%r1,%r1}", 128, (1, 512, 0, 32, 28)),   # the same rows without
])
def test_shared_stores_and_their_bank_conflicts(store: str, stride: int, expected: tuple[int, ...]) -> None:
    """A phase takes as many wavefronts as its busiest bank has different words."""
    work = counted(AT.format(stride=stride) + f"st.shared.{store};", check_races=False)
    assert totals(work["shared stores"]) == expected


@pytest.mark.parametrize(("stride", "expected"), [(256, (2, 1024, 0, 64, 56)), (272, (2, 1024, 0, 8, 0))])
def test_matrices_of_padded_rows_have_no_conflicts(stride: int, expected: tuple[int, ...]) -> None:
    """Eight rows of a matrix begin in one bank, or with 16 bytes of padding in eight places."""
    fill = "st.shared.v4.u32 [%r2], {%r1,%r1,%r1,%r1};"
    body = AT.format(stride=stride) + fill + "bar.warp.sync -1;\nldmatrix.sync.aligned.m8n8.x4.shared.b16" \
        " {%r4,%r5,%r6,%r7}, [%r2]; ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r4,%r5,%r6,%r7}, [%r2];"
    report = run(body, module=".shared .align 16 .b8 tile[8704];", count=True)
    assert totals(report.work["ldmatrix"]) == expected
    assert sorted(report.conflict_lines.values()) == ([28, 56] if stride == 256 else [])
    one = body.replace(".x4", ".x1").replace("{%r4,%r5,%r6,%r7}", "{%r4}")
    work = run(one, module=".shared .align 16 .b8 tile[8704];", count=True).work
    assert totals(work["ldmatrix"]) == tuple(each if i == 0 else each // 4 for i, each in enumerate(expected))


@pytest.mark.parametrize(("load", "stride", "expected"), [
    ("u32 %r4", 4, (1, 128, 4, 0, 0)), ("u32 %r4", 8, (1, 128, 8, 0, 0)), ("u32 %r4", 32, (1, 128, 32, 0, 0)),
    ("u32 %r4", 0, (1, 128, 1, 0, 0)), ("v4.u32 {%r4,%r5,%r6,%r7}", 16, (1, 512, 16, 0, 0)),
    ("u64 %rd3", 8, (1, 256, 8, 0, 0)),
])
def test_global_loads_and_their_sectors(load: str, stride: int, expected: tuple[int, ...]) -> None:
    """A warp's load touches each sector of 32 bytes once, also one that overwrites its own address."""
    data = np.zeros(1024, np.uint32)
    address = f"mad.wide.u32 %rd3, %r1, {stride}, %rd1;"
    assert totals(counted(f"{address} ld.global.{load}, [%rd3];", data)["global loads"]) == expected
    half = f"{address} setp.lt.u32 %p1, %r1, 16; @%p1 ld.global.{load}, [%rd3];"
    assert totals(counted(half, data)["global loads"])[:2] == (1, expected[1] // 2)


def test_copies_count_on_both_sides() -> None:
    """cp.async reads sectors of the lanes that have a source, and stores 16 bytes of each in phases of 8 lanes."""
    body = AT.format(stride=128) + """
        mad.wide.u32 %rd3, %r1, 16, %rd1; setp.lt.u32 %p1, %r1, 6; selp.u32 %r4, 16, 0, %p1;
        cp.async.cg.shared.global [%r2], [%rd3], 16, %r4; cp.async.commit_group; cp.async.wait_group 0;
    """
    work = counted(body, np.zeros(128, np.uint32))
    assert totals(work["cp.async"]) == (1, 512, 3, 32, 28)
    assert totals(work["barriers"])[0] == 2


def test_generic_addresses_are_counted_where_they_lead() -> None:
    """A store without a space is one to shared or to global memory."""
    body = AT.format(stride=4) + "cvta.shared.u64 %rd4, %rd5; cvt.u64.u32 %rd5, %r2; cvta.shared.u64 %rd4, %rd5;" \
        "st.u32 [%rd4], %r1; st.u32 [%rd1], 5;"
    work = counted(body, np.zeros(1, np.uint32))
    assert totals(work["shared stores"]) == (1, 128, 0, 1, 0)
    assert totals(work["global stores"]) == (1, 128, 1, 0, 0)


def test_each_warp_of_the_grid_is_counted_by_class() -> None:
    """Three warps of each of two blocks run a loop as often as their number says; classes add up to what was issued."""
    body = """
        shr.u32 %r2, %r1, 5; mov.u32 %r3, %ctaid.x; mad.lo.u32 %r2, %r3, 3, %r2; mov.f32 %f1, 0f3F800000;
    L:  setp.eq.u32 %p1, %r2, 0;
        @%p1 bra END;
        add.f32 %f1, %f1, %f1; sub.u32 %r2, %r2, 1;
        bra L;
    END: shfl.sync.bfly.b32 %r4, %r1, 1, 31, -1; bar.sync 0;
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
            {%f1,%f2,%f3,%f4}, {%r1,%r1,%r1,%r1}, {%r1,%r1}, {%f1,%f1,%f1,%f1};
        atom.shared.add.u32 %r5, [tile], 1;
    """
    body = "mov.u32 %r9, tile; st.shared.v4.u32 [%r9], {%r9,%r9,%r9,%r9}; ld.global.u32 %r4, [%rd1];" + body
    # Why one block at a time too: the counts of a launch are sums over batches of blocks.
    for at_once in (64, 1):
        work = counted(body, np.zeros(1, np.uint32), block=96, grid=2, blocks_at_once=at_once, check_races=False)
        assert set(work) == set(CLASSES)
        warps = np.arange(6)
        assert work["float"].instructions.tolist() == warps.tolist()
        assert work["integer"].instructions.tolist() == (3 + 2 * warps + 1).tolist()
        for name in ("shuffles", "barriers", "mma", "atomics", "shared stores"):
            assert work[name].instructions.tolist() == [1] * 6, name
        assert work["shared stores"].wavefronts.tolist() == [4] * 6
        assert work["global loads"].sectors.tolist() == [1] * 6
        # Four moves, one of them the thread number, and a parameter; two branches a turn, the one that leaves, and ret.
        assert work["other"].instructions.tolist() == (5 + 2 * warps + 1 + 1).tolist()


@pytest.mark.parametrize(("operation", "name", "wavefronts"), [
    ("shfl.sync.bfly.b32 %r4, %r2, 1, 31, -1;", "shuffles", 0),
    ("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r4,%r5,%r6,%r7}, [%r9];", "ldmatrix", 4),
])
def test_a_warp_in_parts_is_counted_once_at_an_operation_of_all_of_it(
    operation: str, name: str, wavefronts: int
) -> None:
    """Both sides of a branch count; the operation behind them, where one side waits for the other, is one."""
    body = f"""
        mov.u32 %r9, tile; st.shared.v4.u32 [%r9], {{%r9,%r9,%r9,%r9}};
        setp.lt.u32 %p1, %r1, 7;
        @%p1 bra LOW;
        mul.lo.u32 %r2, %r1, 3;
    JOIN: {operation}
        ret;
    LOW: add.u32 %r2, %r1, 3;
        bra JOIN;
    """
    work = counted(body, check_races=False)
    assert totals(work[name]) == (1, 128 * wavefronts, 0, wavefronts, 0)
    assert work["integer"].instructions.tolist() == [4]          # with the one of ``pointers``


@pytest.mark.parametrize(("instruction", "name"), [
    ("st.local.u32 [mine], %r1;", "local"), ("cvta.local.u64 %rd3, %rd3; st.u32 [%rd3], %r1;", "local"),
    ("membar.gl;", "barriers"), ("activemask.b32 %r4;", "shuffles"), ("redux.sync.max.u32 %r4, %r1, -1;", "shuffles"),
    ("match.any.sync.b32 %r4, %r1, -1;", "shuffles"), ("cvt.rni.s32.f32 %r4, %f1;", "float"),
    ("cvt.rn.f32.s32 %f2, %r1;", "float"), ("cvt.rn.bf16x2.f32 %r4, %f1, %f1;", "float"),
    ("fma.rn.bf16x2 %r4, %r1, %r1, %r1;", "float"),
    ("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r9], {%r9};", "shared stores"),
])
def test_classes_of_instructions(instruction: str, name: str) -> None:
    """One more of an instruction is one more of its class."""
    before = ".local .align 4 .b8 mine[4]; mov.u64 %rd3, mine; mov.f32 %f1, 0f3F800000; mov.u32 %r9, tile;"
    work, least = counted(before + instruction), counted(before)
    more = {one: totals(work[one])[0] - totals(least[one])[0] for one in CLASSES if one != "other"}
    assert {one: count for one, count in more.items() if count} == {name: 1}


def test_counting_is_of_its_launch_alone() -> None:
    """A launch that is not counted has no counts, after one of the same text that was; results are the same."""
    body = "add.s64 %rd3, %rd1, %rd10; ld.global.u32 %r2, [%rd3]; shl.b32 %r2, %r2, 1; st.global.u32 [%rd3], %r2;"
    first, second = np.arange(32, dtype=np.uint32), np.arange(32, dtype=np.uint32)
    once, again = (run(body, first, count=True).work for _ in range(2))
    assert all((once[name].instructions == again[name].instructions).all() for name in CLASSES)
    assert run(body, second).work == {}
    assert run(body, second).work == {}
    assert (first == second).all()
