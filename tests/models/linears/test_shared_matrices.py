"""Linear layers whose weight another module reads are found in its source, and keep it."""

from __future__ import annotations

import torch
from torch import nn

from pagedcore.models.linears.packed_linear import PackedLinear, pack_linears
from pagedcore.models.linears.shared_matrices import read_by_others


class Inner(nn.Module):
    """A layer two levels below the module that reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.Linear(16, 16)


class Reads(nn.Module):
    """Computes with the weights of two layers, asks a third for its format, and calls a fourth."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.tied = Inner(), nn.Linear(16, 16)
        self.asked, self.called = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = nn.functional.linear(rows, self.tied.weight.type(torch.float32)) @ self.inner.deep.weight
        return self.asked(self.called(rows.to(self.asked.weight.dtype)))


def test_a_weight_that_is_read_keeps_its_layer() -> None:
    """Packing leaves the layers that ``forward`` reads, and no others; results are the same."""
    model, rows = Reads().eval(), torch.randn(3, 16)
    assert read_by_others(model) == {model.tied, model.inner.deep}
    with torch.inference_mode():
        expected = model(rows)
        pack_linears(model)
        assert (type(model.asked), type(model.called)) == (PackedLinear, PackedLinear)
        assert (type(model.tied), type(model.inner.deep)) == (nn.Linear, nn.Linear)
        assert torch.allclose(model(rows), expected, atol=1e-5)
