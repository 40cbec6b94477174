from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pagedcore import SamplingParams
from pagedcore.errors import InvalidLogits, StepFailed
from pagedcore.execution.compute_threads import ComputeThreads
from pagedcore.execution.model_runner import ModelRunner
from pagedcore.execution.sampler import Sampler
from pagedcore.kv_cache.block_manager import BlockManager
from pagedcore.scheduler.plan import ScheduledRow
from support.doubles import ToyBackend, make_sequence, toy_answer, toy_logits
from support.engine_builders import assert_all_free, make_engine, run


def prepared(backend: Any, prompts: list[int]) -> tuple[ModelRunner, BlockManager, list[ScheduledRow]]:
    """A runner with rows that compute whole prompts."""
    manager = BlockManager(32, 4)
    backend.allocate_kv(32, 4)
    rows = [ScheduledRow(make_sequence(n, sequence_id=i), 0, n) for i, n in enumerate(prompts)]
    reservation = manager.reserve([row.demand for row in rows])
    assert reservation is not None
    reservation.commit()
    return ModelRunner(backend, Sampler(ToyBackend.vocab_size), ComputeThreads(1)), manager, rows


def test_one_token_per_sampled_row_in_order() -> None:
    """Rows that reach their last token get the most likely next one; chunks get none."""
    runner, manager, rows = prepared(ToyBackend(), [5, 9, 2])
    rows[1] = ScheduledRow(rows[1].sequence, 0, 4)
    sampled = runner.execute(rows, manager)
    expected = [int(toy_logits(np.array(row.sequence.token_ids)).argmax()) for row in (rows[0], rows[2])]
    assert np.asarray(sampled.token_ids).tolist() == expected


def test_nothing_is_sampled_of_chunks() -> None:
    """A step of prompt chunks alone computes and returns no token."""
    runner, manager, rows = prepared(ToyBackend(), [9])
    assert len(runner.execute([ScheduledRow(rows[0].sequence, 0, 4)], manager).token_ids) == 0


def test_logits_of_another_shape_fail_the_step() -> None:
    """A model that loses a row is named with both shapes; no row gets another row's token."""
    backend = ToyBackend()
    runner, manager, rows = prepared(backend, [5, 2])
    forward = backend.forward
    backend.forward = lambda batch: forward(batch)[1:]  # type: ignore[method-assign]
    with pytest.raises(StepFailed, match=r"\(1, 32\), expected float32 or bfloat16 logits of shape \(2, 32\)"):
        runner.execute(rows, manager)


@pytest.mark.parametrize("logits", [
    None, [[0.0] * 32], np.zeros((1, 32)), torch.zeros(1, 32, dtype=torch.float16), np.zeros((1, 31), np.float32),
], ids=["None", "list", "float64", "float16", "narrow"])
def test_logits_of_another_kind_fail_the_step(logits: object) -> None:
    """Only float32 arrays and tensors of the vocabulary's width are logits."""
    backend = ToyBackend()
    runner, manager, rows = prepared(backend, [5])
    backend.forward = lambda batch: logits  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(StepFailed, match="expected float32"):
        runner.execute(rows, manager)


class GreedyBackend(ToyBackend):
    """Chooses tokens itself, until it is told not to."""

    decodes_greedily = True

    def __init__(self) -> None:
        super().__init__()
        self.num_greedy = 0

    def forward_greedily(self, batch: Any, barred: Any) -> Any:
        """Return the most likely tokens."""
        self.num_greedy += 1
        logits = np.asarray(self.forward(batch))
        logits[tuple(barred.T)] = -np.inf
        return logits.argmax(1)


def test_a_model_that_decodes_greedily_is_asked_to() -> None:
    """For rows of which nothing else is wanted, and no other: not where one row of the step wants more, or when the
    model does not do so now. Tokens that may not come yet are barred.
    """
    backend = GreedyBackend()
    runner, manager, rows = prepared(backend, [5, 9, 2])
    rows[1] = ScheduledRow(rows[1].sequence, 0, 4)
    expected = [int(toy_logits(np.array(row.sequence.token_ids)).argmax()) for row in (rows[0], rows[2])]

    def sampled() -> tuple[list[int], int]:
        backend.num_greedy = 0
        return runner.execute(rows, manager).token_ids.tolist(), backend.num_greedy

    assert sampled() == (expected, 1)
    plain = rows[0]
    for changes in ({"temperature": 1.0, "seed": 1}, {"logprobs": 1}, {"logit_bias": {3: 1.0}},
                    {"repetition_penalty": 1.5}):
        changed: Any = replace(plain.sequence.params, **changes)
        rows[0] = ScheduledRow(replace(plain.sequence, params=changed), 0, 5)
        tokens, num_greedy = sampled()
        assert (tokens[1], num_greedy) == (expected[1], 0), changes
    longer: Any = replace(plain.sequence.params, min_tokens=3)
    rows[0] = ScheduledRow(replace(plain.sequence, params=longer, stop_token_ids=frozenset([expected[0], 99])), 0, 5)
    second = int(toy_logits(np.array(plain.sequence.token_ids)).argsort()[-2])
    assert sampled() == ([second, expected[1]], 1)
    rows[0] = plain
    backend.decodes_greedily = False
    assert sampled() == (expected, 0)
    assert runner.execute([ScheduledRow(rows[0].sequence, 0, 4)], manager).token_ids.tolist() == []


def test_a_model_in_the_place_of_another_is_asked_itself() -> None:
    """Who looks at every logit, as tests do, puts a model with ``forward`` alone there."""
    backend = GreedyBackend()
    runner, manager, rows = prepared(backend, [5, 2])
    runner.execute(rows, manager)
    runner.backend = ToyBackend()
    runner.backend.allocate_kv(32, 4)
    runner.execute(rows, manager)
    assert (backend.num_greedy, runner.backend.num_steps) == (1, 1)


@pytest.mark.parametrize("token_ids", [
    None, [3, 3], np.array([3, 3, 3]), np.array([[3, 3]]), np.array([3.0, 3.0]), np.array([3, 32]), np.array([-2, 3]),
], ids=["None", "list", "three", "matrix", "floats", "too large", "too small"])
def test_tokens_of_another_kind_fail_the_step(token_ids: object) -> None:
    """Only int64 ids of the vocabulary, one for each row, are tokens; no row gets another row's."""
    backend = GreedyBackend()
    runner, manager, rows = prepared(backend, [5, 2])
    backend.forward_greedily = lambda batch, barred: token_ids  # type: ignore[method-assign]
    with pytest.raises(StepFailed, match=r"forward_greedily returned .* expected int64 token ids of shape \(2,\)"):
        runner.execute(rows, manager)


def test_a_row_that_raises_there_ends_alone() -> None:
    """The rows are computed in parts, as they are where ``forward`` raises."""

    class Raises(GreedyBackend):
        def forward_greedily(self, batch: Any, barred: Any) -> Any:
            """Fail for the second sequence."""
            if 1 in batch.seq_ids:
                raise ValueError("not this one")
            return super().forward_greedily(batch, barred)

    runner, manager, rows = prepared(Raises(), [5, 9, 2])
    sampled = runner.execute(rows, manager)
    expected = [int(toy_logits(np.array(row.sequence.token_ids)).argmax()) for row in rows]
    assert sampled.token_ids.tolist() == [expected[0], -1, expected[2]]
    assert list(sampled.failures) == [1]


def test_a_row_without_a_valid_logit_ends_alone() -> None:
    """A model that finds no token for a row, as for one with NaN, costs that request its answer and no other."""

    class Finds(GreedyBackend):
        def forward_greedily(self, batch: Any, barred: Any) -> Any:
            """Find nothing for the first sequence."""
            return np.where(batch.seq_ids == first, -1, super().forward_greedily(batch, barred))

    engine = make_engine(Finds())
    requests = [engine.add_request(prompt, SamplingParams(max_tokens=4, ignore_eos=True)) for prompt in ([5, 6], [7])]
    first = requests[0].sequences[0].sequence_id
    run(engine)
    assert isinstance(requests[0].error, InvalidLogits)
    assert list(requests[1].output().outputs[0].token_ids) == toy_answer([7], 4)
    assert_all_free(engine)


def reading(row: ScheduledRow, first: int) -> ScheduledRow:
    """The same row of a sequence that generates nothing and has hidden states read from ``first`` on."""
    return ScheduledRow(replace(row.sequence, hidden_from=first), row.start, row.num_tokens)


def test_hidden_states_come_beside_tokens() -> None:
    """A row that is read gets the states of the positions it wants and no token; its neighbours get theirs, also where
    a row makes the model fail and the others are computed in parts."""
    backend = ToyBackend()
    runner, manager, rows = prepared(backend, [5, 9, 2, 3])
    rows[1], rows[2] = reading(rows[1], 4), reading(rows[2], 0)
    tokens = [int(toy_logits(np.array(row.sequence.token_ids)).argmax()) for row in (rows[0], rows[3])]
    states = {row.sequence.sequence_id: [toy_logits(np.array(row.sequence.token_ids[: position + 1]))
                                         for position in row.hidden_positions] for row in rows[1:3]}

    def sampled() -> tuple[list[int], dict[int, int]]:
        result = runner.execute(rows, manager)
        assert result.hidden.keys() <= states.keys()
        for number, own in result.hidden.items():
            assert np.array_equal(own, np.array(states[number]))
        return result.token_ids.tolist(), {number: len(own) for number, own in result.hidden.items()}

    numbers = [row.sequence.sequence_id for row in rows]
    assert sampled() == (tokens, {numbers[1]: 5, numbers[2]: 2})
    forward = backend.forward

    def fail_on_first(batch: Any) -> Any:
        if numbers[0] in batch.seq_ids:
            raise ValueError("not this one")
        return forward(batch)

    backend.forward = fail_on_first  # type: ignore[method-assign]
    assert sampled() == ([-1, tokens[1]], {numbers[1]: 5, numbers[2]: 2})


@pytest.mark.parametrize("hidden", [
    None, np.zeros((1, 32)), np.zeros((2, 32), np.float32), np.zeros((1, 31), np.float32), torch.zeros(1, 32),
], ids=["None", "float64", "two rows", "narrow", "tensor"])
def test_hidden_states_of_another_kind_fail_the_step(hidden: object) -> None:
    """Only float32 arrays of as many rows as were wanted are hidden states."""
    backend = ToyBackend()
    runner, manager, rows = prepared(backend, [5])
    backend.forward_hidden = (  # type: ignore[method-assign]
        lambda batch, _: (backend.forward(batch), hidden))  # type: ignore[assignment,return-value]
    with pytest.raises(StepFailed, match="forward_hidden returned"):
        runner.execute([reading(rows[0], 4)], manager)
