"""Whether numbers are finite, against torch."""

from __future__ import annotations

import pytest
import torch

from pagedcore_kernels.cpu.runtime.finite import all_finite

FORMATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
CHUNK = 2**21


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_every_place_is_looked_at(dtype: torch.dtype) -> None:
    """One number that is none, or infinite, at any place of a word, in the rest behind the words, and across chunks."""
    numbers = torch.randn(CHUNK // dtype.itemsize + 13, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert all_finite(numbers)
    for place in (*range(9), len(numbers) // 2, *range(len(numbers) - 14, len(numbers))):
        for wrong in (torch.nan, torch.inf, -torch.inf):
            before, numbers[place] = numbers[place].clone(), wrong
            assert not all_finite(numbers)
            numbers[place] = before
    assert all_finite(numbers)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_the_largest_and_the_smallest_are_finite(dtype: torch.dtype) -> None:
    """Whatever their neighbours in a word are: no carry leaves its number."""
    limits = torch.finfo(dtype)
    numbers = torch.tensor([limits.max, limits.min, limits.tiny, -limits.tiny, 0.0, -0.0, limits.smallest_normal / 4],
                           dtype=dtype)
    for turn in range(len(numbers)):
        assert all_finite(numbers.roll(turn).repeat(40))


def test_all_halves_are_judged_as_torch_judges_them() -> None:
    """Each of the 65536 bit patterns of both formats of 16 bits."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        numbers = patterns.view(dtype)
        found = [all_finite(number.expand(8).contiguous()) for number in numbers[::37]]
        assert found == numbers[::37].isfinite().tolist()


def test_the_codes_of_e4m3_are_judged_as_torch_judges_them() -> None:
    """Each of the 256 in each place of a word, in a block and in the rest, beside 448s, whose bits are nearly all set.
    """
    for code in range(256):
        octets = torch.full((300,), 0x7E, dtype=torch.uint8)
        for place in (*range(code % 3, 8, 3), 257 + code % 40):
            octets[place], before = code, octets[place].clone()
            numbers = octets.view(torch.float8_e4m3fn)
            assert all_finite(numbers) == bool(numbers.float().isfinite().all())
            octets[place] = before


def test_any_tensor_will_do() -> None:
    """Empty ones, views with gaps, and more dimensions."""
    numbers = torch.zeros(6, 8, 10)
    assert all_finite(numbers[:, ::2])
    assert all_finite(torch.empty(0))
    numbers[3, 2, 1] = torch.nan
    assert not all_finite(numbers[:, ::2])
    assert not all_finite(numbers.transpose(0, 2))
    assert all_finite(numbers[:, 1::2])
