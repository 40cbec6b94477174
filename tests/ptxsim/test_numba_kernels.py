"""What Numba really compiles, for three architectures, runs and gives NumPy's results."""

from __future__ import annotations

import numpy as np
import pytest

from pagedcore_ptxsim import LaunchError, MemoryFault, launch
from ptxsim.numba_kernels import ARCHITECTURES, THREADS, array_arguments, compiled

FAST = ARCHITECTURES[1:2]
"""The rest compile the same sources, and are part of `make kernels`."""
CAPABILITIES = [pytest.param(each, marks=() if each in FAST else pytest.mark.kernels) for each in ARCHITECTURES]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_sum_over_blocks(capability: tuple[int, int]) -> None:
    """A tree in shared memory and one atomic per block; the loop runs a different number of times per thread."""
    values, out = np.random.default_rng(0).standard_normal(1000).astype(np.float32), np.zeros(1, np.float32)
    report = launch(compiled("block_sum", capability), "block_sum", 3, THREADS, array_arguments(values, out, 1000))
    assert abs(float(out[0]) - values.astype(np.float64).sum()) < 1e-3
    assert report.barriers >= 3 * 8


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_histogram(capability: tuple[int, int]) -> None:
    """Shared and global atomics count every value once."""
    values, counts = np.random.default_rng(0).integers(0, 1000, 500, np.int32), np.zeros(16, np.int32)
    launch(compiled("histogram", capability), None, 4, THREADS, array_arguments(values, counts, 500))
    assert (counts == np.bincount(values % 16, minlength=16)).all()


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_softmax_by_shuffles(capability: tuple[int, int]) -> None:
    """A warp per row reduces by shuffles."""
    values, out = np.random.default_rng(0).standard_normal((5, 20)).astype(np.float32), np.zeros((5, 20), np.float32)
    launch(compiled("softmax_rows", capability), None, 5, 32, array_arguments(values, out, 20))
    exact = np.exp(values.astype(np.float64))
    np.testing.assert_allclose(out, exact / exact.sum(1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_integers_and_local_memory(capability: tuple[int, int]) -> None:
    """Divisions of 64-bit integers, a private array with run-time indices, early returns."""
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 10**12, 100), rng.integers(1, 10**6, 100)
    out = np.zeros(100, np.int64)
    launch(compiled("divided", capability), None, 1, THREADS, array_arguments(a, b, out))
    want = []
    for x, y in zip(a.tolist(), b.tolist(), strict=True):
        private = {(k + x) & 3: k + x // y for k in range(4)}
        want.append(private[x & 3] + x % y + (x.bit_count() if x > 5 else 64 - y.bit_length()))
    assert out.tolist() == want


def test_lies_about_a_shape_are_found() -> None:
    """A kernel launched for more rows than the array has reads past its end."""
    values, out = np.ones((5, 20), np.float32), np.zeros((5, 20), np.float32)
    ptx = compiled("softmax_rows", FAST[0])
    with pytest.raises(MemoryFault, match="past the end of argument 4"):
        launch(ptx, None, 6, 32, array_arguments(values, out, 20))
    with pytest.raises(LaunchError, match="arguments"):
        launch(ptx, None, 5, 32, [values, out, 20])
