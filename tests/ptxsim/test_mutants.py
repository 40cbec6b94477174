"""Kernels broken on purpose: a barrier, a wait, a commit or a predicate less is always noticed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pagedcore_ptxsim import AsyncCopyFault, Mutant, PtxError, RaceFault, launch, mutants
from ptxsim.numba_kernels import THREADS, array_arguments, compiled
from ptxsim.test_float_opcodes import from_bf16, to_bf16

PIPELINE = (Path(__file__).parent / "pipeline.ptx").read_text(encoding="utf-8")
Check = Callable[[str], bool]


def pipeline_is_right(ptx: str) -> bool:
    """Whether the tile pipeline gives the product for no tile, one, few and many; faults are the caller's."""
    right = True
    for tiles in (0, 1, 2, 7):
        rng = np.random.default_rng(tiles)
        a, b = (to_bf16(rng.standard_normal(shape).astype(np.float32)) for shape in ((tiles, 16, 16), (tiles, 8, 16)))
        out = np.full((16, 8), np.nan, np.float32)
        launch(ptx, None, 1, 64, [a, b, out, tiles], dynamic_shared_bytes=3072, max_steps=5000)
        want = np.einsum("tik,tjk->ij", from_bf16(a).astype(np.float64), from_bf16(b).astype(np.float64))
        right &= bool(np.allclose(out, want, atol=1e-4))
    return right


def sum_is_right(ptx: str) -> bool:
    """Whether the block sum adds every value once."""
    values, out = np.arange(1, 801, dtype=np.float32), np.zeros(1, np.float32)
    launch(ptx, None, 2, THREADS, array_arguments(values, out, 800), max_steps=5000)
    return float(out[0]) == 800 * 801 / 2


def histogram_is_right(ptx: str) -> bool:
    """Whether the histogram counts every value once, also with a last block that is not full."""
    values, counts = np.arange(200, dtype=np.int32) * 7, np.zeros(16, np.int32)
    launch(ptx, None, 2, THREADS, array_arguments(values, counts, 200), max_steps=5000)
    return bool((counts == np.bincount(values % 16, minlength=16)).all())


def survivors(check: Check, ptx: str, *kinds: str) -> list[str]:
    """The mutants that a check lets pass."""
    def passes(mutant: Mutant) -> bool:
        try:
            return check(mutant.ptx)
        except PtxError:
            return False
    assert check(ptx)
    return [str(mutant) for mutant in mutants(ptx, kinds) if passes(mutant)]


def test_the_pipeline_has_no_spare_part() -> None:
    """Every barrier, wait, commit and predicate of the tile pipeline is missed when it is gone."""
    assert len(mutants(PIPELINE)) == 4 + 1 + 1 + 2 + 10
    assert survivors(pipeline_is_right, PIPELINE, "barrier", "wait", "relaxed wait", "commit", "predicate") == []


@pytest.mark.parametrize(("kind", "fault"), [("wait", AsyncCopyFault), ("relaxed wait", AsyncCopyFault),
                                             ("commit", AsyncCopyFault), ("barrier", RaceFault)])
def test_mutants_are_caught_by_the_right_check(kind: str, fault: type[PtxError]) -> None:
    """A missing wait or commit shows as an early read, a missing barrier as a race, not as a wrong number."""
    for mutant in mutants(PIPELINE, [kind]):
        with pytest.raises(fault):
            pipeline_is_right(mutant.ptx)


@pytest.mark.parametrize(("name", "check"), [("block_sum", sum_is_right), ("histogram", histogram_is_right)])
def test_compiled_barriers_are_all_needed(name: str, check: Check) -> None:
    """Each barrier that Numba compiled is missed when it is gone."""
    ptx = compiled(name, (9, 0))
    assert len(mutants(ptx, ["barrier"])) >= 2
    assert survivors(check, ptx, "barrier") == []


def test_races_need_the_race_check() -> None:
    """In lockstep a missing barrier changes no number: only the race check finds it."""
    mutant = mutants(PIPELINE, ["barrier"])[0]
    text = mutant.ptx
    tiles = to_bf16(np.ones((3, 16, 16), np.float32)), to_bf16(np.ones((3, 8, 16), np.float32))
    launch(text, None, 1, 64, [*tiles, np.zeros((16, 8), np.float32), 3], dynamic_shared_bytes=3072, check_races=False)


def test_mutants_say_what_they_are() -> None:
    """A mutant has its kind, its line and the statement, keeps all lines, and differs from the original in one."""
    before = PIPELINE.splitlines()
    for mutant in mutants(PIPELINE):
        after = mutant.ptx.splitlines()
        assert [i + 1 for i, pair in enumerate(zip(before, after, strict=True)) if len(set(pair)) > 1] == [mutant.line]
        assert mutant.was == before[mutant.line - 1].strip()
        assert str(mutant) == f"{mutant.kind}, line {mutant.line}: {mutant.was}"
    with pytest.raises(ValueError, match="no mutants of kind semicolon"):
        mutants(PIPELINE, ["semicolon"])
