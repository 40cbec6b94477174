"""LangChain's own standard suites for chat models, over the demo model; what is not offered is declared below."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from pagedcore import AsyncEngine
from pagedcore_langchain import ChatPagedCore


@pytest.fixture(autouse=True, scope="module")
def shared_engine() -> Iterator[AsyncEngine]:
    """One engine for all tests of the suites; they make a model each."""
    with AsyncEngine.from_pretrained("demo", num_kv_blocks=256) as engine:
        Declared.engine = engine
        yield engine


class Declared:
    """What the suites ask about a model, answered for this one."""

    engine: AsyncEngine
    has_tool_calling = False
    has_tool_choice = False
    has_structured_output = False
    supports_json_mode = False
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
