"""Packed weights that a file holds: arrangements that keep their version, products of them, and what is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from pagedcore_kernels.cpu.matmul import packed, packed_grouped, packed_int8
from pagedcore_kernels.cpu.matmul.packed import PackedMatmul
from pagedcore_kernels.cpu.matmul.packed_grouped import PackedGroupedMatmul
from pagedcore_kernels.cpu.matmul.packed_int8 import PackedInt8Matmul, form_of_int8_product
from pagedcore_kernels.cpu.matmul.packed_weight import PackedWeight
from pagedcore_kernels.cpu.matmul.product import PackedProduct
from pagedcore_kernels.errors import InternalError

pytestmark = pytest.mark.skipif(form_of_int8_product(16) is None, reason="no such vectors")
OUT, IN = 37, 64


def values(least: int, end: int) -> torch.Tensor:
    return torch.randint(least, end, (OUT, IN), generator=torch.Generator().manual_seed(0), dtype=torch.int8)


def groups(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(OUT, count, generator=torch.Generator().manual_seed(1)).to(dtype)


def floats(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(OUT, IN, generator=torch.Generator().manual_seed(2)).to(dtype)


def grouped(
    bits: int, zeros: torch.Tensor | None = None, scales: torch.Tensor | None = None, codebook: str = ""
) -> PackedProduct:
    scales = groups(4) if scales is None else scales
    least = 0 if zeros is not None and zeros.is_floating_point() else -8
    return PackedGroupedMatmul(values(least, least + 16), scales, zeros, bits, None, torch.float32, codebook)


PRODUCTS: Mapping[str, Callable[[], PackedProduct]] = {
    "float32": lambda: PackedMatmul(floats(torch.float32), None),
    "bfloat16": lambda: PackedMatmul(floats(torch.bfloat16), None),
    "int8": lambda: PackedInt8Matmul(values(-128, 128), groups(1)[:, 0], None, torch.bfloat16),
    "grouped 4": lambda: grouped(4), "grouped 8": lambda: grouped(8), "nf4": lambda: grouped(4, codebook="nf4"),
    "halves": lambda: grouped(4, scales=groups(4, torch.float16)),
    "zeros": lambda: grouped(4, (groups(4) * 15 - 8).to(torch.int8)),
    "least": lambda: grouped(4, groups(4)),
    "int8 rows": lambda: PackedGroupedMatmul(values(-8, 8), groups(2), None, 4, None, torch.bfloat16,
                                             quantizes_rows=True),
}
VERSIONS = {module.LAYOUT: module.LAYOUT_VERSION for module in (packed, packed_int8, packed_grouped)}
#: The version of each arrangement, and the beginning of a SHA-256 of what it makes of the matrices above. Files hold
#: such bytes: where one of these changes, the arrangement's version has to change, and then this table.
ARRANGED = {
    "float32": (1, "7173fbb44f747e9a"),
    "bfloat16": (1, "8b9b4d9d338c38ad"),
    "int8": (1, "1b3291c049d146a1"),
    "grouped 4": (1, "97e180bbb71add32"),
    "grouped 8": (1, "c01cb4c4ae02f74d"),
    "nf4": (1, "4b44584570e40251"),
    "halves": (1, "c940c3497f4bdbb2"),
    "zeros": (1, "a5ada2a7aaff0fee"),
    "least": (1, "c3c5548f337d3641"),
    "int8 rows": (1, "399d826c75e50d75"),
}


def digest_of(weight: PackedWeight) -> str:
    """Of the facts and of all tensors but corrections, which depend on the processor."""
    hasher = hashlib.sha256(repr(sorted(weight.facts.items())).encode())
    for name in sorted(weight.tensors.keys() - {"corrections"}):
        hasher.update(weight.tensors[name].contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()[:16]


@pytest.mark.parametrize("name", PRODUCTS)
def test_an_arrangement_has_its_version(name: str) -> None:
    """Bytes that packing makes are those of the version; others have another one."""
    weight = PRODUCTS[name]().packed
    assert (VERSIONS[weight.layout], digest_of(weight)) == ARRANGED[name]


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_packed_weight_makes_the_same_product(name: str) -> None:
    """A product of memory that is packed already has the bits of one that packed it, and does not move that memory."""
    made = PRODUCTS[name]()
    bias = (torch.arange(OUT) - OUT // 2).to(made.weight.dtype)
    mapped = type(made).of_packed(replace(made.packed, is_mapped=True), bias, made.weight.dtype)
    rows = torch.randn(9, IN, generator=torch.Generator().manual_seed(3)).to(made.weight.dtype)
    again = type(made).of_packed(made.packed, None, made.weight.dtype)
    assert torch.equal(again(rows), made(rows))
    assert torch.equal(mapped(rows)[:, OUT // 2], made(rows)[:, OUT // 2])
    assert (mapped(rows)[:, -1] - made(rows)[:, -1]).float().mean() > OUT // 2 - 1
    assert made.memory[1] > 0
    assert mapped.memory == (0, 0)


@pytest.mark.parametrize("name", ["bfloat16", "int8", "grouped 4"])
@pytest.mark.parametrize("change", [
    {"num_outputs": 65}, {"num_outputs": 2**40}, {"num_inputs": 128}, {"num_inputs": 32}, {"tensors": {}},
], ids=str)
def test_memory_of_another_shape_is_not_read(name: str, change: dict[str, Any]) -> None:
    """A file that says more than its tensors hold is refused before a kernel sees an address."""
    made = PRODUCTS[name]()
    with pytest.raises(InternalError):
        type(made).of_packed(replace(made.packed, **change), None, made.weight.dtype)


@pytest.mark.parametrize("change", [
    {"groups": 0}, {"groups": -4}, {"groups": 8}, {"groups": 3}, {"groups": 4.0}, {"groups": "4"}, {"groups": True},
    {"bits": 8}, {"bits": 5}, {"bits": True}, {"halves": 1}, {"halves": 2}, {"values": "least"}, {"values": "nf5"},
    {"values": []}, {"rows": "int4"}, {"rows": 1},
], ids=str)
def test_facts_that_do_not_fit_are_refused(change: dict[str, Any]) -> None:
    """Groups, bits and what values stand for decide how far a kernel reads."""
    weight = PRODUCTS["grouped 4"]().packed
    with pytest.raises(InternalError):
        PackedGroupedMatmul.of_packed(replace(weight, facts={**weight.facts, **change}), None, torch.float32)
