"""What every matrix product promises, whatever its weights are."""

from __future__ import annotations

from collections.abc import Callable

import torch


def require_same_bits_in_any_company(product: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> None:
    """Any number of 300 rows, at any place, in any order, on any number of threads, has the bits of all together."""
    whole = product(rows)
    for begin, end in [*((0, count) for count in range(1, 70)), (7, 8), (199, 200), (1, 130), (88, 300)]:
        assert torch.equal(product(rows[begin:end]), whole[begin:end])
    assert torch.equal(product(rows.flip(0)), whole.flip(0))
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 7):
            torch.set_num_threads(num_threads)
            assert torch.equal(product(rows), whole)
    finally:
        torch.set_num_threads(before)
