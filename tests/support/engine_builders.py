"""Engines over the toy backend, whose answers show any misplaced block."""

from __future__ import annotations

from typing import Any

from pagedcore.analysis.diagnosis.invariants import InvariantChecker
from pagedcore.engine.engine import Engine
from support.doubles import ToyBackend


def make_engine(backend: Any = None, **settings: Any) -> Engine:
    """Build a small engine over a bring-your-own backend, which checks every law after every step."""
    defaults = {
        "num_kv_blocks": 16, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 8, "check_invariants": True,
        "speculation": "off",
    }
    return Engine.from_pretrained(backend if backend is not None else ToyBackend(), **{**defaults, **settings})


def run(engine: Engine, max_steps: int = 10_000) -> int:
    """Step until nothing is pending, checking every law after every step; return the number of steps."""
    laws = InvariantChecker(engine.scheduler)
    for step in range(max_steps):
        if not engine.has_pending_requests():
            return step
        engine.step()
        laws.check()
    raise AssertionError(f"still pending after {max_steps} steps")


def assert_all_free(engine: Engine) -> None:
    """Nothing is running or waiting, and no block is held."""
    for request in engine.requests:
        request.remove()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocks_used) == (0, 0, 0)
