"""Convolutions over paged rows, against float64 over whole sequences, and their bits under any cut and company."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kernels.attention_cases import Rows, nan_pool, random_tables
from pagedcore.errors import InternalError, InvalidConfig
from pagedcore_kernels.cpu.attention.backend import NumbaCpuAttention
from pagedcore_kernels.layout import Int8KVLayout, KVLayout, LayerShape
from pagedcore_kernels.reference import ReferenceAttention

LAYER, BLOCK_SIZE, LENGTHS = 1, 8, (70, 9, 1, 2, 33)
NUM_BLOCKS = 24


def layout(channels: int, dtype: torch.dtype) -> KVLayout:
    return KVLayout(BLOCK_SIZE, dtype, (LayerShape(2, 8, 8), LayerShape(1, 0, channels), LayerShape(1, 8, 24)))


class Case:
    """Rows [L, 3 * C] of some sequences, and one layer's weight."""

    def __init__(self, channels: int, taps: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(channels + taps)
        self.rows = [torch.randn(length, 3 * channels, generator=generator).to(dtype) for length in LENGTHS]
        self.weight = torch.randn(taps, channels, generator=generator)
        self.bias = torch.randn(channels, generator=generator)
        self.dtype, self.channels = dtype, channels
        self.tables = random_tables([(0, length) for length in LENGTHS], BLOCK_SIZE, NUM_BLOCKS, 5)

    def backend(self, kind: Any = NumbaCpuAttention) -> Any:
        made = layout(self.channels, self.dtype)
        return kind(made, nan_pool(made, NUM_BLOCKS))

    def step(self, backend: Any, *parts: tuple[int, int, int], padding: int = 0) -> list[torch.Tensor]:
        """Compute (sequence, start, end) in one step; return the outputs of each."""
        rows = Rows([(end - start, end) for _, start, end in parts], self.tables[[one for one, _, _ in parts]],
                    BLOCK_SIZE, padding)  # fmt: skip
        given = torch.cat([self.rows[one][start:end] for one, start, end in parts])
        given = torch.cat([given, given.new_full((padding, 3 * self.channels), torch.nan)])
        backend.plan(rows)
        out = given.new_empty(len(given), self.channels)
        backend.convolve_to(out, LAYER, given, self.weight, self.bias)
        return list(torch.split(out[: len(given) - padding], [end - start for _, start, end in parts]))

    def whole(self, kind: Any = NumbaCpuAttention) -> list[torch.Tensor]:
        return self.step(self.backend(kind), *[(one, 0, length) for one, length in enumerate(LENGTHS)], padding=3)


@pytest.mark.parametrize("kind", [NumbaCpuAttention, ReferenceAttention])
@pytest.mark.parametrize(("channels", "taps", "dtype"), [
    (64, 3, torch.float32), (64, 3, torch.bfloat16), (20, 4, torch.float32), (7, 2, torch.bfloat16),
])  # fmt: skip
def test_against_float64(kind: Any, channels: int, taps: int, dtype: torch.dtype) -> None:
    """Each channel is convolved with its own taps, from zeros on, between its gates, in sequences that share nothing
    but the step; inputs are rounded as the modules of transformers round them.
    """
    case = Case(channels, taps, dtype)
    weight, bias = case.weight.double().numpy(), case.bias.double().numpy()
    for rows, out in zip(case.rows, case.whole(kind), strict=True):
        before, after, row = rows.chunk(3, dim=-1)
        padded = np.concatenate([np.zeros((taps - 1, channels)), (before * row).double().numpy()])
        windows = np.lib.stride_tricks.sliding_window_view(padded, taps, axis=0)
        expected = ((windows * weight.T).sum(-1) + bias) * after.double().numpy()
        scale = ((np.abs(windows) * np.abs(weight.T)).sum(-1) + np.abs(bias)) * np.abs(after.double().numpy())
        error = np.abs(out.double().numpy() - expected) / scale
        assert error.max() < (2.0**-7 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuts_and_company_change_no_bit(dtype: torch.dtype) -> None:
    """In one piece, in chunks that end anywhere, token by token, alone or beside others: the same rows."""
    case = Case(64, 3, dtype)
    whole = case.whole()
    backend = case.backend()
    begun = [case.step(backend, (one, 0, min(length, 31)))[0] for one, length in enumerate(LENGTHS)]
    second = case.step(backend, (0, 31, 32), (4, 31, 33))
    third = [case.step(backend, (0, place, place + 1))[0] for place in range(32, 40)]
    rest = case.step(backend, (0, 40, 70))
    assert torch.equal(torch.cat([begun[0], second[0], *third, *rest]), whole[0])
    assert torch.equal(torch.cat([begun[4], second[1]]), whole[4])
    assert all(torch.equal(begun[one], whole[one]) for one in (1, 2, 3))


def test_positions_that_are_computed_again_take_the_new_row() -> None:
    """A rejected position is written over: what follows reads the row that was computed last."""
    case = Case(64, 3, torch.float32)
    whole, backend = case.whole(), case.backend()
    right = case.rows[0].clone()
    case.rows[0][20:24] = 7.0
    case.step(backend, (0, 0, 24))
    case.rows[0] = right
    again = case.step(backend, (0, 20, 30))[0]
    assert torch.equal(again, whole[0][20:30])


def test_wrong_arguments_are_refused() -> None:
    """A kernel that trusts addresses is given no others; int8 pools keep no inputs of convolutions."""
    case = Case(64, 3, torch.float32)
    backend, row, out = case.backend(), case.rows[0][:1], torch.empty(1, 64)
    with pytest.raises(InternalError, match="plan"):
        backend.convolve_to(out, LAYER, row, case.weight, case.bias)
    backend.plan(Rows([(1, 1)], case.tables[:1], BLOCK_SIZE))
    with pytest.raises(InternalError, match="rows"):
        backend.convolve_to(out, LAYER, case.rows[0], case.weight, case.bias)
    for wrong in (torch.empty(2, 64), torch.empty(64, 1).T[:, ::2], torch.empty(1, 128)[:, ::2]):
        with pytest.raises(InternalError, match="output"):
            backend.convolve_to(wrong, LAYER, row, case.weight, case.bias)
    for weight, bias in ((case.weight.double(), case.bias), (case.weight[:, 1:], case.bias),
                         (case.weight, case.bias[1:]), (case.weight.T.contiguous().T, case.bias)):  # fmt: skip
        with pytest.raises(InternalError, match="convolution"):
            backend.convolve_to(out, LAYER, row, weight, bias)
    with pytest.raises(InvalidConfig, match=r"convolutions.*kv_cache_dtype"):
        Int8KVLayout(BLOCK_SIZE, torch.int8, (LayerShape(1, 0, 64),), torch.float32)
