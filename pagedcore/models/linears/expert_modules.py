"""Mixtures of experts of Mixtral, Qwen3-MoE and OLMoE without transformers; the rest is in ``llama_modules.py``.

Owns the same modules under the same names, with the same operations in the same order, as transformers has for them
when experts compute one after the other. ``PackedExperts`` takes the weights of these modules as it takes theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

Weights = Mapping[str, torch.Tensor]


class TopKRouter(nn.Module):
    """Chooses the experts of each row."""

    def __init__(self, config: Any, weight: torch.Tensor, *, has_wide_shares: bool) -> None:
        """Take a weight [experts, hidden]; wide shares always sum to one, and stay in float32."""
        super().__init__()
        self.weight, self._top_k = nn.Parameter(weight, requires_grad=False), int(config.num_experts_per_tok)
        self._is_wide = has_wide_shares
        self._is_normed = self._is_wide or bool(config.norm_topk_prob)

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return logits [T, experts] of ``rows`` [T, hidden], and the shares and numbers [T, k] of their experts."""
        logits = nn.functional.linear(rows, self.weight)
        shares, chosen = logits.softmax(-1, dtype=torch.float32).topk(self._top_k, dim=-1)
        if self._is_normed:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        return logits, shares if self._is_wide else shares.to(logits.dtype), chosen


class Experts(nn.Module):
    """The experts of one layer; the attributes are those by which transformers says how weights are laid out."""

    has_gate = is_concatenated = True
    has_bias = has_post_expert_norm = is_transposed = False

    def __init__(self, weights: Weights) -> None:
        """Copy weights, ``0.gate_proj.weight`` and so on, to where all experts' are."""
        super().__init__()
        num_experts, first = len(weights) // 3, weights["0.gate_proj.weight"]
        inner, hidden = first.shape
        gate_up, down = first.new_empty(num_experts, 2 * inner, hidden), first.new_empty(num_experts, hidden, inner)
        for number in range(num_experts):
            gate_up[number, :inner] = weights[f"{number}.gate_proj.weight"]
            gate_up[number, inner:] = weights[f"{number}.up_proj.weight"]
            down[number] = weights[f"{number}.down_proj.weight"]
        self.gate_up_proj, self.down_proj = (nn.Parameter(one, requires_grad=False) for one in (gate_up, down))
        self.act_fn = nn.SiLU()

    def forward(self, rows: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Return the weighted sums [T, hidden] of the experts ``chosen`` [T, k] for ``rows``, by ``shares`` [T, k]."""
        total = torch.zeros_like(rows)
        for number in sorted(set(chosen.flatten().tolist())):
            place, row = chosen.T.eq(number).nonzero(as_tuple=True)
            gated = self._apply_gate(nn.functional.linear(rows[row], self.gate_up_proj[number]))
            output = nn.functional.linear(gated, self.down_proj[number]) * shares[row, place, None]
            total.index_add_(0, row, output.to(total.dtype))
        return total

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gated: torch.Tensor = self.act_fn(gate) * up
        return gated


class SparseMoeBlock(nn.Module):
    """What a mixture has in the place of the gated half of a layer."""

    def __init__(self, config: Any, weights: Weights, *, has_wide_shares: bool) -> None:
        """Take the weights of ``gate`` and of ``experts``; the rest is as for ``TopKRouter``."""
        super().__init__()
        self.gate = TopKRouter(config, weights["gate.weight"], has_wide_shares=has_wide_shares)
        prefix = "experts."
        self.experts = Experts({name.removeprefix(prefix): weight for name, weight in weights.items()
                                if name.startswith(prefix)})

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Compute ``rows`` [..., hidden]."""
        flat = rows.flatten(0, -2)
        _, shares, chosen = self.gate(flat)
        output: torch.Tensor = self.experts(flat, chosen, shares)
        return output.view(rows.shape)
