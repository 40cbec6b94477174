"""``PagedCoreLLM``: LangChain's completion model over plain text. Read ``settings.py`` for its fields."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, closing
from typing import Any, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import GenerationChunk, LLMResult
from langchain_core.runnables import Runnable, RunnableConfig
from typing_extensions import override

from pagedcore import Infill, RequestOutput
from pagedcore_langchain.background import BACKGROUND
from pagedcore_langchain.batching import Configs, invoke_all
from pagedcore_langchain.errors import also_langchains
from pagedcore_langchain.host import on_loop, require_loop
from pagedcore_langchain.options import require_single_label
from pagedcore_langchain.results import Chunks, llm_output, text_generations
from pagedcore_langchain.settings import PagedCoreSettings


class PagedCoreLLM(PagedCoreSettings, BaseLLM):
    """A completion model whose calls, from any thread, task or chain, share one engine and are batched together.

    ``batch``, ``generate`` and their asynchronous forms have all their inputs in flight at once. The prompt is taken as
    it is, without a chat template. ``generation_info`` has the finish reason, the usage and, if asked for, the
    log-probabilities. Leaving a stream early aborts its request, and errors are as with ``ChatPagedCore``.
    """

    # Why: of several bases the last one's configuration counts, and LangChain's ignores what it does not know.
    model_config = PagedCoreSettings.model_config

    suffix: str | None = None
    """Text behind the completion, which fills the gap between the prompt and it, of a model with fill-in-the-middle
    tokens; also per call and by ``bind``. Empty is none."""

    @property
    @override
    def _llm_type(self) -> str:
        return "pagedcore"

    @property
    @override
    def _identifying_params(self) -> dict[str, Any]:
        return {**self._identity(), **({"suffix": self.suffix} if self.suffix else {})}

    @override
    def _with_keywords(self, keywords: dict[str, Any]) -> Self:
        """Move a suffix to a copy of this model too: it is a part of the prompt, by which caches distinguish calls."""
        suffix = keywords.pop("suffix", None)
        model = super()._with_keywords(keywords)
        return model if suffix is None else model.model_copy(update={"suffix": suffix})

    def _prompt(self, text: str) -> str | Infill:
        return Infill(text, self.suffix) if self.suffix else text

    @override
    def _generate(
        self, prompts: list[str], stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None, **kwargs: Any,
    ) -> LLMResult:
        with also_langchains():
            return self._result(self._complete([*map(self._prompt, prompts)], self._resolve(stop, kwargs)))

    @override
    async def _agenerate(
        self, prompts: list[str], stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None, **kwargs: Any,
    ) -> LLMResult:
        with also_langchains():
            call = self._resolve(stop, kwargs)
            return self._result(await self._complete_on_loop([*map(self._prompt, prompts)], call))

    def _result(self, outputs: list[RequestOutput]) -> LLMResult:
        generations = [text_generations(output, self.model, self.engine.token_text) for output in outputs]
        return LLMResult(generations=generations, llm_output=llm_output(outputs, self.model))

    @override
    def _stream(
        self, prompt: str, stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None, **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        with also_langchains():
            chunks = Chunks(self.model, self.engine.token_text)
            with closing(self._deltas(self._prompt(prompt), self._resolve(stop, kwargs, is_stream=True))) as deltas:
                for delta in deltas:
                    if chunk := chunks.text(delta):
                        if run_manager:
                            run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                        yield chunk

    @override
    async def _astream(
        self, prompt: str, stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None, **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        with also_langchains():
            engine = await self.host.ready()
            chunks, call = Chunks(self.model, engine.token_text), self._resolve(stop, kwargs, is_stream=True)
            async with aclosing(self._deltas_on_loop(self._prompt(prompt), call)) as deltas:
                async for delta in deltas:
                    if chunk := chunks.text(delta):
                        if run_manager:
                            await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                        yield chunk

    @override
    def bind(self, **kwargs: Any) -> Runnable[LanguageModelInput, str]:
        return BaseLLM.bind(self._for_caller(kwargs), **kwargs)

    @override
    def generate(self, prompts: list[str], *args: Any, **kwargs: Any) -> LLMResult:
        model = self._with_keywords(kwargs)
        return BaseLLM.generate(model, prompts, *args, **kwargs)

    @override
    async def agenerate(self, prompts: list[str], *args: Any, **kwargs: Any) -> LLMResult:
        require_loop()
        model = self._with_keywords(kwargs)
        return await BaseLLM.agenerate(model, prompts, *args, **kwargs)

    @override
    def stream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, *, stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[str]:
        model = self._with_keywords(kwargs)
        return BaseLLM.stream(model, input, config, stop=stop, **kwargs)

    @override
    def astream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, *, stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[str]:
        model = self._with_keywords(kwargs)
        return on_loop(BaseLLM.astream(model, input, config, stop=stop, **kwargs))

    @override
    def batch(
        self, inputs: list[LanguageModelInput], config: Configs = None, *, return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        require_single_label(len(inputs), kwargs)
        if len(inputs) < 2 or BACKGROUND.is_here:
            return super().batch(inputs, config, return_exceptions=return_exceptions, **kwargs)
        return BACKGROUND.run(invoke_all(self, inputs, config, return_exceptions, kwargs))

    @override
    async def abatch(
        self, inputs: list[LanguageModelInput], config: Configs = None, *, return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        require_single_label(len(inputs), kwargs)
        return await invoke_all(self, inputs, config, return_exceptions, kwargs)

    @override
    def get_token_ids(self, text: str) -> list[int]:
        return self.engine.encode(text)
