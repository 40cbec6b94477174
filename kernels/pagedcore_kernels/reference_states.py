"""Recurrences in plain torch: the oracle that kernels are compared with, and what to port a model against.

``ReferenceStates`` is a whole ``StateBackend``, slow and portable: one position of one row at a time, in float32. It
knows nothing of how a kernel works.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import silu

from pagedcore_kernels.errors import InternalError
from pagedcore_kernels.interface import RaggedRows
from pagedcore_kernels.state_checks import (
    check_convolution,
    check_decaying_attention,
    check_delta_rule,
    check_linear_recurrence,
    check_mamba1,
    check_mamba2,
    check_state_pool,
)
from pagedcore_kernels.state_layout import StateLayout
from pagedcore_kernels.state_plan import StatePlan

NORM_EPSILON = 1e-6
"""Added to the sum of squares of a query or key that ``delta_rule`` normalizes."""
Advance = Callable[[torch.Tensor, int], torch.Tensor]
"""``advance(state, token) -> output``: bring a state of float32 one token further, in place."""


class ReferenceStates:
    """``StateBackend`` in plain torch."""

    def __init__(self, layout: StateLayout, pool: torch.Tensor) -> None:
        check_state_pool(layout, pool)
        self._layout, self._pool = layout, pool
        self._plan: StatePlan | None = None

    def plan(self, batch: RaggedRows) -> None:
        """Check and keep the batch; see ``StateBackend``."""
        self._plan = StatePlan(batch, len(self._pool))

    def convolve(
        self, layer: int, part: int, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, activation: str
    ) -> torch.Tensor:
        """Convolve rows with their predecessors; see ``StateBackend``."""
        check_convolution(self._layout.layers[layer][part], self._current_plan(), rows, weight, bias, activation)
        after = None
        if activation == "gates":
            before, after, rows = rows.chunk(3, dim=1)
            rows = before * rows
        inputs = rows.float()

        def advance(state: torch.Tensor, token: int) -> torch.Tensor:
            window = torch.cat([state, inputs[token][None]])
            state.copy_(window[1:])
            total = bias
            for row, factor in zip(window, weight, strict=True):
                total = total + row * factor
            if after is not None:
                return after[token] * total.to(rows.dtype)
            return silu(total) if activation == "silu" else total

        return self._advance_rows(layer, part, _empty_like(rows), advance)

    def delta_rule(
        self,
        layer: int,
        part: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor,
        *,
        scale: float,
        normalizes: bool,
    ) -> torch.Tensor:
        """Advance by the gated delta rule; see ``StateBackend``."""
        check_delta_rule(self._layout.layers[layer][part], self._current_plan(), query, key, value, log_decay, beta)
        q, k = (_normalized(x.float()) if normalizes else x.float() for x in (query, key))
        repeats = value.shape[1] // query.shape[1]
        q, k = (x.repeat_interleave(repeats, 1) for x in (q * scale, k))
        v, decay = value.float(), log_decay.exp().view(*value.shape[:2], -1, 1)

        def advance(state: torch.Tensor, token: int) -> torch.Tensor:
            state *= decay[token]
            known = torch.einsum("hkv,hk->hv", state, k[token])
            update = (v[token] - known) * beta[token][:, None]
            state += k[token][:, :, None] * update[:, None]
            return torch.einsum("hkv,hk->hv", state, q[token])

        return self._advance_rows(layer, part, _empty_like(value), advance)

    def mamba2(
        self,
        layer: int,
        part: int,
        x: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        d: torch.Tensor,
    ) -> torch.Tensor:
        """Advance as Mamba 2 does; see ``StateBackend``."""
        check_mamba2(self._layout.layers[layer][part], self._current_plan(), x, dt, a, b, c, d)
        inputs = x.float()
        keys, queries = (y.float().repeat_interleave(x.shape[1] // y.shape[1], 1) for y in (b, c))

        def advance(state: torch.Tensor, token: int) -> torch.Tensor:
            step = dt[token]
            state *= (step * a).exp()[:, None, None]
            state += keys[token][:, :, None] * (step[:, None] * inputs[token])[:, None]
            return torch.einsum("hnp,hn->hp", state, queries[token]) + d[:, None] * inputs[token]

        return self._advance_rows(layer, part, _empty_like(x), advance)

    def mamba1(
        self,
        layer: int,
        part: int,
        x: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        d: torch.Tensor,
    ) -> torch.Tensor:
        """Advance as Mamba 1 does; see ``StateBackend``."""
        check_mamba1(self._layout.layers[layer][part], self._current_plan(), x, dt, a, b, c, d)
        inputs, keys, queries = x.float(), b.float(), c.float()

        def advance(state: torch.Tensor, token: int) -> torch.Tensor:
            step = dt[token]
            state *= (step * a).exp()
            state += keys[token][:, None] * (step * inputs[token])
            return torch.einsum("nc,n->c", state, queries[token]) + d * inputs[token]

        return self._advance_rows(layer, part, _empty_like(x), advance)

    def decaying_attention(
        self,
        layer: int,
        part: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        *,
        scale: float = 1.0,
    ) -> torch.Tensor:
        """Advance by attention whose past decays; see ``StateBackend``."""
        check_decaying_attention(self._layout.layers[layer][part], self._current_plan(), query, key, value, decay)
        q, k, v = query.float() * scale, key.float(), value.float()
        factor = (-decay).exp()[:, None, None]

        def advance(state: torch.Tensor, token: int) -> torch.Tensor:
            state *= factor
            state += k[token][:, :, None] * v[token][:, None]
            return torch.einsum("hkv,hk->hv", state, q[token])

        return self._advance_rows(layer, part, _empty_like(value), advance)

    def linear_recurrence(self, layer: int, part: int, x: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
        """Advance numbers of channels that decay; see ``StateBackend``."""
        check_linear_recurrence(self._layout.layers[layer][part], self._current_plan(), x, decay)
        inputs = x.float()

        def advance(state: torch.Tensor, token: int) -> torch.Tensor:
            state *= decay[token]
            state += inputs[token]
            return state[0]

        return self._advance_rows(layer, part, _empty_like(x), advance)

    def _advance_rows(self, layer: int, part: int, output: torch.Tensor, advance: Advance) -> torch.Tensor:
        """Fill ``output`` [T, ...]: every row from its own state on."""
        plan, states = self._current_plan(), self._layout.view(self._pool, layer, part)
        output[plan.num_computed :] = 0
        for row in range(plan.num_rows):
            read, write = int(plan.reads[row]), int(plan.writes[row])
            state = states[read].float().clone() if read >= 0 else torch.zeros(states.shape[1:])
            for token in range(int(plan.query_start[row]), int(plan.query_start[row + 1])):
                output[token] = advance(state, token).to(output.dtype)
            if write >= 0:
                states[write] = state.to(states.dtype)
        return output

    def _current_plan(self) -> StatePlan:
        if self._plan is None:
            raise InternalError("states: plan was not called before they were to be advanced.")
        return self._plan


def _normalized(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPSILON)


def _empty_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
