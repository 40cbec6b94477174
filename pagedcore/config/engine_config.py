"""What the operator decides about one engine. Checks itself; derives nothing that depends on the machine.

``None`` and ``"auto"`` mean "chosen at start, from the machine and the model"; the choices that were made are
in ``Engine.stats()`` and in ``pagedcore doctor``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Final

from pagedcore.config.limits import MAX_COUNT, MAX_SEED
from pagedcore.config.memory_budget import BudgetShare, MemoryBudget, parse_memory
from pagedcore.errors import InvalidConfig, describe

_Rule = tuple[Callable[[object], bool], str]
"""Whether a value is allowed, and what is."""


def _one_of(*choices: str) -> _Rule:
    return lambda value: isinstance(value, str) and value in choices, f"one of {', '.join(choices)}"


def _is_count(value: object) -> bool:
    return type(value) is int and 1 <= value <= MAX_COUNT


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_seed(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_SEED


def _is_duration(value: object) -> bool:
    return (type(value) is int or type(value) is float) and 0 < value < math.inf


_DEVICE: Final = re.compile(r"auto|cpu|cuda(:[0-9]{1,3})?")


def _is_device(value: object) -> bool:
    return isinstance(value, str) and _DEVICE.fullmatch(value) is not None


def _or_none(rule: _Rule) -> _Rule:
    return lambda value: value is None or rule[0](value), f"{rule[1]}, or None"


_COUNT: Final[_Rule] = _is_count, f"an integer from 1 to {MAX_COUNT}"
_NAME: Final[_Rule] = _is_name, "a name"

_RULES: Final[dict[str, _Rule]] = {
    "dtype": _one_of("auto", "float32", "bfloat16", "float16"),
    "device": (_is_device, "one of auto, cpu, cuda, cuda:0, cuda:1, ..."),
    "block_size": _or_none(_COUNT),
    "num_kv_blocks": _or_none(_COUNT),
    "max_model_len": _or_none(_COUNT),
    "max_num_seqs": _COUNT,
    "max_num_batched_tokens": _COUNT,
    "max_num_waiting": _or_none(_COUNT),
    "queue_timeout_s": _or_none((_is_duration, "a finite number above 0")),
    "num_threads": _or_none(_COUNT),
    "attention_backend": _NAME,
    "scheduling_policy": _NAME,
    "admission": _one_of("optimistic", "guaranteed"),
    "enable_prefix_caching": (lambda value: type(value) is bool, "True or False"),
    "eviction_policy": _one_of("lru", "lfu", "fifo"),
    "preemption": _one_of("auto", "swap", "shrink", "recompute", "wait"),
    "disk_kv_dir": _or_none(_NAME),
    "tokenizer": _or_none(_NAME),
    # Safety: any other true value, the text "false" among them, would let foreign code run.
    "trust_remote_code": (lambda value: type(value) is bool, "True or False"),
    "check_invariants": (lambda value: type(value) is bool, "True or False"),
    "seed": (_is_seed, "an integer from 0 to 2**63 - 1"),
}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine; every field is also a keyword of ``Engine.from_pretrained``.

    Raises:
        InvalidConfig: a field has a value outside its range; the message names it.
    """

    dtype: str = "auto"
    """Weights and KV: "auto" takes bfloat16 where the device computes in it, else float32."""
    device: str = "auto"
    """Where the model runs: "cpu", or "cuda" for an NVIDIA card, "cuda:1" for its second; "auto" takes the CPU."""
    block_size: int | None = None
    """Tokens per KV block; ``None``: the attention backend's choice."""
    num_kv_blocks: int | None = None
    """Blocks of the KV pool; wins over ``kv_cache_memory``."""
    kv_cache_memory: int | float | str | MemoryBudget | BudgetShare | None = None
    """The KV pool in bytes (``2**31`` or ``"2GiB"``) or, as a float below 1, as a share of free memory; or a
    ``MemoryBudget``, or a share of one, that several engines draw on."""
    max_model_len: int | None = None
    """Longest context in tokens, prompt and answer; ``None``: what the model was made for."""
    max_num_seqs: int = 32
    """Most sequences computed in one step."""
    max_num_batched_tokens: int = 512
    """Token budget of one step: decode tokens and prompt chunks together."""
    max_num_waiting: int | None = None
    """Most requests that may wait; ``None``: four times ``max_num_seqs``."""
    queue_timeout_s: float | None = None
    """Longest wait for a first start, in seconds; ``None``: no limit."""
    num_threads: int | None = None
    """Most CPU threads that a step computes with, the engine's own among them; ``None``: as many as torch uses. Never
    more than the cores that affinity and container quota leave."""
    attention_backend: str = "auto"
    """Name of an entry in the plugin table ``attention``."""
    scheduling_policy: str = "fcfs"
    """Name of an entry in the plugin table ``schedulers``: "fcfs", "priority" or "static"."""
    admission: str = "optimistic"
    """"optimistic" admits what fits now and may preempt; "guaranteed" reserves for the longest answer."""
    enable_prefix_caching: bool = True
    """Whether requests share the blocks of equal beginnings; without it a request still reuses its own."""
    eviction_policy: str = "lru"
    """Which cached blocks are forgotten first: "lru", "lfu" or "fifo"."""
    host_kv_memory: int | float | str | None = None
    """Host memory for KV blocks that had to leave the pool, like ``kv_cache_memory``; ``None``: none. All of it is
    taken at the start, which may last three seconds a gigabyte."""
    disk_kv_dir: str | None = None
    """Directory for KV that sessions park on disk; ``None``: a private temporary one, removed with the engine."""
    preemption: str = "auto"
    """What happens when running requests lack blocks: "auto" takes the cheapest way by its own measurements;
    "swap", "shrink", "recompute" and "wait" force one."""
    tokenizer: str | None = None
    """Directory or name of the tokenizer; ``None``: the model's own."""
    trust_remote_code: bool = False
    """Whether code shipped with a model may run; only the owner of the process can know."""
    check_invariants: bool = False
    """Whether the laws of scheduler and cache are checked after every step, which raises ``InternalError`` where one is
    broken; it is slow, and meant for tests and for reports of a bug."""
    seed: int = 0
    """From which the seeds of requests without one are derived."""

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            _require(name, getattr(self, name), rule)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidConfig(
                f"max_num_batched_tokens: got {self.max_num_batched_tokens}, allowed is at least "
                f"{self.max_num_seqs} (max_num_seqs), so that every running sequence can advance in each step."
            )
        if not isinstance(self.kv_cache_memory, MemoryBudget | BudgetShare):
            parse_memory(self.kv_cache_memory, free_bytes=0)
        parse_memory(self.host_kv_memory, free_bytes=0, what="host_kv_memory")

    @property
    def waiting_limit(self) -> int:
        """Most requests that may wait to be started."""
        return self.max_num_waiting if self.max_num_waiting is not None else 4 * self.max_num_seqs

    @classmethod
    def from_keywords(cls, **settings: Any) -> EngineConfig:
        """Build a configuration, refusing unknown names with the list of known ones.

        Raises:
            InvalidConfig: a name or a value is not allowed.
        """
        known = {field.name for field in fields(cls)}
        if unknown := sorted(settings.keys() - known):
            raise InvalidConfig(f"unknown setting {', '.join(unknown)}; known: {', '.join(sorted(known))}.")
        return cls(**settings)


def _require(name: str, value: object, rule: _Rule) -> None:
    if not rule[0](value):
        raise InvalidConfig(f"{name}: got {describe(value)}, allowed is {rule[1]}.")
