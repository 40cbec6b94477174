"""An engine whose steps are made elsewhere: prompts become tokens here, and completions come from a replica's engine.

Owns what crosses between ingress and replica: one ``EngineCall`` there, deltas, outputs and errors back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from pagedcore import AdapterInfo, AsyncEngine, Delta, Engine, Infill, SamplingParams
from pagedcore.errors import EngineClosed, EngineOverloaded, InternalError, InvalidAdapter
from pagedcore.request_options import OptionKeywords, read_options


class ReplicaLost(EngineClosed):
    """The replica that computed a request is gone, or could not be reached. Nothing is repeated by itself: what was
    delivered stands. The request may be sent again, and another replica completes it."""


@dataclass(frozen=True, slots=True)
class EngineCall:
    """One request on its way to a replica."""

    token_ids: list[int]
    params: SamplingParams | None
    options: OptionKeywords
    timeout_s: float | None = None
    wait_for_room: bool = False
    salt: bytes = field(default=b"", repr=False)
    """The salt as it enters cache keys, and the adapter, for the router."""
    gap: Infill | None = None
    """What the tokens are of, if they are those of a gap."""

    @property
    def prompt(self) -> list[int] | Infill:
        """What the replica's engine gets."""
        return self.token_ids if self.gap is None else self.gap


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What an ingress has to know of the replicas' engines to check requests: a model without computation."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    block_size: int
    num_kv_blocks: int
    max_num_waiting: int
    kv_bytes_per_token: int = 1
    is_schedule_invariant: bool = True
    adapters: tuple[str, ...] = ()
    """The names that the replicas' engines have adapters under."""

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Allocate nothing."""

    def forward(self, batch: Any) -> Any:
        """Refuse: no request may reach this engine's steps."""
        raise InternalError("an ingress was asked to compute")

    @classmethod
    def of(cls, engine: Engine) -> ModelFacts:
        """Look at an engine between two of its steps."""
        stats, door = engine.stats(), engine.input_processor
        return cls(door.vocab_size, stats.max_model_len, door.eos_token_ids, stats.block_size, stats.num_blocks,
                   door.max_num_waiting, adapters=engine.adapter_registry.names)


class RemoteEngine(AsyncEngine):
    """An ``AsyncEngine`` that sends its requests to replicas; sessions are not offered, their KV would be elsewhere.

    It tokenises and refuses prompts by itself; parameters and options are checked where the request runs.
    """

    def __init__(self, facts: ModelFacts, tokenizer: str, handle: DeploymentHandle) -> None:
        """Take what the replicas' engines are like, a directory or hub name, and the way to the replicas."""
        super().__init__(Engine.from_pretrained(
            facts, tokenizer=tokenizer, num_kv_blocks=facts.num_kv_blocks, max_num_waiting=facts.max_num_waiting,
        ))
        self._handle, self._adapters = handle, facts.adapters

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The names of the adapters that the replicas were started with."""
        return self._adapters

    async def load_adapter(self, name: str, directory: Any) -> AdapterInfo:
        """Refuse: replicas have the adapters of their settings. Raises ``InvalidAdapter``."""
        raise InvalidAdapter("adapters", "one for a running deployment", "those of the deployment's settings",
                             is_described=True)

    async def generate(
        self, prompt: Any, params: SamplingParams | None = None, *, timeout_s: float | None = None,
        wait_for_room: bool = False, **options: Any,
    ) -> AsyncGenerator[Delta, None]:
        """Complete one prompt on a replica; arguments and errors as ``AsyncEngine.generate``.

        Raises:
            ReplicaLost: the replica is gone.
        """
        call = await self._call(prompt, params, options, timeout_s, wait_for_room)
        deltas = self._handle.options(stream=True).stream.remote(call)
        try:
            async for delta in deltas:
                if isinstance(delta, Exception):
                    raise delta
                yield delta
        except RayError as error:
            raise _lost(error) from error
        except (BackPressureError, DeploymentUnavailableError) as error:
            raise EngineOverloaded(0, 0) from error
        finally:
            deltas.cancel()

    def submit(
        self, prompt: Any, params: SamplingParams | None = None, *, wait_for_room: bool = False, **options: Any
    ) -> Any:
        """Send one prompt off; call it on a running event loop. Refusals come out of the future."""
        completing = self._complete(prompt, params, wait_for_room, options)
        return self.awaitable(asyncio.run_coroutine_threadsafe(completing, asyncio.get_running_loop()))

    async def _complete(self, prompt: Any, params: SamplingParams | None, wait_for_room: bool, options: Any) -> Any:
        call = await self._call(prompt, params, options, None, wait_for_room)
        response = self._handle.complete.remote(call)
        try:
            output = await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        except RayError as error:
            raise _lost(error) from error
        if isinstance(output, Exception):
            raise output
        return output

    async def _call(self, prompt: Any, params: SamplingParams | None, options: Any, timeout_s: float | None,
                    wait_for_room: bool) -> EngineCall:
        asked = read_options(options, "timeout_s", "wait_for_room")
        # Why: equal tokens under two adapters share no cached prefix.
        salt = asked.salt if asked.lora is None else asked.salt + b"\0" + asked.lora.encode()
        token_ids = await asyncio.to_thread(self.encode, prompt)
        # Why: tokens do not say that they are a gap's, at which other tokens end.
        gap = prompt if type(prompt) is Infill else None
        return EngineCall(token_ids, params, options, timeout_s, wait_for_room, salt, gap)


def _lost(error: RayError) -> ReplicaLost:
    return ReplicaLost(f"the replica of this request is gone ({type(error).__name__}); send it again.")
