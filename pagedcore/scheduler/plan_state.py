"""What one plan has taken so far, and the blocks, tokens and rows that are left for the rest.

``admission`` plans the waiting sequences on it, ``step_planner`` the running ones. It reads queues and tables and
changes none of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Set
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, replace

from pagedcore.kv_cache.kv_cache_manager import KVCacheManager
from pagedcore.kv_cache.prefix_match import NO_MATCH, PrefixMatch
from pagedcore.scheduler.plan import Preemption, ScheduledRow, SwapIn
from pagedcore.scheduler.policies import Policy
from pagedcore.scheduler.preemption import PreemptionRules
from pagedcore.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PlanningRules:
    """What a plan must respect; fixed for the life of a scheduler."""

    max_num_seqs: int
    max_num_batched_tokens: int
    is_guaranteed: bool
    """Whether admission counts every sequence at its maximum length, so that none is ever preempted."""
    policy: Policy
    preemption: PreemptionRules
    max_scored_tokens: int
    """Positions of a step whose logits are reported, besides one for each sequence: a row of logits is large."""
    prefill_share: float = 1.0
    """Largest share of the token budget for prefill chunks while running sequences decode; one token at least."""
    phase: str = "mixed"
    """Which rows the step may have: "mixed", or only those of "prefill" or "decode"."""


class PlanState:
    """One plan in the making, used once.

    Invariant: ``free`` is what the pool could still give if all rows planned so far had their blocks.
    """

    def __init__(
        self, rules: PlanningRules, kv_cache: KVCacheManager, running: Iterable[Sequence], waiting: Iterable[Sequence],
        awaiting: tuple[int, ...] = (),
    ) -> None:
        self.rules, self.kv_cache = rules, kv_cache
        self.blocks, self.host = kv_cache.device, kv_cache.host
        self.running, self.waiting, self.awaiting = list(running), list(waiting), awaiting
        """Who runs, who may start, and the ids of those who wait for their adapters and are not planned for."""
        self.free, has_host = self.blocks.num_available_blocks, self.host.num_blocks > 0
        self.arriving = self.host.num_leaving_blocks if has_host else 0
        """Blocks that will be available after this step and are not promised yet."""
        self.room_on_host = self.host.num_available_blocks if has_host else 0
        self.state_room_on_host = self.host.states.num_available if has_host else 0
        self.budget, self._num_scorable = rules.max_num_batched_tokens, rules.max_scored_tokens
        self.rows: dict[int, ScheduledRow] = {}
        self.admitted: list[Sequence] = []
        self.preempted: dict[int, Preemption] = {}
        self.freed: dict[int, Sequence] = {}
        self.swap_ins: list[SwapIn] = []
        self.to_draft: list[tuple[Sequence, int]] = []
        self.num_stalled_rows = self.num_deferred = self.num_drafts = 0
        self.capped: list[int] = []
        self.stopped_by = ""
        self._adopted: set[int] = set()
        self._holders: list[Sequence] | None = None

    def is_in_phase(self, sequence: Sequence, start: int) -> bool:
        """Whether this step may have a row of a sequence from ``start`` on."""
        phase = self.rules.phase
        is_decode = len(sequence.token_ids) - start == 1 and start >= sequence.num_prompt_tokens
        return phase == "mixed" or is_decode == (phase == "decode")

    def has_states_for(self, candidate: Sequence) -> bool:
        """Whether a waiting sequence can have the states that it needs to start, or to be loaded."""
        return True

    def num_blocks_taken(self, match: PrefixMatch) -> int:
        """Available blocks that are not available once a match is held; a copied tail counts until the copy."""
        return sum(
            block_id not in self._adopted and not self.blocks.is_held(block_id) for block_id in match.held_blocks
        )

    def num_scorable_of(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many of the next ``num_tokens`` of a sequence that reports its prompt this step may compute."""
        # Why: at least one, so that every sequence advances however many prompts are reported at a time.
        return min(num_tokens, max(1, self._num_scorable)) if sequence.is_scored else num_tokens

    def keys_to_come(self, sequence: Sequence, start: int) -> ListOf[bytes]:
        """Return the keys of what a sequence computes for others from a position on: its full blocks of known tokens.
        """
        num_blocks = len(sequence.token_ids) // self.blocks.block_size
        first = start // self.blocks.block_size
        if first >= num_blocks:
            return ()
        self.blocks.hasher.extend(sequence.block_keys, sequence.block_root, sequence.token_ids, num_blocks)
        return sequence.block_keys[first:num_blocks]

    def lacks_any(self, candidate: Sequence, match: PrefixMatch, keys: Set[bytes]) -> bool:
        """Whether what a waiting sequence with a match lacks next is among these: a full block."""
        size = self.blocks.block_size
        next_block = match.num_tokens // size
        if (next_block + 1) * size > candidate.num_reusable_tokens:
            return False
        self.blocks.hasher.extend(candidate.block_keys, candidate.block_root, candidate.token_ids, next_block + 1)
        return candidate.block_keys[next_block] in keys

    def has_room_for(self, candidate: Sequence, without: Collection[Sequence] = ()) -> bool:
        """Whether there is what a waiting sequence needs beside blocks, without some of those that run."""
        return True

    def add_row(
        self, sequence: Sequence, start: int, num_tokens: int, num_blocks: int, match: PrefixMatch = NO_MATCH
    ) -> None:
        """Plan a row that needs ``num_blocks`` new blocks besides what it shares."""
        self.rows[sequence.sequence_id] = ScheduledRow(sequence, start, num_tokens, num_blocks, match)
        self.budget -= num_tokens
        if sequence.prompt_logprobs is not None and sequence.is_scored:
            self._num_scorable -= num_tokens
        self.free -= num_blocks
        if match is not NO_MATCH:
            self.free -= self.num_blocks_taken(match)
            self._adopted.update(match.held_blocks)

    @property
    def num_draftable(self) -> int:
        """Drafts that the step has tokens for, and room for their logits."""
        return min(self.budget, self._num_scorable)

    @property
    def num_unused_blocks(self) -> int:
        """Blocks that hold nothing, and are not planned."""
        num_planned = self.blocks.num_available_blocks - self.free
        return max(0, self.blocks.num_unused_blocks - num_planned)

    def add_drafts(self, row: ScheduledRow, drafts: tuple[int, ...]) -> None:
        """Let a planned row compute drafts behind its tokens, in unused blocks where it needs further ones."""
        sequence, end = row.sequence, row.end + len(drafts)
        needed = self.blocks.num_blocks_needed(sequence.sequence_id, end)
        self.rows[sequence.sequence_id] = replace(
            row, num_tokens=row.num_tokens + len(drafts), num_new_blocks=needed, drafts=drafts)
        self.budget -= len(drafts)
        self._num_scorable -= len(drafts)
        self.num_drafts += len(drafts)
        self.free -= needed - row.num_new_blocks

    def num_planned_blocks(self, sequence: Sequence) -> int:
        """New blocks that the row of a running sequence gets in this step."""
        row = self.rows.get(sequence.sequence_id)
        return row.num_new_blocks if row is not None else 0

    def holders(self) -> Iterator[Sequence]:
        """Waiting sequences that keep their blocks so far, last one first."""
        if self._holders is None:
            # Why: a long queue is searched once in a step, not for every row that lacks a block, and only if there are
            # more tables than those of what runs.
            num_running = sum([self.blocks.num_blocks_of(one.sequence_id) > 0 for one in self.running])
            found = self.waiting if self.blocks.num_tables > num_running else []
            self._holders = [one for one in reversed(found) if self.blocks.num_blocks_of(one.sequence_id)]
        return (sequence for sequence in self._holders if sequence.sequence_id not in self.freed)

    def free_holder(self, holder: Sequence) -> int:
        """Plan to free a holder's blocks, and return how many will be available."""
        self.freed[holder.sequence_id] = holder
        return len(self.blocks.own_blocks_of(holder.sequence_id))
