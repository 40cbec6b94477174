"""The settings of one engine. They check themselves and derive nothing that depends on the machine.

``None`` and ``"auto"`` mean "chosen at start, from the machine and the model"; ``Engine.stats()`` and
``pagedcore doctor`` show the choices.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import wraps
from typing import Any, Final

from pagedcore.config import field_rules as rules
from pagedcore.config.config_file import read_settings
from pagedcore.config.limits import MAX_ADAPTERS, MAX_SEED, MAX_WAIT_MS
from pagedcore.config.memory_budget import BudgetShare, MemoryBudget, parse_memory
from pagedcore.config.schemes import SCHEMES, listed
from pagedcore.config.speculation import SPECULATION
from pagedcore.errors import InvalidConfig, describe_name, did_you_mean

_MAX_WAIT_MS: Final = 50.0
BESIDE_SETTINGS: Final = ("config", "plugins", "stream_interval_s", "dead_after_s")
"""Keywords of ``from_pretrained``, an ``AsyncEngine``'s among them, that are no settings."""
_ALIASES: Final = {"max_batch_size": "max_num_seqs", "max_batch_tokens": "max_num_batched_tokens"}
_ONE_DEVICE: Final = "An engine computes on one device; start several processes to use more."
_GUESSES: Final = 'Say speculation="auto", the default; a second model that guesses is speculative_model=DIR.'
_NAMED: Final = listed(f'"{name}"' for name in SCHEMES)
_BITS: Final = f"Say quantization={_NAMED}; files that are quantised say it themselves."
_OF_OTHERS: Final = {
    "enable_lora": 'Say adapters={"name": directory}, or max_adapters=8.',
    "max_loras": "Say max_adapters=8.", "max_cpu_loras": 'Say adapter_memory="1GiB".',
    "max_lora_rank": "Any rank up to 256 is taken.", "lora_modules": 'Say adapters={"name": directory}.',
    "tensor_parallel_size": _ONE_DEVICE, "pipeline_parallel_size": _ONE_DEVICE, "data_parallel_size": _ONE_DEVICE,
    "speculative_config": _GUESSES, "num_speculative_tokens": _GUESSES,
    "quantization_config": _BITS, "load_in_8bit": _BITS, "load_in_4bit": _BITS,
    "gpu_memory_utilization": 'Say kv_cache_memory="4GiB", or num_kv_blocks.',
    "swap_space": 'Say host_kv_memory="4GiB".',
}
"""Settings of other engines, and what there is in their place."""
_FORMATS: Final = {
    "fp16": "float16", "f16": "float16", "half": "float16", "fp32": "float32", "f32": "float32", "float": "float32",
    "bf16": "bfloat16", "torch.float16": "float16", "torch.float32": "float32", "torch.bfloat16": "bfloat16",
}
_WIDTHS: Final = {**{word: name for name, scheme in SCHEMES.items() for word in scheme.called}, "off": "none"}
_SECRETS: Final = frozenset({"session_key"})
_RULES: Final[dict[str, rules.FieldRule[Any]]] = {
    "dtype": rules.one_of("auto", "float32", "bfloat16", "float16", elsewhere=_FORMATS),
    "device": rules.matching(r"auto|cpu|cuda(:[0-9]{1,3})?", "one of auto, cpu, cuda, cuda:0, cuda:1, ...",
                             "auto", "cpu", "cuda", "cuda:0", "cuda:1", elsewhere={"gpu": "cuda", "nvidia": "cuda"}),
    "block_size": rules.COUNT.or_none(),
    "num_kv_blocks": rules.COUNT.or_none(),
    "kv_cache_dtype": rules.one_of("auto", "int8", "e4m3"),
    "max_model_len": rules.COUNT.or_none(),
    "max_num_seqs": rules.COUNT,
    "max_num_batched_tokens": rules.COUNT,
    "min_batch_size": rules.COUNT,
    "max_wait_ms": rules.number(0, MAX_WAIT_MS).or_none(),
    "phases": rules.one_of("mixed", "separate"),
    "prefill_share": rules.number(0, 1, above_low=True),
    "max_num_waiting": rules.COUNT.or_none(),
    "queue_timeout_s": rules.number(0, above_low=True).or_none(),
    "num_threads": rules.COUNT.or_none(),
    "attention_backend": rules.NAME,
    "cuda_kernels": rules.NAME.or_none(),
    "linear_backend": rules.NAME,
    "quantization": rules.one_of("none", *SCHEMES, elsewhere=_WIDTHS),
    "model_backend": rules.NAME,
    "scheduling_policy": rules.NAME,
    "policy_options": rules.OPTIONS,
    "admission": rules.one_of("optimistic", "guaranteed"),
    "enable_prefix_caching": rules.BOOLEAN,
    "eviction_policy": rules.one_of("lru", "lfu", "fifo"),
    "preemption": rules.one_of("auto", "swap", "shrink", "recompute", "wait"),
    "disk_kv_dir": rules.NAME.or_none(),
    "session_key": rules.SECRET.or_none(),
    "tokenizer": rules.NAME.or_none(),
    "chat_template": rules.TEMPLATE.or_none(),
    "control_tokens_in_chats": rules.BOOLEAN,
    "tool_parser": rules.NAME,
    "reasoning_parser": rules.NAME,
    "generation_config": rules.one_of("auto", "none"),
    # Safety: any other true value, the text "false" among them, would let foreign code run.
    "trust_remote_code": rules.BOOLEAN,
    "check_invariants": rules.BOOLEAN,
    "flight_recorder": rules.one_of("off", "on", "tokens"),
    "speculation": SPECULATION,
    "speculative_model": rules.NAME.or_none(),
    "adapters": rules.ADAPTERS,
    "max_adapters": rules.integer(0, MAX_ADAPTERS).or_none(),
    "seed": rules.integer(0, MAX_SEED),
}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine; every field is also a keyword of ``Engine.from_pretrained``.

    ``max_batch_size`` is accepted for ``max_num_seqs``, and ``max_batch_tokens`` for ``max_num_batched_tokens``.

    Raises:
        InvalidConfig: a field has a value outside its range, or there is no such field; the message names it.
    """

    dtype: str = "auto"
    """Weights, and KV unless ``kv_cache_dtype`` says otherwise: "auto" takes bfloat16 where the device computes in it,
    else float32. On a CPU weights of float16 are computed in float32, exactly, with KV in float32 too."""
    device: str = "auto"
    """Where the model runs: "cpu", or "cuda" for an NVIDIA GPU, "cuda:1" for the second one; "auto" takes the CPU."""
    block_size: int | None = None
    """Tokens per KV block; ``None``: the attention backend's choice."""
    num_kv_blocks: int | None = None
    """Blocks of the KV pool; wins over ``kv_cache_memory``. States of recurrent layers come on top."""
    kv_cache_memory: int | float | str | MemoryBudget | BudgetShare | None = None
    """The KV pool in bytes (``2**31`` or ``"2GiB"``) or, as a float below 1, as a share of free memory; or a
    ``MemoryBudget``, or a share of one, that several engines draw on. ``None``: what every sequence can use at its
    full length, at most 30 % of free memory; on a GPU at most nine tenths of all of it, less what is there and what the
    largest step was seen to take. Of models with recurrent layers, half of it at most is for states."""
    kv_cache_dtype: str = "auto"
    """Number format of KV: "auto" is that of the weights; "int8" keeps each token and head as int8 with a float32
    scale for K and one for V, in little more than half the memory of bfloat16, in the same bytes on CPUs and GPUs;
    "e4m3" does so in float8, on a GPU of compute capability 8.9. KV of one is of no use to the other."""
    max_model_len: int | None = None
    """Longest context in tokens, prompt and completion; ``None``: what the model was made for."""
    max_num_seqs: int = 32
    """Most sequences computed in one step; on a GPU 256 unless said otherwise."""
    max_num_batched_tokens: int = 512
    """Token budget of one step: decode tokens and prompt chunks together; on a GPU 8,192 unless said otherwise."""
    min_batch_size: int = 1
    """New sequences start when so many of them wait, or when the oldest has waited for ``max_wait_ms``; running ones
    continue meanwhile. 1: at once."""
    max_wait_ms: float | None = None
    """The longest wait for that, in milliseconds; ``None``: 50. It also bounds the 10 ms for which an ``AsyncEngine``
    that was idle lets requests that come together begin together."""
    phases: str = "mixed"
    """"mixed" computes decode rows and prompt chunks in one step; "separate" in steps of their own, which alternate
    while there is work for both."""
    prefill_share: float = 1.0
    """The largest share of ``max_num_batched_tokens`` that prompt chunks take of a step in which running sequences
    decode, one token at least: smaller ones make the next token come sooner for these, and the first one later."""
    max_num_waiting: int | None = None
    """Most requests that may wait; ``None``: four times ``max_num_seqs``."""
    queue_timeout_s: float | None = None
    """Longest wait for a first start, in seconds; ``None``: 300 for an ``AsyncEngine``, no limit for an ``Engine``,
    where long queues are normal."""
    num_threads: int | None = None
    """Most CPU threads that a step computes with, the engine's own among them; ``None``: as many as torch uses. Never
    more than the cores that affinity and container quota leave."""
    attention_backend: str = "auto"
    """Name of an entry in the plugin table ``attention``."""
    cuda_kernels: str | None = None
    """Directory of kernels for GPUs that ``pagedcore kernels build`` has made, by the same version of pagedcore; what
    is not there is compiled at the first start, and kept. ``None``: those of an installed wheel, if there is one."""
    linear_backend: str = "auto"
    """Name of an entry in the plugin table ``linears``, which makes the products of linear layers on a CPU."""
    quantization: str = "none"
    """What the weights of linear layers become when a model is loaded on a CPU: the name of a scheme in
    docs/quantization.md, such as "w8a8"; "none" leaves them. Embeddings of tokens are int8 then. Sessions and their
    files belong to one choice."""
    model_backend: str = "auto"
    """Name of an entry in the plugin table ``models``, which makes a ``ModelBackend`` of the model; "auto" takes one as
    it is, and "transformers" for everything else."""
    scheduling_policy: str = "fcfs"
    """Name of an entry in the plugin table ``schedulers``: "fcfs", "priority", "deadline", "fair", "shortest-first",
    "cache-aware" or "static"."""
    policy_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Keywords of the policy's function, such as ``{"ageing_s": 10.0}`` for "priority"; see docs/scheduling.md."""
    admission: str = "optimistic"
    """"optimistic" admits what fits now and may preempt; "guaranteed" reserves for the longest completion."""
    enable_prefix_caching: bool = True
    """Whether requests share the blocks of equal prefixes; without it a request still reuses its own."""
    eviction_policy: str = "lru"
    """Which cached blocks are evicted first: "lru", "lfu" or "fifo"."""
    host_kv_memory: int | float | str | None = None
    """Host memory for KV blocks that had to leave the pool, like ``kv_cache_memory``; ``None``: none. All of it is
    taken at the start, which may take three seconds a gigabyte. Refused for models with recurrent layers."""
    disk_kv_dir: str | None = None
    """Where sessions park KV on disk, in a directory of the engine's own; ``None``: among the temporary files."""
    session_key: str | bytes | None = field(default=None, repr=False)
    """Secret of 16 to 1,024 bytes that signs the KV of exported sessions. Engines with the same key share imported KV
    among all requests of a salt, and use no other; ``None``: imported KV serves its own session only."""
    preemption: str = "auto"
    """What happens when running requests lack blocks: "auto" takes the cheapest way by its own measurements;
    "swap", "shrink", "recompute" and "wait" force one. Unless the model is schedule invariant, all but "wait" act as
    "swap" where there is a host tier, and as "wait" where there is none."""
    tokenizer: str | None = None
    """Directory or name of the tokenizer; ``None``: the model's own."""
    chat_template: str | None = field(default=None, repr=False)
    """The text of a chat template in Jinja, instead of the tokenizer's own. It is a program, which runs in a sandbox,
    and comes from you: no request can bring one."""
    control_tokens_in_chats: bool = False
    """Whether the text of a control token, such as ``<|im_end|>``, becomes that token in messages and tools too, so
    that whoever wrote them can end a turn and begin another. Prompts of plain text always have control tokens."""
    tool_parser: str = "auto"
    """Name of an entry in the plugin table ``tool_parsers``, which is how the model writes calls of tools, such as
    "hermes"; "auto": the one that recognises what the model's chat template writes, "none": no calls."""
    reasoning_parser: str = "auto"
    """Name of an entry in the plugin table ``reasoning_parsers``, which is how the model writes its reasoning, such
    as "think"; "auto": the one that recognises the chat template, "none": it is a part of the text."""
    generation_config: str = "auto"
    """"auto": what the model's ``generation_config.json`` says of sampling holds for requests that do not say
    otherwise; "none": it does not. Its end tokens and ``suppress_tokens`` always hold."""
    trust_remote_code: bool = False
    """Whether code shipped with a model may run in this process."""
    check_invariants: bool = False
    """Whether the laws of scheduler and cache are checked after every step, and KV slots before they are read, which
    raises ``InternalError`` if one is broken; it is slow, and meant for tests and for reports of a bug."""
    flight_recorder: str = "off"
    """"on" keeps the last steps' decisions for ``Engine.dump_recording``, in about 64 MiB at most, and dumps them by
    itself when a step fails or nothing progresses; "tokens" also writes token ids and sampling parameters, so that
    single points can be computed again; "off" keeps nothing."""
    speculation: str | Mapping[str, Any] = field(default="auto", hash=False)
    """Whether a step computes several tokens of a completion where they can be guessed: answers are the same, and come
    sooner. "auto" where the model can, "off" nowhere; ``{"sources": ["text"], "most": 8}`` as said, or refused."""
    speculative_model: str | None = None
    """A smaller model with the same tokenizer that guesses too: a directory, GGUF file or hub id. It takes its weights,
    and a KV pool of as many blocks as the engine's. ``None``: there is none."""
    adapters: Mapping[str, str] = field(default_factory=dict, hash=False)
    """LoRA adapters that requests may name as their ``lora``: ``{"fr": "adapters/fr"}``, each a directory in PEFT's
    format. Others can be loaded later; see ``max_adapters``."""
    max_adapters: int | None = None
    """Adapters that are in memory at a time, and that one step can compute with; the least recently used one leaves for
    another. ``None``: 8 where ``adapters`` has any, else 0: none can be loaded."""
    adapter_memory: int | float | str | None = None
    """The most memory that adapters take, like ``kv_cache_memory``; ``None``: a tenth of free memory. It is drawn from
    a ``MemoryBudget`` with the KV pool."""
    seed: int = 0
    """Seeds of requests without one are derived from it."""

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            error = rules.invalid_secret if name in _SECRETS else rules.invalid_setting
            rule.check(name, getattr(self, name), error)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidConfig(
                f"max_num_batched_tokens: got {self.max_num_batched_tokens}, allowed is at least "
                f"{self.max_num_seqs} (max_num_seqs), so that every running sequence can advance in each step."
            )
        if self.min_batch_size > self.max_num_seqs:
            raise InvalidConfig(
                f"min_batch_size: got {self.min_batch_size}, allowed is at most {self.max_num_seqs} (max_num_seqs)."
            )
        if self.speculative_model is not None and self.speculation == "off":
            raise InvalidConfig('speculative_model: got a name, allowed is None with speculation="off".')
        if self.phases == "separate" and self.prefill_share < 1.0:
            raise InvalidConfig(
                f"prefill_share: got {self.prefill_share}, allowed is 1.0 with phases=\"separate\", whose steps have "
                "prefill chunks or decode rows."
            )
        if not isinstance(self.kv_cache_memory, MemoryBudget | BudgetShare):
            parse_memory(self.kv_cache_memory, free_bytes=0)
        parse_memory(self.host_kv_memory, free_bytes=0, what="host_kv_memory")
        parse_memory(self.adapter_memory, free_bytes=0, what="adapter_memory")

    @property
    def waiting_limit(self) -> int:
        """Most requests that may wait to be started."""
        return self.max_num_waiting if self.max_num_waiting is not None else 4 * self.max_num_seqs

    @property
    def max_wait_s(self) -> float:
        """The longest that new sequences wait for company, in seconds."""
        return (_MAX_WAIT_MS if self.max_wait_ms is None else self.max_wait_ms) / 1000.0

    @property
    def session_secret(self) -> bytes:
        """``session_key`` as bytes; empty without one."""
        key = self.session_key or b""
        return key.encode() if isinstance(key, str) else key

    @classmethod
    def from_keywords(cls, **settings: Any) -> EngineConfig:
        """Build a configuration of keywords that a type checker cannot know. Raises as the constructor."""
        return cls(**settings)

    @staticmethod
    def require_names(names: Iterable[str], others: Iterable[str] = ()) -> None:
        """Look at the names alone: each has to be a setting, or another keyword of ``from_pretrained``.

        Args:
            names: as someone has given them.
            others: names that mean something where they were given, which the error may advise.

        Raises:
            InvalidConfig: a name is neither.
        """
        own_names(dict.fromkeys(name for name in names if name not in BESIDE_SETTINGS), (*BESIDE_SETTINGS, *others))

    @classmethod
    def from_file(
        cls, path: str | os.PathLike[str], defaults: Mapping[str, Any] | None = None, **settings: Any
    ) -> EngineConfig:
        """Build a configuration of the names and values in a TOML or JSON file, for ``from_pretrained(config=...)``.

        Args:
            path: of a file whose name ends in ``.toml`` or ``.json``.
            defaults: settings that those of the file replace.
            **settings: replace those of the file.

        Raises:
            InvalidConfig: a name or a value is not allowed, a name comes twice, or the file cannot be read, is larger
                than 64 KiB or is no UTF-8 text in its format.
        """
        return cls(**{**own_names(defaults or {}), **own_names(read_settings(path)), **own_names(settings)})


_WIDEST_ON_GPU: Final = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}
_KNOWN: Final = sorted(one.name for one in fields(EngineConfig))


def own_names(settings: Mapping[str, Any], others: Iterable[str] = ()) -> dict[str, Any]:
    """Return settings with aliases replaced. Raises ``InvalidConfig`` for unknown names, and for two values of one.

    ``others`` are names that the caller of this takes beside them, and may have been meant.
    """
    named: dict[str, Any] = {}
    for given, value in settings.items():
        name = _ALIASES.get(given, given)
        if name not in _KNOWN:
            if given in _OF_OTHERS:
                raise InvalidConfig(f"unknown setting {given!r}. {_OF_OTHERS[given]}")
            advice, known = did_you_mean(given, [*_KNOWN, *_ALIASES, *others]), ", ".join(_KNOWN)
            raise InvalidConfig(f"unknown setting {describe_name(given)}, known are {known}. {advice}".rstrip())
        if name in named and named[name] != value:
            raise InvalidConfig(f"{name}: got two values, its own and another one as an alias; give one of them.")
        named[name] = value
    return named


def _with_own_names(make: Callable[..., None]) -> Callable[..., None]:
    @wraps(make)
    def init(config: EngineConfig, **settings: Any) -> None:
        named = own_names(settings)
        make(config, **_of_gpu(named), **named)

    return init


def _of_gpu(named: Mapping[str, Any]) -> dict[str, int]:
    """Return how wide steps of a GPU are where nothing is said, which never contradicts what is; of a CPU nothing."""
    if not str(named.get("device")).startswith("cuda"):
        return {}
    rows, tokens = (named.get(name, most) for name, most in _WIDEST_ON_GPU.items())
    if isinstance(rows, int) and isinstance(tokens, int):
        rows, tokens = (rows, max(rows, tokens)) if "max_num_seqs" in named else (min(rows, tokens), tokens)
    return {name: one for name, one in zip(_WIDEST_ON_GPU, (rows, tokens), strict=True) if name not in named}


# Why here: a dataclass takes its fields only, and refuses others with an error that names no field.
EngineConfig.__init__ = _with_own_names(EngineConfig.__init__)  # type: ignore[method-assign]
