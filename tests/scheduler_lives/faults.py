"""Fault points: each is armed for a run with one probability and fires with another, as FoundationDB's do."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from pagedcore.plugins.hookspecs import hookimpl
from pagedcore.protocols import FloatArray, RaggedRows
from support.doubles import KeepsToyStates, KeepsToyWindows, ToyBackend, ToyStore

ARMED = 0.25
FIRES = (0.01, 0.25)
#: What may happen; the first four end rows, the next four one request, the others none.
NAMES = (
    "forward raises", "out of memory", "wrong shape", "wrong type",
    "nan", "encode", "push", "finish",
    "transfer refused", "transfer fails", "transfer is late", "transfer ends twice", "transfer never ends",
    "poll raises", "hook", "clock jumps",
)


class Injected(Exception):
    """Raised by a fault point."""


class Faults:
    """The fault points of one run."""

    def __init__(self, rng: random.Random, is_on: bool) -> None:
        self._rng = rng
        self.is_on = is_on
        self.armed = {name: rng.uniform(*FIRES) for name in NAMES if is_on and rng.random() < ARMED}
        self.fired: Counter[str] = Counter()
        self.num_endable = 0
        """Most requests that the faults so far can have ended."""

    def fires(self, name: str, num_endable: int = 0) -> bool:
        """Whether the fault happens now, which may end so many requests."""
        probability = self.armed.get(name, 0.0) if self.is_on else 0.0
        if not probability or self._rng.random() >= probability:
            return False
        self.fired[name] += 1
        self.num_endable += num_endable
        return True


class SimBackend(ToyBackend):
    """A toy model that goes wrong by chance, and lets the callers act in the middle of a step."""

    max_model_len = 256

    def __init__(self, rng: random.Random, faults: Faults, in_step: Callable[[RaggedRows], object]) -> None:
        super().__init__()
        self.rng, self.faults, self._in_step = rng, faults, in_step

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        super().allocate_kv(num_blocks, block_size)
        self._store = SimStore(self, block_size)

    def forward(self, batch: RaggedRows) -> FloatArray:
        self._in_step(batch)
        logits, num_rows = super().forward(batch), len(batch.kv_lens)
        if self.faults.fires("forward raises", num_rows):
            raise Injected("the device failed")
        if self.faults.fires("out of memory", num_rows):
            raise MemoryError
        if self.faults.fires("wrong shape", num_rows):
            return logits[:, :-1]
        if self.faults.fires("wrong type", num_rows):
            return logits.tolist()  # type: ignore[return-value]
        if len(logits) and self.faults.fires("nan", 1):
            logits[self.rng.randrange(len(logits)), self.rng.randrange(self.vocab_size)] = np.nan
        return logits


class SimHybrid(KeepsToyStates, SimBackend):
    """The same with states."""


class SimWindowed(KeepsToyWindows, SimBackend):
    """The same with windows."""


class SimStore(ToyStore):
    """A store whose transfers are refused, fail, come late, twice or never."""

    def __init__(self, backend: SimBackend, block_size: int) -> None:
        super().__init__(backend, block_size)
        self._rng, self._faults = backend.rng, backend.faults
        self.is_slow = True
        self.hanging: set[int] = set()

    def end_all(self) -> None:
        """Let everything end that is under way."""
        self.hanging.clear()
        for transfer_id in list(self.under_way):
            self.end(transfer_id)

    def poll_transfers(self, *, wait: bool) -> list[tuple[int, bool]]:
        if self._faults.fires("poll raises"):
            raise Injected("no answer")
        for transfer_id in sorted(self.under_way.keys() - self.hanging):
            if not self._faults.fires("transfer is late"):
                self.end(transfer_id, is_ok=not self._faults.fires("transfer fails"))
        if self.hanging and self._rng.random() < 0.02:
            self.hanging.pop()
        ended = super().poll_transfers(wait=False)
        if ended and self._faults.fires("transfer ends twice"):
            ended = [*ended, ended[0]]
        return ended

    def _start(self, transfer_id: int, is_out: bool, pairs: Sequence[tuple[int, int]]) -> None:
        if self._faults.fires("transfer refused"):
            raise Injected("no transfers today")
        if self._faults.fires("transfer never ends"):
            self.hanging.add(transfer_id)
        super()._start(transfer_id, is_out, pairs)


class SimTokenizer:
    """Numbers with spaces between them are tokens; a token's text is a letter."""

    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if self._faults.fires("encode", 1):
            raise Injected("the tokenizer failed")
        return [int(word) for word in text.split()]

    def encode_chat(self, messages: Any) -> list[int]:
        return self.encode(messages[-1]["content"])

    def encode_chat_turn(self, messages: Any, known_token_ids: Sequence[int]) -> list[int]:
        return self.encode_chat(messages)

    def decode(self, token_ids: Sequence[int]) -> str:
        return letters(token_ids)

    def new_detokenizer(self) -> SimDetokenizer:
        return SimDetokenizer(self._faults)


class SimDetokenizer:
    """Writes letters, and fails by chance."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def push(self, token_ids: Sequence[int]) -> str:
        if self._faults.fires("push", 1):
            raise Injected("the tokenizer failed")
        return letters(token_ids)

    def finish(self) -> str:
        if self._faults.fires("finish", 1):
            raise Injected("the tokenizer failed")
        return ""


def letters(token_ids: Sequence[int]) -> str:
    """The text of tokens."""
    return "".join(chr(ord("A") + token_id) for token_id in token_ids)


class RudeObserver:
    """A plugin whose hooks raise by chance."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    @hookimpl
    def pagedcore_step(self, stats: object) -> None:
        if self._faults.fires("hook"):
            raise Injected("an observer failed")

    @hookimpl
    def pagedcore_request_finished(self, request: object) -> None:
        if self._faults.fires("hook"):
            raise Injected("an observer failed")


@contextmanager
def silence() -> Iterator[None]:
    """Let the engine's log keep quiet: it reports faults that were ordered."""
    log = logging.getLogger("pagedcore")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)
