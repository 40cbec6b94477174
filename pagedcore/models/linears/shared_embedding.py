"""An embedding without a matrix of its own: it reads the rows that the output layer's product has.

Many models have one matrix for both (tied embeddings, ``tie_word_embeddings``). Rearranged for products it still has
all rows, so that nothing keeps it twice: of the shape of Qwen2.5-0.5B that is a sixth of all memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pagedcore.models.linears.packed_linear import OnUnused, PackedLinear, checked_outputs
from pagedcore_kernels.cpu.matmul.packed import PackedMatmul, can_multiply


@dataclass(frozen=True, slots=True, eq=False)
class RowsOfProduct:
    """What such an embedding has in the place of its parameter; of torch's functions it knows ``F.embedding``."""

    product: PackedMatmul
    shape: tuple[int, int]
    dtype: torch.dtype

    device = torch.device("cpu")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look token ids [...] up, and return their rows [..., in]; torch calls this in the place of its function."""
        if function is not torch.nn.functional.embedding:
            return NotImplemented
        token_ids, rows = args[0], args[1]
        return rows.product.weight_rows(token_ids.flatten()).view(*token_ids.shape, rows.shape[1])


def can_share(embedding: Any, head: Any) -> bool:
    """Whether an embedding and a linear layer, not packed yet, have one matrix that ``share_rows`` makes one of."""
    weight = head.weight
    return weight is embedding.weight and _may_share(embedding) and can_multiply(weight.dtype, weight.shape[1])


def _may_share(embedding: Any) -> bool:
    return isinstance(embedding.weight, nn.Parameter) and embedding.max_norm is None


def share_rows(embedding: Any, head: PackedLinear, on_unused: OnUnused) -> None:
    """Have an embedding read its rows from the layer packed of its matrix, and report the matrix as unused.

    It keeps the matrix where more than looking rows up is asked of it, where the product is none of ours, and where one
    of the rows that are compared has other bits.
    """
    if not _may_share(embedding) or not isinstance(head.multiply, PackedMatmul):
        return
    weight, chosen = embedding.weight, checked_outputs(head.out_features)
    rows = head.multiply.weight_rows(chosen)
    if not torch.equal(rows.view(torch.uint8), weight.detach()[chosen].view(torch.uint8)):
        return
    del embedding.weight
    embedding.weight = RowsOfProduct(head.multiply, (head.out_features, head.in_features), weight.dtype)
    on_unused(weight)
