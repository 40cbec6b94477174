"""Bits of machine code for processors with fewer instructions, against those of this one.

Each pretended processor is one process for all kernels: what it imports and compiles for itself takes seconds.
"""

from __future__ import annotations

import json
import platform
from typing import Any

import pytest

from kernels import test_matmul_grouped_bytes as of_bytes
from kernels import test_recurrence as of_recurrences
from kernels.test_attention_bits import digest_of_steps
from kernels.test_matmul import on_another_processor
from pagedcore_kernels.cpu import features
from pagedcore_kernels.cpu.matmul import packed
from pagedcore_kernels.cpu.matmul.tiles import WIDENED_BYTES

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="names an x86 processor"),
    pytest.mark.skipif(not features.has_instructions("avx2"), reason="no such vectors"),
]
PRODUCTS = """
from kernels.test_matmul import digest_of_products
from pagedcore_kernels.cpu.matmul.packed import products_here
found = {"products": [list(products_here()), digest_of_products()]}
"""
ALL = PRODUCTS + """
from kernels import test_matmul_grouped_bytes as of_bytes
from kernels import test_recurrence as of_recurrences
from kernels.test_attention_bits import digest_of_steps
found |= {
    "bytes": [of_bytes.form_of_byte_groups(128), of_bytes.digest_of_products()], "recurrences": of_recurrences.digest(),
    "int8 pools": digest_of_steps(is_int8=True),
}
"""
SAY = "import json; print(json.dumps(found))"


@pytest.fixture(scope="module")
def narrow() -> dict[str, Any]:
    """What a processor with vectors of 256 bits computes, without instructions for products of bytes and bfloat16."""
    said = on_another_processor("haswell", "amx", "avx512", "avx10", "evex512", "avxvnni", program=ALL + SAY)
    return json.loads(said)  # type: ignore[no-any-return]


def test_attention_in_steps(narrow: dict[str, Any]) -> None:
    """Attention with every option over int8 pools."""
    assert narrow["int8 pools"] == digest_of_steps(is_int8=True)


@pytest.mark.slow
def test_attention_over_floats() -> None:
    """As above, over pools of float32."""
    program = "from kernels.test_attention_bits import digest_of_steps; print(digest_of_steps(is_int8=False))"
    said = on_another_processor("haswell", "amx", "avx512", "avx10", "evex512", "avxvnni", program=program)
    assert said.strip() == digest_of_steps(is_int8=False)


def test_recurrences(narrow: dict[str, Any]) -> None:
    """Recurrences, with smaller groups of columns."""
    assert narrow["recurrences"] == of_recurrences.digest()


def test_products_of_bytes(narrow: dict[str, Any]) -> None:
    """Products of int8 rows with weights of few bits, by another instruction."""
    assert narrow["bytes"] == [WIDENED_BYTES, of_bytes.digest_of_products()]


@pytest.mark.skipif(not features.has_wide_vectors(), reason="no vectors of 512 bits")
def test_products(narrow: dict[str, Any]) -> None:
    """Vectors of 256 and of 512 bits add in the same order: widened pairs have the same bits with either."""
    wide = on_another_processor("skylake-avx512", "amx", "avx512bf16", "avx512fp16", "avx10", program=PRODUCTS + SAY)
    forms, digest = json.loads(wide)["products"]
    assert forms == [packed.SINGLES, packed.WIDENED_PAIRS, packed.WIDENED_PAIRS]
    assert narrow["products"] == [forms, digest]
