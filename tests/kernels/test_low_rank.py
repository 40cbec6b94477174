"""Updates by pairs of thin matrices against float64, and the bits of a row in other company."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedcore.errors import InternalError
from pagedcore_kernels.cpu.matmul.low_rank import (
    PLACE_WORDS,
    LowRankPair,
    LowRankUpdate,
    StepUpdates,
    UpdatePart,
    pair_bytes,
    shrunk_width,
)
from pagedcore_kernels.cpu.runtime.threads import Computing

NUM_INPUTS, NUM_OUTPUTS = 53, 230
#: By slot: ranks, and outputs, of each part. None covers all outputs, and none of a rank or size is a whole vector's.
PARTS = {1: [(5, 0, 70), (16, 73, 150), (1, 150, 230)], 3: [(8, 64, 192)]}
FORMATS = [(rows, pair) for rows in (torch.float32, torch.bfloat16) for pair in (torch.float32, torch.bfloat16)]
#: Largest error relative to the largest output: one rounding of it, and of sums in float32.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8}


def parts_of(slot: int, dtype: torch.dtype) -> list[UpdatePart]:
    """Return random parts whose products have about the size of the outputs."""
    generator = torch.Generator().manual_seed(slot)
    return [
        UpdatePart(begin, end, torch.randn(rank, NUM_INPUTS, generator=generator).to(dtype),
                   torch.randn(end - begin, rank, generator=generator).to(dtype), 0.1 * (slot + rank))
        for rank, begin, end in PARTS[slot]
    ]  # fmt: skip


def pair_of(parts: list[UpdatePart]) -> LowRankPair:
    """Return parts arranged, in memory that has other numbers before."""
    is_bf16 = all(part.first.dtype == torch.bfloat16 for part in parts)
    size = pair_bytes(NUM_INPUTS, [(len(part.first), part.end - part.begin) for part in parts], 2 if is_bf16 else 4)
    room = torch.full((size + 64,), 0x7F, dtype=torch.uint8)
    begin = -room.data_ptr() % 64
    return LowRankPair(parts, room[begin : begin + size])


def updated(
    slots: list[int], rows: torch.Tensor, outputs: torch.Tensor, dtype: torch.dtype, num_threads: int = 2
) -> torch.Tensor:
    """Return what the kernels make of outputs."""
    places = np.zeros((4, PLACE_WORDS), np.int64)
    pairs = {slot: pair_of(parts_of(slot, dtype)) for slot in PARTS}
    for slot, pair in pairs.items():
        places[slot] = pair.words(NUM_INPUTS, NUM_OUTPUTS)
    count, out = len(slots), outputs.clone()
    table = torch.zeros(StepUpdates.table_words(count), dtype=torch.int64)
    step = StepUpdates(count, table, torch.full((count, shrunk_width(16)), torch.nan))
    step.fill(np.array(slots, np.int32))
    with Computing(num_threads):
        LowRankUpdate(NUM_INPUTS, NUM_OUTPUTS, rows.dtype, places).add_to(out, rows, step)
    return out


@pytest.mark.parametrize(("dtype", "of_pair"), FORMATS)
def test_a_row_gets_what_its_own_pair_makes_of_it(dtype: torch.dtype, of_pair: torch.dtype) -> None:
    """Slots 0 and 2 are empty: their rows stay as they are, as do outputs of no part. Slot 1 has more than a group."""
    slots = [0, 1, 3, 1, 0, 2, 3, 3, 3, *[1] * 70, 3]
    generator = torch.Generator().manual_seed(9)
    rows = torch.randn(len(slots), NUM_INPUTS, generator=generator).to(dtype)
    outputs = torch.randn(len(slots), NUM_OUTPUTS, generator=generator).to(dtype)
    expected, is_touched = outputs.double().numpy().copy(), np.zeros(outputs.shape, bool)
    for row, slot in enumerate(slots):
        for part in parts_of(slot, of_pair) if slot in PARTS else ():
            first, second = part.first.double().numpy(), part.second.double().numpy()
            expected[row, part.begin : part.end] += part.scale * (second @ (first @ rows[row].double().numpy()))
            is_touched[row, part.begin : part.end] = True
    found = updated(slots, rows, outputs, of_pair)
    error = np.abs(found.double().numpy() - expected).max() / np.abs(expected).max()
    assert error <= TOLERANCE[dtype]
    assert torch.equal(found[~torch.from_numpy(is_touched)], outputs[~torch.from_numpy(is_touched)])
    for row in (1, 2, 40, len(slots) - 1):
        alone = updated([slots[row]], rows[row : row + 1], outputs[row : row + 1], of_pair, num_threads=1)
        assert torch.equal(alone[0], found[row])


def test_memory_that_does_not_fit_is_not_touched() -> None:
    """Kernels read and write by addresses alone."""
    parts = parts_of(3, torch.float32)
    pair, size = pair_of(parts), pair_bytes(NUM_INPUTS, [(8, 128)], 4)
    for memory in (torch.empty(size - 1, dtype=torch.uint8), torch.empty(size + 1, dtype=torch.uint8)):
        with pytest.raises(InternalError, match="memory"):
            LowRankPair(parts, memory)
    for sizes in ((NUM_INPUTS + 1, NUM_OUTPUTS), (NUM_INPUTS, 191)):
        with pytest.raises(InternalError, match="update"):
            pair.words(*sizes)
    update = LowRankUpdate(NUM_INPUTS, NUM_OUTPUTS, torch.float32, np.zeros((1, PLACE_WORDS), np.int64))
    step = StepUpdates(2, torch.zeros(StepUpdates.table_words(2), dtype=torch.int64), torch.empty(2, 8))
    rows, outputs = torch.zeros(2, NUM_INPUTS), torch.zeros(2, NUM_OUTPUTS)
    for bad in ((outputs[:1], rows), (outputs, rows.double()), (outputs.T.contiguous().T, rows)):
        with pytest.raises(InternalError):
            update.add_to(*bad, step)
    with pytest.raises(InternalError):
        step.fill(np.zeros(3, np.int32))
