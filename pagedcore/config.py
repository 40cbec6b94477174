"""What the operator decides about one engine. Checks itself; derives nothing that depends on the machine.

``None`` and ``"auto"`` mean "chosen at start, from the machine and the model"; the choices that were made are
in ``Engine.stats()`` and in ``pagedcore doctor``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final

from pagedcore.errors import InvalidConfig, describe

_CHOICES: Final = {
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "device": ("auto", "cpu"),
    "admission": ("optimistic", "guaranteed"),
}
_POSITIVE: Final = (
    "block_size", "num_kv_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_num_waiting",
)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine; every field is also a keyword of ``Engine.from_pretrained``.

    Raises:
        InvalidConfig: a field has a value outside its range; the message names it.
    """

    dtype: str = "auto"
    """Weights and KV: "auto" takes bfloat16 where the machine computes in it, else float32."""
    device: str = "auto"
    """Where the model runs: "cpu"."""
    block_size: int | None = None
    """Tokens per KV block; ``None``: the attention backend's choice."""
    num_kv_blocks: int | None = None
    """Blocks of the KV pool; wins over ``kv_cache_memory``."""
    kv_cache_memory: int | float | str | None = None
    """The KV pool in bytes (``2**31`` or ``"2GiB"``) or, as a float below 1, as a share of free memory."""
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
    attention_backend: str = "auto"
    """Name of an entry in the plugin table ``attention``."""
    scheduling_policy: str = "fcfs"
    """Name of an entry in the plugin table ``schedulers``: "fcfs", "priority" or "static"."""
    admission: str = "optimistic"
    """"optimistic" admits what fits now and may preempt later; "guaranteed" reserves for the longest answer."""
    tokenizer: str | None = None
    """Directory or name of the tokenizer; ``None``: the model's own."""
    trust_remote_code: bool = False
    """Whether code shipped with a model may run; only the owner of the process can know."""
    seed: int = 0
    """From which the seeds of requests without one are derived."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise InvalidConfig(f"{name}: got {getattr(self, name)!r}, allowed is one of {', '.join(choices)}.")
        for name in _POSITIVE:
            _require_positive(name, getattr(self, name))
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidConfig(
                f"max_num_batched_tokens: got {self.max_num_batched_tokens}, allowed is at least "
                f"max_num_seqs ({self.max_num_seqs}), so that every running sequence can advance in every step."
            )
        if self.queue_timeout_s is not None and not self.queue_timeout_s > 0:
            raise InvalidConfig(f"queue_timeout_s: got {describe(self.queue_timeout_s)}, allowed is above 0 or None.")
        if type(self.seed) is not int or not 0 <= self.seed < 2**63:
            raise InvalidConfig(f"seed: got {describe(self.seed)}, allowed is an integer from 0 to 2**63 - 1.")
        parse_memory(self.kv_cache_memory, free_bytes=0)

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
            raise InvalidConfig(f"unknown setting {', '.join(unknown)}; known are {', '.join(sorted(known))}.")
        return cls(**settings)


def _require_positive(name: str, value: int | None) -> None:
    if value is not None and (type(value) is not int or value < 1):
        raise InvalidConfig(f"{name}: got {describe(value)}, allowed is an integer of at least 1.")


_UNITS: Final = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
                 "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "B": 1}


def parse_memory(given: int | float | str | None, *, free_bytes: int) -> int | None:
    """Turn a memory setting into bytes.

    Args:
        given: bytes, text such as ``"2GiB"``, or a share (float between 0 and 1) of ``free_bytes``.
        free_bytes: memory that a share refers to.

    Returns:
        Bytes, or ``None`` when nothing was given.

    Raises:
        InvalidConfig: ``given`` is none of these.
    """
    if given is None:
        return None
    if isinstance(given, str):
        return _parse_size(given)
    if isinstance(given, float) and 0 < given < 1:
        return int(given * free_bytes)
    if type(given) is int and given > 0:
        return given
    raise InvalidConfig(
        f'kv_cache_memory: got {describe(given)}, allowed is bytes, text such as "2GiB", or a share between 0 and 1.'
    )


def _parse_size(text: str) -> int:
    cleaned = text.strip().upper().replace(" ", "")
    unit = next((u for u in _UNITS if cleaned.endswith(u)), "")
    try:
        return int(float(cleaned.removesuffix(unit)) * _UNITS[unit]) if unit else int(cleaned)
    except (ValueError, OverflowError):
        raise InvalidConfig(
            f'kv_cache_memory: got {describe(text)}, allowed is a number with a unit, such as "512MiB" or "2GiB".'
        ) from None
