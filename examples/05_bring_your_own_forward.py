"""A model of your own: anything with the members of ``ModelBackend`` is scheduled, batched, preempted and streamed.

This one is NumPy and knows one thing: the next token is the sum of the last two, modulo 100. What it "caches" is the
token itself, in the slot the engine assigned, and it reads the second last one back through the block table.
"""

import numpy as np

from pagedcore import Engine, SamplingParams
from pagedcore.protocols import FloatArray, RaggedRows


class FibonacciModel:
    """A language model of ten lines."""

    vocab_size = 100
    max_model_len = 256
    eos_token_ids: frozenset[int] = frozenset()
    block_size = 4
    kv_bytes_per_token = 8
    is_schedule_invariant = True

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Make one place per slot."""
        self.cache = np.zeros((num_blocks, block_size), dtype=np.int64)

    def forward(self, batch: RaggedRows) -> FloatArray:
        """Store the step's tokens in their slots, then predict after each row's last token."""
        num_tokens = batch.query_start[-1]
        self.cache.ravel()[batch.slot_mapping[:num_tokens]] = batch.token_ids[:num_tokens]
        rows = np.searchsorted(batch.query_start, batch.logits_rows, side="right") - 1
        before = batch.positions[batch.logits_rows] - 1
        block, offset = np.divmod(before, self.cache.shape[1])
        second_last = self.cache[batch.block_tables[rows, block], offset]
        logits = np.zeros((len(rows), self.vocab_size), dtype=np.float32)
        logits[np.arange(len(rows)), (batch.token_ids[batch.logits_rows] + second_last) % self.vocab_size] = 1.0
        return logits


def main() -> None:
    """Continue five sequences in a cache too small for them: some are preempted, none is wrong."""
    starts = [[1, 1], [2, 1], [1, 3, 4, 7], [5, 5], [34, 55]]
    with Engine.from_pretrained(FibonacciModel(), num_kv_blocks=10, max_num_seqs=4) as engine:
        for start, output in zip(starts, engine.generate(starts, SamplingParams(max_tokens=12)), strict=True):
            print(start, "->", list(output.outputs[0].token_ids))
        print(f"{engine.stats().num_preemptions} preemptions")


if __name__ == "__main__":
    main()
