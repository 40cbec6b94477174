"""What is said of the rows of products that torch computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pagedcore.models.linears.torch_products import describe_rows

Change = Callable[[torch.Tensor], torch.Tensor]


def exact(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A product each of whose rows is computed alone."""
    return torch.stack([(row * weight).sum(1) + (0 if bias is None else bias) for row in rows])


def by_number(rows: torch.Tensor) -> torch.Tensor:
    """Another bit from 64 rows on."""
    return torch.full((len(rows), 1), 2.0**-20 if len(rows) >= 64 else 0.0)


def by_number_of_some(rows: torch.Tensor) -> torch.Tensor:
    """Another bit with 8 rows and with 32."""
    return torch.full((len(rows), 1), 2.0**-20 if len(rows) in (8, 32) else 0.0)


def by_place(rows: torch.Tensor) -> torch.Tensor:
    """Another bit in every fourth row but the first ones."""
    return torch.tensor([[2.0**-20 if place % 4 == 3 else 0.0] for place in range(len(rows))])


@pytest.mark.parametrize(("change", "found"), [
    (None, "gave a row the same bits among 1 to 512 rows, powers of two, on this GPU; other numbers of rows were not"),
    (by_number, r"other bits by their number: 5 x 16 with 1 to 32 and with 64 to 512; 7 x 16 with 1 to 32 and with"),
    (by_number_of_some, r"5 x 16 with 1, 2, 4, 16, 64, 128, 256, 512 and with 8, 32; 7 x"),
    (by_place, r"other bits by its place: 5 x 16, 7 x 16"),
])
def test_what_products_do_is_said(change: Change | None, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of numbers of rows are told apart by bits, places too, one product of each shape is tried, and nothing is
    promised where all are equal."""
    tried = []

    def linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        tried.append(weight)
        return exact(rows, weight, bias) + (0 if change is None else change(rows))

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    products = [torch.nn.Linear(16, size, bias=size == 7) for size in (5, 7, 5)]
    said = describe_rows(products, torch.float32)
    assert found in said
    assert len({id(weight) for weight in tried}) == 2
    assert ("promises nothing" in said) == (change is None)
