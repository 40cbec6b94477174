"""Loads the small model that guesses for an engine's own, and refuses one that speaks other tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pagedcore.config.engine_config import EngineConfig
from pagedcore.errors import InvalidConfig
from pagedcore.execution.compute_threads import ComputeThreads
from pagedcore.execution.draft_model import DraftModel
from pagedcore.execution.model_runner import ModelRunner
from pagedcore.execution.sampler import Sampler
from pagedcore.kv_cache.block_manager import BlockManager
from pagedcore.models.loading import DEFAULT_MODEL_BACKEND, load_tokenizer, model_source, plan_backend, resolve_backend
from pagedcore.protocols import KeepsStates, TakesPositionsBack, UsesTorchThreads
from pagedcore.tokenizer.same_vocabulary import different_token, lists_tokens

if TYPE_CHECKING:
    from pagedcore.plugins.registry import Registry
    from pagedcore.protocols import ModelBackend, Tokenizer


@dataclass(frozen=True, slots=True)
class LoadedDraftModel:
    """A small model without a pool."""

    backend: ModelBackend
    weight_bytes: int

    def with_pool(self, num_blocks: int, block_size: int, vocab_size: int, config: EngineConfig) -> DraftModel:
        """Return what drafts with it, once its backend has so many blocks."""
        in_torch = isinstance(self.backend, UsesTorchThreads) and self.backend.computes_in_torch
        threads = ComputeThreads(config.num_threads, computes_in_torch=in_torch)
        runner = ModelRunner(self.backend, Sampler(self.backend.vocab_size), threads)
        blocks = BlockManager(num_blocks, block_size, copies_blocks=False)
        return DraftModel(runner, blocks, vocab_size, config.max_num_batched_tokens)


def settings_of_draft_model(config: EngineConfig, block_size: int | None) -> EngineConfig:
    """Return the settings that a small model is loaded by: those of the machine, and what its own files say."""
    return replace(
        EngineConfig(), dtype=config.dtype, block_size=block_size, kv_cache_dtype=config.kv_cache_dtype,
        attention_backend=config.attention_backend, model_backend=DEFAULT_MODEL_BACKEND,
        trust_remote_code=config.trust_remote_code,
    )


def load_draft_model(
    config: EngineConfig, backend: ModelBackend, text: Tokenizer | None, registry: Registry
) -> LoadedDraftModel:
    """Load the model ``config.speculative_model`` for an engine's own backend and tokenizer.

    Raises:
        InvalidConfig: it cannot be loaded, has other tokens, or cannot take computed positions back.
    """
    name = config.speculative_model or ""
    own = settings_of_draft_model(config, config.block_size or backend.block_size)
    with _as_its_own():
        source = model_source(name)
        weight_bytes = plan_backend(source, own, registry.attention.load).weight_bytes
        tokenizer = load_tokenizer(source, own)
        small = resolve_backend(source, own, registry.load)
    _require_same_tokens(small.vocab_size, tokenizer, backend.vocab_size, text)
    if not (isinstance(small, TakesPositionsBack) and small.takes_positions_back):
        raise InvalidConfig("speculative_model: got one that cannot take computed positions back; take another one.")
    if isinstance(small, KeepsStates) and small.state_bytes:
        raise InvalidConfig("speculative_model: got one with recurrent layers, allowed is a model of attention alone.")
    return LoadedDraftModel(small, weight_bytes)


@contextmanager
def _as_its_own() -> Iterator[None]:
    try:
        yield
    except InvalidConfig as error:
        raise InvalidConfig(f"speculative_model: {error}") from error


def _require_same_tokens(size: int, tokenizer: object, own_size: int, own: object) -> None:
    """Check that tokens of two models are the same. Sizes alone may differ where tokens are known: by padding."""
    if lists_tokens(tokenizer) and lists_tokens(own):
        if (token_id := different_token(tokenizer, own)) is not None:
            raise InvalidConfig(
                f"speculative_model: its token {token_id} is another one than the model's; take a model with the same "
                "tokenizer."
            )
    elif size != own_size:
        raise InvalidConfig(
            f"speculative_model: got one with {size} tokens, allowed are those of the model, {own_size}.")
