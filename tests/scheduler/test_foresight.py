"""Steps that are booked before their tokens are known."""

from __future__ import annotations

import pytest

from pagedcore.errors import InternalError
from support.doubles import make_scheduler, make_sequence


def test_no_key_of_a_block_is_made_of_a_token_that_is_not_known() -> None:
    """A plan may ask for the keys of blocks to come; those of tokens that only stand for others are forgotten."""
    scheduler, sequence = make_scheduler(num_blocks=8, block_size=4), make_sequence([1, 2, 3], max_tokens=4)
    scheduler.add_sequences(sequence)
    plan = scheduler.schedule()
    scheduler.reserve(plan, is_queued=True)
    scheduler.foresee(plan)
    assert sequence.token_ids == [1, 2, 3, -1]
    with pytest.raises(InternalError, match="not known"):
        scheduler.snapshot()
    hasher = scheduler.kv_cache.device.hasher
    hasher.extend(sequence.block_keys, sequence.block_root, sequence.token_ids, 1)
    scheduler.recall()
    assert (sequence.token_ids, sequence.block_keys) == ([1, 2, 3], [])
    (new,) = scheduler.read({sequence.sequence_id: 9})
    assert (new.token_id, new.finish_reason, sequence.token_ids) == (9, None, [1, 2, 3, 9])
    assert scheduler.has_landed
