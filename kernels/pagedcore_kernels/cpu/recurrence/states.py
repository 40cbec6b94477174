"""The states of recurrent layers on the CPU: Numba kernels behind the ``StateBackend`` contract.

Owns the parameter blocks and the choice of kernel variants; checks everything a kernel will trust. The arithmetic is in
``columns.py``, the order of work in ``outer_products.py`` and ``state_convolution.py``.
"""

from __future__ import annotations

from math import gcd

import numpy as np
import torch

from pagedcore_kernels.cpu.features import has_fused_vectors
from pagedcore_kernels.cpu.layers.elementwise import rows_at_once
from pagedcore_kernels.cpu.recurrence import columns, outer_products, state_convolution
from pagedcore_kernels.cpu.runtime.kept_arrays import KeptArrays
from pagedcore_kernels.cpu.runtime.kernel import Kernel, ParameterBlock
from pagedcore_kernels.cpu.runtime.recorded_calls import Sizes, StepShape
from pagedcore_kernels.cpu.runtime.threads import num_threads
from pagedcore_kernels.cpu.simd import LANES, LINE
from pagedcore_kernels.errors import InternalError, InvalidConfig
from pagedcore_kernels.interface import RaggedRows
from pagedcore_kernels.state_checks import (
    check_convolution,
    check_decaying_attention,
    check_delta_rule,
    check_linear_recurrence,
    check_mamba1,
    check_mamba2,
    check_output,
    check_state_pool,
)
from pagedcore_kernels.state_layout import StateLayout
from pagedcore_kernels.state_plan import StatePlan

Words = tuple[int, ...]
_ENDINGS = {"none": 0, "silu": state_convolution.SILU, "gates": state_convolution.GATES}
_MOST_ROWS = 256
"""A model of so small states that as many rows write few bytes is not prepared to write them past the caches."""


class RecurrentStates:
    """``StateBackend`` for float32 and bfloat16 models. Methods write to ``out``, contiguous, if it is given, by
    kernels alone: such calls may be recorded, and repeated they compute the step that is planned then.

    A token's result is the same bits whatever else is in the batch, however its prompt was cut into chunks, wherever
    its states lie and however many threads there are; see ``outer_products.py``.

    Invariant: one thread at a time uses an instance; its parameter blocks serve one call at a time.
    """

    def __init__(self, layout: StateLayout, pool: torch.Tensor) -> None:
        check_state_pool(layout, pool)
        self._layout, self._pool = layout, pool
        self._plan: StatePlan | None = None
        self._arrays = KeptArrays()
        self._of_rows: Words = ()
        """Rows, the longest first, reads, writes and ``query_start`` as kernels take them, and the number of rows."""
        self._of_tokens = 0
        """The row of each token."""
        self._longest_rows = 0
        """How many rows as long as the longest one the step's tokens would be."""
        self._streams = 0
        """Whether the step writes its states past the caches: 1 if it does."""
        self._parameters = ParameterBlock(outer_products.NUM_ARGUMENTS)
        self._convolution_parameters = ParameterBlock(state_convolution.NUM_ARGUMENTS)
        shapes = [part.shape for parts in layout.layers for part in parts]
        self._zeros = torch.zeros(width := max(shape[-1] for shape in shapes))
        self._ones = {dtype: torch.ones(width, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
        """What an input from a state is multiplied with, and the key and query of recurrences that have none."""
        self._signs = torch.ones(2, max(shape[0] for shape in shapes)) * torch.tensor([[1.0], [-1.0]])
        """What rates of each head are multiplied with: 1, and -1."""

    def plan(self, batch: RaggedRows) -> None:
        """Check the batch and work out what all layers share; see ``StateBackend``.

        Raises:
            InternalError: a state or a row's tokens are out of range; nothing was computed.
        """
        plan = self._plan = StatePlan(batch, len(self._pool))
        order, rows = np.argsort(-plan.query_lens, kind="stable"), np.arange(plan.num_rows)
        arrays = {"rows": order, "reads": plan.reads, "writes": plan.writes, "query start": plan.query_start}
        self._of_rows = *(self._arrays.keep(name, array) for name, array in arrays.items()), plan.num_rows
        self._of_tokens = self._arrays.keep("row of tokens", np.repeat(rows, plan.query_lens))
        longest = int(plan.query_lens.max(initial=1))
        self._longest_rows = plan.num_computed // longest
        written = int((plan.writes >= 0).sum()) * self._layout.state_bytes
        self._streams = int(longest == 1 and written >= outer_products.STREAMED_BYTES)

    def convolve(
        self, layer: int, part: int, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, activation: str, *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Convolve rows with their predecessors; see ``StateBackend``. ``out`` is [T, C]."""
        plan, channels = self._current_plan(), weight.shape[-1]
        check_convolution(self._layout.layers[layer][part], plan, rows, weight, bias, activation)
        out = self._output(rows[:, :channels], out)
        lanes, item = gcd(channels, LANES), rows.itemsize
        self._convolution_parameters.fill(
            rows.data_ptr(), rows.stride(0) * item, out.data_ptr(), weight.data_ptr(), bias.data_ptr(),
            self._zeros.data_ptr(), self._ones[rows.dtype].data_ptr(),
            self._pool.data_ptr() + self._layout.offset(layer, part), self._layout.state_bytes, channels // lanes,
            *self._words_of_tokens(),
        )  # fmt: skip
        kernel = state_convolution.state_convolution_kernel(
            int(rows.dtype == torch.bfloat16), lanes, len(weight), _ENDINGS[activation]
        )
        if plan.num_computed:
            kernel.run(self._convolution_parameters, plan.num_computed, (self._sizes_of_convolution,))
        return out

    def delta_rule(
        self, layer: int, part: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        log_decay: torch.Tensor, beta: torch.Tensor, *, scale: float, normalizes: bool,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Advance by the gated delta rule; see ``StateBackend``. ``out`` is [T, H, Dv]."""
        check_delta_rule(
            self._layout.layers[layer][part], self._current_plan(), query, key, value, log_decay, beta
        )  # fmt: skip
        form = columns.DELTA if log_decay.dim() == 2 else columns.DELTA_PER_KEY
        out, rates = self._output(value, out), (log_decay, self._signs[0], beta)
        self._advance(out, form, layer, part, (query, key, value), rates, scale=scale, normalizes=normalizes)
        return out

    def mamba2(
        self, layer: int, part: int, x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor,
        c: torch.Tensor, d: torch.Tensor, *, out: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Advance as Mamba 2 does; see ``StateBackend``. ``out`` is [T, H, P]."""
        check_mamba2(self._layout.layers[layer][part], self._current_plan(), x, dt, a, b, c, d)
        out = self._output(x, out)
        self._advance(out, columns.MAMBA2, layer, part, (c, b, x), (dt, a, dt), d)
        return out

    def mamba1(
        self, layer: int, part: int, x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor,
        c: torch.Tensor, d: torch.Tensor, *, out: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Advance as Mamba 1 does; see ``StateBackend``. ``out`` is [T, C]."""
        check_mamba1(self._layout.layers[layer][part], self._current_plan(), x, dt, a, b, c, d)
        out = self._output(x, out)
        # Shape: one head that has all channels as its columns.
        rows = c[:, None], b[:, None], x[:, None]
        self._advance(out[:, None], columns.MAMBA1, layer, part, rows, (dt, a, dt), d)
        return out

    def decaying_attention(
        self, layer: int, part: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor,
        *, scale: float = 1.0, out: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Advance by attention whose past decays; see ``StateBackend``. ``out`` is [T, H, Dv]."""
        check_decaying_attention(self._layout.layers[layer][part], self._current_plan(), query, key, value, decay)
        out, rates = self._output(value, out), (decay, self._signs[1], decay)
        self._advance(out, columns.ATTENTION, layer, part, (query, key, value), rates, scale=scale)
        return out

    def linear_recurrence(
        self, layer: int, part: int, x: torch.Tensor, decay: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Advance numbers of channels that decay; see ``StateBackend``. ``out`` is [T, C]."""
        check_linear_recurrence(self._layout.layers[layer][part], self._current_plan(), x, decay)
        out = self._output(x, out)
        # Shape: one head whose columns are the channels, and whose only row is taken as it is. All tokens have the same
        # key, also those of a recorded call that goes on to more of them.
        ones = self._ones[x.dtype].as_strided((len(x), 1, 1), (0, 0, 1))
        self._advance(out[:, None], columns.CHANNELS, layer, part, (ones, ones, x[:, None]), (decay, decay, decay))
        return out

    def _advance(
        self,
        out: torch.Tensor,
        form: int,
        layer: int,
        part: int,
        rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rates: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        passed: torch.Tensor | None = None,
        *,
        scale: float = 1.0,
        normalizes: bool = False,
    ) -> None:
        """Run the kernel: ``rows`` are queries, keys and values, ``rates`` are rates, exponents and factors."""
        query, key, value = rows
        of_tokens, exponents, factors = rates
        heads, width, size = value.shape[1], value.shape[2], query.shape[2]
        if size > outer_products.MOST_ROWS:
            raise InvalidConfig(f"size of a key: got {size}, allowed are at most {outer_products.MOST_ROWS}.")
        # Why not strides: those of one token may be anything, and a recorded call goes on to more tokens.
        steps = [0 if form == columns.ATTENTION else rates[0].nbytes for rates in (of_tokens, factors)]
        parameters = self._parameters
        parameters.fill(
            *_places(query), *_places(key), *_places(value), out.data_ptr(), of_tokens.data_ptr(),
            steps[0], exponents.data_ptr(), factors.data_ptr(), steps[1],
            0 if passed is None else passed.data_ptr(), heads, heads // query.shape[1], width, int(normalizes),
            self._pool.data_ptr() + self._layout.offset(layer, part), self._layout.state_bytes, self._zeros.data_ptr(),
            *self._of_rows, self._columns_at_once(heads, width, size),
        )  # fmt: skip
        for word, number in ((outer_products.SCALE, scale), (outer_products.KEY_SCALE, 1.0)):
            parameters.set_float(word - parameters.FIRST, number)
        kernels = self._kernels(form, int(value.dtype == torch.bfloat16), size, width)
        resize = self._sizes_of_products, heads, width, size, *(kernel.address for kernel in kernels)
        if self._current_plan().num_computed:
            kernels[self._streams].run(parameters, self._num_items(heads, width, size), resize)

    def _kernels(self, form: int, is_bf16: int, size: int, width: int) -> tuple[Kernel, ...]:
        """The kernel, and the one that writes states past the caches, which is the same where none may or will.

        Why both at once, and by the model alone: no step of more rows waits for a compiler later.
        """
        variant = form, is_bf16, size, *outer_products.group_vectors(width, size)
        # Safety: such a write takes addresses on cache lines only.
        is_aligned = width % LANES == 0 and self._pool.data_ptr() % LINE == 0
        is_large = self._layout.state_bytes >= outer_products.STREAMED_BYTES // _MOST_ROWS
        streams = is_aligned and is_large and has_fused_vectors()
        return tuple(outer_products.outer_product_kernel(*variant, may) for may in (0, int(streams)))

    def _output(self, like: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
        """Return the given output, or a new one, with zeros for padding."""
        plan, out = self._current_plan(), given
        if out is None:
            out = torch.empty_like(like, memory_format=torch.contiguous_format)
        check_output(out, like)
        if plan.num_computed < plan.num_tokens:
            out[plan.num_computed :] = 0
        return out

    def _words_of_tokens(self) -> Words:
        num_tokens = self._current_plan().num_computed
        return self._of_tokens, *self._of_rows[1:4], num_tokens, rows_at_once(num_tokens)

    def _sizes_of_convolution(self, shape: StepShape) -> Sizes:
        words = self._words_of_tokens()
        return Sizes([*enumerate(words, state_convolution.ROW_OF_TOKENS)], words[-2])

    def _sizes_of_products(self, shape: StepShape, heads: int, width: int, size: int, *entries: int) -> Sizes:
        words = *self._of_rows, self._columns_at_once(heads, width, size)
        items = self._num_items(heads, width, size)
        return Sizes([*enumerate(words, outer_products.ROWS)], items, entries[self._streams])

    def _num_items(self, heads: int, width: int, size: int) -> int:
        return self._of_rows[-1] * heads * (width // self._columns_at_once(heads, width, size))

    def _columns_at_once(self, heads: int, width: int, size: int) -> int:
        return outer_products.columns_at_once(width, size, heads * self._longest_rows, num_threads())

    def _current_plan(self) -> StatePlan:
        if self._plan is None:
            raise InternalError("states: plan was not called before they were to be advanced.")
        return self._plan


def _places(rows: torch.Tensor) -> Words:
    """Where rows [T, heads, size] lie: their address, bytes from token to token and from head to head."""
    return rows.data_ptr(), rows.stride(0) * rows.itemsize, rows.stride(1) * rows.itemsize
