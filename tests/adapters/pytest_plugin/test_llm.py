"""The fixture ``llm`` on the shipped model: the same answers in any order and by any way, and what a test has asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("openai")
pytest.importorskip("langchain_core")

from openai import OpenAI

from pagedcore import SamplingParams
from pagedcore.errors import InvalidConfig, InvalidPrompt, UnknownParameter
from pagedcore_langchain import ChatPagedCore
from pagedcore_pytest import LLM, GoldenChanged
from pagedcore_pytest.current import CurrentTest
from pagedcore_pytest.errors import NothingToCompare
from pagedcore_pytest.goldens import Goldens
from pagedcore_pytest.llm import open_llm
from pagedcore_pytest.loopback import serve_openai
from support.paused_steps import slowed

QUESTION = "What is 2 + 3?"
WILD: dict[str, Any] = {"temperature": 3.0, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def current() -> CurrentTest:
    """The test that an inner run would be in."""
    return CurrentTest()


@pytest.fixture(scope="module")
def opened(current: CurrentTest) -> Iterator[LLM]:
    """The model, opened once."""
    with open_llm("demo", None, current, Goldens(Path(), is_updating=False)) as llm:
        yield llm


@pytest.fixture
def llm(opened: LLM, current: CurrentTest, tmp_path: Path) -> LLM:
    """The model in a test that has just begun."""
    item: Any = SimpleNamespace(path=tmp_path / "test_inner.py")
    current.begin(item)
    return opened


def test_text_chats_and_batches(llm: LLM) -> None:
    """A prompt, token ids, a message, messages and several prompts; errors are those of pagedcore."""
    assert llm(QUESTION) == llm(llm.engine.encode(QUESTION)) == "\n2 + 3 = 5."
    assert llm.chat(QUESTION) == llm.chat([{"role": "user", "content": QUESTION}]) == "2 + 3 = 5."
    outputs = llm.generate([QUESTION, "What is 9 - 5?"], n=2, temperature=0.1)
    assert [len(one.outputs) for one in outputs] == [2, 2]
    with pytest.raises(UnknownParameter, match="temprature"):
        llm(QUESTION, temprature=1)
    with pytest.raises(InvalidPrompt):
        llm(None)  # type: ignore[arg-type]


def test_sampled_answers_do_not_depend_on_what_came_before(llm: LLM) -> None:
    """Without a seed of its own a sampled completion is the same again, after others, beside others, through OpenAI's
    client at its default temperature, and through LangChain; other seeds give others. A usage has no cached tokens."""
    before = llm(QUESTION, **WILD)
    llm.generate([f"What is {number} + 1?" for number in range(5)], **WILD)
    beside = llm.generate([QUESTION, "What is 9 - 5?", QUESTION], **WILD)
    assert [before, before] == [beside[0].outputs[0].text, beside[2].outputs[0].text]
    assert len({llm(QUESTION, seed=seed, **WILD) for seed in range(1, 5)}) > 1
    params = SamplingParams(**WILD)
    assert "".join(delta.text for delta in llm.engine.generate_sync(QUESTION, params)) == before
    chat = ChatPagedCore.from_engine(llm.engine, max_tokens=24)
    chatted = [chat.invoke(QUESTION, temperature=1.0).content for _ in range(2)]
    with serve_openai(llm.engine, "demo") as url, OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        asked: Any = {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 24}
        replies = [client.chat.completions.create(**asked) for _ in range(2)]
        chunks = list(client.chat.completions.create(stream=True, **asked))
    texts = [reply.choices[0].message.content for reply in replies]
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert {*texts, *chatted, streamed} == {llm.chat(QUESTION, temperature=1.0, max_tokens=24)}
    assert [reply.usage.prompt_tokens_details.cached_tokens for reply in replies] == [0, 0]  # type: ignore[union-attr]


async def test_every_asynchronous_way_has_the_seed(llm: LLM) -> None:
    """Streams on an event loop and sessions get it too."""
    wanted = llm(QUESTION, **WILD)
    params = SamplingParams(**WILD)
    assert "".join([delta.text async for delta in llm.engine.generate(QUESTION, params)]) == wanted
    async with llm.engine.session(params) as session:
        assert (await session.ask(QUESTION)).outputs[0].text == wanted


def test_calls_are_those_of_the_running_test(llm: LLM, current: CurrentTest) -> None:
    """Whatever way they came by, in order, with text and tokens; an aborted one is left out; a new test begins with
    none, and with those that end in it."""
    chat = ChatPagedCore.from_engine(llm.engine, max_tokens=24)
    chat.invoke(QUESTION)
    llm("What is 9 - 5?")
    with slowed(llm.engine):
        left = llm.engine.generate_sync(QUESTION, SamplingParams(max_tokens=500, ignore_eos=True))
        next(left)
        left.close()
    first, second = llm.calls
    assert QUESTION in first.prompt
    assert (first.text, second.prompt, second.text) == ("2 + 3 = 5.", "What is 9 - 5?", "\n9 - 5 = 4.")
    assert list(second.prompt_token_ids) == llm.engine.encode("What is 9 - 5?")
    assert current.item is not None
    current.begin(current.item)
    assert llm.calls == []
    llm(QUESTION)
    assert [one.prompt for one in llm.calls] == [QUESTION]


def test_a_golden_answer_of_the_real_model(llm: LLM, current: CurrentTest, tmp_path: Path) -> None:
    """A stored token that the model would not choose is named with the model's own log-probabilities, of both tokens;
    scoring them leaves no trace in the test's calls."""
    updating = LLM(llm.engine, "demo", current, Goldens(tmp_path, is_updating=True), llm._observer)
    assert updating.golden("sum", QUESTION) == "\n2 + 3 = 5."
    assert len(llm.calls) == 1
    assert llm.golden("sum", QUESTION) == "\n2 + 3 = 5."
    path = tmp_path / "__goldens__" / "test_inner.json"
    content = json.loads(path.read_text("utf-8"))
    (stored,) = content["goldens"]["sum"]["calls"]
    (scored,) = llm.generate([QUESTION], logprobs=1)
    wanted = scored.outputs[0].logprobs
    assert wanted is not None
    assert stored["logprobs"] == [round(one.logprob, 4) for one in wanted]
    (environment,) = content["environments"].values()
    assert {"model", "kernels", "CPU features", "torch"} <= set(environment)
    place = [llm.name_of(token) for token in stored["token_ids"]].index("5")
    other = llm.engine.encode("6")[-1]
    stored["token_ids"][place] = other
    path.write_text(json.dumps(content), "utf-8")
    (now,) = llm.logprobs_of([*stored["prompt_token_ids"], *stored["token_ids"][:place]], [other])
    with pytest.raises(GoldenChanged) as changed:
        llm.golden("sum", QUESTION)
    assert f"changed at token {place}" in str(changed.value)
    assert f"'6' (token id {other}, log-probability {wanted[place].logprob:.4f} when recorded, {now:.4f} now)" in str(
        changed.value)
    five = wanted[place]
    assert f"'5' (token id {five.token_id}, log-probability {five.logprob:.4f} now)" in str(changed.value)
    assert "the same model" in str(changed.value)


def test_a_golden_of_the_whole_test(llm: LLM, current: CurrentTest, tmp_path: Path) -> None:
    """Without a prompt all completions of the test are compared; without any, and outside a test, it says so."""
    updating = LLM(llm.engine, "demo", current, Goldens(tmp_path, is_updating=True), llm._observer)
    with pytest.raises(NothingToCompare, match="has had no completion yet"):
        llm.golden("all")
    for one in (updating, llm):
        one.generate([QUESTION, "What is 9 - 5?"])
        assert one.golden("all")
        assert current.item is not None
        current.begin(current.item)
    llm("What is 9 - 4?")
    with pytest.raises(GoldenChanged, match="the prompt changed"):
        llm.golden("all")
    current.end()
    with pytest.raises(NothingToCompare, match="inside a test"):
        llm.golden("all", QUESTION)


def test_the_end_closes_engine_and_server(tmp_path: Path) -> None:
    """After the block the engine's thread and the server's are gone, also where the block raises; settings of a file
    replace those of the plugin, and a wrong model or file says what is wrong."""
    file = tmp_path / "engine.toml"
    file.write_text("num_kv_blocks = 40\n", "utf-8")
    before = set(threading.enumerate())
    goldens = Goldens(tmp_path, is_updating=False)
    seen: list[LLM] = []
    with pytest.raises(ZeroDivisionError):
        use_and_raise(file, goldens, seen)
    assert not seen[0].engine.is_alive
    assert [one for one in set(threading.enumerate()) - before if one.name.startswith("pagedcore-pytest")] == []
    for model, config in (("./no-such-model", None), ("demo", tmp_path / "none.toml")):
        with pytest.raises((InvalidConfig, OSError)), open_llm(model, config, CurrentTest(), goldens):
            pass


def use_and_raise(file: Path, goldens: Goldens, seen: list[LLM]) -> None:
    with open_llm("demo", file, CurrentTest(), goldens) as llm:
        seen.append(llm)
        assert llm.engine.stats().num_blocks == 40
        with serve_openai(llm.engine, "demo"):
            raise ZeroDivisionError
