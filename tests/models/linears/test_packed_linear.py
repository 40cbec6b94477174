from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from pagedcore.models.linears.packed_linear import (
    FASTEST,
    OneDnnMatmul,
    PackedLinear,
    can_pack,
    pack_linears,
    probe_invariance,
)
from support.families import tiny_model

DTYPES = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.skipif(not can_pack(torch.bfloat16), reason="this processor cannot pack bfloat16 weights")


def linear(out: int = 24, size: int = 40, dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Linear:
    torch.manual_seed(out * size)
    return nn.Linear(size, out, bias=bias).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(40,), (1, 40), (7, 40), (1, 1, 40), (2, 3, 40), (0, 40), (1, 0, 40)], ids=str)
@torch.inference_mode()
def test_packed_layers_compute_the_linear_function(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Any number of leading dimensions, one row and no row included, gives what ``nn.Linear`` gives."""
    plain = linear(dtype=dtype)
    rows = torch.randn(shape).to(dtype)
    packed = PackedLinear(plain.weight, plain.bias)
    torch.testing.assert_close(packed(rows), plain(rows))
    assert packed(rows).shape == plain(rows).shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.inference_mode()
def test_a_lone_row_has_the_bits_it_has_in_company(dtype: torch.dtype) -> None:
    """One row goes through the product of two: its own path would round differently."""
    plain = linear(64, 4864, dtype)
    packed = PackedLinear(plain.weight, None)
    rows = torch.randn(5, 4864).to(dtype)
    assert torch.equal(packed(rows[3:4]), packed(rows)[3:4])


@torch.inference_mode()
def test_conv1d_is_packed_transposed() -> None:
    """GPT-2's layer, whose weight is [in, out], becomes the same function."""
    holder = nn.Sequential(Conv1D(24, 40))
    nn.init.normal_(holder[0].weight)
    rows = torch.randn(6, 40)
    expected = holder(rows)
    report = pack_linears(holder)
    assert isinstance(holder[0], PackedLinear)
    assert len(report.packed) == 1
    torch.testing.assert_close(holder(rows), expected)


def test_originals_are_freed_one_after_the_other() -> None:
    """When a layer has been packed its weight is gone, before the next one is packed."""
    holder = nn.Sequential(linear(8, 8), linear(16, 8), linear(24, 16))
    originals = [weakref.ref(layer.weight) for layer in holder]
    alive: list[int] = []

    class Noting(type(FASTEST)):  # type: ignore[misc]
        def supports(self, dtype: torch.dtype, num_inputs: int) -> bool:
            alive.append(sum(original() is not None for original in originals))
            return True

    pack_linears(holder, linears=Noting())
    assert alive == [3, 2, 1]
    assert [original() for original in originals] == [None] * 3


def test_a_tied_embedding_keeps_its_weight() -> None:
    """The output layer is packed by itself; the shared weight is not reported as free."""
    model = tiny_model("llama", tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    unused: list[torch.Tensor] = []
    expected = model.model.embed_tokens.weight.clone()
    report = pack_linears(model, on_unused=unused.append)
    assert isinstance(model.lm_head, PackedLinear)
    assert torch.equal(model.model.embed_tokens.weight, expected)
    assert len(unused) == len(report.packed) - 1


def test_other_modules_with_matrices_are_left_alone_and_named() -> None:
    """Experts, routers and subclasses of linear layers keep their weights and are reported."""

    class Special(nn.Linear):
        """Might compute anything."""

    holder = nn.ModuleDict({"special": Special(4, 4), "plain": linear(), "embed": nn.Embedding(4, 4)})
    report = pack_linears(holder)
    assert report.unpacked == ("Special",)
    assert type(holder["special"]) is Special
    assert pack_linears(tiny_model("mixtral")).unpacked == ("MixtralExperts", "MixtralTopKRouter")


def test_without_packing_the_model_stays_as_it_was() -> None:
    """Where the operation is missing, plain layers remain and are reported as not packed."""
    holder = nn.Sequential(linear())

    class Nothing(type(FASTEST)):  # type: ignore[misc]
        def supports(self, dtype: torch.dtype, num_inputs: int) -> bool:
            return False

    report = pack_linears(holder, linears=Nothing())
    assert report.packed == ()
    assert report.unpacked == ("Linear",)
    assert type(holder[0]) is nn.Linear


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int8], ids=str)
def test_formats_that_cannot_be_packed_are_known(dtype: torch.dtype) -> None:
    """Only formats for which there is a product on this machine are tried."""
    assert not can_pack(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_products_do_not_depend_on_company(dtype: torch.dtype) -> None:
    """The probe finds nothing in the layer shapes of a real model, the one that differs for a lone row included."""
    shapes = [(1152, 896), (896, 896), (9728, 896), (896, 4864)]
    layers = [PackedLinear(linear(out, size, dtype).weight, None) for out, size in shapes]
    assert probe_invariance(layers) == ()


class _Blocked(PackedLinear):
    """Adds up in another order when there are many rows, as libraries do."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        product = super().forward(rows)
        return product + 1e-6 if rows.shape[0] > 200 else product


class _Placed(PackedLinear):
    """Treats the last row differently."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        product = super().forward(rows)
        product[511:] += 1e-3
        return product


@pytest.mark.parametrize("kind", [_Blocked, _Placed])
def test_the_probe_finds_products_that_depend_on_company(kind: Any) -> None:
    """A product that depends on the number of rows, or on a row's place, is reported by its shape, once."""
    odd, even = linear(24, 40).weight, linear(8, 8).weight
    layers = [kind(odd, None), PackedLinear(even, None), kind(odd, None)]
    assert probe_invariance(layers) == ((24, 40, torch.float32),)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias_is_added(dtype: torch.dtype) -> None:
    """A row of zeros gives the bias itself, which later changes of the original do not reach."""
    plain = linear(dtype=dtype)
    expected = plain.bias.detach().clone()
    packed = PackedLinear(plain.weight, plain.bias)
    with torch.no_grad():
        plain.bias.zero_()
    assert torch.equal(packed(torch.zeros(2, 40, dtype=dtype)), expected.expand(2, -1))
    assert expected.abs().sum() > 0


def test_what_our_product_cannot_do_is_left_to_onednn() -> None:
    """An odd number of inputs has no pairs; the layer computes all the same."""
    plain = linear(24, 41, torch.bfloat16)
    packed = PackedLinear(plain.weight, plain.bias)
    assert isinstance(packed.multiply, OneDnnMatmul)
    rows = torch.randn(5, 41).bfloat16()
    torch.testing.assert_close(packed(rows), plain(rows))
