"""The sampler's kernel, executed by the PTX interpreter, against sorting in float64 and against the CPU's sampler."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kernels.cuda.simulated_driver import SimulatedDriver
from pagedcore.errors import InternalError
from pagedcore_kernels.cpu.sampling import samplers as cpu
from pagedcore_kernels.cuda.build.toolchain import missing_compiler_parts
from pagedcore_kernels.cuda.sampling import TokenSampler
from support.sampling_reference import Draw, choose, explains

pytestmark = pytest.mark.skipif(bool(missing_compiler_parts()), reason="needs pagedcore[cuda] to compile kernels")

Logits = npt.NDArray[np.float32]
MODES = [
    Draw(1.0), Draw(0.3), Draw(3.0), Draw(1.0, top_k=1), Draw(0.8, top_k=50), Draw(1.0, top_k=3000),
    Draw(1.0, top_p=0.5), Draw(1.0, top_p=0.95), Draw(2.0, top_p=0.999), Draw(1.0, top_p=1e-9), Draw(1.0, min_p=0.05),
    Draw(1.0, min_p=1.0), Draw(0.8, top_k=40, top_p=0.9), Draw(1.0, top_k=4500, top_p=0.97), Draw(0.0),
    Draw(1.0, top_p=0.9, min_p=0.02), Draw(1.5, top_k=100, top_p=0.99, min_p=0.01), Draw(10.0), Draw(1e-300),
]


def rows_of(draws: list[Draw]) -> npt.NDArray[np.void]:
    fields = ("temperature", "top_k", "top_p", "min_p", "seed", "position")
    return cpu.sampling_rows(*[[getattr(draw, field) for draw in draws] for field in fields])


def sample(logits: Logits, draws: list[Draw], *, gap: int = 0, arch: str = "sm_90") -> list[int]:
    """Tokens of ``draws``, one per row of ``logits``; rows lie ``gap`` elements apart, NaN in between."""
    count, vocab = logits.shape
    memory = torch.full((count, vocab + gap), torch.nan)
    memory[:, :vocab] = torch.from_numpy(logits)
    before = memory.clone()
    driver = SimulatedDriver(arch, check_races=True)
    tokens = TokenSampler(vocab, driver)(memory[:, :vocab], rows_of(draws))
    assert torch.equal(memory.view(torch.int32), before.view(torch.int32))
    return [int(token) for token in tokens]


def sample_on_cpu(logits: Logits, draws: list[Draw]) -> list[int]:
    return [int(token) for token in cpu.TokenSampler(logits.shape[1])(logits.copy(), rows_of(draws))]


def normal_logits(num_rows: int, vocab: int, scale: float = 3.0, seed: int = 0) -> Logits:
    return (np.random.default_rng(seed).standard_normal((num_rows, vocab)) * scale).astype(np.float32)


def assert_as_on_cpu(logits: Logits, draws: list[Draw], found: list[int], most_apart: float = 0.02) -> None:
    """The same tokens; where not, the reference explains ours by the documented tolerance, and there are few."""
    expected = sample_on_cpu(logits, draws)
    apart = [i for i in range(len(draws)) if found[i] != expected[i]]
    assert len(apart) <= max(1, most_apart * len(draws))
    for i in apart:
        assert explains(logits[i], draws[i], found[i]), (draws[i], found[i], expected[i])


@pytest.mark.parametrize(("arch", "vocab", "gap", "scale"), [
    ("sm_90", 4501, 1, 3.0), *[pytest.param(*case, marks=pytest.mark.kernels) for case in [
        ("sm_80", 4501, 1, 3.0), *(("sm_100", *row) for row in ((127, 1, 0.3), (4097, 3, 3.0), (5003, 1, 3.0))),
        *(("sm_90", *row) for row in (
            (1, 0, 3.0), (2, 3, 3.0), (127, 1, 0.3), (128, 0, 3.0), (1000, 0, 0.3), (4096, 0, 0.3), (4097, 3, 3.0),
            (5003, 1, 3.0), (9000, 0, 0.3), (30011, 2, 0.3), (50257, 0, 3.0))),
    ]],
])
def test_every_mode_chooses_as_the_cpu_does(arch: str, vocab: int, gap: int, scale: float) -> None:
    """Equal logits and parameters give the CPU sampler's token, in rows that start anywhere and have any length."""
    repeats = 3 if vocab < 4500 else 1
    logits = normal_logits(len(MODES) * repeats, vocab, scale, seed=vocab)
    draws = [replace(m, seed=seed, position=7 + 3 * seed) for seed in range(repeats) for m in MODES]
    assert_as_on_cpu(logits, draws, sample(logits, draws, gap=gap, arch=arch))


@pytest.mark.kernels
@pytest.mark.parametrize("mode", MODES)
def test_a_large_vocabulary(mode: Draw) -> None:
    """So it is with 151,936 tokens, flat and peaked, as the exact reference has it."""
    logits = np.concatenate([normal_logits(1, 151936, scale, seed=3) for scale in (1.0, 4.0)])
    draws = [replace(mode, seed=11, position=position) for position in range(2)]
    for row, draw, token in zip(logits, draws, sample(logits, draws), strict=True):
        assert token == choose(row, draw) or explains(row, draw, token)


def test_ties_masks_and_extremes() -> None:
    """Equal logits are kept in order of their ids, masked ones never, and no finite logit is too large."""
    values = np.array([-np.inf, -0.0, 0.0, 3e38, -3e38, -1e9, 1.5, 1.5, 1.0, 2.0], np.float32)
    rng = np.random.default_rng(4)
    modes = [
        replace(m, temperature=t, top_k=min(m.top_k, 37))
        for m in MODES for t in ({m.temperature} | ({0.01, 1e-320, 1e30} if m.temperature == 1.0 else set()))
    ]
    logits = rng.choice(values, (len(modes), 300)).astype(np.float32)
    logits[::2] = rng.choice(np.array([0.5, 1.0, 1.5, -np.inf], np.float32), logits[::2].shape)
    draws = [replace(mode, seed=i, position=i) for i, mode in enumerate(modes)]
    found = sample(logits, draws)
    assert np.isfinite(logits[np.arange(len(found)), found]).all()
    with np.errstate(over="ignore"):
        assert_as_on_cpu(logits, draws, found)


@pytest.mark.parametrize("vocab", [300, pytest.param(9000, marks=pytest.mark.kernels)])
def test_equal_logits_beyond_the_limit_are_left_out_from_the_end(vocab: int) -> None:
    """With all logits equal, top-k and top-p keep the lowest ids, whether or not the row fits into shared memory."""
    logits = np.full((64, vocab), 1.5, np.float32)
    by_k = sample(logits, [Draw(1.0, top_k=10, position=i) for i in range(64)])
    assert set(by_k) <= set(range(10))
    assert len(set(by_k)) == 10
    by_p = sample(logits, [Draw(1.0, top_p=0.5, position=i) for i in range(64)])
    assert vocab * 0.4 < max(by_p) < vocab / 2
    both = sample(logits, [Draw(1.0, top_k=vocab - 1, top_p=0.1, position=i) for i in range(64)])
    assert max(both) < vocab * 0.1


def test_the_random_number_is_the_documented_one() -> None:
    """Seeds and positions of any size give the number that the CPU draws with."""
    places = [(0, 0), (1, 0), (0, 1), (2**63 - 1, 10**6), (12345678901234567, 2**40)]
    draws = [Draw(1.0, seed=seed, position=position) for seed, position in places]
    flat = np.zeros((len(places), 4096), np.float32)
    assert sample(flat, draws) == sample_on_cpu(flat, draws)


def test_rows_that_are_not_valid_and_their_neighbours() -> None:
    """A NaN, a plus infinity or nothing finite give -1, wherever they stand; other rows do not notice."""
    modes = [Draw(1.0, top_k=5, top_p=0.9), Draw(0.0), Draw(2.0, min_p=0.1), Draw(1.0), Draw(1.0, top_p=0.3)] * 3
    draws = [replace(mode, position=i) for i, mode in enumerate(modes)]
    logits = normal_logits(len(draws), 701, seed=2)
    whole = sample(logits, draws)
    for row, (place, value) in enumerate([(0, np.nan), (700, np.inf), (350, -np.nan)]):
        logits[5 * row + row, place] = value
    logits[9] = -np.inf
    broken = sample(logits, draws)
    assert [i for i, token in enumerate(broken) if token == -1] == [0, 6, 9, 12]
    assert all(b in (-1, a) for a, b in zip(whole, broken, strict=True))
    order = np.random.default_rng(1).permutation(len(draws))
    assert sample(logits[order], [draws[i] for i in order]) == [broken[i] for i in order]


def test_greedy() -> None:
    """The largest logit wins, the first of equal ones, zero and minus zero being equal; an invalid row is -1."""
    logits = normal_logits(8, 1201)
    logits[0, 0] = logits[1, -1] = logits[2, 600] = 99
    logits[3, [1200, 70, 130]] = 50
    logits[4] = -1
    logits[4, [1100, 66, 65]] = [0.0, 0.0, -0.0]
    logits[5, 3], logits[6] = np.nan, -np.inf
    driver = SimulatedDriver(check_races=True)
    found = TokenSampler(1201, driver)(torch.from_numpy(logits), None)
    assert found.tolist() == [0, 1200, 600, 70, 65, -1, -1, int(logits[7].argmax())]
    assert found.tolist() == cpu.GreedyPicker(1201)(logits).tolist()
    assert TokenSampler(1201, driver)(torch.empty(0, 1201), None).shape == (0,)


@pytest.mark.parametrize("logits", [
    torch.zeros(2, 9), torch.zeros(2, 10, dtype=torch.float64), torch.zeros(10), torch.zeros(10, 2).T,
])
def test_memory_of_another_shape_is_refused(logits: torch.Tensor) -> None:
    """A kernel that reads raw memory gets rows of exactly its vocabulary, and parameters for each of them."""
    driver = SimulatedDriver()
    with pytest.raises(InternalError):
        TokenSampler(10, driver)(logits, None)
    with pytest.raises(InternalError):
        TokenSampler(10, driver)(torch.zeros(3, 10), rows_of([Draw()]))
    for vocab in (0, 2**24):
        with pytest.raises(InternalError, match="vocabulary"):
            TokenSampler(vocab, driver)
    assert driver.launched == []
