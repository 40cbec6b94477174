"""Bugs of states put in by hand: a few lives of a model whose logits follow from its states have to find each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import pytest

from pagedcore.execution.kv_transfers import KVTransfers
from pagedcore.kv_cache.block_manager import BlockManager
from pagedcore.kv_cache.host_cache import HostCache
from pagedcore.kv_cache.hybrid_blocks import HybridBlocks
from pagedcore.kv_cache.kv_cache_manager import KVCacheManager
from pagedcore.kv_cache.prefix_cache import Content
from pagedcore.kv_cache.state_blocks import StateBlocks
from scheduler_lives.engine_simulator import EngineSimulation
from scheduler_lives.laws import SimulationFailure
from scheduler_lives.simulator import hybrid_life

NUM_SEEDS = 200
CROWDED = 247
"""A life in which sequences are loaded while those that run need all other states."""
NUM_ENGINES = 60

Patch = pytest.MonkeyPatch


def written_where_it_is_read(patch: Patch) -> None:
    """A step overwrites the state that it begins from, so that what breaks off cannot be computed again."""
    begin = StateBlocks.begin

    def in_place(self: StateBlocks, rows: Iterable[tuple[int, int]]) -> None:
        begin(self, rows)
        self.written.update({number: self.current[number] for number in self.written if number in self.current})

    patch.setattr(StateBlocks, "begin", in_place)


def not_held(patch: Patch) -> None:
    """What a row begins from is not held while states are allocated for others."""
    begin = StateBlocks.begin

    def loosely(self: StateBlocks, rows: Iterable[tuple[int, int]]) -> None:
        rows = list(rows)
        begin(self, [(number, -1) for number, _ in rows])
        self.current.update((number, state_id) for number, state_id in rows if state_id >= 0)

    patch.setattr(StateBlocks, "begin", loosely)


def outlives_its_kv(patch: Patch) -> None:
    """A state stays findable when the KV before it has been evicted."""
    patch.setattr(StateBlocks, "forget", lambda self, key: None)


def never_advanced(patch: Patch) -> None:
    """A committed row keeps the state that it began from."""
    patch.setattr(StateBlocks, "advance", StateBlocks.go_back)


def leaked_by_a_rollback(patch: Patch) -> None:
    """A step that is rolled back does not give back what it would have written."""
    patch.setattr(HybridBlocks, "_undo_states", lambda self, demands: None)


def leaked_at_the_end(patch: Patch) -> None:
    """A sequence that leaves keeps its state."""
    patch.setattr(StateBlocks, "release", lambda self, number: self.go_back(number))


def kept_one_block_early(patch: Patch) -> None:
    """A state is found under the key of the block before."""
    keep = StateBlocks.keep

    def early(self: StateBlocks, content: Content, state_id: int, num_saved: int) -> bool:
        if not content.is_first:
            content = content._replace(key=content.parent_key, token_ids=(0,) * self.block_size)
        return keep(self, content, state_id, num_saved)

    patch.setattr(StateBlocks, "keep", early)


def begun_without_a_state(patch: Patch) -> None:
    """A prefix hit takes the KV that is there, whatever states are."""
    patch.setattr(HybridBlocks, "match", BlockManager.match)


def evicted_while_held(patch: Patch) -> None:
    """A kept state counts as unused although a sequence has it."""
    keep = StateBlocks.keep

    def idly(self: StateBlocks, content: Content, state_id: int, num_saved: int) -> bool:
        self._idle[state_id] = 0, 0
        self._sort_idle()
        return keep(self, content, state_id, num_saved)

    patch.setattr(StateBlocks, "keep", idly)


def left_behind(patch: Patch) -> None:
    """KV moves between the memories without its state."""
    patch.setattr(KVTransfers, "_copy_states", lambda self, direction, pairs: None)


def failed_copy_believed(patch: Patch) -> None:
    """A copy of states that failed counts as one that did not."""
    copy = KVTransfers._copy_states

    def boldly(self: KVTransfers, direction: Any, pairs: Any) -> None:
        with suppress(OSError):
            copy(self, direction, pairs)

    patch.setattr(KVTransfers, "_copy_states", boldly)


def not_pinned(patch: Patch) -> None:
    """The state of a sequence whose KV is pinned on the host may be evicted there."""
    patch.setattr(HostCache, "_arrived_state", lambda self, transfer: transfer.host_states[0])
    patch.setattr(HostCache, "free_pins", lambda self, number: self.free_references(self.pins.pop(number, ())))


def leaked_by_a_late_transfer(patch: Patch) -> None:
    """A transfer that is timed out keeps the states of the device."""
    patch.setattr(HostCache, "device_states_of", lambda self, transfer_id: ())


def loaded_without_room(patch: Patch) -> None:
    """A sequence is loaded whose state a running one needs for its next step."""
    patch.setattr(KVCacheManager, "has_states_for", lambda self, running, num_more: True)


MUTANTS: list[Callable[[Patch], None]] = [
    written_where_it_is_read, not_held, outlives_its_kv, never_advanced, leaked_by_a_rollback, leaked_at_the_end,
    kept_one_block_early, begun_without_a_state, evicted_while_held, left_behind, failed_copy_believed, not_pinned,
    leaked_by_a_late_transfer, loaded_without_room,
]


def drafts_kept_although_wrong(patch: Patch) -> None:
    """After drafts of which not all were right, the state behind all of them is the sequence's."""
    patch.setattr(StateBlocks, "go_back", StateBlocks.advance)


def back_without_the_positions(patch: Patch) -> None:
    """The state goes back to before the row, and the positions do not."""
    shorten = HybridBlocks.shorten

    def half(self: HybridBlocks, sequence: Any) -> None:
        num_computed = sequence.num_computed_tokens
        shorten(self, sequence)
        sequence.num_computed_tokens = num_computed

    patch.setattr(HybridBlocks, "shorten", half)


def registered_before_it_is_settled(patch: Patch) -> None:
    """Blocks of a row with drafts can be found before it is known which of them count."""
    register = HybridBlocks.register

    def at_once(self: HybridBlocks, sequence: Any, num_tokens: int) -> None:
        BlockManager.register(self, sequence, num_tokens)
        register(self, sequence, num_tokens)

    patch.setattr(HybridBlocks, "register", at_once)


MUTANTS_OF_DRAFTS = [drafts_kept_although_wrong, back_without_the_positions, registered_before_it_is_settled]


def live() -> None:
    for seed in (CROWDED, *range(NUM_SEEDS)):
        hybrid_life(seed, has_faults=seed % 2 == 1).run()


def live_as_engines() -> None:
    for seed in range(NUM_ENGINES):
        EngineSimulation(seed, has_faults=seed % 2 == 1, has_drafts=True, keeps_states=True).run()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_simulation_finds_mutants_of_states(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    """A bug of this kind cannot live through the ordinary test run."""
    mutant(monkeypatch)
    with pytest.raises(SimulationFailure):
        live()


@pytest.mark.parametrize("mutant", MUTANTS_OF_DRAFTS, ids=lambda mutant: mutant.__name__)
def test_the_engine_simulation_finds_mutants_of_drafts(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    """The same for drafts, which only lives of engines have."""
    mutant(monkeypatch)
    with pytest.raises(SimulationFailure):
        live_as_engines()
