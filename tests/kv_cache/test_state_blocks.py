"""State blocks: which of those that are kept are evicted, and when."""

from __future__ import annotations

from pagedcore.kv_cache.prefix_cache import Content
from pagedcore.kv_cache.state_blocks import StateBlocks


def keep(states: StateBlocks, name: int, num_saved: int) -> None:
    """Keep a state of so many tokens that nothing holds."""
    (state_id,) = states.allocate(1)
    content = Content(bytes([name]), b"", (1, 2, 3, 4), is_first=True)
    states.keep(content, state_id, num_saved)
    states.free(state_id)


def kept(states: StateBlocks) -> set[int]:
    return {name for name in range(256) if states.find(bytes([name])) is not None}


def test_what_saves_least_is_evicted_first() -> None:
    """Among states of one age the tokens that each saves decide, and among equal ones which was used longest ago."""
    states = StateBlocks(4, 4)
    for name, num_saved in enumerate((2000, 16, 300, 16)):
        keep(states, name, num_saved)
    keep(states, 4, 300)
    assert kept(states) == {0, 2, 3, 4}
    keep(states, 5, 300)
    assert kept(states) == {0, 2, 4, 5}


def test_what_saves_much_goes_when_enough_others_have_gone() -> None:
    """A state that saves ten times as much as those that come outlives as many evictions as that pays for, and is
    evicted then if nothing uses it; a use makes it young again."""
    for is_used in (False, True):
        states = StateBlocks(4, 4)
        keep(states, 0, 1000)
        for number in range(60):
            keep(states, 1 + number, 100)
            if number == 25:
                assert 0 in kept(states)
                if is_used:
                    state_id = states.find(b"\0").state_id  # type: ignore[union-attr]
                    states.hold(state_id)
                    states.free(state_id)
            if number == 40:
                assert (0 in kept(states)) == is_used
        assert 0 not in kept(states)
