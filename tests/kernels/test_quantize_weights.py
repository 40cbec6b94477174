"""Weights in integers and scales against NumPy in float32, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedcore_kernels.cpu.matmul import quantize_weights
from pagedcore_kernels.cpu.matmul.quantize_weights import quantize_groups

#: Outputs, inputs, groups: less than a vector, whole vectors, vectors with a rest.
SHAPES = [(1, 1, 1), (3, 7, 1), (5, 16, 1), (9, 17, 1), (64, 128, 1), (63, 96, 6), (37, 384, 3), (33, 72, 3)]
each_bits = pytest.mark.parametrize("bits", [4, 8])
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def numbers(kind: str, shape: tuple[int, int]) -> torch.Tensor:
    """Return weights of a kind; an output is zero."""
    random = np.random.default_rng(sum(shape))
    weight = torch.from_numpy(random.normal(size=shape).astype(np.float32))
    places = torch.from_numpy(random.random(shape))
    weight = {"any": weight, "positive": weight.abs(), "negative": -weight.abs(), "few": weight.round(),
              "tiny": weight * 1e-44, "small": weight * 1e-40, "large": weight.clamp(-1, 1) * 3.4e38,
              "NaN": weight.masked_fill(places < 0.05, torch.nan).masked_fill(places > 0.97, -torch.nan),
              "infinite": weight.masked_fill(places < 0.05, torch.inf).masked_fill(places > 0.97, -torch.inf),
              }[kind]  # fmt: skip
    weight[len(weight) // 2] = 0
    return weight


def expected(group: np.ndarray, bits: int) -> tuple[np.ndarray, np.float32]:
    """Return values and scale of float32 [n], by the definition."""
    if not np.isfinite(group).all():
        return np.zeros(group.shape), np.float32(np.nan)
    largest = np.abs(group).max()
    signed = largest if bits == 8 or largest in group else -largest
    scale = signed / np.float32(127 if bits == 8 else -8)
    if scale == 0:
        return np.zeros(group.shape), np.float32(0)
    return np.clip(np.rint(group / scale), *((-127, 127) if bits == 8 else (-8, 7))), scale


@each_bits
@each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_scales_are_those_of_numpy(shape: tuple[int, int, int], dtype: torch.dtype, bits: int) -> None:
    """Of two numbers of one magnitude the positive one counts; zeros, NaN and what rounds to a scale of zero too."""
    for kind in ("any", "positive", "negative", "few", "tiny", "small", "large", "NaN", "infinite"):
        require_numbers_of_numpy(numbers(kind, shape[:2]).to(dtype), shape[2], bits)


def require_numbers_of_numpy(weight: torch.Tensor, num_groups: int, bits: int) -> None:
    num_outputs = len(weight)
    values, scales = quantize_groups(weight, num_groups, bits)
    groups = weight.float().numpy().reshape(num_outputs, num_groups, -1)
    for output, group in np.ndindex(num_outputs, num_groups):
        wanted, scale = expected(groups[output, group], bits)
        given = values.view(groups.shape)[output, group].numpy()
        assert scales[output, group].numpy().tobytes() == scale.tobytes() or (
            np.isnan(scale) and scales[output, group].isnan()
        )
        assert np.array_equal(given, wanted)


@each_bits
def test_weights_may_have_gaps(bits: int) -> None:
    """A weight that is a part of another, or turned, is quantised as a copy of it."""
    whole = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    for part in (whole[:, ::2], whole.T, whole[3:5, 1:17]):
        for given, wanted in zip(quantize_groups(part, 1, bits), quantize_groups(part.clone(), 1, bits), strict=True):
            assert torch.equal(given, wanted)


@each_bits
def test_threads_share_the_groups(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With any number of threads every group is converted once."""
    weight, before = torch.randn(300, 48, generator=torch.Generator().manual_seed(0)), torch.get_num_threads()
    wanted = quantize_groups(weight, 3, bits)
    monkeypatch.setattr(quantize_weights, "_AT_ONCE", 1)
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            assert all(torch.equal(*pair) for pair in zip(quantize_groups(weight, 3, bits), wanted, strict=True))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(0, 8), (5, 0)], ids=str)
def test_there_may_be_nothing(shape: tuple[int, int]) -> None:
    """A weight without outputs or inputs has no values."""
    values, scales = quantize_groups(torch.zeros(shape), 1, 8)
    assert values.shape == shape
    assert scales.tolist() == [[0.0]] * shape[0]
