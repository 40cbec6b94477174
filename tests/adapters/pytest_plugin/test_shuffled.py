"""A thousand tests in shuffled orders, in several processes, beside a busy machine: the same bytes."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from adapters.pytest_plugin.inner import PLUGIN, run_code

pytest.importorskip("openai")
pytest.importorskip("langchain_core")

CONFTEST = """
import json, os, random
from pathlib import Path
import pytest

@pytest.fixture(scope="session")
def said():
    lines = []
    yield lines
    worker = os.environ.get("PYTEST_XDIST_WORKER", "alone")
    Path(os.environ["SAID"], worker + ".json").write_text(json.dumps(lines))

def pytest_collection_modifyitems(items):
    random.Random(os.environ["ORDER"]).shuffle(items)
"""
TESTS = """
import pytest
from openai import OpenAI

@pytest.fixture(scope="session")
def client(openai_base_url):
    with OpenAI(base_url=openai_base_url, api_key="none", max_retries=0) as client:
        yield client

@pytest.mark.parametrize("turn", range({turns}))
@pytest.mark.parametrize("number", range(25))
def test_ask(number, turn, llm, client, chat_model, said):
    question = f"What is {number} + {number + 2}?"
    messages = [{"role": "user", "content": question}]
    match number % 4:
        case 0:
            (output,) = llm.generate([question], temperature=1.3, n=2, logprobs=2, max_tokens=12)
            got = [[one.text, one.token_ids, [[t.logprob.hex(), t.top] for t in one.logprobs]]
                   for one in output.outputs]
        case 1:
            stream = client.chat.completions.create(model="demo", messages=messages, max_tokens=20, stream=True,
                                                    stream_options={"include_usage": True})
            chunks = list(stream)
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            got = [text, chunks[-1].usage.model_dump()]
        case 2:
            got = [chat_model.invoke(question, temperature=1.0).content, len(llm.calls)]
        case 3:
            got = llm.golden(question, messages)
    said.append([number, repr(got)])
"""
TURNS = 40


def burn() -> None:
    while True:
        sum(range(10_000))


@contextmanager
def busy(number: int) -> Iterator[None]:
    """Keep cores busy with other processes."""
    processes = [multiprocessing.get_context("spawn").Process(target=burn, daemon=True) for _ in range(number)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()


def answers(folder: Path, order: str, *words: str) -> list[list[object]]:
    """Run the tests in an order and return what each got."""
    said = folder / f"said-{order}"
    said.mkdir()
    run_code(folder, f"import os, pytest, sys; os.environ.update(SAID={str(said)!r}, ORDER={order!r})\n"
                     f"sys.exit(pytest.main(['-q', '-p', {PLUGIN!r}, '-p', 'no:cacheprovider', *{list(words)!r}]))")
    return [one for path in said.iterdir() for one in json.loads(path.read_text("utf-8"))]


@pytest.mark.slow
def test_a_thousand_shuffled_tests_beside_a_busy_loop_get_the_same_bytes(tmp_path: Path) -> None:
    """Two hundred and fifty tests alone and in one process, then a thousand in another order in four processes on busy
    cores: for each question one answer, sampled, streamed, with log-probabilities to the last bit and usage, through
    the model, OpenAI's client and LangChain; golden answers pass."""
    (tmp_path / "conftest.py").write_text(CONFTEST, "utf-8")
    (tmp_path / "test_many.py").write_text(TESTS.replace("{turns}", "10"), "utf-8")
    alone = answers(tmp_path, "1", "--update-goldens")
    (tmp_path / "test_many.py").write_text(TESTS.replace("{turns}", str(TURNS)), "utf-8")
    with busy(2):
        beside = answers(tmp_path, "2", "-p", "xdist.plugin", "-n", "4", "--dist", "worksteal")
    assert (len(alone), len(beside)) == (250, 25 * TURNS)
    wanted = dict(map(tuple, alone))  # type: ignore[arg-type]
    assert len(wanted) == 25
    assert {tuple(one) for one in [*alone, *beside]} == set(wanted.items())
