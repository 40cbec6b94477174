"""A continuous-batching inference core for language models that lives inside your own Python process.

    from pagedcore import Engine, SamplingParams

    with Engine.from_pretrained("demo") as engine:
        print(engine.generate(["What is 2 + 3?"], SamplingParams(max_tokens=16))[0].outputs[0].text)

The names below are the public ones; each is imported when it is first used. Read ``docs/architecture.md`` next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pagedcore_kernels  # noqa: F401  # Why first: it says on which systems pagedcore runs.
from pagedcore._version import __version__ as __version__
from pagedcore.lazy_names import lazy_names

if TYPE_CHECKING:
    from pagedcore.config.engine_config import EngineConfig
    from pagedcore.config.memory_budget import MemoryBudget
    from pagedcore.engine.continuous_batcher import Batch, BatchRequest, ContinuousBatcher
    from pagedcore.engine.engine import Engine
    from pagedcore.metrics.recorder import engine_metrics, engine_metrics_text
    from pagedcore.outputs import (
        AdapterInfo,
        Classification,
        CompletionOutput,
        CompletionScore,
        Delta,
        Embedding,
        PairScore,
        RequestOutput,
        TokenLogprobs,
        TokenText,
        Usage,
    )
    from pagedcore.plugins.manager import expose
    from pagedcore.requests.infill import Infill
    from pagedcore.requests.request import Request
    from pagedcore.sampling_params import SamplingParams
    from pagedcore.serving.async_engine import AsyncEngine
    from pagedcore.serving.shared_engines import SharedEngines
    from pagedcore.sessions.session import Session
    from pagedcore.structured_output import StructuredOutput
    from pagedcore.tokenizer.chat import Chat
    from pagedcore.tool_calls.chat_reply import ChatReply

__all__ = [
    "AdapterInfo", "AsyncEngine", "Batch", "BatchRequest", "Chat", "ChatReply", "Classification", "CompletionOutput",
    "CompletionScore", "ContinuousBatcher", "Delta", "Embedding", "Engine", "EngineConfig", "Infill",
    "MemoryBudget", "PairScore", "Request", "RequestOutput", "SamplingParams", "Session", "SharedEngines",
    "StructuredOutput", "TokenLogprobs", "TokenText", "Usage", "engine_metrics", "engine_metrics_text", "expose",
]

_HOMES: Final = {
    "AsyncEngine": "pagedcore.serving.async_engine",
    "Batch": "pagedcore.engine.continuous_batcher",
    "BatchRequest": "pagedcore.engine.continuous_batcher",
    "Chat": "pagedcore.tokenizer.chat",
    "ChatReply": "pagedcore.tool_calls.chat_reply",
    "ContinuousBatcher": "pagedcore.engine.continuous_batcher",
    "Engine": "pagedcore.engine.engine",
    "EngineConfig": "pagedcore.config.engine_config",
    "Infill": "pagedcore.requests.infill",
    "MemoryBudget": "pagedcore.config.memory_budget",
    "Request": "pagedcore.requests.request",
    "SamplingParams": "pagedcore.sampling_params",
    "Session": "pagedcore.sessions.session",
    "SharedEngines": "pagedcore.serving.shared_engines",
    "StructuredOutput": "pagedcore.structured_output",
    "engine_metrics": "pagedcore.metrics.recorder",
    "engine_metrics_text": "pagedcore.metrics.recorder",
    "expose": "pagedcore.plugins.manager",
}
"""The modules of the public names that are not in ``outputs.py``."""

__getattr__ = lazy_names(__name__, {name: _HOMES.get(name, "pagedcore.outputs") for name in __all__})


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted({*globals(), *__all__})
