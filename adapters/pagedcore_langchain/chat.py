"""``ChatPagedCore``: LangChain's chat model over chat messages. Read ``settings.py`` for its fields."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, closing
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult, LLMResult
from typing_extensions import override

from pagedcore_langchain.background import BACKGROUND
from pagedcore_langchain.batching import Configs, invoke_all
from pagedcore_langchain.messages import to_chat
from pagedcore_langchain.options import hide_salt, mask_salt, require_single_label
from pagedcore_langchain.refusals import NotOffered
from pagedcore_langchain.results import Chunks, chat_result
from pagedcore_langchain.settings import PagedCoreSettings


class ChatPagedCore(PagedCoreSettings, BaseChatModel):
    """A chat model whose calls, from any thread, task or chain, share one engine and are batched together.

    ``batch``, ``generate`` and their asynchronous forms have all their inputs in flight at once. Send the whole history
    with every call; nothing is kept between calls, and ``usage_metadata["input_token_details"]["cache_read"]`` is the
    number of its tokens that were found in the cache. Tools, structured output and images are not offered.

    Leaving a stream early aborts its request. After a plain ``break`` out of ``async for`` that happens when the
    generator is collected; with ``contextlib.aclosing`` at once. Errors are those of pagedcore.
    """

    # Why: of several bases the last one's configuration counts, and LangChain's ignores what it does not know.
    model_config = PagedCoreSettings.model_config

    streaming: bool = False
    """Pass each token to callbacks also where the caller waits for the whole completion."""

    @property
    @override
    def _llm_type(self) -> str:
        return "pagedcore-chat"

    @property
    @override
    def _identifying_params(self) -> dict[str, Any]:
        return self._identity()

    @override
    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None, **kwargs: Any,
    ) -> ChatResult:
        outputs = self._complete([to_chat(messages)], self._resolve(stop, kwargs))
        return chat_result(outputs[0], self.model, self.engine.token_text)

    @override
    async def _agenerate(
        self, messages: list[BaseMessage], stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None, **kwargs: Any,
    ) -> ChatResult:
        outputs = await self._complete_on_loop([to_chat(messages)], self._resolve(stop, kwargs))
        return chat_result(outputs[0], self.model, self.engine.token_text)

    @override
    def _stream(
        self, messages: list[BaseMessage], stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None, **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        chunks = Chunks(self.model, self.engine.token_text)
        with closing(self._deltas(to_chat(messages), self._resolve(stop, kwargs, is_stream=True))) as deltas:
            for delta in deltas:
                if chunk := chunks.message(delta):
                    if run_manager:
                        run_manager.on_llm_new_token(delta.text, chunk=chunk)
                    yield chunk

    @override
    async def _astream(
        self, messages: list[BaseMessage], stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None, **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        engine, call = await self.host.ready(), self._resolve(stop, kwargs, is_stream=True)
        chunks = Chunks(self.model, engine.token_text)
        async with aclosing(self._deltas_on_loop(to_chat(messages), call)) as deltas:
            async for delta in deltas:
                if chunk := chunks.message(delta):
                    if run_manager:
                        await run_manager.on_llm_new_token(delta.text, chunk=chunk)
                    yield chunk

    @override
    def bind_tools(self, tools: Sequence[Any], *, tool_choice: str | None = None, **kwargs: Any) -> Any:
        if not tools:
            return self.bind(**kwargs)
        advice = ("This model writes text only. Leave tools out of create_agent, or call the functions in your chain "
                  "and put their results into the prompt.")
        raise NotOffered("tools", len(tools), "none", advice)

    @override
    def with_structured_output(self, schema: Any, *, include_raw: bool = False, **kwargs: Any) -> Any:
        advice = ("This model writes text only. Ask for the format in the prompt and use an output parser, "
                  "such as JsonOutputParser or PydanticOutputParser.")
        raise NotOffered("schema", schema, "none", advice)

    @override
    def bind(self, **kwargs: Any) -> Any:
        return super().bind(**hide_salt(kwargs))

    @override
    def _get_invocation_params(self, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        return super()._get_invocation_params(stop, **mask_salt(kwargs))

    @override
    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        return super()._get_llm_string(stop, **mask_salt(kwargs))

    @override
    def generate(self, messages: list[list[BaseMessage]], *args: Any, **kwargs: Any) -> LLMResult:
        require_single_label(len(messages), kwargs)
        if len(messages) < 2 or BACKGROUND.is_here:
            return super().generate(messages, *args, **kwargs)
        return BACKGROUND.run(self.agenerate(messages, *args, **kwargs))

    @override
    async def agenerate(self, messages: list[list[BaseMessage]], *args: Any, **kwargs: Any) -> LLMResult:
        require_single_label(len(messages), kwargs)
        return await super().agenerate(messages, *args, **kwargs)

    @override
    def batch(
        self, inputs: list[LanguageModelInput], config: Configs = None, *, return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        require_single_label(len(inputs), kwargs)
        if len(inputs) < 2 or BACKGROUND.is_here:
            return super().batch(inputs, config, return_exceptions=return_exceptions, **kwargs)
        return BACKGROUND.run(invoke_all(self, inputs, config, return_exceptions, kwargs))

    @override
    async def abatch(
        self, inputs: list[LanguageModelInput], config: Configs = None, *, return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        require_single_label(len(inputs), kwargs)
        return await invoke_all(self, inputs, config, return_exceptions, kwargs)

    @override
    def get_token_ids(self, text: str) -> list[int]:
        return self.engine.encode(text)

    @override
    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Any = None) -> int:
        return len(self.engine.encode(to_chat(messages)))
