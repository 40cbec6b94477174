"""Which sequences are preempted when a running one lacks blocks, and how: the cheapest choice that is expected to work.

A pure choice over numbers from ``step_planner``; estimates come from ``cost_model``. A victim's tail can be freed, its
blocks can move to the host or be computed again, or the asker can wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Final

from pagedcore.kv_cache.host_cache import Direction
from pagedcore.scheduler.cost_model import CostModel
from pagedcore.scheduler.plan import Preemption, PreemptionKind
from pagedcore.sequence import Sequence

MAX_PREEMPTIONS: Final = 8
"""A sequence that was preempted so often is not chosen while another one can be."""
WINDOW: Final = 8
"""Victims that are compared; the others are considered when these are not enough."""
_KEEPING_FACTOR: Final = 2.0
"""The cost of a background copy beside the transfer: booking its blocks, and the CPU caches it displaces.
Measured with ``benchmarks/memory_pressure.py``: in all two to four times the transfer."""


@dataclass(frozen=True, slots=True)
class Victim:
    """A running sequence that may be preempted."""

    sequence: Sequence
    num_blocks: int
    """Blocks that become available, those planned for it in this step included."""
    num_held_blocks: int
    """Blocks it holds now and will need again."""
    num_blocks_to_host: int | None
    """Blocks that would be copied to the host; ``None`` when it has no room for them."""


@dataclass(frozen=True, slots=True)
class PreemptionRules:
    """How victims are chosen in one engine."""

    mode: str
    """"auto" for the cheapest way, or "swap", "shrink", "recompute" or "wait" for always the same one."""
    costs: CostModel
    block_size: int

    def choose(
        self, lacking: int, victims: Callable[[], Iterable[Victim]], *, may_wait: bool, num_steps_to_wait: int | None,
        num_running: int,
    ) -> list[Preemption]:
        """Choose victims that cover a shortage; an empty list means that the asker waits.

        Args:
            lacking: blocks.
            victims: yields candidates, the one to preempt first in front.
            may_wait: whether another sequence can run while the asker waits.
            num_steps_to_wait: until a sequence ends that needs no further block; ``None`` if there is none.
            num_running: sequences, the asker included.
        """
        if may_wait and self.mode == "wait":
            return []
        source = victims()
        spared = (victim for victim in source if victim.sequence.num_preemptions < MAX_PREEMPTIONS)
        chosen = self._cover(lacking, list(islice(spared, WINDOW)))
        if not chosen:
            # Why: several small victims, or often preempted ones, are better than a standstill.
            chosen = [] if may_wait else self._cover(lacking, list(victims()))
        if may_wait and self.mode == "auto" and num_steps_to_wait is not None:
            wait_s = self.costs.wait_s(num_steps_to_wait, num_running, self.block_size)
            return chosen if wait_s >= sum(one.estimated_s for one in chosen) else []
        return chosen

    def cheapest(self, victim: Victim, lacking: int) -> Preemption:
        """Return the cheapest way to preempt a victim that leaves as much of it as ``lacking`` blocks allow."""
        return min(self._options(victim, lacking), key=attrgetter("estimated_s"))

    def is_worth_loading(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether to load so many blocks that the host has, rather than to compute so many tokens."""
        return self.mode != "auto" or self.costs.loading_saves_s(num_blocks, num_tokens) >= 0

    def is_worth_keeping(self, num_blocks: int, num_tokens: int, share: float) -> bool:
        """Whether to copy so many finished blocks to the host, a share of which will be asked for again instead of
        computing so many tokens.
        """
        if self.mode != "auto":
            return True
        copying_s = _KEEPING_FACTOR * self.costs.moves[Direction.OUT].seconds(self.costs.units(num_blocks, 1))
        return copying_s <= share * self.costs.loading_saves_s(num_blocks, num_tokens)

    def _cover(self, lacking: int, victims: ListOf[Victim]) -> list[Preemption]:
        """Take the cheapest single victim that is enough, or else the cheapest by block until it is enough."""
        options = [(victim, self.cheapest(victim, lacking)) for victim in victims]
        # Why: the victims come last first, and sorting is stable, so the last one is chosen among equals.
        enough = [option for option in options if option[0].num_blocks >= lacking]
        if enough:
            return [min(enough, key=lambda option: (option[1].estimated_s, option[0].num_held_blocks))[1]]
        chosen: list[Preemption] = []
        for victim, preemption in sorted(options, key=lambda option: option[1].estimated_s / option[0].num_blocks):
            chosen.append(preemption)
            lacking -= victim.num_blocks
            if lacking <= 0:
                return chosen
        return []

    def _options(self, victim: Victim, lacking: int) -> Iterable[Preemption]:
        if self.mode in ("auto", "swap") and victim.num_blocks_to_host is not None:
            seconds = self.costs.swap_s(victim.num_blocks_to_host, victim.num_held_blocks)
            yield Preemption(victim.sequence, PreemptionKind.SWAP, seconds)
            if self.mode == "swap":
                return
        num_computed = victim.sequence.num_computed_tokens
        num_left = min(num_computed, max(0, victim.num_held_blocks - lacking) * self.block_size)
        # Why: shrinking frees the tail only, unless that is everything; without room on the host it is what is left.
        if num_left and self.mode != "recompute":
            lost_s = self.costs.shrink_s(num_computed - num_left, num_left)
            yield Preemption(victim.sequence, PreemptionKind.SHRINK, lost_s, num_left)
        else:
            yield Preemption(victim.sequence, PreemptionKind.RECOMPUTE, self.costs.compute_s(num_computed))
