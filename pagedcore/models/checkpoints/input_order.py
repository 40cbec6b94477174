"""The order of inputs in files of GPTQ whose inputs were quantised in the order of their activations ("act-order").

Owns the reading of ``g_idx``, the group of each input.
"""

from __future__ import annotations

import torch

from pagedcore.models.linears.stored_weight import refusal


def order_of(groups: torch.Tensor, num_groups: int, name: str) -> torch.Tensor | None:
    """Return int64 [in], the inputs group by group; ``None``: they are in this order already.

    Args:
        groups: integers [in], the group of each input.
        num_groups: how many groups the layer's scales are for.
        name: of the layer, for the error.

    Raises:
        ModelNotSupported: the groups are not of one size.
    """
    num_inputs, wide = len(groups), groups.long()
    in_order = torch.arange(num_inputs) // (num_inputs // num_groups)
    if torch.equal(wide, in_order):
        return None
    order = wide.argsort(stable=True)
    if not torch.equal(wide[order], in_order):
        raise refusal(f"the groups of {name} (g_idx) are not {num_groups} of one size")
    return order
