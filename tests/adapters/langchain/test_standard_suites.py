"""LangChain's own standard suites for chat models; what is not offered is declared below.

The model is scripted, because the suites ask for calls with certain arguments; templates, grammars, parsers and all of
the engine are real.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from operator import add
from typing import Any, ClassVar

import pytest

pytest.importorskip("llguidance")

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from adapters.langchain.assistant import assistant
from pagedcore import AsyncEngine
from pagedcore_langchain import ChatPagedCore
from support.scripted_model import TEMPLATES, scripted_engine


@pytest.fixture(autouse=True, scope="module")
def shared_engine() -> Iterator[AsyncEngine]:
    """One engine for all tests of the suites; they make a model each."""
    with scripted_engine(assistant) as engine:
        Declared.engine = engine
        yield engine


class Declared:
    """What the suites ask about a model, answered for this one."""

    engine: AsyncEngine
    has_tool_calling = True
    has_tool_choice = True
    has_structured_output = True
    supports_json_mode = True
    supports_image_inputs = False
    supports_image_urls = False
    supports_image_tool_message = False
    supports_pdf_inputs = False
    supports_pdf_tool_message = False
    supports_audio_inputs = False
    supports_video_inputs = False
    supports_anthropic_inputs = True
    supports_model_override = False
    enable_vcr_tests = False
    returns_usage_metadata = True
    supported_usage_metadata_details: ClassVar[dict[str, list[str]]] = {
        kind: ["cache_read_input", "reasoning_output"] for kind in ("invoke", "stream")}

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatPagedCore

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "demo", "engine": Declared.engine}


class TestStandardUnit(Declared, ChatModelUnitTests):
    """The unit suite."""


class TestStandardIntegration(Declared, ChatModelIntegrationTests):
    """The integration suite; the network it is made for is not needed here."""

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        """Ask again what was asked before."""
        chat = ChatPagedCore.from_engine(Declared.engine)
        asked(chat, "Hello, once more and again.", stream)
        again = asked(chat, "Hello, once more and again.", stream)
        assert again.usage_metadata is not None
        assert again.usage_metadata["input_token_details"]["cache_read"] > 0
        return again

    def invoke_with_reasoning_output(self, *, stream: bool = False) -> AIMessage:
        """Ask a model that thinks."""
        with scripted_engine("<think>\nHm.\n</think>\n\nSeven.", "{#- </think> #}" + TEMPLATES["hermes"]) as engine:
            answer = asked(ChatPagedCore.from_engine(engine), "What is 3 + 4?", stream)
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["output_token_details"]["reasoning"] > 0
        return answer


def asked(chat: BaseChatModel, question: str, is_stream: bool) -> AIMessage:
    """Return the answer, or the sum of its chunks."""
    return reduce(add, list(chat.stream(question))) if is_stream else chat.invoke(question)


class TestWithFunctionCalling(TestStandardIntegration):
    """Structured output by way of a call."""

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": "function_calling"}
