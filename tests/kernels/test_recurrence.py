"""Recurrences over states, against float64 over whole sequences, and their bits under any cut and company."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kernels import edge_of_memory
from kernels.state_cases import (
    LAYER,
    PART,
    Case,
    Convolution,
    DecayingAttention,
    DeltaRule,
    LinearRecurrence,
    Mamba1,
    Mamba2,
    Recurrence,
    StateRows,
)
from pagedcore.errors import InternalError, InvalidConfig
from pagedcore_kernels.cpu.recurrence import outer_products
from pagedcore_kernels.cpu.recurrence.states import RecurrentStates
from pagedcore_kernels.cpu.runtime.kernel import Kernel
from pagedcore_kernels.cpu.runtime.recorded_calls import RecordedCalls, StepShape
from pagedcore_kernels.cpu.runtime.threads import Computing
from support.apart import Apart

F32, BF16 = torch.float32, torch.bfloat16
SMALL = [
    Convolution(F32), Convolution(BF16, 20, 3, "gates"), DeltaRule(F32), DeltaRule(BF16, per_channel=True),
    Mamba2(F32), Mamba1(BF16), DecayingAttention(F32), LinearRecurrence(BF16),
]  # fmt: skip
UNEVEN = [
    Convolution(BF16, 7, 2, "none"), DeltaRule(F32, 1, 3, 24, 20, normalizes=False), DeltaRule(BF16, 2, 2, 12, 36),
    Mamba2(BF16, 6, 3, 12, 10), Mamba1(F32, 37, 5), DecayingAttention(BF16, 3, 8, 24),
    LinearRecurrence(F32, 21),
]  # fmt: skip
"""Sizes that vectors do not divide."""
REAL = [
    Convolution(BF16, 8192, 4), DeltaRule(BF16, 16, 32, 128, 128), DeltaRule(F32, 30, 30, 96, 192),
    DeltaRule(BF16, 32, 32, 128, 128, per_channel=True), Mamba2(BF16, 128, 1, 64, 128), Mamba2(BF16, 24, 1, 64, 256),
    Mamba2(F32, 64, 8, 64, 128), Mamba1(BF16, 8192, 16), DecayingAttention(BF16, 64, 128, 128),
]  # fmt: skip
"""Those of Qwen3-Next, OLMo hybrid, Kimi Linear, Granite 4 H, Falcon-H1, Nemotron-H, Jamba and MiniMax."""
LENGTHS = 21, 1, 4, 9


def assert_near_float64(case: Case) -> None:
    """Outputs within a rounding to storage or, in float32, 2e-6 of the largest one; states within 2e-6 of theirs."""
    for one, out in enumerate(case.whole()):
        expected, state = case.expected(one)
        limit = 2.0**-7 if case.recurrence.dtype == BF16 else 2e-6
        assert np.abs(out.double().numpy() - expected).max() < limit * np.abs(expected).max()
        assert np.abs(case.states()[one].double().numpy() - state).max() < 2e-6 * np.abs(state).max()


@pytest.mark.parametrize("recurrence", SMALL + UNEVEN, ids=str)
def test_against_float64(recurrence: Recurrence) -> None:
    """Outputs and states are those of the formulas, from zeros on, in sequences that share nothing but the step."""
    assert_near_float64(Case(recurrence, LENGTHS))


@pytest.mark.slow
@pytest.mark.parametrize("recurrence", REAL, ids=str)
def test_real_sizes_against_float64(recurrence: Recurrence) -> None:
    """So they are in the sizes of models."""
    assert_near_float64(Case(recurrence, (9, 1, 3)))


@pytest.mark.parametrize("recurrence", [DeltaRule(F32, 2, 2, 32, 32), Mamba2(F32, 2, 1, 32, 16)], ids=str)
def test_long_sequences_drift_no_further(recurrence: Recurrence) -> None:
    """After 3,000 positions outputs and state are as near to float64 as after a few."""
    assert_near_float64(Case(recurrence, (3000,)))


@pytest.mark.parametrize("recurrence", SMALL + UNEVEN[:1], ids=str)
def test_a_cut_at_any_position_changes_no_bit(recurrence: Recurrence) -> None:
    """A prompt in one piece, in two wherever it is cut, and token by token: the same outputs and the same state."""
    length, last = 9, 1
    case = Case(recurrence, (length,))
    (whole,) = case.step((0, 0, length), reads=[-1], writes=[last])
    state = case.states()[last].clone()
    for cut in range(1, length):
        (begun,) = case.step((0, 0, cut), reads=[-1], writes=[5])
        (rest,) = case.step((0, cut, length), reads=[5], writes=[3])
        assert torch.equal(torch.cat([begun, rest]), whole)
        assert torch.equal(case.states()[3], state)
    tokens = [case.step((0, t, t + 1), reads=[6 + t % 2 if t else -1], writes=[7 - t % 2])[0] for t in range(length)]
    assert torch.equal(torch.cat(tokens), whole)
    assert torch.equal(case.states()[7], state)


@pytest.mark.parametrize("recurrence", SMALL, ids=str)
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_company_and_threads_change_no_bit(recurrence: Recurrence, num_threads: int) -> None:
    """Alone on one thread, or in any order and place beside others on several: the same outputs and the same states."""
    case, alone = Case(recurrence, LENGTHS), Case(recurrence, LENGTHS)
    order, places = (2, 0, 3, 1), (8, 2, 11, 0)
    with Computing(num_threads):
        outs = case.step(*[(one, 0, LENGTHS[one]) for one in order], reads=[-1] * 4, writes=places, padding=5)
    for out, one, place in zip(outs, order, places, strict=True):
        (expected,) = alone.step((one, 0, LENGTHS[one]), reads=[-1], writes=[4])
        assert torch.equal(out, expected)
        assert torch.equal(case.states()[place], alone.states()[4])


@pytest.mark.parametrize("recurrence", [
    DeltaRule(F32, 2, 2, 32, 512), DeltaRule(BF16, 1, 2, 32, 512, per_channel=True), Mamba1(BF16, 512),
    DecayingAttention(F32, 2, 32, 512), Mamba2(F32, 2, 1, 512),
    LinearRecurrence(F32, 512),
], ids=str)  # fmt: skip
def test_columns_taken_together_change_no_bit(recurrence: Recurrence, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a thread takes few or many columns of a state, what comes of each is the same."""
    case = Case(recurrence, LENGTHS)
    lanes, vectors = outer_products.group_vectors(512, 32)
    found = []
    for taken in (lanes * vectors, outer_products.columns_at_once(512, 32, 8, 1)):
        monkeypatch.setattr(outer_products, "columns_at_once", lambda *_, taken=taken: taken)
        found.append((taken, [*case.whole(), case.states()[:4].clone()]))
    (few, first), (many, second) = found
    assert few < many
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize(("wide", "narrow", "names"), [
    (Convolution(BF16, 64), Convolution(BF16, 20), ("rows", "weight", "bias")),
    (Convolution(F32, 64), Convolution(F32, 7), ("rows", "weight", "bias")),
    (DeltaRule(F32), DeltaRule(F32, value_size=20), ("value",)),
    (DeltaRule(F32), DeltaRule(F32, value_size=7), ("value",)),
    (Mamba1(BF16), Mamba1(BF16, 37), ("x", "dt", "a", "d")),
    (LinearRecurrence(BF16), LinearRecurrence(BF16, 37), ("x", "decay")),
    (Mamba2(F32), Mamba2(F32, head_size=6), ("x",)),
], ids=str)  # fmt: skip
def test_vectors_and_remainders_have_the_same_bits(wide: Any, narrow: Any, names: tuple[str, ...]) -> None:
    """Channels computed by vectors of any number of lanes, or one by one, have the bits of whole vectors."""
    cases = [Case(one, LENGTHS) for one in (wide, narrow)]
    size = narrow.part.shape[-1]
    cases[1].sequences = [
        {name: x[..., :size].contiguous() if name in names else x for name, x in given.items()}
        for given in cases[0].sequences
    ]
    weights = cases[0].weights.items()
    cases[1].weights = {name: x[..., :size].contiguous() if name in names else x for name, x in weights}
    for whole, part in zip(cases[0].whole(), cases[1].whole(), strict=True):
        assert torch.equal(whole[..., :size], part)
    assert torch.equal(cases[0].states()[:4, ..., :size], cases[1].states()[:4])


@pytest.mark.parametrize("recurrence", SMALL, ids=str)
def test_forks_read_one_state_and_only_what_is_named_is_written(recurrence: Recurrence) -> None:
    """Rows that begin from one state go on as each would alone; it stays as it was, and so do all others."""
    case = Case(recurrence, (12, 12, 12))
    case.step((0, 0, 5), reads=[-1], writes=[3])
    before = case.pool.clone()
    outs = case.step((0, 5, 9), (1, 5, 12), (2, 5, 6), reads=[3, 3, 3], writes=[7, -1, 0])
    layout = recurrence.layout
    start, end = layout.offset(LAYER, PART), layout.offset(LAYER, PART) + recurrence.part.num_bytes
    changed = (case.pool != before).nonzero()
    assert set(changed[:, 0].tolist()) == {7, 0}
    assert start <= int(changed[:, 1].min())
    assert int(changed[:, 1].max()) < end
    for one, (end, write) in enumerate(((9, 7), (12, -1), (6, 0))):
        (alone,) = case.step((one, 5, end), reads=[3], writes=[5])
        assert torch.equal(outs[one], alone)
        assert write < 0 or torch.equal(case.states()[write], case.states()[5])


@pytest.mark.parametrize("recurrence", SMALL, ids=str)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_poisoned_row_poisons_no_other(recurrence: Recurrence, poison: float) -> None:
    """NaN and infinity in one row's inputs, or in its state, are in no other row's outputs and states."""
    case = Case(recurrence, LENGTHS)
    whole = case.whole()
    states = case.states()[:4].clone()
    for x in case.sequences[2].values():
        x[-2] = poison
    for out, one, state, expected in zip(case.whole(), whole, case.states()[:4], states, strict=True):
        is_poisoned = one is whole[2]
        assert torch.equal(out, one) is not is_poisoned
        assert torch.equal(state, expected) is not is_poisoned
        assert is_poisoned is not bool(out.isfinite().all())
    case.states()[6] = poison
    outs = case.step((3, 0, 9), (0, 0, 2), (1, 0, 1), reads=[-1, 6, -1], writes=[7, 8, 9])
    assert torch.equal(outs[0], whole[3])
    assert torch.equal(outs[2], whole[1])
    assert not outs[1].isfinite().any()


def test_rows_may_be_slices_of_a_wider_projection() -> None:
    """Queries, keys and values that lie side by side in one tensor need not be copied."""
    recurrence = DeltaRule(BF16)
    case = Case(recurrence, (9,))
    apart = case.whole(padding=0)[0]
    given = case.sequences[0]
    fused = torch.cat([given[name].flatten(1) for name in ("query", "key", "value")], 1)
    query, key, value = fused.split([64, 64, 128], 1)
    given.update(query=query.view(9, 2, 32), key=key.view(9, 2, 32), value=value.view(9, 4, 32))
    case.backend.plan(StateRows([9], [-1], [1]))
    assert torch.equal(recurrence.call(case.backend, LAYER, PART, given), apart)


def test_decays_of_zero_and_of_everything() -> None:
    """A decay of exp(0) keeps a state as it is, one of exp(-inf) or exp(-200) forgets it whatever it was."""
    case = Case(DeltaRule(F32), (4,))
    given = case.sequences[0]
    given["beta"][:] = 0
    given["log_decay"][:] = 0
    case.states()[2] = torch.randn(case.states()[2].shape, generator=torch.Generator().manual_seed(0))
    case.step((0, 0, 4), reads=[2], writes=[3])
    assert torch.equal(case.states()[3], case.states()[2])
    given["log_decay"][1], given["log_decay"][2] = -torch.inf, -200
    case.step((0, 0, 2), reads=[2], writes=[4])
    case.step((0, 2, 3), reads=[2], writes=[5])
    assert not case.states()[4:6].any()


@pytest.mark.parametrize("recurrence", SMALL, ids=str)
def test_recorded_calls_go_on_with_the_present_plan(recurrence: Recurrence) -> None:
    """A call recorded for one row computes what is planned when it is repeated: other rows, other states."""
    case = Case(recurrence, (1, 1, 1))
    expected = case.step((0, 0, 1), (1, 0, 1), (2, 0, 1), reads=[-1, -1, -1], writes=[4, 5, 6])
    states = case.states()[4:7].clone()
    room = {name: torch.cat([one[name] for one in case.sequences]) for name in case.sequences[0]}
    outs = torch.cat(expected).zero_()
    case.backend.plan(StateRows([1], [-1], [1]))
    with RecordedCalls() as recording:
        recurrence.call(case.backend, LAYER, PART, {k: x[:1] for k, x in room.items()} | case.weights, outs[:1])
    case.pool[4:7] = 0
    case.backend.plan(StateRows([1, 1, 1], [-1, -1, -1], [4, 5, 6]))
    recording.run(StepShape(3))
    assert not recording.is_empty
    assert torch.equal(outs, torch.cat(case.whole(padding=0)))
    assert torch.equal(case.states()[4:7], states)


def digest() -> str:
    """A checksum over the outputs and states of all small recurrences."""
    found = hashlib.sha256()
    for recurrence in [*SMALL, DeltaRule(F32, 1, 1, 24, 192)]:
        case = Case(recurrence, LENGTHS)
        for tensor in (*case.whole(), case.states()[:4].contiguous()):
            found.update(tensor.view(torch.int16).numpy().tobytes())
    return found.hexdigest()


def test_nothing_is_read_or_written_beyond_its_end(apart: Apart) -> None:
    """Rows, rates, the plan's arrays, outputs and the pool may end where memory ends."""
    out = apart.run("from kernels import edge_of_memory; edge_of_memory.main('recurrences')")
    assert out.count("torch.Size") == len(edge_of_memory.RECURRENCES)


@pytest.mark.parametrize("recurrence", [SMALL[3], SMALL[5]], ids=str)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_states_written_past_the_caches_have_the_same_bits(
    recurrence: Recurrence, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode steps that write much run another kernel, recorded ones too; what they compute is the same."""
    plain, ran, run = Case(recurrence, LENGTHS), [], Kernel.run
    monkeypatch.setattr(Kernel, "run", lambda kernel, *given: (ran.append(kernel.address), run(kernel, *given)))
    steps = [[(0, 0, 5), (3, 0, 2)], [(0, 5, 6), (3, 2, 3), (1, 0, 1)], [(2, 0, 1)]]
    places = [([-1, -1], [0, 1]), ([0, 1, -1], [2, 3, -1]), ([-1], [4])]

    def compute(case: Case) -> list[torch.Tensor]:
        made = (case.step(*parts, reads=reads, writes=writes)
                for parts, (reads, writes) in zip(steps, places, strict=True))  # fmt: skip
        return [out for outs in made for out in outs]

    expected = compute(plain)
    monkeypatch.setattr(outer_products, "STREAMED_BYTES", 1)
    streamed = Case(recurrence, LENGTHS)
    ran.clear()
    with Computing(num_threads):
        found = compute(streamed)
    assert ran[0] != ran[1] == ran[2]
    assert torch.equal(streamed.pool, plain.pool)
    assert all(map(torch.equal, found, expected))
    given = {name: x[:5].clone() for name, x in streamed.sequences[0].items()}
    out = torch.zeros_like(expected[0])
    streamed.backend.plan(StateRows([5], [-1], [0]))
    with RecordedCalls() as recording:
        recurrence.call(streamed.backend, LAYER, PART, given | streamed.weights, out)
    for x, new in zip(given.values(), streamed.sequences[0].values(), strict=True):
        x[:1] = new[5:6]
    streamed.backend.plan(StateRows([1], [0], [5]))
    recording.run(StepShape(1))
    assert torch.equal(out[:1], expected[2])
    assert torch.equal(streamed.states()[5], plain.states()[2])


def test_wrong_arguments_are_refused() -> None:
    """A kernel that trusts addresses is given no others."""
    case = Case(DeltaRule(F32), (3,))
    given = case.sequences[0]
    with pytest.raises(InternalError, match="plan"):
        case.recurrence.call(case.backend, LAYER, PART, given)
    case.backend.plan(StateRows([3], [-1], [1]))
    wrong = {
        "query": [given["query"][:2], given["query"][:, :, ::2], given["query"][:, :0], given["query"].bfloat16()],
        "key": [given["key"][:, :1], given["key"].transpose(1, 2).contiguous().transpose(1, 2)],
        "value": [given["value"][..., :31], given["value"][:, :3], given["value"].half(), given["value"][0]],
        "log_decay": [given["log_decay"].double(), given["log_decay"][:, :3], given["log_decay"].T.contiguous().T],
        "beta": [given["beta"].bfloat16(), given["beta"][:2]],
    }
    for name, tensors in wrong.items():
        for tensor in tensors:
            with pytest.raises((InternalError, InvalidConfig)):
                case.recurrence.call(case.backend, LAYER, PART, given | {name: tensor})
    with pytest.raises(InternalError, match="state"):
        case.recurrence.call(case.backend, LAYER, 0, given)
    with pytest.raises(InternalError, match="pool"):
        RecurrentStates(case.recurrence.layout, case.pool[:, 1:])
    convolution = Case(Convolution(F32), (3,))
    convolution.backend.plan(StateRows([3], [-1], [1]))
    with pytest.raises(InternalError, match="activation"):
        replace(convolution.recurrence, activation="tanh").call(
            convolution.backend, LAYER, PART, convolution.sequences[0] | convolution.weights
        )


def test_outputs_and_sizes_that_do_not_fit_are_refused() -> None:
    """A kernel writes to no tensor of another shape or format, and takes no keys that its memory has no room for."""
    case = Case(DeltaRule(F32), (3,))
    case.backend.plan(StateRows([3], [-1], [1]))
    out = torch.empty(3, 4, 32)
    for wrong in (out[:2], out.bfloat16(), out.transpose(1, 2).contiguous().transpose(1, 2)):
        with pytest.raises(InternalError, match="output"):
            case.recurrence.call(case.backend, LAYER, PART, case.sequences[0], wrong)
    large = Case(DecayingAttention(F32, 1, outer_products.MOST_ROWS + 1, 8), (1,))
    with pytest.raises(InvalidConfig, match="key"):
        large.whole()
