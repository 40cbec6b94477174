"""LangChain's own standard suites for chat models; what is not offered is declared below.

The model is scripted, because the suites ask for calls with certain arguments; templates, grammars, parsers and all of
the engine are real.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("llguidance")

from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from adapters.langchain.assistant import assistant
from pagedcore import AsyncEngine
from pagedcore_langchain import ChatPagedCore
from support.scripted_model import scripted_engine


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
    supports_anthropic_inputs = False
    supports_model_override = False
    enable_vcr_tests = False
    returns_usage_metadata = True

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


class TestWithFunctionCalling(TestStandardIntegration):
    """Structured output by way of a call."""

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": "function_calling"}
