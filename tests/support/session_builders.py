"""Two-turn conversations whose second turn is compared byte for byte, in this process or in another one.

As a script it imports sessions in a fresh process and prints what their second turns were, one line each:

    python -m support.session_builders KIND FILE ...
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pagedcore.engine.builder import build_components
from pagedcore.engine.engine import Engine
from pagedcore.protocols import RaggedRows
from pagedcore.sampling_params import SamplingParams
from pagedcore.scheduler.step_time import StepTimes
from pagedcore.sessions.session import Session
from support.doubles import FakeClock

VOCAB = 211
PARAMS = SamplingParams(max_tokens=20, temperature=0.9, top_p=0.95, repetition_penalty=1.1, seed=7, ignore_eos=True)
BLOCK_BYTES = {"demo": 16384, "float32": 8192, "bfloat16": 4096, "int8 KV": 2560}
FIRST, SECOND = [5, 9, 11, 14, 3, 8, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51], [60, 61, 62]


class Recorder:
    """A backend in front of another that remembers the bytes of every wanted row of logits."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.logits: dict[tuple[int, int], bytes] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def forward(self, batch: RaggedRows) -> Any:
        """Compute and remember."""
        logits = self._backend.forward(batch)
        widened = torch.as_tensor(logits).float().numpy()
        rows = np.searchsorted(batch.query_start, batch.logits_rows, side="right") - 1
        for i, (row, token) in enumerate(zip(rows.tolist(), batch.logits_rows.tolist(), strict=True)):
            self.logits[int(batch.seq_ids[row]), int(batch.positions[token])] = widened[i].tobytes()
        return logits


def tiny_model(seed: int = 0, num_layers: int = 2) -> Any:
    """A random Qwen2 with grouped-query attention, the same for the same seed in every process."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=num_layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, eos_token_id=2, pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.2)
    return model


@dataclass
class Lab:
    """An engine under observation."""

    engine: Engine
    recorder: Recorder
    clock: FakeClock

    def flood(self) -> None:
        """Fill every block that can be had, on the device and on the host, with the tokens of another request."""
        num_tokens = self.engine.stats().num_blocks * self.engine.stats().block_size
        length = min(num_tokens, self.engine.stats().max_model_len) - 2
        for start in range(3, 9):
            prompt = [100 + (start * i + i // 7) % 80 for i in range(start, start + length)]
            self.engine.generate([prompt], SamplingParams(max_tokens=1))


def make_lab(kind: str, **settings: Any) -> Lab:
    """An engine over the demo model, or a tiny model in the number format ``kind``, or in bfloat16 with int8 KV."""
    model, dtype = ("demo", "auto") if kind == "demo" else (tiny_model(), kind)
    formats = {"dtype": "bfloat16", "kv_cache_dtype": "int8"} if kind == "int8 KV" else {"dtype": dtype}
    defaults = {
        **formats, "block_size": 16, "num_kv_blocks": 12, "host_kv_memory": 24 * BLOCK_BYTES[kind],
        "max_model_len": 160, "speculation": "off",
    }
    clock = FakeClock()
    engine = Engine(build_components(model, **{**defaults, **settings}), clock)
    recorder = Recorder(engine._runner.backend)
    engine._runner.backend = recorder  # type: ignore[assignment]
    # Why: transfers take no time on this clock. If steps seemed to, blocks would be kept that these tests lose.
    engine.scheduler.costs.steps.times = StepTimes(0.0, 0.0, 0.0, 0.0)
    return Lab(engine, recorder, clock)


def first_turn(lab: Lab) -> Session:
    """A conversation after its first turn."""
    session = lab.engine.session(PARAMS)
    session.ask(FIRST)
    return session


def second_turn(lab: Lab, session: Session, prompt: list[int] | None = SECOND) -> tuple[list[int], str, int]:
    """Ask on; return the answer's tokens, a digest of all its logits, and how much was found in a cache."""
    lab.recorder.logits.clear()
    output = session.ask(prompt)
    rows = [row for _, row in sorted(lab.recorder.logits.items())]
    return list(output.outputs[0].token_ids), hashlib.sha256(b"".join(rows)).hexdigest(), output.num_cached_tokens


def go_on(kind: str, *paths: str) -> None:
    """Print how the conversation of each exported session goes on."""
    lab = make_lab(kind)
    for path in paths:
        print(json.dumps(second_turn(lab, lab.engine.import_session(path))))
        lab.flood()
