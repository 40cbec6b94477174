"""Loads, stores and atomics in every space, and the faults that wrong addresses are."""

from __future__ import annotations

import numpy as np
import pytest

from pagedcore_ptxsim import MemoryFault, RaceFault, UninitializedRead
from ptxsim.number_tables import integers
from ptxsim.ptx_texts import run

SHARED = ".shared .align 16 .b8 tile[512];"


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("vector", [1, 2, 4])
def test_loads_and_stores_of_every_width(width: int, vector: int) -> None:
    """A vector of items moves from global to shared to global memory unchanged."""
    if width * vector > 16:
        pytest.skip("no vector is wider than 16 bytes")
    source = np.random.default_rng(0).integers(0, 256, 32 * width * vector, np.uint8)
    target = np.zeros_like(source)
    prefix = {1: "%rs", 2: "%rs", 4: "%r", 8: "%rd"}[width]
    registers = [f"{prefix}{12 + i}" for i in range(vector)]
    items = "{" + ", ".join(registers) + "}" if vector > 1 else registers[0]
    v = f".v{vector}" if vector > 1 else ""
    run(f"""
    mul.lo.u32 %r2, %r1, {width * vector};
    cvt.u64.u32 %rd4, %r2; add.s64 %rd5, %rd1, %rd4; add.s64 %rd6, %rd2, %rd4;
    mov.u32 %r3, tile; add.u32 %r3, %r3, %r2;
    ld.global{v}.b{8 * width} {items}, [%rd5];
    st.shared{v}.b{8 * width} [%r3], {items};
    bar.sync 0;
    ld.shared{v}.b{8 * width} {items}, [%r3];
    st.global{v}.b{8 * width} [%rd6], {items};
    """, source, target, module=SHARED)
    assert (target == source).all()


def test_narrow_loads_extend() -> None:
    """A load narrower than its register is extended with zeros or with the sign."""
    source, target = np.array([200, 100], np.uint8), np.zeros(4, np.int32)
    run("ld.global.s8 %r2, [%rd1]; ld.global.u8 %r3, [%rd1]; ld.global.s8 %r4, [%rd1+1]; ld.global.nc.u8 %r5, [%rd1+1];"
        "st.global.v4.s32 [%rd2], {%r2, %r3, %r4, %r5};", source, target, block=1)
    assert target.tolist() == [-56, 200, 100, 100]


def test_constants_and_variables_of_the_module() -> None:
    """Initialised .const and .global arrays have addresses and their data; .const may not be written."""
    module = (".const .align 4 .u32 table[4] = {1, 2, 3, 0x10};\n"
              ".global .align 4 .f32 numbers[2] = {0f3F800000, 2.5};\n.global .align 8 .u64 unused;")
    out = np.zeros(4, np.uint32)
    body = """
    mov.u64 %rd4, table; add.s64 %rd5, %rd4, %rd10; ld.const.u32 %r2, [%rd5];
    ld.global.f32 %f1, [numbers+4]; cvt.rzi.u32.f32 %r3, %f1; add.u32 %r2, %r2, %r3;
    add.s64 %rd6, %rd1, %rd10; st.global.u32 [%rd6], %r2;
    """
    run(body, out, block=4, module=module)
    assert out.tolist() == [3, 4, 5, 18]
    with pytest.raises(MemoryFault, match=r"variable table .* read-only"):
        run(body + "st.global.u32 [%rd5], %r2;", out, block=4, module=module)


def test_local_memory_is_private() -> None:
    """Every thread has its own .local bytes, and reading ones it never wrote is a fault."""
    out = np.zeros(32, np.uint32)
    body = """
    .local .align 8 .b8 depot[16];
    mov.u64 %rd4, depot; st.local.u32 [%rd4+4], %r1;
    cvta.local.u64 %rd5, %rd4; ld.u32 %r2, [%rd5+4];
    add.s64 %rd6, %rd1, %rd10; st.global.u32 [%rd6], %r2;
    """
    run(body, out)
    assert (out == np.arange(32)).all()
    with pytest.raises(UninitializedRead, match="never wrote"):
        run(body.replace("ld.u32 %r2, [%rd5+4]", "ld.u32 %r2, [%rd5+8]"), out)
    with pytest.raises(MemoryFault, match="a thread has 16 bytes"):
        run(body.replace("[%rd4+4]", "[%rd4+16]"), out)


def test_generic_accesses_find_their_space() -> None:
    """One generic store may go to shared memory for some threads and to global for others."""
    out = np.zeros(64, np.uint32)
    run("""
    mov.u64 %rd4, tile; cvta.shared.u64 %rd4, %rd4; add.s64 %rd4, %rd4, %rd10;
    add.s64 %rd5, %rd1, %rd10;
    setp.lt.u32 %p1, %r1, 16; selp.b64 %rd6, %rd4, %rd5, %p1;
    st.u32 [%rd6], %r1;
    ld.u32 %r2, [%rd6]; add.u32 %r2, %r2, 100;
    st.global.u32 [%rd5+128], %r2;
    """, out, module=SHARED)
    assert (out[:32] == np.where(np.arange(32) < 16, 0, np.arange(32))).all()
    assert (out[32:] == np.arange(32) + 100).all()


@pytest.mark.parametrize(("text", "message"), [
    ("ld.global.u32 %r2, [%rd1+128];", "0 bytes past the end of argument 0"),
    ("ld.global.u32 %r2, [%rd1+-4];", "4 bytes before argument 0"),
    ("st.global.u32 [%rd1+400], %r1;", "272 bytes past the end of argument 0"),
    ("ld.global.u32 %r2, [%rd1+2];", "no multiple of 4"),
    ("ld.global.v4.u32 {%r2,%r3,%r4,%r5}, [%rd1+8];", "no multiple of 16"),
    ("ld.global.v4.u32 {%r2,%r3,%r4,%r5}, [%rd1+128];", "past the end"),
    ("ld.global.u32 %r2, [16];", "bytes before argument 0"),
    ("cvt.u32.u64 %r2, %rd1; cvt.u64.u32 %rd1, %r2; ld.global.u32 %r2, [%rd1];", "bytes before argument 0"),
    ("mov.u32 %r3, 512; ld.shared.u32 %r2, [%r3];", "the block has 512 bytes"),
    ("mov.u32 %r3, 0xFFFFFFFC; st.shared.u32 [%r3], %r1;", "the block has 512 bytes"),
    ("mov.u32 %r3, 6; st.shared.u32 [%r3], %r1;", "no multiple of 4"),
    ("mov.u32 %r3, 8; st.shared.v4.u32 [%r3], {%r1,%r1,%r1,%r1};", "no multiple of 16"),
])
def test_wrong_addresses_fault(text: str, message: str) -> None:
    """Any access outside its space or off its alignment is a fault that says by how much, where and who."""
    with pytest.raises(MemoryFault, match=message) as caught:
        run(f"setp.eq.u32 %p1, %r1, 5;\n@%p1 {text}" if ";" not in text[:-1] else text,
            np.zeros(32, np.uint32), module=SHARED)
    assert caught.value.line > 5
    assert text.split("; ")[-1] in str(caught.value)
    assert "of block (0, 0, 0)" in str(caught.value)


def test_buffers_do_not_touch() -> None:
    """One past the end of an array is out of bounds, also where another array was passed next to it."""
    first, second = np.zeros(256, np.uint32), np.zeros(256, np.uint32)
    for address in ("%rd1+1024", "%rd1+-4", "%rd2+1024", "%rd2+-4"):
        with pytest.raises(MemoryFault, match="argument"):
            run(f"ld.global.u32 %r2, [{address}];", first, second, block=1)


def test_masked_threads_touch_nothing() -> None:
    """A predicate that is false keeps a wild address from being used, and the register from being written."""
    out = np.zeros(32, np.uint32)
    run("""
    setp.eq.u32 %p1, %r1, 3; mov.u32 %r2, 7; mov.u64 %rd4, 1;
    @%p1 mov.u64 %rd4, %rd1;
    @%p1 ld.global.u32 %r2, [%rd4];
    @!%p1 add.u32 %r2, %r2, 1;
    add.s64 %rd6, %rd1, %rd10; st.global.u32 [%rd6], %r2;
    """, out)
    assert (out == np.where(np.arange(32) == 3, 0, 8)).all()


def test_uninitialised_shared_reads_fault() -> None:
    """Reading shared bytes that were never written is a fault, even next to bytes that were written."""
    with pytest.raises(UninitializedRead, match="never written"):
        run("mov.u32 %r3, tile; st.shared.u32 [%r3], %r1; ld.shared.v2.u32 {%r4, %r5}, [%r3];",
            np.zeros(1, np.uint32), block=1, module=SHARED)


def atomic_reference(name: str, kind: type, start: int, values: np.ndarray) -> tuple[int, list[int]]:
    """What a cell comes to, and what each thread found, one after the other."""
    functions = {
        "add": lambda old, v: old + v, "min": min, "max": max, "and": lambda old, v: old & v,
        "or": lambda old, v: old | v, "xor": lambda old, v: old ^ v, "exch": lambda old, v: v,
        "inc": lambda old, v: 0 if old >= v else old + 1, "dec": lambda old, v: v if old == 0 or old > v else old - 1,
    }
    cell, found = start, []
    bits = 8 * np.dtype(kind).itemsize
    for value in values:
        found.append(cell)
        cell = functions[name](cell, int(value))
        cell = int(np.array(cell & ((1 << bits) - 1), f"u{bits // 8}").view(kind)) if name == "add" else cell
    return cell, found


@pytest.mark.parametrize(("name", "kind"), [
    ("add", np.uint32), ("add", np.int32), ("add", np.uint64), ("min", np.int32), ("max", np.uint32), ("min", np.int64),
    ("and", np.uint32), ("or", np.uint32), ("xor", np.uint64), ("exch", np.uint32), ("inc", np.uint32),
    ("dec", np.uint32)])
@pytest.mark.parametrize("space", ["global", "shared"])
def test_atomics_apply_every_thread(name: str, kind: type, space: str) -> None:
    """All threads that name one cell take their turn, and each gets what it found."""
    dtype = np.dtype(kind)
    values = integers(dtype.str[1:], 32)[-32:] if name not in ("inc", "dec") else np.full(32, 20, kind)
    start = 17
    cells, found = np.array([start, 99], kind), np.zeros(32, kind)
    suffix = f"{'b' if name in ('and', 'or', 'xor', 'exch') else 's' if dtype.kind == 'i' else 'u'}{8 * dtype.itemsize}"
    r, size = ("%rd", 8) if dtype.itemsize == 8 else ("%r", 4)
    address = "[%rd1]" if space == "global" else "[tile]"
    load = "" if space == "global" else f"ld.global.b{8 * size} {r}20, [%rd1]; st.shared.b{8 * size} [tile], {r}20;"
    back = "" if space == "global" else f"ld.shared.b{8 * size} {r}21, [tile]; st.global.b{8 * size} [%rd1], {r}21;"
    run(f"""
    mad.wide.u32 %rd12, %r1, {size}, %rd2; mad.wide.u32 %rd13, %r1, {size}, %rd3;
    {load} bar.sync 0;
    ld.global.b{8 * size} {r}9, [%rd12];
    atom.{space}.{name}.{suffix} {r}11, {address}, {r}9;
    bar.sync 0;
    st.global.b{8 * size} [%rd13], {r}11;
    {back}
    """, cells, values, found, module=SHARED, check_races=False)
    want, order = atomic_reference(name, kind, start, values)
    assert int(cells[0]) == want
    assert [int(v) for v in found] == order
    assert cells[1] == 99


def test_compare_and_swap_and_floats() -> None:
    """cas changes a cell once; red adds floats; f16x2 adds its halves."""
    cells, found = np.array([5, 0, 0], np.uint32), np.zeros(32, np.uint32)
    run("""
    add.u32 %r2, %r1, 100; atom.global.cas.b32 %r3, [%rd1], 5, %r2;
    cvt.rn.f32.u32 %f1, %r1; red.global.add.f32 [%rd1+4], %f1;
    mov.b32 %r4, 0x40003C00; red.global.add.noftz.f16x2 [%rd1+8], %r4;
    add.s64 %rd6, %rd2, %rd10; st.global.u32 [%rd6], %r3;
    """, cells, found)
    assert cells[0] == 100
    assert found.tolist() == [5] + [100] * 31
    assert cells[1:2].view(np.float32)[0] == sum(range(32))
    assert cells[2:].view(np.float16).tolist() == [32, 64]


def test_stores_to_one_place() -> None:
    """Threads may store one value to one place in one instruction; different values are a race."""
    out = np.zeros(1, np.uint32)
    run("mov.u32 %r2, 7; st.shared.u32 [tile], %r2; ld.shared.u32 %r3, [tile];", out, block=1, module=SHARED)
    run("mov.u32 %r2, 7; st.shared.u32 [tile], %r2; bar.sync 0; ld.shared.u32 %r3, [tile];", out, module=SHARED)
    with pytest.raises(RaceFault, match="different values to one place"):
        run("st.shared.u32 [tile], %r1;", out, module=SHARED)
