"""Bugs of window blocks put in by hand: a few lives of a model that reads its windows there have to find each."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from pagedcore.kv_cache.block_manager import BlockManager
from pagedcore.kv_cache.window_blocks import WindowBlocks
from pagedcore.kv_cache.windowed_blocks import WindowedBlocks
from pagedcore.scheduler.plan_state import PlanState
from pagedcore.scheduler.window_rows import WindowPlanState
from pagedcore.sequence import Sequence
from scheduler_lives.laws import SimulationFailure
from scheduler_lives.simulator import Simulation

NUM_SEEDS = 150

Patch = pytest.MonkeyPatch


def passed_too_early(patch: Patch) -> None:
    """A window block is given up while the next token still reads it."""
    first_read = WindowedBlocks.first_read
    patch.setattr(WindowedBlocks, "first_read", lambda self, position: first_read(self, position + self.block_size))


def never_passed(patch: Patch) -> None:
    """What has left the window stays held."""
    patch.setattr(WindowedBlocks, "register", BlockManager.register)


def found_without_windows(patch: Patch) -> None:
    """A sequence begins behind blocks whose window blocks are gone."""
    patch.setattr(WindowedBlocks, "match", BlockManager.match)


def not_held(patch: Patch) -> None:
    """What a sequence begins behind is not held."""
    patch.setattr(WindowBlocks, "hold", lambda self, block_ids: None)


def not_copied(patch: Patch) -> None:
    """A block is copied without its window block."""
    patch.setattr(WindowedBlocks, "window_pairs", lambda self, pairs: [])


def outlives_its_block(patch: Patch) -> None:
    """A window block stays with a block whose contents were evicted."""
    patch.setattr(WindowBlocks, "forget", lambda self, block_id: None)


def shared_although_written(patch: Patch) -> None:
    """Whatever a sequence frees stays with its block, also where nobody can find that."""
    free = WindowBlocks.free

    def keeps(self: WindowBlocks, block_ids: Iterable[int], *, is_end: bool) -> None:
        is_registered, self._is_registered = self._is_registered, lambda block_id: True
        free(self, block_ids, is_end=is_end)
        self._is_registered = is_registered

    patch.setattr(WindowBlocks, "free", keeps)


def promised_to_all(patch: Patch) -> None:
    """Sequences start although nobody can promise them their window."""
    patch.setattr(WindowPlanState, "has_room_for", PlanState.has_room_for)


def leaked_by_a_rollback(patch: Patch) -> None:
    """Blocks that leave a table leave their window blocks behind."""
    def keeps(self: WindowedBlocks, sequence_id: int, num_blocks: int, *, is_minor: bool = False) -> int:
        return BlockManager._truncate(self, sequence_id, num_blocks, is_minor=is_minor)

    patch.setattr(WindowedBlocks, "_truncate", keeps)


def one_token_short(patch: Patch) -> None:
    """A chunk may take a window block more than there is."""
    limit = WindowPlanState._limit

    def longer(self: WindowPlanState, sequence: Sequence, start: int) -> int:
        return limit(self, sequence, start) + self.blocks.block_size

    patch.setattr(WindowPlanState, "_limit", longer)


MUTANTS = [passed_too_early, never_passed, found_without_windows, not_held, not_copied, outlives_its_block,
           shared_although_written, promised_to_all, leaked_by_a_rollback, one_token_short]


def live() -> None:
    for seed in range(NUM_SEEDS):
        Simulation(seed, has_faults=seed % 2 == 1, has_windows=True).run()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_simulation_finds_mutants_of_windows(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    """A bug of this kind cannot live through the ordinary test run."""
    mutant(monkeypatch)
    with pytest.raises(SimulationFailure):
        live()
