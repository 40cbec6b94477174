"""What a sequence may do, and what its handle promises."""

from __future__ import annotations

from itertools import product
from unittest.mock import Mock

import pytest

from pagedcore.errors import InternalError, RequestStateError
from pagedcore.request_options import RequestOptions
from pagedcore.requests.request import Request
from pagedcore.sampling_params import SamplingParams
from pagedcore.sequence import LEGAL_MOVES, Sequence, SequenceStatus
from support.doubles import make_sequence


def make_request(*sequences: Sequence) -> Request:
    return Request("r", list(sequences), SamplingParams(), RequestOptions(), Mock())


@pytest.mark.parametrize(("old", "new"), list(product(SequenceStatus, SequenceStatus)))
def test_exactly_the_moves_of_the_table_are_legal(old: SequenceStatus, new: SequenceStatus) -> None:
    """Every other move is a broken law and leaves the status as it was."""
    sequence = make_sequence()
    sequence.status = old
    if new in LEGAL_MOVES[old]:
        sequence.move_to(new)
        assert sequence.status is new
    else:
        with pytest.raises(InternalError, match="not legal"):
            sequence.move_to(new)
        assert sequence.status is old


def test_a_sequence_owns_its_tokens() -> None:
    """The caller's list can change without the sequence noticing."""
    prompt = [1, 2]
    sequence = make_sequence(prompt)
    prompt.append(3)
    assert sequence.token_ids == [1, 2]
    assert len(sequence.token_ids) - sequence.num_computed_tokens == 2


def test_the_last_allowed_token_ends_the_turn_with_length() -> None:
    """Exactly max_tokens tokens are appended."""
    sequence = make_sequence([1], max_tokens=3)
    assert [sequence.append_token(t) for t in (5, 6, 7)] == [None, None, "length"]
    assert sequence.output_token_ids == [5, 6, 7]
    assert len(sequence.token_ids) == sequence.max_total_tokens


def test_a_stop_token_ends_the_turn_with_stop() -> None:
    """Also when it is the last one allowed: stop wins over length."""
    assert make_sequence([1], max_tokens=3, stop_token_ids=[9]).append_token(9) == "stop"
    assert make_sequence([1], max_tokens=1, stop_token_ids=[9]).append_token(9) == "stop"


def test_a_stop_token_of_the_prompt_means_nothing() -> None:
    """Only generated tokens stop a turn."""
    assert make_sequence([9, 9], stop_token_ids=[9]).append_token(1) is None


def test_a_stop_token_before_min_tokens_goes_on() -> None:
    """A turn ends with its min_tokens-th token at the earliest."""
    sequence = make_sequence([1], max_tokens=5, stop_token_ids=[9], min_tokens=3)
    assert [sequence.append_token(9) for _ in range(3)] == [None, None, "stop"]


def test_with_ignore_eos_only_the_requests_own_stop_tokens_end_a_turn() -> None:
    """The model's end token, 9, is a stop token of the sequence, and ends nothing."""
    params = SamplingParams(stop_token_ids=(4,), ignore_eos=True, min_tokens=1)
    sequence = Sequence(0, [1], params, max_tokens=5, seed=0, stop_token_ids=frozenset({4, 9}))
    assert sequence.end_token_ids == {4}
    assert [sequence.append_token(9), sequence.append_token(9), sequence.append_token(4)] == [None, None, "stop"]


def finished_sequence() -> Sequence:
    sequence = make_sequence([1, 2, 3], max_tokens=2)
    sequence.append_token(4)
    sequence.append_token(5)
    sequence.num_computed_tokens = 4
    sequence.status, sequence.finish_reason = SequenceStatus.FINISHED, "length"
    return sequence


def test_a_new_turn_keeps_what_was_computed() -> None:
    """Everything known becomes the prompt; only what is missing has to be computed."""
    sequence = finished_sequence()
    sequence.begin_turn([6, 7], SamplingParams(), max_tokens=9, stop_token_ids=frozenset({1}), arrival=8)
    assert sequence.token_ids == [1, 2, 3, 4, 5, 6, 7]
    assert sequence.num_prompt_tokens == 7
    assert (sequence.num_computed_tokens, sequence.num_cached_tokens) == (4, None)
    assert (sequence.output_token_ids, sequence.finish_reason) == ([], None)
    assert (sequence.max_total_tokens, sequence.arrival) == (16, 8)
    assert sequence.status is SequenceStatus.WAITING


def test_preemption_does_not_change_what_was_cached_at_the_start() -> None:
    """What a running turn found in the cache stays a fact when its blocks are taken later."""
    sequence = finished_sequence()
    sequence.begin_turn([6], SamplingParams(), max_tokens=1, stop_token_ids=frozenset(), arrival=8)
    sequence.num_cached_tokens = 4
    sequence.move_to(SequenceStatus.RUNNING)
    sequence.reset_computed()
    assert (sequence.num_computed_tokens, sequence.num_cached_tokens) == (0, 4)


def test_a_request_is_done_when_every_answer_is() -> None:
    """One open answer keeps the request open."""
    first, second = make_sequence(), make_sequence()
    request = make_request(first, second)
    first.finish_reason = "stop"
    assert not request.is_done
    second.finish_reason = "abort"
    assert request.is_done


def test_tokens_are_taken_once_and_per_answer() -> None:
    """Each generated token is returned by exactly one call, prompts by none."""
    first, second = make_sequence([1, 2]), make_sequence([1, 2])
    request = make_request(first, second)
    first.append_token(7)
    assert request.take_new_tokens() == [7]
    first.append_token(8)
    assert request.take_new_tokens() == [8]
    assert request.take_new_tokens() == []
    assert request.take_new_tokens(1) == []
    assert request.prompt_token_ids == [1, 2]


def test_only_a_finished_request_can_be_removed() -> None:
    """A running one has to be aborted first; its owner is not asked."""
    request = make_request(make_sequence())
    with pytest.raises(RequestStateError, match="abort"):
        request.remove()
