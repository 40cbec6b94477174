"""Sources of drafts that are as wrong, and as right, as a test wants, and an engine that always asks them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedcore.config.engine_config import EngineConfig
from pagedcore.drafting.offers import Chances
from pagedcore.engine.draft_models import LoadedDraftModel
from pagedcore.engine.engine import Engine
from pagedcore.execution.draft_model import DraftModel
from pagedcore.protocols import FloatArray, ForcedTokens
from pagedcore.scheduler.draft_costs import DraftCosts
from pagedcore.scheduler.speculation import DraftSource, Speculation
from pagedcore.scheduler.step_time import StepTimeModel
from support.doubles import VOCAB_SIZE, ToyBackend

Continues = Callable[[Sequence[int], int], Sequence[int]]
"""Says how tokens go on, for so many at most."""


class Adversary:
    """Proposes what will follow, as far as it knows, with mistakes, ends too early and goes on behind the end.

    What it says depends on the seed, the sequence and its length alone.
    """

    def __init__(self, knows: Continues, vocab_size: int, seed: int = 0, *, promises: float = 1.0) -> None:
        self._knows, self._vocab_size, self._seed, self._promises = knows, vocab_size, seed, promises
        self.live: set[int] = set()

    def begin(self, sequence_id: int, root: bytes, token_ids: Sequence[int]) -> None:
        """Note that it is live."""
        self.live.add(sequence_id)

    def forget(self, sequence_id: int, token_ids: Sequence[int], keep: bool) -> None:
        """Note that it is not."""
        self.live.discard(sequence_id)

    def chances(self, sequence_id: int, token_ids: Sequence[int]) -> Chances:
        """Promise everything, or what was said."""
        assert sequence_id in self.live
        return Chances(self._promises, self._promises)

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


class FirstCosts(DraftCosts):
    """What is thought before anything was measured, for ever: no number of drafts depends on the machine."""

    def observe(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """Learn nothing."""


def let_guess(
    engine: Engine, source: DraftSource, vocab_size: int, most: int = 6, forced: ForcedTokens | None = None,
    model: DraftModel | None = None,
) -> Speculation:
    """Let an engine have drafts of a source wherever there is room: steps seem to cost what they do at first."""
    speculation = Speculation(source, FirstCosts(StepTimeModel()), vocab_size, most, forced, model)
    engine.scheduler.speculation = speculation
    return speculation


class Mistaken(ToyBackend):
    """A toy that says something else than others behind some texts, and reads its slots as closely."""

    def __init__(self, share: float = 0.2) -> None:
        super().__init__()
        self._share = share

    def logits_after(self, token_ids: npt.NDArray[np.int64]) -> FloatArray:
        """Turn some rows round."""
        logits = super().logits_after(token_ids)
        is_wrong = random.Random(token_ids.tobytes()).random() < self._share
        return np.ascontiguousarray(logits[::-1]) if is_wrong else logits


def draft_model(
    backend: Any, vocab_size: int = VOCAB_SIZE, *, num_blocks: int = 8, block_size: int = 4, **settings: Any
) -> DraftModel:
    """Make a model that drafts, with a small pool; a forward of it seems to take no time."""
    backend.allocate_kv(num_blocks, block_size)
    config = EngineConfig(**{"max_num_seqs": 1, "max_num_batched_tokens": 16, **settings})
    model = LoadedDraftModel(backend, 0).with_pool(num_blocks, block_size, vocab_size, config)
    model._clock = lambda: 0.0
    return model


def assert_forgotten(model: DraftModel) -> None:
    """It knows no sequence, and no block of its pool is held."""
    assert not model._tracks
    assert model._blocks.num_tables == 0
    assert model._blocks.num_available_blocks == model._blocks.num_blocks
