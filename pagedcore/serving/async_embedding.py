"""Vectors and scores of texts from an engine on its own thread: a bulk is handed over as others leave room for it."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, TypeVar, Unpack

from pagedcore.embedding_defaults import Pooling
from pagedcore.errors import RequestTimeout
from pagedcore.outputs import Classification, CompletionScore, Embedding, PairScore, RequestOutput
from pagedcore.request_options import NO_OPTIONS, TIMEOUT, OptionKeywords, RequestOptions, read_options
from pagedcore.requests.classification import TextClassifier
from pagedcore.requests.embedding import KEYWORDS, Text, TextEncoder, embedding_of, last_state, options_at, texts_of
from pagedcore.requests.input_processor import InputProcessor, ProcessedRequest, Prompt
from pagedcore.requests.reranking import KEYWORDS as PAIR_KEYWORDS
from pagedcore.requests.reranking import PairScorer, check_top_n, numbered, pair_list, pairs_of, ranked
from pagedcore.requests.scoring import CompletionScorer
from pagedcore.sampling_params import SamplingParams
from pagedcore.serving.host_program import running_loop
from pagedcore.serving.long_prompts import is_long, is_structured
from pagedcore.serving.stream import AwaitableFuture

_T = TypeVar("_T")
_AT_ONCE: Final = 64
"""Texts of one call that the engine has at a time: enough to fill its steps, and the queue keeps room for others."""


class AsyncEmbeddings:
    """The part of an ``AsyncEngine`` that embeds and scores."""

    input_processor: InputProcessor

    @abstractmethod
    def _submit(
        self, prepare: Callable[[], ProcessedRequest], prompt: Prompt, params: SamplingParams | None, owner: bytes,
        may_wait: bool,
    ) -> AwaitableFuture[RequestOutput]:
        """As ``AsyncEngine`` has it."""

    def warm_up(self) -> AwaitableFuture[RequestOutput]:
        """Compute one token, so that no caller waits for kernels to be compiled: of a completion, or of a text where
        there is no output layer.
        """
        inputs = self.input_processor
        if inputs.embeddings.generates:
            prepare = partial(inputs.process, [0], SamplingParams(max_tokens=1), NO_OPTIONS)
        else:
            prepare = partial(last_state, inputs, [0], NO_OPTIONS)
        return self._submit(prepare, [0], None, b"", False)

    async def embed(
        self, texts: Text | Iterable[Text], *, pooling: Pooling | None = None, normalize: bool | None = None,
        dimensions: int | None = None, prompt_name: str | None = None, timeout_s: float | None = None,
        wait_for_room: bool = True, **options: Unpack[OptionKeywords],
    ) -> list[Embedding]:
        """Turn texts into vectors and return them in the same order; cancelling this aborts what is left.

        The engine has 64 texts of a call at a time. Arguments are as for ``Engine.embed``.

        Args:
            timeout_s: longest time from here to the last vector, in seconds; ``None``: no limit.
            wait_for_room: wait when the waiting queue is full; ``False``: the first text is refused then, and with it
                the call.

        Raises:
            InvalidRequest: a text or a value is refused, or this model makes no vectors; texts before it may have been
                computed in vain.
            EngineOverloaded: too many callers wait for room.
            EngineClosed, QueueTimeout: as ``submit``.
            RequestFailed: a text could not be computed.
            RequestTimeout: it took longer than ``timeout_s``.
            NoEventLoop: no event loop of asyncio runs here.
        """
        asked = read_options(options, *KEYWORDS, "timeout_s", "wait_for_room")
        encoder = TextEncoder.of(self.input_processor, pooling, normalize, dimensions, prompt_name)
        return await self._each(encoder.process, texts_of(texts), embedding_of, asked, timeout_s, wait_for_room)

    async def score(
        self, prompt: Prompt, completions: Text | Iterable[Text], *, temperature: float | None = None,
        params: SamplingParams | None = None, timeout_s: float | None = None, wait_for_room: bool = True,
        **options: Unpack[OptionKeywords],
    ) -> list[CompletionScore]:
        """Say how likely given completions of a prompt are, as ``Engine.score``; other arguments as ``embed``.

        Raises:
            InvalidRequest: as ``Engine.score``; the rest as ``embed``.
        """
        asked = read_options(options, "temperature", "params", "timeout_s", "wait_for_room")
        make = partial(CompletionScorer.of, self.input_processor, prompt, params, temperature)
        running_loop()
        scorer = await asyncio.to_thread(make) if is_long(prompt) or is_structured(params) else make()
        given = texts_of(completions, "completions")
        return await self._each(scorer.process, given, scorer.score_of, asked, timeout_s, wait_for_room)

    async def classify(
        self, texts: Text | Iterable[Text], *, timeout_s: float | None = None, wait_for_room: bool = True,
        **options: Unpack[OptionKeywords],
    ) -> list[Classification]:
        """Say which class each text is of, as ``Engine.classify``; other arguments as ``embed``.

        Raises:
            InvalidRequest: as ``Engine.classify``; the rest as ``embed``.
        """
        asked, classifier = read_options(options, "timeout_s", "wait_for_room"), TextClassifier.of(self.input_processor)
        given = texts_of(texts)
        return await self._each(classifier.process, given, classifier.result_of, asked, timeout_s, wait_for_room)

    async def score_pairs(
        self, pairs: Iterable[tuple[str, str]], *, instruction: str | None = None, prompt_name: str | None = None,
        timeout_s: float | None = None, wait_for_room: bool = True, **options: Unpack[OptionKeywords],
    ) -> list[PairScore]:
        """Say how relevant the document of each pair is to its query, as ``Engine.score_pairs``; others as ``embed``.

        Raises:
            InvalidRequest: as ``Engine.score_pairs``; the rest as ``embed``.
        """
        asked = read_options(options, *PAIR_KEYWORDS, "timeout_s", "wait_for_room")
        scorer = PairScorer.of(self.input_processor, instruction, prompt_name)
        found = await self._each(scorer.process, pair_list(pairs), scorer.result_of, asked, timeout_s, wait_for_room)
        return numbered(found)

    async def rerank(
        self, query: str, documents: str | Iterable[str], *, top_n: int | None = None,
        instruction: str | None = None, prompt_name: str | None = None, timeout_s: float | None = None,
        wait_for_room: bool = True, **options: Unpack[OptionKeywords],
    ) -> list[PairScore]:
        """Order documents by their relevance to a query, as ``Engine.rerank``; other arguments as ``embed``.

        Raises:
            InvalidRequest: as ``Engine.rerank``; the rest as ``embed``.
        """
        most, given = check_top_n(top_n), pairs_of(query, documents)
        return ranked(await self.score_pairs(
            given, instruction=instruction, prompt_name=prompt_name, timeout_s=timeout_s, wait_for_room=wait_for_room,
            **options), most)

    async def _each(
        self, process: Callable[[Any, RequestOptions], ProcessedRequest], given: list[Any],
        result_of: Callable[[RequestOutput], _T], asked: RequestOptions, timeout_s: float | None, may_wait: bool,
    ) -> list[_T]:
        """Send texts off, some of them at a time, and return their results in order."""
        running_loop()
        limit_s = TIMEOUT.check("timeout_s", timeout_s)
        running, done = deque[AwaitableFuture[RequestOutput]](), list[_T]()

        async def finish_first() -> None:
            done.append(result_of(await asyncio.wrap_future(running[0])))
            running.popleft()

        try:
            async with asyncio.timeout(limit_s):
                for place, text in enumerate(given):
                    while len(running) >= _AT_ONCE:
                        await finish_first()
                    prepare = partial(process, text, options_at(asked, place))
                    running.append(self._submit(prepare, text, None, asked.owner, may_wait or place > 0))
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
