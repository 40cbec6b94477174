"""The check at load that a model computes the same through paged attention as it does by itself.

Owns the twelve tokens, the schedules they go through and the comparison. It catches what no other check knows:
an architecture that keeps state, ignores positions, or bends attention in a way that never reaches the attention
function. It also finds out whether results depend on the schedule bit for bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from pagedcore.errors import ModelNotSupported
from pagedcore.execution.ragged_batch import assemble
from pagedcore.models.families.model_facts import format_and_device
from pagedcore.protocols import RaggedRows

Forward = Callable[[RaggedRows], torch.Tensor]

_NUM_TOKENS: Final = 12
_CHUNK: Final = 7
_BEGUN: Final = 5
"""Tokens of a third sequence before it goes on token by token."""
_NUM_SEQUENCES: Final = 3
_NUM_ROWS: Final = 10
"""Of all batches together."""

_TOLERANCE: Final = {torch.float32: 2e-3, torch.float16: 0.05, torch.bfloat16: 0.15}
"""Largest relative difference of one token's logits, by number format: summation order, not a different function."""
QUANTIZED_TOLERANCE: Final = 0.15
"""The same at least where rows may be quantised: a difference in the last bit can round a number to its neighbour."""
INT8_KV_TOLERANCE: Final = 0.4
"""The same at least with KV in int8, which is compared with KV in the model's format."""
_LARGEST: Final = 2.0**40
"""What a module may give at most: a million times what trained models have. From 2**64 on, the squares that a norm sums
are not finite and its result is zeros, which would pass for logits; and of scores beyond 2**30 attention makes NaN."""
_OUTLIERS: Final = 0.25
"""Share of the tokens that may differ more in a coarse format, where a router's near tie can send a token elsewhere."""


class SelfTest:
    """The test of one model: its tokens, spread over the vocabulary, and what the model computes for them by itself."""

    def __init__(self, model: Any, block_size: int, least_tolerance: float = 0.0) -> None:
        """Compute the expected logits [12, vocabulary] with a causal language model whose attention is its own, and
        note the largest number of each module.

        Its linear layers are its own too or have the quantised products of the paged path, which were compared with
        their weights one by one. ``least_tolerance`` is that of what the model does not do by itself.
        """
        vocab_size = model.get_input_embeddings().num_embeddings
        self._tokens = (np.arange(_NUM_TOKENS, dtype=np.int64) * 7919 + 17) % vocab_size
        self._dtype, device = format_and_device(model)
        input_ids = torch.from_numpy(self._tokens)[None].to(device)
        with _outputs_seen(model) as seen:
            self._expected: torch.Tensor = model(input_ids=input_ids, use_cache=False).logits[0].float().cpu()
        largest = torch.stack([*seen.values()]).tolist() if seen else []
        self._largest = [*zip(seen, largest, strict=True)]
        """The largest magnitude that each module gave, in their order."""
        self._is_coarse = least_tolerance > 0 or self._dtype != torch.float32
        self._tolerance = max(_TOLERANCE[self._dtype], least_tolerance)
        self._block_size = block_size
        self.num_blocks = _NUM_SEQUENCES * -(-_NUM_TOKENS // block_size)
        """Blocks that the test needs; those of a sequence run backwards."""
        self._tables = np.split(np.arange(self.num_blocks, dtype=np.int32)[::-1], _NUM_SEQUENCES)
        self.num_states = _NUM_ROWS
        """State blocks that it needs: each row writes its own."""
        self._states: dict[tuple[int, int], int] | None = None
        """Where the state of a sequence behind so many tokens is."""

    def check(self, forward: Forward, *, keeps_states: bool = False) -> bool:
        """Compare the paged path, in two chunks, with the expected logits; ``forward`` needs ``num_blocks`` blocks, and
        ``num_states`` of states if the model keeps any.

        Returns:
            Whether the logits were the same bits chunked, whole, and token by token, in company of three kinds.

        Raises:
            ModelNotSupported: they differ by more than rounding; the message says where and by how much.
        """
        self._states, self._num_written = {} if keeps_states else None, 0
        # Why so few forwards: each reads all weights, which takes most of its time. The first has the most rows, so
        # that a decoder which repeats what it has noted of a step does so from the second on.
        run, last = partial(self._run, forward), (1, _NUM_TOKENS - 1, _NUM_TOKENS)
        first = run((0, 0, _CHUNK), (1, 0, _NUM_TOKENS), (2, 0, _BEGUN))
        # Why the third: to compute the last token once more takes the state before it.
        before_last = ((1, 0, _NUM_TOKENS - 1),) if keeps_states else ()
        second = run((0, _CHUNK, _NUM_TOKENS), (2, _BEGUN, _BEGUN + 1), *before_last)
        chunked, begun = torch.cat([first[:_CHUNK], second[: _NUM_TOKENS - _CHUNK]]), second[_NUM_TOKENS - _CHUNK]
        self._compare(chunked)
        decoded = [run((2, place, place + 1), last) for place in (_BEGUN + 1, _BEGUN + 2)]
        return (
            torch.equal(chunked, first[_CHUNK : _CHUNK + _NUM_TOKENS])
            and torch.equal(chunked[:_BEGUN], first[-_BEGUN:]) and torch.equal(chunked[_BEGUN], begun)
            and all(torch.equal(chunked[[_BEGUN + 1 + number, -1]], rows) for number, rows in enumerate(decoded))
        )  # fmt: skip

    def _run(self, forward: Forward, *rows: tuple[int, int, int]) -> torch.Tensor:
        """Compute a batch of (sequence, start, end) of the tokens, with the logits of every token wanted."""
        ids, starts, ends = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
        reads = writes = None
        if self._states is not None:
            reads = np.array([self._states.get((one, start), -1) for one, start, _ in rows], dtype=np.int32)
            writes = np.arange(len(rows), dtype=np.int32) + self._num_written
            self._states |= {(one, end): int(block) for (one, _, end), block in zip(rows, writes, strict=True)}
            self._num_written += len(rows)
        batch = assemble(
            np.concatenate([self._tokens[start:end] for _, start, end in rows]), starts, ends - starts,
            seq_ids=ids, tables=[self._tables[i] for i in ids], block_size=self._block_size,
            state_reads=reads, state_writes=writes,
        )
        # Why a copy: the next forward may overwrite what this one returns.
        return forward(dataclasses.replace(batch, logits_rows=np.arange(batch.num_tokens))).clone()

    def _compare(self, actual: torch.Tensor) -> None:
        """Compare per token: the distance of the logits, relative to their spread around their mean."""
        expected, tolerance = self._expected, self._tolerance
        for name, value in self._largest:
            if not value <= _LARGEST:
                raise ModelNotSupported(
                    f"model: self-test failed. In a plain forward {name} gives numbers of up to {value:.3g}, needed "
                    f"are finite ones up to {_LARGEST:.3g}. Its weights, or those before it, are damaged."
                )
        if not expected.isfinite().all():
            raise ModelNotSupported("model: self-test failed. Its own logits are not finite; its weights are damaged.")
        spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1).clamp_min(1e-30)
        error = (actual - expected).norm(dim=-1) / spread
        allowed = int(_OUTLIERS * _NUM_TOKENS) if self._is_coarse else 0
        wrong = (~(error <= tolerance)).nonzero().flatten().tolist()
        if len(wrong) > allowed:
            where = "the second chunk" if wrong[0] >= _CHUNK else "the first chunk"
            raise ModelNotSupported(
                f"model: self-test failed. Logits of {len(wrong)} of {_NUM_TOKENS} tokens differ from a plain forward "
                f"by up to {error.max().item():.3g} of their spread (allowed {tolerance}), from token {wrong[0]} on, "
                f"in {where}. {self._why(actual)}"
            )

    def _why(self, actual: torch.Tensor) -> str:
        if actual.isfinite().all() or not self._largest:
            return "The architecture does something that paged attention does not see."
        name, value = max(self._largest, key=lambda one: one[1])
        return f"They are not finite; the largest numbers of that forward are {value:.3g}, of {name}."


@contextmanager
def _outputs_seen(model: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Note the largest magnitude that each module gives, NaN if it gives one; nothing waits for a GPU."""
    seen: dict[str, torch.Tensor] = {}

    def note(name: str, _: Any, __: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.is_floating_point() and output.numel():
            largest = output.detach().abs().amax().float()
            seen[name] = torch.maximum(seen.get(name, largest), largest)

    # Why not the last: a part of a product of several layers takes its numbers from the whole.
    handles = [module.register_forward_hook(partial(note, name)) for name, module in model.named_modules()
               if name and not name.endswith(".whole")]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
