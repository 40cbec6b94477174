"""Vectors of texts from an engine on its own thread: a bulk of them is handed over as others leave room for it."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, Unpack

from pagedcore.embedding_defaults import Pooling
from pagedcore.errors import RequestTimeout
from pagedcore.outputs import Embedding, RequestOutput
from pagedcore.request_options import TIMEOUT, OptionKeywords, read_options
from pagedcore.requests.embedding import KEYWORDS, Text, TextEncoder, embedding_of, texts_of
from pagedcore.requests.input_processor import InputProcessor, ProcessedRequest, Prompt
from pagedcore.sampling_params import SamplingParams
from pagedcore.serving.host_program import running_loop
from pagedcore.serving.stream import AwaitableFuture

_AT_ONCE: Final = 64
"""Texts of one call that the engine has at a time: enough to fill its steps, and the queue keeps room for others."""


class AsyncEmbeddings:
    """The part of an ``AsyncEngine`` that embeds."""

    input_processor: InputProcessor

    @abstractmethod
    def _submit(
        self, prepare: Callable[[], ProcessedRequest], prompt: Prompt, params: SamplingParams | None, owner: bytes,
        may_wait: bool,
    ) -> AwaitableFuture[RequestOutput]:
        """As ``AsyncEngine`` has it."""

    async def embed(
        self, texts: Text | Iterable[Text], *, pooling: Pooling | None = None, normalize: bool | None = None,
        dimensions: int | None = None, prompt_name: str | None = None, timeout_s: float | None = None,
        **options: Unpack[OptionKeywords],
    ) -> list[Embedding]:
        """Turn texts into vectors and return them in the same order; cancelling this aborts what is left.

        Texts wait for room in the queue, 64 of a call at a time. Arguments are as for ``Engine.embed``.

        Args:
            timeout_s: longest time from here to the last vector, in seconds; ``None``: no limit.

        Raises:
            InvalidRequest: a text or a value is refused, or this model makes no vectors; texts before it may have been
                computed in vain.
            EngineOverloaded: too many callers wait for room.
            EngineClosed, QueueTimeout: as ``submit``.
            RequestFailed: a text could not be computed.
            RequestTimeout: it took longer than ``timeout_s``.
            NoEventLoop: no event loop of asyncio runs here.
        """
        running_loop()
        limit_s, asked = TIMEOUT.check("timeout_s", timeout_s), read_options(options, *KEYWORDS, "timeout_s")
        encoder = TextEncoder.of(self.input_processor, pooling, normalize, dimensions, prompt_name)
        running, done = deque[AwaitableFuture[RequestOutput]](), list[Embedding]()

        async def finish_first() -> None:
            done.append(embedding_of(await asyncio.wrap_future(running[0])))
            running.popleft()

        try:
            async with asyncio.timeout(limit_s):
                for text in texts_of(texts):
                    while len(running) >= _AT_ONCE:
                        await finish_first()
                    running.append(self._submit_text(encoder, text, asked))
                    # Why: preparing many texts at once would keep the caller's loop from all else.
                    await asyncio.sleep(0)
                while running:
                    await finish_first()
        except TimeoutError:
            raise RequestTimeout(limit_s or 0.0) from None
        finally:
            for one in running:
                one.cancel()
        return done

    def _submit_text(self, encoder: TextEncoder, text: Any, asked: Any) -> AwaitableFuture[RequestOutput]:
        return self._submit(partial(encoder.process, text, asked), text, None, asked.owner, True)
