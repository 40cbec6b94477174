"""How much of what is left is asked for again: learned in either direction, within bounded memory."""

from __future__ import annotations

import pytest

from pagedcore.scheduler.retention import ReuseRate


def keys(first: int, count: int) -> list[bytes]:
    return [number.to_bytes(4, "big") for number in range(first, first + count)]


def test_the_first_guess_gives_way_to_what_happens() -> None:
    """Blocks that are not asked for again lower the share within a burst; blocks that are raise it."""
    rate = ReuseRate(10_000)
    assert rate.share == 0.5
    rate.leave(keys(0, 112))
    assert rate.share == pytest.approx(8 / 128)
    rate.want(keys(0, 112))
    assert rate.share == pytest.approx(120 / 128)


@pytest.mark.parametrize("returning", [0, 1, 3])
def test_a_steady_share_is_learned(returning: int) -> None:
    """Of every four sequences some come back: the share is theirs, within a tenth, after any start."""
    rate = ReuseRate(10_000)
    rate.leave(keys(10**6, 1000))
    rate.want(keys(10**6, 1000))
    for turn in range(1200):
        rate.leave(keys(5 * turn, 5))
        if turn % 4 < returning:
            rate.want(keys(5 * turn, 5))
    assert rate.share == pytest.approx(returning / 4, abs=0.1)


def test_what_is_asked_for_twice_or_left_twice_counts_once() -> None:
    """A key counts again only after it was left again, and leaving what is remembered adds nothing."""
    rate = ReuseRate(100)
    rate.leave(keys(0, 32))
    rate.leave(keys(0, 32))
    assert rate.share == pytest.approx(8 / 48)
    rate.want(keys(0, 8))
    rate.want(keys(0, 8))
    assert rate.share == pytest.approx(16 / 48)


def test_only_what_follows_without_a_gap_is_wanted() -> None:
    """Behind a block that was not left nothing could have been used."""
    rate = ReuseRate(100)
    rate.leave(keys(0, 32))
    rate.want([*keys(0, 2), *keys(90, 1), *keys(2, 8)])
    assert rate.share == pytest.approx(10 / 48)


def test_keys_beyond_the_hosts_room_are_removed_oldest_first() -> None:
    """What the host would have evicted does not count as asked for."""
    rate = ReuseRate(8)
    rate.leave(keys(0, 32))
    rate.want(keys(0, 8))
    assert rate.share == pytest.approx(8 / 48)
    rate.want(keys(24, 8))
    assert rate.share == pytest.approx(16 / 48)


def test_keys_that_are_left_again_are_removed_later() -> None:
    """The host would have kept it longer too."""
    rate = ReuseRate(2)
    for key in (1, 2, 1, 3):
        rate.leave(keys(key, 1))
    rate.want(keys(2, 1))
    assert rate.share == pytest.approx(8 / 19)
    rate.want(keys(1, 1))
    assert rate.share == pytest.approx(9 / 19)


def test_a_share_is_at_most_everything() -> None:
    """What was left before the past was halved may be asked for after it."""
    rate = ReuseRate(10_000)
    rate.leave(keys(0, 1100))
    rate.want(keys(0, 1100))
    assert rate.share == 1.0
