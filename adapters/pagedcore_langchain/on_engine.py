"""What every object of LangChain's on an engine has: the engine, who a call is for, and how urgent it is."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    SecretBytes,
    SecretStr,
    StrictInt,
    field_validator,
    model_validator,
)

from pagedcore import AsyncEngine, EngineConfig
from pagedcore.errors import InvalidConfig
from pagedcore_langchain.background import BACKGROUND
from pagedcore_langchain.host import EngineHost
from pagedcore_langchain.options import reveal_secret

T = TypeVar("T")


class OnEngine(BaseModel):
    """Fields of a model, of embeddings or of a reranker.

    Invariant: copies, bindings and reconfigured variants share the ``host``, so they share its engine.
    """

    # Safety: a refused salt must not be repeated.
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, hide_input_in_errors=True)

    model: str = "pagedcore"
    """``"demo"``, a directory or a hub id; with an engine of your own, the name to report."""
    engine_settings: dict[str, Any] = Field(default_factory=dict)
    """Fields of ``EngineConfig`` for the engine that this builds."""
    timeout: PositiveFloat | None = None
    """Longest time for a completion, or for a call for vectors or scores, in seconds; then ``RequestTimeout``, and the
    request is aborted."""
    priority: StrictInt = 0
    """Higher runs first under the engine's "priority" policy; others refuse any but 0."""
    cache_salt: SecretStr | SecretBytes | None = Field(default=None, exclude=True, repr=False)
    """Requests with different salts share no cached prompts. Give each tenant its own."""
    tenant: str = ""
    """Who the service is counted for, under the engine's "fair" policy."""
    weight: float = 1.0
    """Share of the tenant beside others, under that policy; others refuse any but 1."""
    deadline_s: PositiveFloat | None = None
    """When a completion should end, in seconds, under the engine's "deadline" policy; others refuse it."""
    lora: str | None = None
    """The name of an adapter that the engine has loaded, to compute with; ``None``: the model alone."""
    host: EngineHost = Field(default=None, exclude=True, repr=False)  # type: ignore[assignment]  # Why: set below.

    @field_validator("engine_settings")
    @classmethod
    def _hide_session_key(cls, settings: dict[str, Any]) -> dict[str, Any]:
        # Safety: representations, caches and tracers show all settings.
        key = settings.get("session_key")
        hidden = SecretStr(key) if isinstance(key, str) else SecretBytes(key) if isinstance(key, bytes) else key
        return {**settings, "session_key": hidden} if key is not None else settings

    @model_validator(mode="after")
    def _make_host(self) -> Self:
        if self.host is None:
            if "model" not in self.model_fields_set:
                # Why: the name to report without one would be looked for at the hub, where it may be a stranger's.
                raise InvalidConfig('model: not given; name one, such as "demo", a directory or a hub id, or give an '
                                    "engine of your own with from_engine.")
            self.host = EngineHost(self.model, {n: reveal_secret(value) for n, value in self.engine_settings.items()})
            self.model_fields_set.discard("host")
        return self

    @classmethod
    def from_engine(cls, engine: AsyncEngine, **fields: Any) -> Self:
        """Build a model on an engine that its owner shares and closes."""
        return cls(host=EngineHost(None, {}, engine), **fields)

    @classmethod
    def around(cls, model: Any, settings: Mapping[str, Any]) -> Self:
        """Build the engine now; names in ``settings`` that are no fields of this class go to the engine."""
        own = {name: value for name, value in settings.items() if name in cls.model_fields}
        if isinstance(model, AsyncEngine):
            return cls.from_engine(model, **dict(settings))
        name = model if isinstance(model, str) else type(model).__name__
        engine_settings = {name: value for name, value in settings.items() if name not in own}
        EngineConfig.require_names(engine_settings, cls.model_fields)
        host = EngineHost(model, engine_settings | own.pop("engine_settings", {}))
        chosen = cls(**{"model": name, "host": host, **own})
        _ = host.engine
        return chosen

    @property
    def engine(self) -> AsyncEngine:
        """The engine, built now if it is not there yet. Raises ``InvalidConfig`` as ``from_pretrained``."""
        return self.host.engine

    def close(self) -> None:
        """Close the engine, for all copies of this model, unless it was handed over."""
        self.host.close()

    @property
    def limits(self) -> dict[str, Any]:
        """What a call for vectors or scores tells the engine."""
        return {"timeout_s": self.timeout, "priority": self.priority, "tenant": self.tenant, "weight": self.weight,
                "deadline_s": self.deadline_s, "lora": self.lora, "cache_salt": reveal_secret(self.cache_salt)}


def run_here(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, whether or not a loop runs here."""
    if not BACKGROUND.is_here:
        return BACKGROUND.run(coroutine)
    # Why: a callback that runs on the background's own loop would wait for itself.
    with ThreadPoolExecutor(1) as other:
        return other.submit(asyncio.run, coroutine).result()
