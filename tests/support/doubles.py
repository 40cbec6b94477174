"""Stand-ins used everywhere: a model whose answers betray any misplaced block, one that fails, a clock, builders.

``ToyBackend`` keeps the token and the position of every slot instead of keys and values, and its logits are a hash
of *all* tokens of a sequence as read back through its block table. A block that is lost, shared or in the wrong
place changes the answer or trips an assertion; ``toy_answer`` says what the answer has to be.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import cached_property
from itertools import count
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedcore.kv_cache.eviction import POLICIES
from pagedcore.kv_cache.host_cache import Transfer
from pagedcore.kv_cache.kv_cache_manager import KVCacheManager
from pagedcore.protocols import FloatArray, RaggedRows
from pagedcore.request_options import RequestOptions
from pagedcore.sampling_params import SamplingParams
from pagedcore.scheduler import policies, step_recipe
from pagedcore.scheduler.plan import NewToken, SchedulePlan
from pagedcore.scheduler.policies import Policy
from pagedcore.scheduler.scheduler import Scheduler
from pagedcore.sequence import Sequence

VOCAB_SIZE = 32
LONG = 2**20
"""What is added to the positions in slots of long sequences."""
_MIX = np.uint64(0x9E3779B97F4A7C15)
_ids = count()


def raising(error: Exception) -> Callable[..., Any]:
    """Return a function that raises an error whatever it is called with."""

    def call(*_: object, **__: object) -> Any:
        raise error

    return call


def toy_logits(token_ids: npt.NDArray[np.int64], vocab_size: int = VOCAB_SIZE) -> FloatArray:
    """Logits of the next token, all different: [vocab_size] float32, a pure function of every token before."""
    return logits_of(toy_digest(token_ids), vocab_size)


def logits_of(digest: np.uint64, vocab_size: int = VOCAB_SIZE) -> FloatArray:
    """The logits behind tokens with this digest."""
    scores = _scramble(digest + np.arange(vocab_size, dtype=np.uint64) * _MIX)
    logits = np.empty(vocab_size, dtype=np.float32)
    logits[np.argsort(scores)] = np.arange(vocab_size, dtype=np.float32) / 4
    return logits


def toy_digest(token_ids: npt.NDArray[np.int64], first: int = 0) -> np.uint64:
    """What ``toy_logits`` make of tokens from position ``first`` on: of a text, the exclusive or of its parts."""
    places = np.arange(first + 1, first + len(token_ids) + 1, dtype=np.uint64)
    return np.uint64(np.bitwise_xor.reduce(_scramble(token_ids.astype(np.uint64) * _MIX + places)))


def toy_answer(
    prompt: Iterable[int], max_tokens: int, *, stop_token_ids: Iterable[int] = (), min_tokens: int = 0
) -> list[int]:
    """The greedy answer of a ``ToyBackend`` to one prompt that runs alone: the sequential oracle."""
    tokens, answer = list(prompt), []
    stops = set(stop_token_ids)
    while len(answer) < max_tokens:
        token = int(np.argmax(toy_logits(np.array(tokens, dtype=np.int64))))
        tokens.append(token)
        answer.append(token)
        if token in stops and len(answer) >= min_tokens:
            break
    return answer


def _scramble(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class ToyBackend:
    """A ``ModelBackend`` in NumPy; see the module."""

    vocab_size = VOCAB_SIZE
    max_model_len = 4096
    eos_token_ids = frozenset({VOCAB_SIZE - 1})
    block_size = 4
    kv_bytes_per_token = 16
    is_schedule_invariant = takes_positions_back = True
    num_short_tokens: int | None = None
    """With a number, slots of long sequences are told from those of short ones, and no row reads both."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.slot_tokens = np.full(0, -1, dtype=np.int64)
        self.slot_positions = np.full(0, -1, dtype=np.int64)
        self._block_size = self.block_size

    @property
    def cache_store(self) -> ToyStore:
        """What moves blocks."""
        return self._store

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Make empty slots."""
        self._store = ToyStore(self, block_size)
        self._block_size = block_size
        self.slot_tokens = np.full(num_blocks * block_size, -1, dtype=np.int64)
        self.slot_positions = np.full(num_blocks * block_size, -1, dtype=np.int64)

    def forward(self, batch: RaggedRows) -> FloatArray:
        """Write the step's tokens to their slots, then read every sampled sequence back through its table."""
        self.num_steps += 1
        num_tokens = int(batch.query_start[-1])
        slots, positions = batch.slot_mapping[:num_tokens], batch.positions[:num_tokens]
        assert len(np.unique(slots)) == num_tokens, "two tokens of one step share a slot"
        for row in range(len(batch.kv_lens)):
            self._check_row(batch, row)
        self.slot_tokens[slots] = batch.token_ids[:num_tokens]
        self.slot_positions[slots] = positions
        if batch.is_long is not None:
            counts = batch.query_start[1:] - batch.query_start[:-1]
            self.slot_positions[slots] += LONG * np.repeat(batch.is_long, counts)
        rows = np.searchsorted(batch.query_start, batch.logits_rows, side="right") - 1
        logits = [
            self.logits_after(self._read_back(batch, row, int(batch.positions[token]) + 1))
            for row, token in zip(rows.tolist(), batch.logits_rows.tolist(), strict=True)
        ]
        return np.array(logits, dtype=np.float32).reshape(-1, self.vocab_size)

    hidden_size = VOCAB_SIZE
    """A hidden state is the logits that follow."""

    def forward_hidden(
        self, batch: RaggedRows, hidden_rows: npt.NDArray[np.int64]
    ) -> tuple[FloatArray, FloatArray]:
        """Do the same, with the logits of further tokens as their hidden states."""
        num_logits = len(batch.logits_rows)
        both = replace(batch, logits_rows=np.concatenate((batch.logits_rows, hidden_rows)))  # type: ignore[type-var]
        logits = self.forward(both)
        return logits[:num_logits], logits[num_logits:].copy()

    def _is_long(self, batch: RaggedRows, row: int) -> bool:
        return batch.is_long is not None and bool(batch.is_long[row])

    def logits_after(self, token_ids: npt.NDArray[np.int64]) -> FloatArray:
        """Return the logits of the token after these: [vocab_size]."""
        return toy_logits(token_ids)

    def _slots_of(self, batch: RaggedRows, row: int, start: int, end: int) -> npt.NDArray[np.int64]:
        positions = np.arange(start, end)
        blocks = batch.block_tables[row, positions // self._block_size].astype(np.int64)
        assert blocks.min() >= 0, "a position lies past the end of its table"
        slots: npt.NDArray[np.int64] = blocks * self._block_size + positions % self._block_size
        return slots

    def _check_row(self, batch: RaggedRows, row: int) -> None:
        first, last = int(batch.query_start[row]), int(batch.query_start[row + 1])
        end = int(batch.kv_lens[row])
        start = end - (last - first)
        assert np.array_equal(batch.positions[first:last], np.arange(start, end)), "positions do not end at kv_lens"
        expected = self._slots_of(batch, row, start, end)
        assert np.array_equal(batch.slot_mapping[first:last], expected), "slots and block table disagree"

    def _read_back(self, batch: RaggedRows, row: int, num_positions: int) -> npt.NDArray[np.int64]:
        slots = self._slots_of(batch, row, 0, num_positions)
        stored = self.slot_positions[slots]
        is_long = self._is_long(batch, row)
        wanted = np.arange(num_positions) + LONG * is_long
        assert np.array_equal(stored, wanted), "a block holds other positions than it should, or other angles"
        assert is_long or num_positions <= (self.num_short_tokens or num_positions), "a long row is told to be short"
        tokens: npt.NDArray[np.int64] = self.slot_tokens[slots]
        return tokens


class ToyStore:
    """A ``CacheStore`` over a ``ToyBackend``'s slots. Transfers end at once, unless ``is_slow``: then they read and
    write only when a test ends them, as late and in whatever order it likes, and may fail. While it ``is_hung``,
    waiting ends none of them either.
    """

    def __init__(self, backend: ToyBackend, block_size: int) -> None:
        self._backend = backend
        self._block_size = block_size
        self._host = np.full((0, 2, block_size), -1, dtype=np.int64)
        self._ended: list[tuple[int, bool]] = []
        self.is_slow = False
        self.is_hung = False
        self.under_way: dict[int, tuple[bool, tuple[tuple[int, int], ...]]] = {}

    @property
    def block_bytes(self) -> int:
        """Tokens and positions of one block."""
        return 2 * 8 * self._block_size

    @property
    def _device(self) -> npt.NDArray[np.int64]:
        tokens, positions = self._backend.slot_tokens, self._backend.slot_positions
        return np.stack((tokens.reshape(-1, self._block_size), positions.reshape(-1, self._block_size)), axis=1)

    @property
    def contents(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Device and host, each [blocks, 2, block_size]: tokens and positions."""
        return self._device, self._host

    def allocate_host(self, num_blocks: int) -> None:
        """Make empty blocks."""
        self._host = np.full((num_blocks, 2, self._block_size), -1, dtype=np.int64)

    def copy_blocks(self, pairs: SequenceOf[tuple[int, int]]) -> None:
        """Copy device blocks."""
        for source, destination in pairs:
            self._put(destination, self._device[source])

    def start_swap_out(self, transfer_id: int, pairs: SequenceOf[tuple[int, int]]) -> None:
        """Begin to copy to the host."""
        self._start(transfer_id, True, pairs)

    def start_swap_in(self, transfer_id: int, pairs: SequenceOf[tuple[int, int]]) -> None:
        """Begin to copy to the device."""
        self._start(transfer_id, False, pairs)

    def end(self, transfer_id: int, *, is_ok: bool = True) -> None:
        """Let a transfer end; one that fails has written rubbish into half of its destinations."""
        is_out, pairs = self.under_way.pop(transfer_id)
        for source, destination in pairs if is_ok else pairs[: len(pairs) // 2]:
            contents = (self._device if is_out else self._host)[source] if is_ok else np.int64(-7)
            if is_out:
                self._host[destination] = contents
            else:
                self._put(destination, contents)
        self._ended.append((transfer_id, is_ok))

    def poll_transfers(self, *, wait: bool) -> list[tuple[int, bool]]:
        """Return the ended transfers; a waiting caller gets the oldest one, ended."""
        if wait and not self.is_hung and self.under_way and not self._ended:
            self.end(min(self.under_way))
        ended, self._ended = self._ended, []
        return ended

    def read_blocks(self, block_ids: SequenceOf[int]) -> npt.NDArray[np.uint8]:
        """Return tokens and positions as bytes."""
        return np.ascontiguousarray(self._device[list(block_ids)]).view(np.uint8).reshape(len(block_ids), -1)

    def read_host_blocks(self, block_ids: SequenceOf[int]) -> npt.NDArray[np.uint8]:
        """Return tokens and positions of host blocks as bytes."""
        return np.ascontiguousarray(self._host[list(block_ids)]).view(np.uint8).reshape(len(block_ids), -1)

    def write_blocks(self, block_ids: SequenceOf[int], contents: npt.NDArray[np.uint8]) -> None:
        """Overwrite tokens and positions."""
        for block_id, block in zip(block_ids, contents, strict=True):
            self._put(block_id, np.ascontiguousarray(block).view(np.int64).reshape(2, self._block_size))

    def _start(self, transfer_id: int, is_out: bool, pairs: SequenceOf[tuple[int, int]]) -> None:
        self.under_way[transfer_id] = is_out, tuple(pairs)
        if not self.is_slow:
            self.end(transfer_id)

    def _put(self, block_id: int, contents: npt.NDArray[np.int64] | np.int64) -> None:
        place = slice(block_id * self._block_size, (block_id + 1) * self._block_size)
        both = np.broadcast_to(contents, (2, self._block_size))
        self._backend.slot_tokens[place], self._backend.slot_positions[place] = both


class GatedBackend(ToyBackend):
    """A toy that computes only while ``gate`` is set, so that a test decides when a step ends."""

    def __init__(self) -> None:
        super().__init__()
        self.is_entered, self.gate = threading.Event(), threading.Event()

    def forward(self, batch):  # type: ignore[no-untyped-def]
        """Wait for the gate, at most a minute."""
        self.is_entered.set()
        assert self.gate.wait(30)
        return super().forward(batch)


class FlakyBackend(ToyBackend):
    """A ``ToyBackend`` that goes wrong in chosen steps; the first forward is step 1.

    Args:
        raise_on_step: raise after the step's tokens were written, as a device that is lost half-way.
        nan_on: (step, row of the logits) that is returned as NaN.

    A test that clears ``may_fail`` and sets it later decides what happens before a step fails.
    """

    def __init__(
        self,
        *,
        raise_on_step: int | None = None,
        nan_on: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.raise_on_step = raise_on_step
        self.nan_on = nan_on
        self.may_fail = threading.Event()
        self.may_fail.set()

    def forward(self, batch: RaggedRows) -> FloatArray:
        """Compute as ``ToyBackend`` does, then go wrong if it is time."""
        logits = super().forward(batch)
        if self.num_steps in (self.raise_on_step, self.nan_on and self.nan_on[0]):
            assert self.may_fail.wait(60.0)
        if self.num_steps == self.raise_on_step:
            raise RuntimeError("CUDA error: the device is gone")
        if self.nan_on is not None and self.num_steps == self.nan_on[0]:
            logits[self.nan_on[1]] = np.nan
        return logits


class KeepsToyStates:
    """What makes a toy a hybrid: a state of each sequence, the digest of its tokens and how many they are.

    Logits are those of a ``ToyBackend`` where state and slots tell of the same tokens, and others where they do not. So
    a state that is lost, or another one's, changes the answer as a misplaced block does. While ``has_attention`` is
    false, logits follow from the states alone.
    """

    has_attention = True
    state_bytes = 16
    num_states = 0

    def allocate_states(self, num_states: int) -> None:
        """Make states that nothing wrote."""
        self.num_states = num_states
        self.states = np.full((num_states, 2), 2**64 - 1, dtype=np.uint64)

    @property
    def state_store(self) -> KeepsToyStates:
        """What moves states: this object."""
        return self

    def allocate_host(self, num_states: int) -> None:
        """Make states of the host that nothing wrote."""
        self.host_states = np.full((num_states, 2), 2**64 - 1, dtype=np.uint64)

    def swap_out(self, pairs: SequenceOf[tuple[int, int]]) -> None:
        """Copy states to the host."""
        self._copy(self.states, self.host_states, pairs)

    def swap_in(self, pairs: SequenceOf[tuple[int, int]]) -> None:
        """Copy states from the host."""
        self._copy(self.host_states, self.states, pairs)

    def may_copy(self) -> bool:
        """Whether a copy between the memories succeeds; one that fails has written rubbish."""
        return True

    def _copy(
        self, source: npt.NDArray[np.uint64], destination: npt.NDArray[np.uint64], pairs: SequenceOf[tuple[int, int]]
    ) -> None:
        is_ok = self.may_copy()
        for here, there in pairs:
            destination[there] = source[here] if is_ok else 7
        if not is_ok:
            raise OSError("no copies of states today")

    def read_states(self, state_ids: SequenceOf[int]) -> npt.NDArray[np.uint8]:
        """Return states as bytes."""
        return self.states[list(state_ids)].view(np.uint8).reshape(len(state_ids), -1)

    def read_host_states(self, state_ids: SequenceOf[int]) -> npt.NDArray[np.uint8]:
        """Return states of the host as bytes."""
        return self.host_states[list(state_ids)].view(np.uint8).reshape(len(state_ids), -1)

    def write_states(self, state_ids: SequenceOf[int], contents: npt.NDArray[np.uint8]) -> None:
        """Overwrite states."""
        self.states[list(state_ids)] = np.ascontiguousarray(contents).view(np.uint64).reshape(len(state_ids), 2)

    def forward(self, batch: RaggedRows) -> FloatArray:
        """Advance the states of all rows, then compute."""
        reads, writes = batch.state_reads, batch.state_writes
        assert reads is not None, "a step of a hybrid says nothing of states"
        assert writes is not None, "a step of a hybrid says nothing of states"
        used = writes[writes >= 0]
        assert len(np.unique(used)) == len(used), "two rows write one state"
        assert not np.isin(reads[reads >= 0], used).any(), "a state is read and written in one step"
        self._digest_after: dict[tuple[int, int], np.uint64] = {}
        for row, (read, write) in enumerate(zip(reads.tolist(), writes.tolist(), strict=True)):
            first, last = batch.query_start[row : row + 2].tolist()
            start = int(batch.kv_lens[row]) - (last - first)
            digest, count = self.states[read] if read >= 0 else np.zeros(2, np.uint64)
            if count != start:
                digest = np.uint64(count) ^ np.uint64(0xBAD)
            for place in range(first, last):
                position = start + place - first
                digest = digest ^ toy_digest(batch.token_ids[place : place + 1], position)
                self._digest_after[row, position + 1] = digest
            if write >= 0:
                self.states[write] = digest, start + last - first
        return super().forward(batch)  # type: ignore[misc,no-any-return]

    def _read_back(self, batch: RaggedRows, row: int, num_positions: int) -> npt.NDArray[np.int64]:
        self._told = self._digest_after[row, num_positions]
        if not self.has_attention:
            return np.zeros(0, np.int64)
        return super()._read_back(batch, row, num_positions)  # type: ignore[misc,no-any-return]

    def logits_after(self, token_ids: npt.NDArray[np.int64]) -> FloatArray:
        """Return the logits that slots and state agree on."""
        kept = toy_digest(token_ids) if self.has_attention else self._told
        return logits_of(self._told if kept == self._told else ~(kept ^ self._told))


class ToyHybrid(KeepsToyStates, ToyBackend):
    """A ``ToyBackend`` that keeps states."""


class FlakyHybrid(KeepsToyStates, FlakyBackend):
    """A ``FlakyBackend`` that keeps states."""


class ToyWindowLayers:
    """Window blocks of a toy: tokens are kept there too."""

    window = 6
    num_windows = 0
    store: ToyStore | None = None

    def block_bytes(self, block_size: int) -> int:
        """Half of a block's."""
        return 16 * block_size

    def use(self, num_windows: int) -> None:
        """Let ``allocate_kv`` make window blocks."""
        self.num_windows = num_windows

    def allocate(self, block_size: int) -> None:
        """Make them."""
        self.slots = ToyBackend()
        self.slots.allocate_kv(self.num_windows, block_size)
        self.store = ToyStore(self.slots, block_size) if self.num_windows else None


class KeepsToyWindows:
    """What lets a toy have window blocks: each row that is sampled reads those in its window from there. Without any it
    is the toy that it was.
    """

    @cached_property
    def windows(self) -> ToyWindowLayers:
        """Its layers with a window."""
        return ToyWindowLayers()

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Make empty slots, and those of window blocks."""
        super().allocate_kv(num_blocks, block_size)  # type: ignore[misc]
        self.windows.allocate(block_size)

    def free_kv_bytes(self) -> int:
        """More than is asked for."""
        return 2**30

    def kv_block_bytes(self, block_size: int) -> int:
        """As many bytes again for layers with a window."""
        return 2 * 16 * block_size

    def release_kv(self) -> None:
        """Forget the window blocks."""
        self.windows.use(0)

    def forward(self, batch: RaggedRows) -> FloatArray:
        """Write to window blocks, then compute."""
        if self.windows.num_windows:
            assert batch.window_slots is not None, "a step says nothing of window blocks"
            num_tokens = int(batch.query_start[-1])
            slots, positions = batch.window_slots[:num_tokens], batch.positions[:num_tokens].copy()
            assert len(np.unique(slots)) == num_tokens, "two tokens of one step share a slot of a window block"
            if batch.is_long is not None:
                positions += LONG * np.repeat(batch.is_long, np.diff(batch.query_start))
            self.windows.slots.slot_tokens[slots] = batch.token_ids[:num_tokens]
            self.windows.slots.slot_positions[slots] = positions
        return super().forward(batch)  # type: ignore[misc,no-any-return]

    def _read_back(self, batch: RaggedRows, row: int, num_positions: int) -> npt.NDArray[np.int64]:
        tokens: npt.NDArray[np.int64] = super()._read_back(batch, row, num_positions)  # type: ignore[misc]
        if self.windows.num_windows:
            in_windows = replace(batch, block_tables=batch.window_tables)  # type: ignore[type-var]
            first, there = max(0, num_positions - self.windows.window), self.windows.slots
            slots = there._slots_of(in_windows, row, first, num_positions)
            is_long = batch.is_long is not None and bool(batch.is_long[row])
            wanted = np.arange(first, num_positions) + LONG * is_long
            assert np.array_equal(there.slot_positions[slots], wanted), "a window block holds other positions"
            assert np.array_equal(there.slot_tokens[slots], tokens[first:]), "a window block holds other tokens"
        return tokens


class ToyWindowed(KeepsToyWindows, ToyBackend):
    """A ``ToyBackend`` with windows."""


class FlakyWindowed(KeepsToyWindows, FlakyBackend):
    """A ``FlakyBackend`` with windows."""


class FakeClock:
    """A clock that moves only when a test moves it."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """Return the current time in seconds."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now_s += seconds

    def sleep(self, seconds: float) -> None:
        """Let time pass at once."""
        self.advance(seconds)


def make_sequence(
    prompt: int | Iterable[int] = 3,
    max_tokens: int = 4,
    *,
    sequence_id: int | None = None,
    priority: int = 0,
    arrival: int | None = None,
    stop_token_ids: Iterable[int] = (),
    min_tokens: int = 0,
    cache_root: bytes = b"",
    arrival_s: float = 0.0,
    num_short_tokens: int | None = None,
    **options: Any,
) -> Sequence:
    """Build a waiting sequence; ``prompt`` is its tokens or how many; ids and arrivals count up unless given."""
    number = next(_ids) if sequence_id is None else sequence_id
    token_ids = [1 + i % 7 for i in range(prompt)] if isinstance(prompt, int) else list(prompt)
    return Sequence(
        number,
        token_ids,
        SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens),
        max_tokens=max_tokens,
        seed=0,
        stop_token_ids=frozenset(stop_token_ids),
        options=RequestOptions(priority=priority, **options),
        arrival_s=arrival_s,
        arrival=number if arrival is None else arrival,
        cache_root=cache_root,
        num_short_tokens=num_short_tokens,
    )


def make_policy(policy: str | Policy, **options: Any) -> Policy:
    """Build a built-in policy by its name; return another one as it is."""
    if isinstance(policy, Policy):
        return policy
    made: Policy = getattr(policies, policy.replace("-", "_"))(**options)
    return made


def make_scheduler(
    num_blocks: int = 8,
    block_size: int = 2,
    policy: str | Policy = "fcfs",
    *,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    max_num_waiting: int = 16,
    admission: str = "optimistic",
    preemption: str = "auto",
    num_host_blocks: int = 0,
    eviction: str = "lru",
    copies_blocks: bool = True,
    max_scored_tokens: int = 4,
    policy_options: Mapping[str, Any] = MappingProxyType({}),
    num_states: int = 0,
    num_host_states: int = 0,
    num_windows: int = 0,
    window: int = 0,
    **formation: Any,
) -> Scheduler:
    """Build a small scheduler with a pool of its own."""
    return Scheduler(
        KVCacheManager(
            num_blocks, block_size, num_host_blocks=num_host_blocks, policy=POLICIES[eviction],
            copies_blocks=copies_blocks, num_states=num_states, num_host_states=num_host_states,
            num_windows=num_windows, window=window,
        ),
        make_policy(policy, **policy_options),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_waiting=max_num_waiting,
        admission=admission,
        preemption=preemption,
        max_scored_tokens=max_scored_tokens,
        **formation,
    )


class StandingHost:
    """A ``StepHost`` without a model: steps take as long as is expected of them, transfers end at once, and every
    sampled row gets the same token."""

    def __init__(self, scheduler: Scheduler, token_id: int = 1, clock: FakeClock | None = None) -> None:
        self.scheduler, self._token_id, self.clock = scheduler, token_id, clock or FakeClock()
        self.now = self.clock.now

    def move_blocks(self) -> None:
        """Let what is due begin and end."""
        self.end_transfers(self.scheduler.moves.take_due())

    def make_room(self, plan: SchedulePlan, transfers: Iterable[Transfer]) -> None:
        """Let the transfers end."""
        self.end_transfers(transfers)

    def end_transfers(self, transfers: Iterable[Transfer]) -> None:
        """Let transfers end."""
        for transfer in transfers:
            self.scheduler.moves.complete_transfer(transfer.transfer_id, 0.0, is_ok=True)

    def compute(self, plan: SchedulePlan, copies: object, begun_s: float) -> None:
        """Let the expected time pass."""
        self.clock.advance(self.scheduler.costs.steps.predict(*plan.work))

    def tokens(self, plan: SchedulePlan, sampled: None) -> Mapping[int, int | None]:
        """Give every sampled row the same token."""
        return {row.sequence.sequence_id: self._token_id for row in plan.rows if row.num_sampled}

    def publish(self, plan: SchedulePlan, news: SequenceOf[NewToken]) -> None:
        """Do nothing."""


def next_plan(scheduler: Scheduler) -> SchedulePlan:
    """Schedule, with every transfer that is asked for complete at once."""
    return step_recipe.next_plan(scheduler, StandingHost(scheduler))


def run_step(scheduler: Scheduler, token_id: int = 1) -> SchedulePlan:
    """Run one step in which every sampled row gets the same token."""
    return step_recipe.run_step(scheduler, StandingHost(scheduler, token_id))
