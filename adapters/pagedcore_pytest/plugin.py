"""What pytest loads: options and fixtures. Imports nothing but pytest until a fixture is used."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING, Final

import pytest

from pagedcore_pytest import short_names
from pagedcore_pytest.current import CurrentTest

if TYPE_CHECKING:
    from pagedcore_langchain import ChatPagedCore
    from pagedcore_pytest.llm import LLM


_CURRENT: Final = pytest.StashKey[CurrentTest]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    # Why: another plugin may have this option already, and then means the same by it.
    with suppress(Exception):
        parser.getgroup("pagedcore", "pagedcore: a real model in tests").addoption(
            "--update-goldens", action="store_true", default=False, dest="update_goldens",
            help="store the answers that llm.golden() gets instead of comparing them")
    parser.addini("pagedcore_model", 'model of the fixtures: "demo", a directory or a hub id', default="demo")
    parser.addini("pagedcore_config", "file with engine settings (TOML or JSON), relative to the root directory; its "
                                      "settings replace the plugin's own", default="")
    parser.addini("pagedcore_short_names", "whether there are llm, openai_base_url and chat_model beside "
                                           "pagedcore_llm, pagedcore_openai_base_url and pagedcore_chat_model",
                  type="bool", default=True)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register the short names of fixtures that no other plugin has."""
    config.stash[_CURRENT] = CurrentTest()
    if not config.getini("pagedcore_short_names"):
        return
    fixtures, others = ModuleType("pagedcore_pytest_short_names"), _fixtures_of_plugins(config)
    for fixture in short_names.FIXTURES:
        if (other := others.get(fixture.__name__)) is None:
            setattr(fixtures, fixture.__name__, fixture)
            continue
        config.issue_config_time_warning(pytest.PytestConfigWarning(
            f"the fixture {fixture.__name__!r} is the one of the plugin {other!r}; that of pagedcore is "
            f"'pagedcore_{fixture.__name__}'. The setting pagedcore_short_names = false ends this warning."), 2)
    config.pluginmanager.register(fixtures, fixtures.__name__)


def _fixtures_of_plugins(config: pytest.Config) -> dict[str, str]:
    """Return the names of fixtures of other plugins, with the plugins'; a conftest.py may replace any fixture."""
    kind = type(short_names.llm)
    return {
        getattr(value, "name", name): plugin_name
        for plugin_name, plugin in config.pluginmanager.list_name_plugin()
        if isinstance(plugin, ModuleType) and not plugin_name.endswith("conftest.py")
        for name, value in vars(plugin).items() if type(value) is kind
    }


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Note which test runs: golden answers lie beside it, and ``llm.calls`` are its own."""
    current = item.config.stash[_CURRENT]
    current.begin(item)
    try:
        return (yield)
    finally:
        current.end()


@pytest.fixture(scope="session")
def pagedcore_llm(pytestconfig: pytest.Config) -> Iterator[LLM]:
    """A language model: llm(prompt), llm.chat(messages), llm.generate(prompts), llm.golden(name, prompt), llm.calls."""
    from pagedcore_pytest.goldens import Goldens
    from pagedcore_pytest.llm import open_llm

    file = pytestconfig.getini("pagedcore_config")
    goldens = Goldens(pytestconfig.rootpath, is_updating=bool(pytestconfig.getoption("update_goldens", False)))
    with open_llm(pytestconfig.getini("pagedcore_model"), pytestconfig.rootpath / file if file else None,
                  pytestconfig.stash[_CURRENT], goldens) as llm:
        yield llm


@pytest.fixture(scope="session")
def pagedcore_openai_base_url(pagedcore_llm: LLM) -> Iterator[str]:
    """The address of the same model for OpenAI's client, on this machine; any API key will do."""
    from pagedcore_pytest.loopback import serve_openai

    with serve_openai(pagedcore_llm.engine, pagedcore_llm.model) as url:
        yield url


@pytest.fixture
def pagedcore_chat_model(pagedcore_llm: LLM) -> ChatPagedCore:
    """The same model as a chat model of LangChain; each test gets an object of its own."""
    from pagedcore_langchain import ChatPagedCore
    from pagedcore_pytest.llm import DEFAULT_MAX_TOKENS

    return ChatPagedCore.from_engine(pagedcore_llm.engine, model=pagedcore_llm.model, max_tokens=DEFAULT_MAX_TOKENS)
