"""Turns what a user calls a model into a ``ModelBackend``, and finds the tokenizer that goes with it.

Owns the distinction between a name, a directory, "demo", a loaded model and a backend of one's own. transformers is
imported only when one of the first four is given. Read ``models/pretrained.py`` and ``models/transformers_model.py``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pagedcore.config import EngineConfig
from pagedcore.demo_model import DEMO_MODEL_DIR
from pagedcore.errors import InvalidConfig, describe
from pagedcore.ports import AttentionBackend, ModelBackend, Tokenizer

if TYPE_CHECKING:
    from pagedcore.execution.models.blueprint import Blueprint
    from pagedcore.execution.models.transformers_model import TransformersModel

AttentionFactory = Callable[..., AttentionBackend]
"""``(layout, pool) -> AttentionBackend``."""

DEFAULT_ATTENTION: Final = "numba-cpu"


def resolve_backend(
    model: Any, config: EngineConfig, load_attention: Callable[[str], AttentionFactory]
) -> ModelBackend:
    """Return a backend for ``model``.

    Args:
        model: "demo", a directory, a hub name, a loaded ``PreTrainedModel`` (taken over), or a ``ModelBackend``.
        config: number format, block size, attention backend and trust.
        load_attention: returns the attention factory of a name.

    Raises:
        InvalidConfig: it is none of these, or it cannot run here.
    """
    if isinstance(model, str | os.PathLike):
        from pagedcore.execution.models.pretrained import load_pretrained

        loaded = load_pretrained(
            _source(model), dtype=config.dtype, trust_remote_code=config.trust_remote_code
        )
        return _take_over(loaded, config, load_attention, is_private=True)
    if is_pretrained_model(model):
        return _take_over(_converted(model, config.dtype), config, load_attention, is_private=False)
    if isinstance(model, ModelBackend):
        return model
    raise InvalidConfig(
        f'model: got {describe(model)}, allowed is "demo", a directory, a hub name, a causal language model of '
        "transformers, or an object with the members of ModelBackend."
    )


def plan_backend(
    model: str | os.PathLike[str], config: EngineConfig, load_attention: Callable[[str], AttentionFactory]
) -> Blueprint:
    """Return what is known of ``model`` without its weights; arguments and errors as ``resolve_backend``."""
    from pagedcore.execution.models.blueprint import read_blueprint

    return read_blueprint(
        _source(model), load_attention(_attention_name(config)), dtype=config.dtype, block_size=config.block_size,
        trust_remote_code=config.trust_remote_code,
    )


def load_tokenizer(model: Any, config: EngineConfig) -> Tokenizer | None:
    """Return the tokenizer the configuration names, or else the model's own; ``None`` for a model without one.

    Raises:
        InvalidConfig: a tokenizer was named and cannot be loaded.
    """
    from pagedcore.text.tokenizer import HFTokenizer

    if config.tokenizer is not None:
        return HFTokenizer.from_directory(_source(config.tokenizer), config.trust_remote_code)
    if not isinstance(model, str | os.PathLike):
        return None
    source = _source(model)
    if Path(source).is_dir() and not any(Path(source).glob("tokenizer*")):
        return None
    return HFTokenizer.from_directory(source, config.trust_remote_code)


def model_name(model: Any) -> str:
    """Return a short name for people: never a path beyond its last part."""
    if isinstance(model, str | os.PathLike):
        path = Path(os.fspath(model))
        return path.name if path.is_dir() else os.fspath(model)
    return type(model).__name__


def is_pretrained_model(model: Any) -> bool:
    """Whether ``model`` is a loaded model of transformers; does not import transformers."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def _source(model: str | os.PathLike[str]) -> str:
    return os.fspath(DEMO_MODEL_DIR) if model == "demo" else os.fspath(model)


def _converted(model: Any, dtype: str) -> Any:
    """Return the model in the number format asked for; "auto" leaves it as it came."""
    from pagedcore.execution.models.pretrained import resolve_dtype

    return model if dtype == "auto" else model.to(resolve_dtype(dtype))


def _take_over(
    model: Any, config: EngineConfig, load_attention: Callable[[str], AttentionFactory], *, is_private: bool
) -> TransformersModel:
    from pagedcore.execution.models.transformers_model import TransformersModel

    name = _attention_name(config)
    return TransformersModel(
        model, load_attention(name), block_size=config.block_size, is_private=is_private, attention_name=name
    )


def _attention_name(config: EngineConfig) -> str:
    return DEFAULT_ATTENTION if config.attention_backend == "auto" else config.attention_backend
