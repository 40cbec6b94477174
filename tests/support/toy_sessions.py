"""Conversations with a small engine over the toy backend, whose every turn is compared with the oracle."""

from __future__ import annotations

from typing import Any

from pagedcore.engine.builder import build_components
from pagedcore.engine.engine import Engine
from pagedcore.sampling_params import SamplingParams
from pagedcore.sessions.session import Session
from support.doubles import FakeClock, ToyBackend, toy_answer

PARAMS = SamplingParams(max_tokens=5, ignore_eos=True)
BLOCK = 4 * ToyBackend.kv_bytes_per_token


def make(
    num_host_blocks: int = 24, clock: FakeClock | None = None, backend: ToyBackend | None = None, **settings: Any
) -> Engine:
    """A small engine with a host tier."""
    defaults: dict[str, Any] = {
        "num_kv_blocks": 16, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 64,
        "host_kv_memory": num_host_blocks * BLOCK if num_host_blocks else None,
        # Why: by the clock computing costs a toy model nothing, so that "auto" would copy nothing.
        "preemption": "swap",
        "check_invariants": True, "speculation": "off",
    }
    return Engine(build_components(backend or ToyBackend(), **{**defaults, **settings}), clock)


def ask(session: Session, *prompt: int) -> int:
    """Give a turn, compare the answer with the oracle, and return what was found in a cache."""
    known = [*session.token_ids, *prompt]
    output = session.ask(list(prompt), PARAMS)
    assert list(output.outputs[0].token_ids) == toy_answer(known, 5)
    assert output.prompt_token_ids == tuple(known)
    return output.num_cached_tokens


def flood(engine: Engine) -> None:
    """Use every block that can be had for something else."""
    length = min(60, 4 * engine.stats().num_blocks - 2)
    for start in range(12):
        engine.generate([[(start * i * i + i // 3 + start) % 30 for i in range(length)]], SamplingParams(max_tokens=1))
