"""What "auto" copies to the host when a sequence ends, and loads from there: what takes less time."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from pagedcore.kv_cache.host_cache import Direction, Transfer
from pagedcore.scheduler.cost_model import Line
from pagedcore.scheduler.step_recipe import run_step
from pagedcore.scheduler.step_time import StepTimes
from pagedcore.sequence import Sequence
from support.doubles import StandingHost, make_scheduler, make_sequence

TOKEN_S = 1.0
BLOCK_TOKENS = 2
NUM_BLOCKS = 8


class Priced(StandingHost):
    """A scheduler with a host, where a token takes a second and a block moved either way always as long as is said."""

    def __init__(self, block_s: float, mode: str = "auto") -> None:
        self.block_s = block_s
        super().__init__(make_scheduler(NUM_BLOCKS, BLOCK_TOKENS, num_host_blocks=256, preemption=mode))
        self.scheduler.costs.steps.times = StepTimes(0.0, TOKEN_S, TOKEN_S, 0.0)
        self.change_price(block_s)

    def change_price(self, block_s: float) -> None:
        """Let moving take another time from now on."""
        self.block_s = block_s
        self.scheduler.costs.moves.update({direction: Line(0.0, block_s) for direction in Direction})

    def complete(self, sequence: Sequence) -> int:
        """Answer a sequence alone; return how many of its tokens were found."""
        self.scheduler.add_sequences(sequence)
        while self.scheduler.has_work:
            self.step()
        return sequence.num_cached_tokens or 0

    def step(self) -> None:
        """Run one step, with the transfers before and after it."""
        run_step(self.scheduler, self)

    def flood(self, first: int) -> None:
        """Use every block of the device for prompts that do not come back."""
        self.complete(make_sequence([first + place for place in range(BLOCK_TOKENS * NUM_BLOCKS - 1)], 1))

    @property
    def num_on_host(self) -> int:
        return self.scheduler.stats().num_host_blocks_cached

    @property
    def num_copied(self) -> int:
        """Blocks copied to the host so far, also those evicted since."""
        return self.scheduler.counters.num_blocks_swapped_out

    def end_transfers(self, transfers: Iterable[Transfer]) -> None:
        """Let transfers end, after the time that they take."""
        for transfer in transfers:
            self.scheduler.moves.complete_transfer(transfer.transfer_id, len(transfer.moves) * self.block_s, is_ok=True)


PROMPT = list(range(100, 109))
"""Five blocks with the completion of one token, whose K/V is never computed."""


@pytest.mark.parametrize(
    ("block_s", "mode", "num_kept"),
    [(0.35, "auto", 5), (0.45, "auto", 0), (3.0, "auto", 0), (3.0, "swap", 5), (3.0, "recompute", 5)],
)
def test_what_is_left_is_copied_if_half_of_it_has_to_pay(block_s: float, mode: str, num_kept: int) -> None:
    """Before anything is known half is expected to be asked for again: a block moved out has to save twice its time.

    Saved is half of what two tokens take less what loading them takes; that pays up to 0.4 seconds a block. Other modes
    copy everything, at any cost.
    """
    priced = Priced(block_s, mode)
    priced.complete(make_sequence(PROMPT, 1))
    assert priced.num_on_host == num_kept


def test_prompts_that_do_not_come_back_are_not_copied_until_one_would_have_been_found() -> None:
    """Strangers stop the copying; conversations that come back, although nothing was copied, start it again."""
    priced = Priced(0.1)
    for number in range(24):
        priced.flood(1000 * (number + 1))
    before = priced.num_on_host
    priced.flood(100_000)
    assert priced.num_on_host == before
    for number in range(20):
        prompt = [200_000 + 1000 * number + place for place in range(9)]
        priced.complete(make_sequence(prompt, 1))
        priced.flood(300_000 + 1000 * number)
        if priced.complete(make_sequence([*prompt, 1], 1)):
            break
    assert 0 < number < 19
    assert priced.num_on_host > before


def test_a_beginning_that_was_found_is_copied_alone() -> None:
    """Where prompts do not come back, the prefix that a sequence found itself is worth a copy, once; its end is not."""
    priced = Priced(0.2)
    for number in range(24):
        priced.flood(1000 * (number + 1))
    before = priced.num_on_host
    for last in (1, 2, 3):
        found = priced.complete(make_sequence([*range(500, 507), *([last] * 4)], 1))
        assert found == (7 if last > 1 else 0)
        assert priced.num_on_host == before + (3 if last > 1 else 0)
    priced.flood(100_000)
    assert priced.complete(make_sequence([*range(500, 507), 4, 4], 1)) == 6
    assert priced.scheduler.counters.num_blocks_swapped_in == 3


def test_a_beginning_that_comes_back_says_nothing_of_what_follows_it() -> None:
    """However often a shared beginning is loaded, ends that do not come back are not copied for it."""
    priced = Priced(0.1)
    for number in range(24):
        priced.flood(1000 * (number + 1))
    for last in range(40):
        priced.complete(make_sequence([*range(500, 506), *([600 + last] * 5)], 1))
        priced.complete(make_sequence([*range(500, 506), *([700 + last] * 5)], 1))
        before = priced.num_copied
        priced.flood(200_000 + 1000 * last)
    assert priced.num_copied == before
    assert priced.scheduler.counters.num_blocks_swapped_in == 3 * 39


def test_what_is_found_on_the_device_is_no_reason_to_copy() -> None:
    """Asked for twice in a row, prompts are found without the host; strangers are not copied for that."""
    priced = Priced(0.1)
    for number in range(24):
        priced.flood(1000 * (number + 1))
    for number in range(40):
        prompt = [200_000 + 1000 * number + place for place in range(9)]
        assert [priced.complete(make_sequence(prompt, 1)) for _ in range(2)] == [0, 8]
    before = priced.num_copied
    priced.flood(100_000)
    assert priced.num_copied == before


def test_conversations_that_come_back_are_copied_every_time() -> None:
    """A load counts as asked for, so that a conversation that comes back is a reason to copy the next one."""
    priced = Priced(0.1)
    for number in range(60):
        prompt = [200_000 + 1000 * number + place for place in range(9)]
        priced.complete(make_sequence(prompt, 1))
        priced.flood(300_000 + 1000 * number)
        assert priced.complete(make_sequence([*prompt, 1], 1)) == 9


def test_a_session_is_kept_whatever_others_do_unless_computing_is_cheaper() -> None:
    """A session, which announces its next turn, is judged by the price alone and not by the reuse of others."""
    for block_s, num_kept in ((0.65, 5), (0.7, 0)):
        priced = Priced(block_s)
        sequence = make_sequence(PROMPT, 1)
        sequence.is_in_session = True
        priced.complete(sequence)
        assert priced.num_on_host == num_kept


@pytest.mark.parametrize(("block_s", "mode", "num_found"), [(1.9, "auto", 9), (2.1, "auto", 0), (2.1, "swap", 9)])
def test_what_the_host_has_is_loaded_unless_computing_is_cheaper(block_s: float, mode: str, num_found: int) -> None:
    """Found on the host, but dearer to load than two tokens a block are to compute, it is computed."""
    priced = Priced(0.1, mode)
    priced.complete(make_sequence(PROMPT, 1))
    priced.flood(1000)
    priced.change_price(block_s)
    assert priced.complete(make_sequence([*PROMPT, 1], 1)) == num_found


def test_what_was_parked_is_loaded_whatever_it_costs() -> None:
    """Blocks that are kept for a sequence on purpose are used, and let go then."""
    priced = Priced(0.1)
    sequence = make_sequence(PROMPT, 1)
    priced.complete(sequence)
    assert priced.scheduler.moves.park(sequence) == 9
    priced.flood(1000)
    priced.change_price(5.0)
    sequence.begin_turn([1], sequence.params, max_tokens=1, stop_token_ids=frozenset(), arrival=10**6)
    assert priced.complete(sequence) == 9
    assert priced.scheduler.stats().num_host_blocks_used == 0


def test_a_parked_sequence_that_is_still_on_the_device_is_unpinned_on_the_host() -> None:
    """Nothing has to be loaded, so the next turn's start is what ends the keeping."""
    priced = Priced(0.1)
    sequence = make_sequence(PROMPT, 1)
    priced.complete(sequence)
    assert priced.scheduler.moves.park(sequence) == 9
    assert priced.scheduler.stats().num_host_blocks_used == 5
    sequence.begin_turn([1], sequence.params, max_tokens=1, stop_token_ids=frozenset(), arrival=10**6)
    assert priced.complete(sequence) == 9
    assert priced.scheduler.stats().num_host_blocks_used == 0


def test_one_sequence_is_loaded_at_a_time() -> None:
    """Room for a second load might be taken from what the second one has found, so it waits for the first."""
    priced = Priced(0.1)
    prompts = [[start + place for place in range(5)] for start in (100, 200)]
    for prompt in prompts:
        priced.complete(make_sequence(prompt, 1))
    priced.flood(1000)
    for prompt in prompts:
        priced.scheduler.add_sequences(make_sequence([*prompt, 1], 1))
    assert [len(one.match.host_blocks) for one in priced.scheduler.schedule().swap_ins] == [3]


def test_fetching_leaves_a_block_for_every_running_sequence() -> None:
    """What a session finds on the device is no longer available to others once it is fetched, so it counts too."""
    priced = Priced(0.1)
    session, runner, passer = make_sequence(PROMPT, 1), make_sequence(range(200, 205), 4), make_sequence([7, 8, 9], 1)
    priced.complete(session)
    assert priced.scheduler.moves.park(session) == 9
    priced.scheduler.add_sequences(runner)
    priced.step()
    priced.scheduler.add_sequences(passer)
    priced.step()
    blocks = priced.scheduler.kv_cache.device
    match = priced.scheduler.kv_cache.match(session)
    assert (len(match.device_blocks), len(match.host_blocks), blocks.num_available_blocks) == (3, 2, 5)
    assert priced.scheduler.moves.fetch(session) == 0
    priced.scheduler.finish_sequence(runner, "abort")
    assert priced.scheduler.moves.fetch(session) == 9
