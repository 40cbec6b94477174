"""Recurrences over random sequences, for their tests: inputs, steps and oracles in NumPy, no tests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagedcore_kernels.cpu.recurrence.states import RecurrentStates
from pagedcore_kernels.state_layout import StateLayout, StatePart

LAYER, PART = 1, 1
"""The part under test; others are there so that offsets are not zero."""
Float64Array = npt.NDArray[np.float64]
Tensors = dict[str, torch.Tensor]


@dataclass
class StateRows:
    """What a backend of states reads of a ``RaggedRows``: rows of so many tokens, and which states they read and write.
    """

    counts: Sequence[int]
    reads: Sequence[int]
    writes: Sequence[int]
    padding: int = 0
    token_ids: Any = field(init=False)
    query_start: Any = field(init=False)
    state_reads: Any = field(init=False)
    state_writes: Any = field(init=False)

    def __post_init__(self) -> None:
        self.query_start = np.cumsum([0, *self.counts])
        self.token_ids = np.zeros(sum(self.counts) + self.padding, np.int64)
        self.state_reads, self.state_writes = (np.array(ids, np.int32) for ids in (self.reads, self.writes))


@dataclass(frozen=True)
class Recurrence(ABC):
    """One recurrence of one size."""

    dtype: torch.dtype

    @property
    @abstractmethod
    def part(self) -> StatePart:
        """What it keeps."""

    @abstractmethod
    def tokens(self, length: int, random: torch.Generator) -> Tensors:
        """Return what it is given of so many tokens, by name; each [length, ...]."""

    @abstractmethod
    def weights(self, random: torch.Generator) -> Tensors:
        """Return what a layer has of it."""

    @property
    @abstractmethod
    def operator(self) -> tuple[str, dict[str, Any]]:
        """Name of a backend's method, and its options."""

    def call(
        self, backend: Any, layer: int, part: int, given: Tensors, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute a planned step, into ``out`` if it is given."""
        name, options = self.operator
        result: torch.Tensor = getattr(backend, name)(layer, part, **given, **options, out=out)
        return result

    @abstractmethod
    def oracle(self, given: dict[str, Float64Array]) -> tuple[Float64Array, Float64Array]:
        """Return the outputs of a whole sequence and the state after it, in float64."""

    @property
    def layout(self) -> StateLayout:
        other = StatePart((3, 5), torch.bfloat16)
        return StateLayout(((other,), (other, self.part), (self.part,)))

    def random(self, *shape: int, random: torch.Generator) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(self.dtype)


@dataclass(frozen=True)
class Convolution(Recurrence):
    channels: int = 64
    taps: int = 4
    activation: str = "silu"

    @property
    def part(self) -> StatePart:
        return StatePart((self.taps - 1, self.channels), self.dtype)

    def tokens(self, length: int, random: torch.Generator) -> Tensors:
        parts = 3 if self.activation == "gates" else 1
        return {"rows": self.random(length, parts * self.channels, random=random)}

    def weights(self, random: torch.Generator) -> Tensors:
        shape = self.taps, self.channels
        return {"weight": torch.randn(shape, generator=random), "bias": torch.randn(shape[1], generator=random)}

    @property
    def operator(self) -> tuple[str, dict[str, Any]]:
        return "convolve", {"activation": self.activation}

    def oracle(self, given: dict[str, Float64Array]) -> tuple[Float64Array, Float64Array]:
        inputs, after = given["rows"], 1.0
        if self.activation == "gates":
            before, after, inputs = np.split(inputs, 3, axis=1)
            # What is kept is rounded.
            inputs = torch.from_numpy(before * inputs).to(self.dtype).double().numpy()
        rows = np.concatenate([np.zeros((self.taps - 1, self.channels)), inputs])
        out = np.empty_like(inputs)
        for t in range(len(out)):
            total = given["bias"] + (rows[t : t + self.taps] * given["weight"]).sum(0)
            out[t] = total / (1 + np.exp(-total)) if self.activation == "silu" else total
        return out * after, rows[len(out) :]


@dataclass(frozen=True)
class DeltaRule(Recurrence):
    key_heads: int = 2
    heads: int = 4
    key_size: int = 32
    value_size: int = 32
    per_channel: bool = False
    normalizes: bool = True

    @property
    def part(self) -> StatePart:
        return StatePart((self.heads, self.key_size, self.value_size), torch.float32)

    def tokens(self, length: int, random: torch.Generator) -> Tensors:
        rate = (length, self.heads, self.key_size) if self.per_channel else (length, self.heads)
        scale = 1.0 if self.normalizes else self.key_size**-0.5
        return {
            "query": self.random(length, self.key_heads, self.key_size, random=random) * scale,
            "key": self.random(length, self.key_heads, self.key_size, random=random) * scale,
            "value": self.random(length, self.heads, self.value_size, random=random),
            "log_decay": -torch.rand(rate, generator=random) ** 4,
            "beta": torch.rand(length, self.heads, generator=random),
        }

    def weights(self, random: torch.Generator) -> Tensors:
        return {}

    @property
    def operator(self) -> tuple[str, dict[str, Any]]:
        return "delta_rule", {"scale": self.key_size**-0.5, "normalizes": self.normalizes}

    def oracle(self, given: dict[str, Float64Array]) -> tuple[Float64Array, Float64Array]:
        query, key, value = given["query"], given["key"], given["value"]
        if self.normalizes:
            query, key = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (query, key))
        query = query * self.key_size**-0.5
        decay = np.exp(given["log_decay"]).reshape(*value.shape[:2], -1)
        out, states = np.empty_like(value), np.zeros(self.part.shape)
        for t in range(len(out)):
            for h in range(self.heads):
                q, k = query[t, h * self.key_heads // self.heads], key[t, h * self.key_heads // self.heads]
                kept = decay[t, h][:, None] * states[h]
                states[h] = kept + np.outer(k, given["beta"][t, h] * (value[t, h] - kept.T @ k))
                out[t, h] = states[h].T @ q
        return out, states


@dataclass(frozen=True)
class Mamba2(Recurrence):
    heads: int = 4
    groups: int = 2
    head_size: int = 32
    state_size: int = 16

    @property
    def part(self) -> StatePart:
        return StatePart((self.heads, self.state_size, self.head_size), torch.float32)

    def tokens(self, length: int, random: torch.Generator) -> Tensors:
        return {
            "x": self.random(length, self.heads, self.head_size, random=random),
            "dt": torch.rand(length, self.heads, generator=random),
            "b": self.random(length, self.groups, self.state_size, random=random),
            "c": self.random(length, self.groups, self.state_size, random=random),
        }

    def weights(self, random: torch.Generator) -> Tensors:
        return {"a": -torch.rand(self.heads, generator=random), "d": torch.randn(self.heads, generator=random)}

    @property
    def operator(self) -> tuple[str, dict[str, Any]]:
        return "mamba2", {}

    def oracle(self, given: dict[str, Float64Array]) -> tuple[Float64Array, Float64Array]:
        x, dt, out, states = given["x"], given["dt"], np.empty_like(given["x"]), np.zeros(self.part.shape)
        for t in range(len(out)):
            for h in range(self.heads):
                group = h * self.groups // self.heads
                states[h] *= np.exp(dt[t, h] * given["a"][h])
                states[h] += np.outer(given["b"][t, group], dt[t, h] * x[t, h])
                out[t, h] = states[h].T @ given["c"][t, group] + given["d"][h] * x[t, h]
        return out, states


@dataclass(frozen=True)
class Mamba1(Recurrence):
    channels: int = 64
    state_size: int = 16

    @property
    def part(self) -> StatePart:
        return StatePart((self.state_size, self.channels), torch.float32)

    def tokens(self, length: int, random: torch.Generator) -> Tensors:
        return {
            "x": self.random(length, self.channels, random=random),
            "dt": torch.rand(length, self.channels, generator=random),
            "b": self.random(length, self.state_size, random=random),
            "c": self.random(length, self.state_size, random=random),
        }

    def weights(self, random: torch.Generator) -> Tensors:
        rates = -torch.rand(self.state_size, self.channels, generator=random)
        return {"a": rates, "d": torch.randn(self.channels, generator=random)}

    @property
    def operator(self) -> tuple[str, dict[str, Any]]:
        return "mamba1", {}

    def oracle(self, given: dict[str, Float64Array]) -> tuple[Float64Array, Float64Array]:
        x, dt, out, state = given["x"], given["dt"], np.empty_like(given["x"]), np.zeros(self.part.shape)
        for t in range(len(out)):
            state = np.exp(dt[t] * given["a"]) * state + np.outer(given["b"][t], dt[t] * x[t])
            out[t] = state.T @ given["c"][t] + given["d"] * x[t]
        return out, state


@dataclass(frozen=True)
class DecayingAttention(Recurrence):
    heads: int = 4
    key_size: int = 32
    value_size: int = 32

    @property
    def part(self) -> StatePart:
        return StatePart((self.heads, self.key_size, self.value_size), torch.float32)

    def tokens(self, length: int, random: torch.Generator) -> Tensors:
        return {
            "query": self.random(length, self.heads, self.key_size, random=random),
            "key": self.random(length, self.heads, self.key_size, random=random),
            "value": self.random(length, self.heads, self.value_size, random=random),
        }

    def weights(self, random: torch.Generator) -> Tensors:
        return {"decay": torch.rand(self.heads, generator=random)}

    @property
    def operator(self) -> tuple[str, dict[str, Any]]:
        return "decaying_attention", {"scale": 0.25}

    def oracle(self, given: dict[str, Float64Array]) -> tuple[Float64Array, Float64Array]:
        query, key, value = given["query"], given["key"], given["value"]
        out, states = np.empty_like(value), np.zeros(self.part.shape)
        for t in range(len(out)):
            for h in range(self.heads):
                states[h] = np.exp(-given["decay"][h]) * states[h] + np.outer(key[t, h], value[t, h])
                out[t, h] = states[h].T @ query[t, h] * 0.25
        return out, states


@dataclass(frozen=True)
class LinearRecurrence(Recurrence):
    channels: int = 64

    @property
    def part(self) -> StatePart:
        return StatePart((1, self.channels), torch.float32)

    def tokens(self, length: int, random: torch.Generator) -> Tensors:
        decay = torch.rand(length, self.channels, generator=random)
        return {"x": self.random(length, self.channels, random=random), "decay": decay}

    def weights(self, random: torch.Generator) -> Tensors:
        return {}

    @property
    def operator(self) -> tuple[str, dict[str, Any]]:
        return "linear_recurrence", {}

    def oracle(self, given: dict[str, Float64Array]) -> tuple[Float64Array, Float64Array]:
        out, state = np.empty_like(given["x"]), np.zeros(self.part.shape)
        for t in range(len(out)):
            state = given["decay"][t] * state + given["x"][t]
            out[t] = state
        return out, state


class Case:
    """Random sequences of one recurrence, and a pool of states full of NaN."""

    def __init__(self, recurrence: Recurrence, lengths: Sequence[int], num_states: int = 12) -> None:
        random = torch.Generator().manual_seed(len(lengths))
        self.recurrence = recurrence
        self.sequences = [recurrence.tokens(length, random) for length in lengths]
        self.lengths = lengths
        self.weights = recurrence.weights(random)
        self.pool = recurrence.layout.allocate(num_states).fill_(0xFF)
        self.backend = RecurrentStates(recurrence.layout, self.pool)

    def states(self) -> torch.Tensor:
        """View the states [num_states, ...] of the part under test."""
        return self.recurrence.layout.view(self.pool, LAYER, PART)

    def step(
        self, *parts: tuple[int, int, int], reads: Sequence[int], writes: Sequence[int], padding: int = 0
    ) -> list[torch.Tensor]:
        """Compute (sequence, start, end) in one step; return the outputs of each."""
        counts = [end - start for _, start, end in parts]
        given = {
            name: torch.cat([self.sequences[one][name][start:end] for one, start, end in parts])
            for name in self.sequences[0]
        }
        given = {name: torch.cat([x, x.new_full((padding, *x.shape[1:]), torch.nan)]) for name, x in given.items()}
        self.backend.plan(StateRows(counts, reads, writes, padding))
        out = self.recurrence.call(self.backend, LAYER, PART, {**given, **self.weights})
        assert out.is_contiguous()
        assert out.dtype == self.recurrence.dtype
        assert torch.equal(out[sum(counts) :], torch.zeros_like(out[sum(counts) :]))
        return list(torch.split(out[: sum(counts)], counts))

    def whole(self, padding: int = 3) -> list[torch.Tensor]:
        """Compute all sequences in one step, sequence i to state i."""
        parts = [(one, 0, length) for one, length in enumerate(self.lengths)]
        return self.step(*parts, reads=[-1] * len(parts), writes=range(len(parts)), padding=padding)

    def expected(self, one: int) -> tuple[Float64Array, Float64Array]:
        """Return the outputs of a sequence and its last state, in float64."""
        given = {**self.sequences[one], **self.weights}
        return self.recurrence.oracle({name: x.double().numpy() for name, x in given.items()})
