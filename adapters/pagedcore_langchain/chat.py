"""``ChatPagedCore``: LangChain's chat model over chat messages. Read ``settings.py`` for its fields."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, closing
from dataclasses import replace
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult, LLMResult
from langchain_core.runnables import RunnableConfig
from typing_extensions import override

from pagedcore import Chat
from pagedcore.errors import InvalidRequest
from pagedcore.tool_calls.chat_format import ChatTurn
from pagedcore_langchain.background import BACKGROUND
from pagedcore_langchain.batching import Configs, invoke_all
from pagedcore_langchain.errors import also_langchains
from pagedcore_langchain.host import on_loop, require_loop
from pagedcore_langchain.messages import to_chat
from pagedcore_langchain.options import Call, mask_salt, require_single_label
from pagedcore_langchain.results import ChatChunks, chat_result
from pagedcore_langchain.settings import PagedCoreSettings
from pagedcore_langchain.structured import Method, response_format, structured_runnable
from pagedcore_langchain.tools import OF_TOOLS, openai_choice, openai_tools


class ChatPagedCore(PagedCoreSettings, BaseChatModel):
    """A chat model whose calls, from any thread, task or chain, share one engine and are batched together.

    ``batch``, ``generate`` and their asynchronous forms have all their inputs in flight at once. Send the whole history
    with every call; nothing is kept between calls, and ``usage_metadata["input_token_details"]["cache_read"]`` is the
    number of its tokens that were found in the cache. Images are not read.

    Leaving a stream early aborts its request. After a plain ``break`` out of ``async for`` that happens when the
    generator is collected; with ``contextlib.aclosing`` at once. Errors are those of pagedcore; refusals, overload and
    time limits are LangChain's ``ModelError`` as well, a prompt that is too long its ``ContextOverflowError``.
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
        with also_langchains():
            prompt, call, turn = self._turn(messages, stop, kwargs)
            outputs = self._complete([prompt], call)
            return chat_result(outputs[0], self.model, self.engine.token_text, turn)

    @override
    async def _agenerate(
        self, messages: list[BaseMessage], stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None, **kwargs: Any,
    ) -> ChatResult:
        with also_langchains():
            await self.host.ready()
            prompt, call, turn = self._turn(messages, stop, kwargs)
            outputs = await self._complete_on_loop([prompt], call)
            return chat_result(outputs[0], self.model, self.engine.token_text, turn)

    @override
    def _stream(
        self, messages: list[BaseMessage], stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None, **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with also_langchains():
            prompt, call, turn = self._turn(messages, stop, kwargs, is_stream=True)
            chunks = ChatChunks(self.model, self.engine.token_text, turn)
            with closing(self._deltas(prompt, call)) as deltas:
                for delta in deltas:
                    if chunk := chunks.message(delta):
                        if run_manager:
                            run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                        yield chunk

    @override
    async def _astream(
        self, messages: list[BaseMessage], stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None, **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        with also_langchains():
            engine = await self.host.ready()
            prompt, call, turn = self._turn(messages, stop, kwargs, is_stream=True)
            chunks = ChatChunks(self.model, engine.token_text, turn)
            async with aclosing(self._deltas_on_loop(prompt, call)) as deltas:
                async for delta in deltas:
                    if chunk := chunks.message(delta):
                        if run_manager:
                            await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                        yield chunk

    def _turn(
        self, messages: Sequence[BaseMessage], stop: Sequence[str] | None, keywords: dict[str, Any], *,
        is_stream: bool = False,
    ) -> tuple[Any, Call, ChatTurn]:
        """Return the prompt, the call, with the grammar of its tools, and how its completion is read."""
        others = {name: value for name, value in keywords.items() if name not in OF_TOOLS}
        if (wanted := others.pop("response_format", None)) is not None:
            others["structured"] = response_format(wanted)
        call, chat = self._resolve(stop, others, is_stream=is_stream), to_chat(messages)
        tools, form = keywords.get("tools"), self.engine.chat_format
        arguments = form.arguments(keywords.get("chat_template_kwargs"), keywords.get("reasoning_effort"),
                                   "chat_template_kwargs")
        prompt = Chat.prompt_of(
            chat, tools or None, arguments, add_generation_prompt=keywords.get("add_generation_prompt"),
            continue_final_message=keywords.get("continue_final_message"))
        is_parallel = keywords.get("parallel_tool_calls")
        is_parallel = True if is_parallel is None else is_parallel
        if type(is_parallel) is not bool:
            raise InvalidRequest("parallel_tool_calls", is_parallel, "True or False")
        turn = form.turn(prompt, call.params, keywords.get("tool_choice"), is_parallel)
        return prompt, replace(call, params=turn.params), turn

    @override
    def bind_tools(
        self, tools: Sequence[Any], *, tool_choice: Any = None, strict: bool | None = None,
        parallel_tool_calls: bool | None = None, **kwargs: Any,
    ) -> Any:
        """Offer tools to the model: functions, pydantic models, LangChain's tools, or OpenAI's form of them.

        Args:
            tools: what ``convert_to_openai_tool`` takes.
            tool_choice: "auto" or ``None``, "none", "required", "any" or ``True``, or the name of a tool, also as
                OpenAI's object.
            strict: whether arguments must follow every word of a schema; ``None``: as far as grammars can say it.
            parallel_tool_calls: whether several calls at once are allowed; ``None``: they are.
            **kwargs: as of a call.

        Raises:
            InvalidTools: a tool or the choice is malformed.
        """
        if not tools:
            return self.bind(**kwargs)
        bound = openai_tools(tools, strict)
        choice = openai_choice(tool_choice, bound)
        given = {"tool_choice": choice, "parallel_tool_calls": parallel_tool_calls}
        return self.bind(tools=bound, **{name: value for name, value in given.items() if value is not None}, **kwargs)

    @override
    def with_structured_output(
        self, schema: Any, *, include_raw: bool = False, method: Method = "json_schema", strict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return a runnable whose output is an object of a schema: a pydantic model's instance, or a dictionary.

        Args:
            schema: a pydantic model, a ``TypedDict`` or any other type that pydantic knows (an ``Enum``,
                ``list[int]``), a JSON schema of any kind, or OpenAI's form of a tool or of a response.
            include_raw: return the message and a parsing error as well; nothing is raised then.
            method: "json_schema" has the model write JSON of the schema, "function_calling" a call of a tool with
                these arguments, which are an object, and "json_mode" any JSON object.
            strict: with ``True`` objects of a JSON schema have declared members only, as those of Python's types
                always have unless they ask for more; and tools as of ``bind_tools``.
            **kwargs: as of a call.

        A completion that was cut off, by ``max_tokens`` or a stop of the call's own, is an ``OutputParserException``
        of LangChain, or the parsing error.

        Raises:
            InvalidRequest: there is no such method, or the schema is refused.
        """
        return structured_runnable(self, schema, method, strict, include_raw, kwargs)

    @override
    def _resolve_model_profile(self) -> ModelProfile:
        # Why: agents choose by it between a grammar and a tool for their answers.
        return {"text_inputs": True, "text_outputs": True, "tool_calling": True, "structured_output": True}

    @override
    def bind(self, **kwargs: Any) -> Any:
        return BaseChatModel.bind(self._for_caller(kwargs), **kwargs)

    @override
    def _get_invocation_params(self, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        return super()._get_invocation_params(stop, **mask_salt(kwargs))

    @override
    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        if (lora := kwargs.pop("lora", None)) is not None:
            # Why: a name may stand for another adapter later, and the identity of a field says which.
            return self.model_copy(update={"lora": lora})._get_llm_string(stop, **kwargs)
        return super()._get_llm_string(stop, **mask_salt(kwargs))

    @override
    def generate(self, messages: list[list[BaseMessage]], *args: Any, **kwargs: Any) -> LLMResult:
        require_single_label(len(messages), kwargs)
        if len(messages) < 2 or BACKGROUND.is_here:
            return super().generate(messages, *args, **kwargs)
        return BACKGROUND.run(self.agenerate(messages, *args, **kwargs))

    @override
    def astream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, *, stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        return on_loop(super().astream(input, config, stop=stop, **kwargs))

    @override
    async def agenerate(self, messages: list[list[BaseMessage]], *args: Any, **kwargs: Any) -> LLMResult:
        require_loop()
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
        if not messages:
            # Why: it is what LangChain asks where no message is left.
            return 0
        chat = to_chat(messages)
        return len(self.engine.encode(Chat(chat, openai_tools(tools, None)) if tools else chat))
