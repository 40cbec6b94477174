"""Sources of drafts that are as wrong, and as right, as a test wants, and an engine that always asks them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from pagedcore.drafting.offers import Chances
from pagedcore.engine.engine import Engine
from pagedcore.protocols import ForcedTokens
from pagedcore.scheduler.draft_costs import DraftCosts
from pagedcore.scheduler.speculation import DraftSource, Speculation
from pagedcore.scheduler.step_time import StepTimeModel

Continues = Callable[[Sequence[int], int], Sequence[int]]
"""Says how tokens go on, for so many at most."""


class Adversary:
    """Proposes what will follow, as far as it knows, with mistakes, ends too early and goes on behind the end.

    What it says depends on the seed, the sequence and its length alone.
    """

    def __init__(self, knows: Continues, vocab_size: int, seed: int = 0) -> None:
        self._knows, self._vocab_size, self._seed = knows, vocab_size, seed
        self.live: set[int] = set()

    def begin(self, sequence_id: int, root: bytes, token_ids: Sequence[int]) -> None:
        """Note that it is live."""
        self.live.add(sequence_id)

    def forget(self, sequence_id: int, token_ids: Sequence[int], keep: bool) -> None:
        """Note that it is not."""
        self.live.discard(sequence_id)

    def chances(self, sequence_id: int, token_ids: Sequence[int]) -> Chances:
        """Promise everything."""
        assert sequence_id in self.live
        return Chances(1.0, 1.0)

    def observe(self, sequence_id: int, num_tokens: int, num_offered: int, num_kept: int) -> None:
        """Learn nothing."""
        assert sequence_id in self.live
        assert 0 <= num_kept <= num_offered

    def propose(self, sequence_id: int, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """Propose up to ``most`` tokens."""
        assert sequence_id in self.live
        assert most > 0
        rng = random.Random(f"{self._seed} {sequence_id} {len(token_ids)}")
        if rng.random() < 0.2:
            return ()
        drafts = list(self._knows(token_ids, most)) if rng.random() < 0.8 else []
        drafts += [rng.randrange(self._vocab_size) for _ in range(most - len(drafts))]
        if rng.random() < 0.5:
            drafts[rng.randrange(len(drafts))] = rng.randrange(self._vocab_size)
        return tuple(drafts[: rng.choice([most, rng.randint(1, most)])])


class _FirstCosts(DraftCosts):
    """What is thought before anything was measured, for ever: no number of drafts depends on the machine."""

    def observe(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """Learn nothing."""


def let_guess(
    engine: Engine, source: DraftSource, vocab_size: int, most: int = 6, forced: ForcedTokens | None = None
) -> Speculation:
    """Let an engine have drafts of a source wherever there is room: steps seem to cost what they do at first."""
    speculation = Speculation(source, _FirstCosts(StepTimeModel()), vocab_size, most, forced)
    engine.scheduler.speculation = speculation
    return speculation
