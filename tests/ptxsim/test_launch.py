"""The launch function: arguments to device memory and back, geometry, kernel names, the report."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pagedcore_ptxsim import (
    LaunchError,
    MemoryFault,
    PtxSyntaxError,
    Runaway,
    UninitializedRead,
    UnsupportedPtx,
    launch,
    unsupported,
)
from ptxsim.ptx_texts import kernel, pointers, run

DOUBLE = """
    add.s64 %rd11, %rd1, %rd10;
    add.s64 %rd12, %rd2, %rd10;
    ld.global.f32 %f1, [%rd11];
    add.f32 %f2, %f1, %f1;
    st.global.f32 [%rd12], %f2;
"""
COORDINATES = """
    mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ctaid.y; mov.u32 %r4, %ctaid.z;
    mov.u32 %r5, %nctaid.x; mov.u32 %r6, %nctaid.y;
    mov.u32 %r7, %tid.y; mov.u32 %r8, %tid.z; mov.u32 %r9, %ntid.x; mov.u32 %r10, %ntid.y; mov.u32 %r15, %ntid.z;
    mad.lo.u32 %r11, %r4, %r6, %r3; mad.lo.u32 %r11, %r11, %r5, %r2;
    mad.lo.u32 %r12, %r8, %r10, %r7; mad.lo.u32 %r12, %r12, %r9, %r1;
    mul.lo.u32 %r13, %r9, %r10; mul.lo.u32 %r13, %r13, %r15; mad.lo.u32 %r14, %r11, %r13, %r12;
    mad.wide.u32 %rd11, %r14, 4, %rd1;
    st.global.u32 [%rd11], %r14;
"""


def test_arrays_are_changed_in_place() -> None:
    """A kernel reads one array and writes another, and both are the caller's afterwards."""
    source, target = np.arange(32, dtype=np.float32), np.zeros(32, np.float32)
    run(DOUBLE, source, target)
    assert (target == 2 * source).all()


def test_every_thread_of_every_block_runs_once() -> None:
    """Grids and blocks of three dimensions number their threads as CUDA does, whatever the batch and the order."""
    for at_once, order in ((64, None), (5, None), (7, np.random.default_rng(0).permutation(24))):
        out = np.zeros(24 * 40, np.uint32)
        text = kernel(pointers(1) + COORDINATES, ["u64"])
        launch(text, "k", (2, 3, 4), (5, 4, 2), [out], block_order=order, blocks_at_once=at_once)
        assert (out == np.arange(24 * 40)).all()


def test_launches_do_not_remember_each_other() -> None:
    """A kernel launched again sees its own arguments, grid, memory and shared memory, also after a fault."""
    text = kernel(pointers(1) + """
    ld.param.u32 %r2, [p1]; mov.u32 %r3, %nctaid.x; add.u32 %r2, %r2, %r3;
    setp.ge.u32 %p1, %r2, 100; @%p1 bra READ;
    st.shared.u32 [tile], %r2;
READ:
    ld.shared.u32 %r4, [tile]; add.s64 %rd5, %rd1, %rd10; st.global.u32 [%rd5], %r4;
    """, ["u64", "u32"], ".shared .align 4 .b8 tile[4];")
    for grid, value in ((1, 5), (3, 5), (1, 6), (1, 7)):
        out = np.zeros(32, np.uint32)
        assert launch(text, None, grid, 32, [out, value], check_races=False).instructions == 13
        assert (out == grid + value).all()
        with pytest.raises(UninitializedRead):
            launch(text, None, grid, 32, [out, 200], check_races=False)
        assert (out == grid + value).all()


def test_launches_of_several_threads_do_not_meet() -> None:
    """The same kernel launched from many threads at once gives each its own result."""
    def one(scale: int) -> bool:
        source, target = np.full(64, scale, np.float32), np.zeros(64, np.float32)
        run(DOUBLE, source, target, block=64)
        return bool((target == 2 * scale).all())
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(one, range(40)))


def test_views_of_one_array_overlap_on_the_device() -> None:
    """Two arguments that share host memory share device memory, at the same distance."""
    pool = np.zeros(64, np.float32)
    pool[:32] = np.arange(32)
    run(DOUBLE, pool[:32], pool[32:])
    assert (pool[32:] == 2 * np.arange(32)).all()
    run(DOUBLE, pool, pool)
    assert (pool[:32] == 2 * np.arange(32)).all()


def test_a_strided_view_gives_access_to_its_elements_only() -> None:
    """The bytes between the elements of a strided view are out of bounds."""
    pool = np.arange(64, dtype=np.float32)
    with pytest.raises(MemoryFault, match="between the elements"):
        run(DOUBLE, pool[::2], np.zeros(32, np.float32))
    out = np.zeros((32, 3), np.float32)
    run(DOUBLE.replace("%rd2, %rd10", "%rd2, %rd13").replace("    add.s64 %rd12", "mul.lo.s64 %rd13, %rd10, 3;\n"
        "    add.s64 %rd12"), np.ones(32, np.float32), out[:, 1])
    assert (out == [0, 2, 0]).all()


def test_read_only_arrays_may_not_be_stored_to() -> None:
    """A store to an array whose owner forbids writing is a fault; a load is not."""
    source, target = np.ones(32, np.float32), np.zeros(32, np.float32)
    source.flags.writeable = False
    run(DOUBLE, source, target)
    target.flags.writeable = False
    with pytest.raises(MemoryFault, match="read-only"):
        run(DOUBLE, source, target)


def test_after_a_fault_arrays_are_unchanged() -> None:
    """A launch that fails writes nothing back."""
    target = np.zeros(33, np.float32)
    with pytest.raises(MemoryFault):
        run(DOUBLE, np.ones(33, np.float32), target, block=64)
    assert not target.any()


@pytest.mark.parametrize(("kind", "value", "bits"), [
    ("u32", 2**32 - 1, 0xFFFFFFFF), ("s32", -1, 0xFFFFFFFF), ("u64", 5, 5), ("s64", -2, 2**64 - 2),
    ("f32", 1.5, 0x3FC00000), ("f32", 2, 0x40000000), ("f64", 1.5, 0x3FF8000000000000), ("b32", 1.5, 0x3FC00000),
    ("b64", np.float32(1.5), 0x3FF8000000000000), ("u8", np.uint8(200), 200), ("u16", True, 1),
])
def test_scalars_arrive_as_their_bits(kind: str, value: float, bits: int) -> None:
    """A number becomes the bits of its parameter's type, and a float parameter takes integers too."""
    size = {"8": 8, "16": 16, "32": 32, "64": 64}[kind.lstrip("usbf")]
    register = "%rs1" if size < 32 else "%r2" if size == 32 else "%rd2"
    out = np.zeros(1, np.uint64)
    text = kernel(f"ld.param.u64 %rd1, [p0]; ld.param.b{size} {register}, [p1];"
                  f"cvt.u64.u{max(size, 16)} %rd3, {register}; st.global.u64 [%rd1], %rd3;", ["u64", kind])
    launch(text, None, 1, 1, [out, value])
    assert out[0] == bits


@pytest.mark.parametrize(("change", "message"), [
    ({"args": [1]}, "2 parameters"), ({"args": [2**64, 0]}, "does not fit"), ({"args": ["x", 0]}, "str"),
    ({"args": [1.5, 0]}, "float; the parameter is"),
    ({"grid": 0}, "grid is 0"), ({"grid": (1, 1, 1, 1)}, "one to three"),
    ({"block": 2000}, "2000 threads"), ({"kernel_name": "none"}, "0 kernels match"),
    ({"dynamic_shared_bytes": -1}, "negative"), ({"block_order": [0, 0]}, "every number"),
    ({"args": [np.array([object()]), 0]}, "dtype object"),
])
def test_wrong_launches_are_refused(change: dict[str, object], message: str) -> None:
    """An argument that does not fit the kernel is refused before it runs, saying what and what to pass instead."""
    asked: dict[str, object] = {"kernel_name": "k", "grid": 1, "block": 32, "args": [0, 0]} | change
    with pytest.raises(LaunchError, match=message):
        launch(kernel(""), **asked)  # type: ignore[arg-type]


def test_block_limits_of_the_text_hold() -> None:
    """``.maxntid`` and ``.reqntid`` bound the block."""
    with pytest.raises(LaunchError, match="allows 64"):
        launch(kernel("", header=".maxntid 64, 1, 1"), None, 1, 96, [0, 0])
    with pytest.raises(LaunchError, match="requires 64"):
        launch(kernel("", header=".reqntid 64"), None, 1, 32, [0, 0])


def test_the_report_counts_what_ran() -> None:
    """Instructions are counted by line and by opcode, and lines that no thread reached are listed."""
    text = kernel("mov.u32 %r1, 0;\nsetp.ne.u32 %p1, %r1, 0;\n@%p1 bra L;\nadd.u32 %r1, %r1, 1;\nbra M;\n"
                  "L: sub.u32 %r1, %r1, 1;\nM:")
    report = launch(text, None, 3, 64, [0, 0])
    assert report.opcodes == {"mov.u32": 1, "setp.ne.u32": 1, "bra": 2, "add.u32": 1, "ret": 1}
    assert report.instructions == 6
    assert report.thread_instructions == 6 * 3 * 64
    assert [text.splitlines()[line - 1] for line in report.unexecuted] == ["L: sub.u32 %r1, %r1, 1;"]
    assert report.coverage == pytest.approx(6 / 7)


def test_endless_loops_end() -> None:
    """A loop that never ends is given up at the step limit."""
    with pytest.raises(Runaway, match="more than the limit of 1000"):
        launch(kernel("L: bra L;"), None, 1, 32, [0, 0], max_steps=1000)


def test_unknown_instructions_are_refused_by_name() -> None:
    """What the interpreter lacks is an error that quotes the instruction and its line."""
    with pytest.raises(UnsupportedPtx, match=r"line \d+: no implementation of tex"):
        launch(kernel("tex.1d.v4.f32.f32 {%f1,%f2,%f3,%f4}, [p0, {%f5}];"), None, 1, 32, [0, 0])
    with pytest.raises(UnsupportedPtx, match="form that is not implemented"):
        launch(kernel("cvt.rn.f16x2.u32 %r1, %r2;"), None, 1, 32, [0, 0])


def test_what_is_unsupported_is_known_without_a_launch() -> None:
    """Every instruction that a launch would refuse is named, also with a broken operand or an unknown guard."""
    body = "tex.1d.v4.f32.f32 {%f1}, [p0, {%f5}];\n@%none mov.u32 %r1, 0;\nmov.f32 %f1, 0f;\nselp.f32 %f1, %f2;"
    found = unsupported(kernel(body), "k")
    assert [re.sub(r".*(tex|none|mov|selp).*", r"\1", each) for each in found] == ["tex", "none", "mov", "selp"]
    assert unsupported(kernel(pointers(2)), None) == []


def test_texts_without_a_kernel_are_refused() -> None:
    """A text that holds no entry, or no end, is a syntax error."""
    with pytest.raises(PtxSyntaxError, match=r"no \.entry"):
        launch(".version 8.3\n.target sm_90\n.address_size 64\n", None, 1, 1, [])
    with pytest.raises(PtxSyntaxError, match="never closed"):
        launch(kernel("").rstrip().removesuffix("}"), None, 1, 1, [0, 0])
