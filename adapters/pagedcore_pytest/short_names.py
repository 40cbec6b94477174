"""The fixtures under their short names; the plugin registers those that no other plugin has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pagedcore_langchain import ChatPagedCore
    from pagedcore_pytest.llm import LLM


@pytest.fixture(scope="session")
def llm(pagedcore_llm: LLM) -> LLM:
    """A language model: llm(prompt), llm.chat(messages), llm.generate(prompts), llm.golden(name, prompt), llm.calls."""
    return pagedcore_llm


@pytest.fixture(scope="session")
def openai_base_url(pagedcore_openai_base_url: str) -> str:
    """The address of the same model for OpenAI's client, on this machine; any API key will do."""
    return pagedcore_openai_base_url


@pytest.fixture
def chat_model(pagedcore_chat_model: ChatPagedCore) -> ChatPagedCore:
    """The same model as a chat model of LangChain."""
    return pagedcore_chat_model


FIXTURES = (llm, openai_base_url, chat_model)
