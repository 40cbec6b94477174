"""Which sequences are preempted, and how: the cheapest way, in every mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from pagedcore.kv_cache.host_cache import Direction
from pagedcore.scheduler.cost_model import CostModel, Line
from pagedcore.scheduler.plan import Preemption, PreemptionKind
from pagedcore.scheduler.preemption import MAX_PREEMPTIONS, PreemptionRules, Victim
from pagedcore.scheduler.step_time import StepTimeModel, StepTimes
from support.doubles import make_sequence

SWAP, SHRINK, RECOMPUTE = PreemptionKind.SWAP, PreemptionKind.SHRINK, PreemptionKind.RECOMPUTE


def rules(mode: str = "auto", *, block_s: float = 1.0, token_s: float = 1.0, step_s: float = 1.0) -> PreemptionRules:
    """Rules with blocks of 2 tokens and prices: of a block moved one way, of a token, of the fixed part of a step."""
    moves = {direction: Line(0.0, block_s) for direction in Direction}
    return PreemptionRules(mode, CostModel(StepTimeModel(StepTimes(step_s, token_s, token_s, 0.0)), moves), 2)


def victim(num_blocks: int, *, on_host: int | None = None, num_preemptions: int = 0) -> Victim:
    """A running sequence of full blocks; ``on_host`` is what would have to be copied there."""
    sequence = make_sequence(2 * num_blocks + 1)
    sequence.num_computed_tokens = 2 * num_blocks
    sequence.num_preemptions = num_preemptions
    return Victim(sequence, num_blocks, num_blocks, on_host)


def choose(
    some: PreemptionRules, lacking: int, victims: Iterable[Victim], *, may_wait: bool = False,
    steps: int | None = None,
) -> list[Preemption]:
    listed = list(victims)
    return some.choose(
        lacking, lambda: iter(listed), may_wait=may_wait, num_steps_to_wait=steps, num_running=len(listed) + 1
    )


def kinds(chosen: list[Preemption]) -> list[PreemptionKind]:
    return [one.kind for one in chosen]


@pytest.mark.parametrize(
    ("mode", "on_host", "lacking", "kind"),
    [
        ("swap", 3, 1, SWAP), ("swap", None, 1, SHRINK), ("swap", None, 3, RECOMPUTE),
        ("shrink", 3, 1, SHRINK), ("shrink", 3, 3, RECOMPUTE), ("recompute", 3, 1, RECOMPUTE),
        ("wait", 3, 1, SHRINK), ("auto", 3, 1, SHRINK),
    ],
)
def test_each_mode_takes_its_way(mode: str, on_host: int | None, lacking: int, kind: PreemptionKind) -> None:
    """Forced modes take theirs, and the nearest one where theirs is impossible."""
    assert kinds(choose(rules(mode), lacking, [victim(3, on_host=on_host)])) == [kind]


def test_waiting_is_forced_only_while_another_sequence_can_run() -> None:
    """In mode "wait" no sequence is preempted, unless all would stall."""
    for mode, expected in (("wait", 0), ("recompute", 1)):
        assert len(choose(rules(mode), 1, [victim(3)], may_wait=True)) == expected
    assert len(choose(rules("wait"), 1, [victim(3)], may_wait=False)) == 1


@pytest.mark.parametrize(("block_s", "token_s", "kind"), [(0.1, 10.0, SWAP), (10.0, 0.1, RECOMPUTE)])
def test_auto_compares_moving_with_computing(block_s: float, token_s: float, kind: PreemptionKind) -> None:
    """Everything has to go: it is moved where bytes are cheap and computed again where tokens are."""
    (chosen,) = choose(rules(block_s=block_s, token_s=token_s), 3, [victim(3, on_host=3)])
    assert chosen.kind is kind
    assert chosen.estimated_s == pytest.approx(min(6 * block_s, 6 * token_s))


@pytest.mark.parametrize(("loss_share", "estimated_s"), [(0.0, 2.0), (0.5, 4.0), (1.0, 6.0)])
def test_a_tail_costs_its_tokens_and_what_is_lost_of_the_rest(loss_share: float, estimated_s: float) -> None:
    """Shrinking by one of three blocks is priced at one block of tokens, and a share of the other two."""
    some = rules("shrink")
    some.costs.loss_share = loss_share
    (chosen,) = choose(some, 1, [victim(3)])
    assert chosen.estimated_s == pytest.approx(estimated_s)
    assert chosen.num_left_tokens == 4


@pytest.mark.parametrize(("loss_share", "kind"), [(0.0, SHRINK), (1.0, SWAP)])
def test_auto_moves_what_would_not_be_left(loss_share: float, kind: PreemptionKind) -> None:
    """Where others take what a shrunk sequence leaves, moving all of it is cheaper, although the tail alone is not."""
    some = rules(block_s=0.5)
    some.costs.loss_share = loss_share
    assert kinds(choose(some, 1, [victim(3, on_host=3)])) == [kind]


def test_one_cheap_victim_is_better_than_several() -> None:
    """Of those that are enough alone, the cheapest goes; among equals the last in order."""
    small, large, last = victim(1), victim(4), victim(2)
    assert [one.sequence for one in choose(rules("recompute"), 2, [small, large, last])] == [last.sequence]
    twins = [victim(2), victim(2)]
    assert [one.sequence for one in choose(rules("recompute"), 2, twins)] == [twins[0].sequence]


def test_a_set_covers_the_shortage_and_no_more() -> None:
    """When no victim is enough alone, the cheapest by block are taken until it is enough."""
    victims = [victim(2), victim(2), victim(2)]
    assert [len(choose(rules("recompute"), lacking, victims)) for lacking in (3, 4, 6)] == [2, 2, 3]
    assert choose(rules("recompute"), 7, victims) == []


@pytest.mark.parametrize("num_preemptions", [MAX_PREEMPTIONS, MAX_PREEMPTIONS + 3])
def test_a_sequence_that_was_preempted_eight_times_is_spared(num_preemptions: int) -> None:
    """It is chosen only when no other one can be, and not even then while the asker can wait."""
    weary, fresh = victim(2, num_preemptions=num_preemptions), victim(5)
    assert [one.sequence for one in choose(rules("recompute"), 2, [weary, fresh])] == [fresh.sequence]
    assert choose(rules("recompute"), 2, [weary], may_wait=True) == []
    assert [one.sequence for one in choose(rules("recompute"), 2, [weary])] == [weary.sequence]


def test_seven_times_is_not_yet_enough() -> None:
    """One less than the cap is an ordinary victim."""
    assert len(choose(rules("recompute"), 2, [victim(2, num_preemptions=MAX_PREEMPTIONS - 1)], may_wait=True)) == 1


@pytest.mark.parametrize(("steps", "step_s", "waits"), [(1, 0.001, True), (1, 1000.0, False), (None, 0.001, False)])
def test_auto_waits_when_that_is_cheaper(steps: int | None, step_s: float, waits: bool) -> None:
    """If a sequence ends soon and steps are cheap, none is preempted. If none ends, waiting is no choice."""
    chosen = choose(rules(step_s=step_s), 1, [victim(3)], may_wait=True, steps=steps)
    assert (chosen == []) == waits


def test_a_preemption_is_chosen_among_a_few_victims() -> None:
    """Only a window of victims is looked at, so that a long running list costs no more."""
    asked: list[int] = []

    def many() -> Iterable[Victim]:
        for place in range(1000):
            asked.append(place)
            yield victim(2)

    source: Callable[[], Iterable[Victim]] = many
    assert rules("recompute").choose(
        1, source, may_wait=True, num_steps_to_wait=None, num_running=1000
    )
    assert len(asked) <= 9
