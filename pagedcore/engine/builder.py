"""Puts an engine together: model, tokenizer, KV pool, scheduler, plugins. The one place that sees all of them.

Every "auto" of the configuration is decided here, from the machine and the model; nothing is decided later.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, cast

from pagedcore.config.engine_config import BESIDE_SETTINGS, EngineConfig, own_names
from pagedcore.config.field_rules import invalid_setting
from pagedcore.config.limits import MAX_SCORED_BYTES
from pagedcore.config.speculation import rules_of
from pagedcore.drafting.drafts import SOURCES as DRAFTS_FROM
from pagedcore.drafting.drafts import Drafts
from pagedcore.embedding_defaults import EmbeddingDefaults
from pagedcore.engine.adapter_verbs import empty_slots, load_first, make_slots, num_slots_of
from pagedcore.engine.draft_models import LoadedDraftModel, load_draft_model
from pagedcore.engine.kv_memory import KVMemory, context_length, draw_weights
from pagedcore.errors import InvalidConfig
from pagedcore.execution.compute_threads import ComputeThreads
from pagedcore.execution.model_runner import ModelRunner
from pagedcore.execution.sampler import Sampler
from pagedcore.generation_defaults import GenerationDefaults
from pagedcore.kv_cache import eviction
from pagedcore.kv_cache.kv_cache_manager import KVCacheManager
from pagedcore.lazy_names import delegate
from pagedcore.lora.registry import AdapterRegistry
from pagedcore.models.checkpoints.hub import ModelName
from pagedcore.models.fingerprint import backend_fingerprint, description_of, kv_format
from pagedcore.models.loading import DEFAULT_MODEL_BACKEND, load_tokenizer, model_name, plan_backend, resolve_backend
from pagedcore.plugins.hookspecs import EngineInfo
from pagedcore.plugins.manager import EngineHooks, create_plugin_manager
from pagedcore.protocols import (
    DecodesTokens,
    HasEmbeddingDefaults,
    HasFingerprint,
    HasGenerationConfig,
    HasShortContext,
    HasTextHead,
    ModelFingerprint,
    NamesVariablePart,
    RecordsSteps,
    ReturnsHidden,
    TakesAdapters,
    TakesPositionsBack,
    UsesTorchThreads,
)
from pagedcore.requests.input_processor import NO_PAIRS, InputProcessor
from pagedcore.requests.observers import EngineObserver
from pagedcore.scheduler.adapter_slots import AdapterSlots
from pagedcore.scheduler.batch_gate import BatchGate
from pagedcore.scheduler.draft_costs import DraftCosts
from pagedcore.scheduler.policy_guard import make_policy
from pagedcore.scheduler.scheduler import Scheduler
from pagedcore.scheduler.speculation import Speculation
from pagedcore.structured.grammars import Grammars
from pagedcore.tool_calls.chat_format import ChatFormat
from pagedcore_kernels.cpu.runtime.float_state import DefaultFloatState
from pagedcore_kernels.cpu.runtime.openmp import usable_torch

if TYPE_CHECKING:
    from pagedcore.execution.draft_model import DraftModel
    from pagedcore.plugins.manager import PluginManager
    from pagedcore.plugins.registry import Registry, Table
    from pagedcore.protocols import CacheStore, ModelBackend, StateStore, Tokenizer, WindowStore
    from pagedcore.scheduler.policies import Policy

_log = logging.getLogger("pagedcore")
_promise_deadlines: Callable[..., tuple[EngineObserver, ...]] = delegate(
    "pagedcore.analysis.quotes.promises", "promise_deadlines")
_shadow = delegate("pagedcore.analysis.diagnosis.shadow", "shadow")


@dataclass(frozen=True, slots=True)
class EngineComponents:
    """Everything an engine is made of."""

    config: EngineConfig
    input_processor: InputProcessor
    kv_cache: KVCacheManager
    scheduler: Scheduler
    runner: ModelRunner
    hooks: EngineHooks
    info: EngineInfo
    kv_bytes: int
    memory: KVMemory
    store: CacheStore | None
    fingerprint: ModelFingerprint
    kv_format: str
    """What KV blocks of another process have to match to be of use here."""
    identity: str
    """As ``Engine.identity``."""
    chat_format: ChatFormat
    """As ``Engine.chat_format``."""
    adapters: AdapterRegistry
    """As ``Engine.adapter_registry``."""
    num_short_tokens: int | None = None
    """As of ``HasShortContext``."""
    observers: tuple[EngineObserver, ...] = ()
    """What watches it from the start: laws (``check_invariants``), and promises if the policy makes some."""
    speculation: str = "off"
    """"on", or "off" with the reason."""
    states: tuple[StateStore | None, int] = (None, 0)
    """What moves the states of recurrent layers, and the bytes of one, if there are any."""
    windows: WindowStore | None = None
    """What moves window blocks, if there are any."""


def build_components(
    model: Any, *, config: EngineConfig | None = None, tokenizer: Any = None, plugins: Iterable[object] = (),
    **settings: Any,
) -> EngineComponents:
    """Build the parts of an engine; arguments as ``Engine.from_pretrained``.

    Raises:
        InvalidConfig: a setting is unknown or out of range, the model cannot run here, or a memory budget has not
            enough left.
    """
    if not isinstance(config, EngineConfig | None):
        raise invalid_setting("config", config, "an EngineConfig, or None")
    is_object = tokenizer is not None and not isinstance(tokenizer, str)
    if tokenizer is not None:
        settings["tokenizer"] = None if is_object else tokenizer
    start = {} if config is None else {one.name: getattr(config, one.name) for one in fields(config)}
    config = EngineConfig.from_keywords(**{**start, **own_names(settings, BESIDE_SETTINGS)})
    manager = create_plugin_manager(plugins)
    policy = make_policy(manager.registry.schedulers.load(config.scheduling_policy), config.policy_options)
    named = ModelName(model) if type(model) is str else model
    num_slots_of(config)  # Why here: what can be refused without the model is
    # Why first: what the budget has no room for is not read.
    weights = draw_weights(config, lambda: _weight_bytes(named, config, manager))
    with DefaultFloatState():
        with usable_torch():
            backend = resolve_backend(named, config, manager.registry.load)
        text = _as_tokenizer(tokenizer) if is_object else load_tokenizer(named, config)
        if config.chat_template is not None:
            text = _with_template(text, config.chat_template)
        with usable_torch():
            draft = _load_draft_model(config, backend, text, manager)
        # Why undone: the backend may be the user's own, and shall make the next engine.
        undo = ExitStack()
        try:
            slots = make_slots(backend, config, undo)
            memory = KVMemory(backend, config, draft, weights)
            undo.callback(memory.close)
            for one in memory.backends:
                if isinstance(one, RecordsSteps):
                    one.record_steps(config.max_num_seqs, context_length(backend.max_model_len, config))
            # Why last, so that it is first: freeing the pool ends the model's use of slots.
            undo.callback(empty_slots, slots, backend)
            components = _assemble(
                model_name(model), memory.states.followed_by(config), manager, policy, backend, text, memory, tokenizer,
                slots, undo.close, draft)
            load_first(components.adapters, config)
        except BaseException:
            undo.close()
            raise
        return components


def _assemble(
    name: str, config: EngineConfig, manager: PluginManager, policy: Policy, backend: ModelBackend,
    text: Tokenizer | None, memory: KVMemory, tokenizer: Any, slots: AdapterSlots, at_the_end: Callable[[], None],
    draft: LoadedDraftModel | None,
) -> EngineComponents:
    kv_cache = KVCacheManager(
        memory.num_blocks, memory.block_size, num_host_blocks=memory.num_host_blocks,
        policy=eviction.POLICIES[config.eviction_policy], secret=secrets.token_bytes(32),
        copies_blocks=memory.store is not None, num_states=memory.states.num_states,
        num_host_states=memory.states.num_host_states, state_weight=memory.state_weight,
        num_windows=memory.windows.num_windows, window=memory.windows.window,
    )
    info, end_ids = _describe(name, backend, config, kv_cache), backend.eos_token_ids
    hooks = EngineHooks(manager, at_the_end=at_the_end)
    grammars = Grammars(text, backend.vocab_size, end_ids | (text.eos_token_ids if text is not None else frozenset()))
    defaults = _generation_defaults(backend, config)
    adapters = AdapterRegistry(backend if isinstance(backend, TakesAdapters) else None, slots)
    input_processor = InputProcessor(
        text, backend.vocab_size, info.max_model_len, kv_cache.device.num_blocks * kv_cache.device.block_size,
        config.waiting_limit, grammars.eos_token_ids, policy.unread_options, grammars, hooks.request_context,
        config.control_tokens_in_chats, defaults,
        backend.embedding_defaults if isinstance(backend, HasEmbeddingDefaults) else EmbeddingDefaults(),
        backend.hidden_size if isinstance(backend, ReturnsHidden) else 0,
        *((backend.text_head, backend.pair_defaults) if isinstance(backend, HasTextHead) else (None, NO_PAIRS)),
        adapters.find,
    )
    scheduler = Scheduler(
        kv_cache, policy, max_num_seqs=config.max_num_seqs, max_num_waiting=config.waiting_limit,
        max_num_batched_tokens=config.max_num_batched_tokens, admission=config.admission,
        preemption=_preemption(backend, config, memory), max_scored_tokens=max_scored_tokens(backend.vocab_size),
        gate=BatchGate(config.min_batch_size, config.max_wait_s), phases=config.phases,
        prefill_share=config.prefill_share, adapters=slots,
    )
    drafting = draft.with_pool(memory.num_blocks, memory.block_size, backend.vocab_size, config) if draft else None
    scheduler.speculation, speculation = _speculation(backend, config, scheduler, grammars, drafting)
    observers = _promise_deadlines(scheduler) if policy.promises else ()
    store, form, states = memory.store, kv_format(backend, memory.block_size), memory.states.store
    windows = memory.windows.store
    in_torch = isinstance(backend, UsesTorchThreads) and backend.computes_in_torch
    threads = ComputeThreads(config.num_threads, computes_in_torch=in_torch)
    runner = ModelRunner(backend, Sampler(backend.vocab_size, grammars), threads)
    runner.slot_of = slots.slot_of
    if config.check_invariants:
        store, states, windows, runner, laws = _shadow(scheduler, store, states, windows, runner)
        observers = *observers, laws
    return EngineComponents(
        config, input_processor, kv_cache, scheduler, runner, hooks, info,
        memory.num_bytes, memory, store, backend_fingerprint(backend), form,
        _identity(backend, form, info.max_model_len, tokenizer, config.chat_template, defaults),
        _chat_format(manager.registry, config, text), adapters,
        backend.num_short_tokens if isinstance(backend, HasShortContext) else None, observers, speculation,
        (states, memory.states.state_bytes), windows,
    )


def _speculation(
    backend: ModelBackend, config: EngineConfig, scheduler: Scheduler, grammars: Grammars, model: DraftModel | None
) -> tuple[Speculation | None, str]:
    """Return what gives rows drafts, and whether there is that, in words."""
    rules = rules_of(config.speculation)
    if rules is None:
        return None, "off"
    if reason := why_no_drafts(backend, config):
        if rules.is_explicit:
            raise InvalidConfig(f'speculation: got a mapping, allowed is "auto" or "off" here: {reason}.')
        return None, f"off: {reason}"
    source = Drafts([one for one in rules.sources if one in DRAFTS_FROM])
    forced = grammars.forced if "grammar" in rules.sources else None
    return Speculation(source, DraftCosts(scheduler.costs.steps), backend.vocab_size, rules.most, forced, model), "on"


def _weight_bytes(model: Any, config: EngineConfig, manager: PluginManager) -> int:
    """Return the bytes of a model's weights, by its configuration. Raises ``InvalidConfig`` where nothing says them."""
    if not isinstance(model, str) or config.model_backend not in ("auto", DEFAULT_MODEL_BACKEND):
        raise InvalidConfig(
            "kv_cache_memory: got a budget that counts weights, needed is a model by its directory, GGUF file or name "
            "on the hub, whose bytes are known before it is read.")
    return plan_backend(model, config, manager.registry.attention.load).weight_bytes


def _load_draft_model(
    config: EngineConfig, backend: ModelBackend, text: Tokenizer | None, manager: PluginManager
) -> LoadedDraftModel | None:
    if config.speculative_model is None:
        return None
    if reason := why_no_drafts(backend, config):
        raise InvalidConfig(f"speculative_model: got a name, allowed is None here: {reason}.")
    return load_draft_model(config, backend, text, manager.registry)


def why_no_drafts(backend: ModelBackend, config: EngineConfig) -> str:
    """Return why an engine of these gives no drafts; empty if it can."""
    if not (isinstance(backend, TakesPositionsBack) and backend.takes_positions_back):
        return "the model cannot take computed positions back"
    if not backend.is_schedule_invariant:
        return "results of the model depend on the schedule"
    if description_of(backend).device_name:
        return "the model runs on a GPU"
    return ""


def _generation_defaults(backend: ModelBackend, config: EngineConfig) -> GenerationDefaults:
    fields = backend.generation_config if isinstance(backend, HasGenerationConfig) else {}
    defaults = GenerationDefaults.of(
        fields, backend.vocab_size, backend.eos_token_ids, is_used=config.generation_config == "auto")
    defaults.log()
    return defaults


def _chat_format(registry: Registry, config: EngineConfig, tokenizer: Tokenizer | None) -> ChatFormat:
    tables: tuple[tuple[Table[Any], str], ...] = (
        (registry.tool_parsers, config.tool_parser), (registry.reasoning_parsers, config.reasoning_parser))
    for table, name in tables:
        if name not in ("auto", "none"):
            table.find(name)
    return ChatFormat(tokenizer, *(partial(_find_format, table, name) for table, name in tables))


def _find_format(table: Table[Callable[[], Any]], name: str, template: str) -> Any:
    known = recognised_format(table, template) if name == "auto" else name
    return None if known in (None, "none") else table.load(known)()


def recognised_format(table: Table[Callable[[], Any]], template: str) -> str | None:
    """Return the name of the entry of a table of formats that "auto" means for a chat template, if there is one."""
    names = (entry.name for entry in table if table.can_import(entry.name))
    return next((name for name in names if table.load(name)().recognises(template)), None)


def _identity(
    backend: ModelBackend, form: str, max_model_len: int, tokenizer: Any, template: str | None,
    defaults: GenerationDefaults,
) -> str:
    # Why: weights of a backend that does not describe them, and a tokenizer object, are not known to be another's.
    is_known = isinstance(backend, HasFingerprint) and isinstance(tokenizer, str | None)
    held = repr(sorted(defaults.as_mapping.items())) if defaults.as_mapping else None
    own = "".join(f"-{sha256(text.encode()).hexdigest()}" for text in (template, held) if text is not None)
    return f"{form if is_known else secrets.token_hex(32)}-{max_model_len}-{tokenizer if is_known else ''}{own}"


def _preemption(backend: ModelBackend, config: EngineConfig, memory: KVMemory) -> str:
    """Return how to preempt: where computing again may give other bits, by a way that keeps what was computed."""
    if backend.is_schedule_invariant:
        return config.preemption
    chosen = "swap" if config.preemption != "wait" and memory.num_host_blocks else "wait"
    reason = backend.variable_part if isinstance(backend, NamesVariablePart) else "its backend says so"
    _log.warning(
        "Results of this model depend on the schedule in their last bits (%s): the same request can get another "
        "completion where two tokens are nearly equally likely. Preemption is %r, so that what was computed is kept.",
        reason, chosen,
    )
    return chosen


def max_scored_tokens(vocab_size: int) -> int:
    """Return how many rows of float32 logits a step may hold for prompts that are reported: 64 MiB of them."""
    return max(1, MAX_SCORED_BYTES // (4 * vocab_size))


def _as_tokenizer(tokenizer: Any) -> Tokenizer:
    """Return a tokenizer of ours or of the user's own as it is, one of transformers wrapped."""
    if isinstance(tokenizer, DecodesTokens):
        return cast("Tokenizer", tokenizer)
    from pagedcore.tokenizer.tokenizer import HFTokenizer

    return HFTokenizer.from_transformers(tokenizer)


def _with_template(text: Tokenizer | None, source: str) -> Tokenizer:
    from pagedcore.tokenizer.tokenizer import HFTokenizer

    if not isinstance(text, HFTokenizer):
        raise InvalidConfig("chat_template: got a template, allowed is None with this tokenizer, or without one.")
    return text.with_chat_template(source)


def _describe(name: str, backend: ModelBackend, config: EngineConfig, kv_cache: KVCacheManager) -> EngineInfo:
    facts = description_of(backend)
    return EngineInfo(
        model=name,
        dtype=str(facts.dtype).removeprefix("torch."),
        attention_backend=facts.attention_name,
        scheduling_policy=config.scheduling_policy,
        block_size=kv_cache.device.block_size,
        num_blocks=kv_cache.device.num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_model_len=context_length(backend.max_model_len, config),
        is_schedule_invariant=backend.is_schedule_invariant,
    )
