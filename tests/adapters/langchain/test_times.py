"""When tokens came, in LangChain's metadata: the same names and numbers on every path, as the engine counts them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.messages import HumanMessage

from pagedcore import AsyncEngine
from pagedcore.engine.builder import build_components
from pagedcore.engine.engine import Engine
from pagedcore.protocols import FloatArray, RaggedRows
from pagedcore_langchain import ChatPagedCore, PagedCoreLLM
from support.doubles import FakeClock, ToyBackend
from support.letters import WritesLetters

NAMES = ("queue_s", "ttft_s", "itl_s")


class Letters(WritesLetters):
    """A token for each letter, also of a chat."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return a token for each letter."""
        return [ord(letter) % 26 for letter in text]

    def encode_chat(self, messages: Any) -> list[int]:
        """Return those of the last message."""
        return self.encode(messages[-1]["content"])


class TimedBackend(ToyBackend):
    """A step takes two seconds for a prompt and one for a token, on a virtual clock."""

    eos_token_ids = frozenset()

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.clock = clock

    def forward(self, batch: RaggedRows) -> FloatArray:
        """Compute, and let time pass."""
        self.clock.advance(2.0 if int(batch.query_start[-1]) > len(batch.kv_lens) else 1.0)
        return super().forward(batch)


@pytest.fixture
def timed() -> Iterator[AsyncEngine]:
    """An engine whose steps take known times; nothing but steps lets time pass."""
    clock = FakeClock()
    components = build_components(TimedBackend(clock), num_kv_blocks=32, block_size=4, tokenizer=Letters(),
                                  max_model_len=64, speculation="off")
    with AsyncEngine(Engine(components, clock)) as engine:
        yield engine


def times(metadata: dict[str, Any]) -> list[Any]:
    return [metadata[name] for name in NAMES]


def test_a_message_has_them_however_it_is_asked_for(timed: AsyncEngine) -> None:
    """invoke, ainvoke, stream and astream give the same three entries, which JSON can have."""
    chat = ChatPagedCore.from_engine(timed, max_tokens=4)

    async def read() -> list[dict[str, Any]]:
        chunks = [chunk async for chunk in chat.astream("abc")]
        return [(await chat.ainvoke("abc")).response_metadata, sum(chunks[1:], chunks[0]).response_metadata]

    chunks = list(chat.stream("abc"))
    assert all("ttft_s" not in chunk.response_metadata for chunk in chunks[:-1])
    found = [chat.invoke("abc").response_metadata, sum(chunks[1:], chunks[0]).response_metadata, *asyncio.run(read())]
    # Why not the first call, the stream: it computes the whole prompt, and the others find all but a token cached.
    expected = [[0.0, 2.0 if place == 1 else 1.0, [1.0, 1.0, 1.0]] for place in range(4)]
    assert [json.loads(json.dumps(times(metadata))) for metadata in found] == expected


def test_each_generation_has_its_own(timed: AsyncEngine) -> None:
    """Of n completions each has its intervals; a completion model has them in ``generation_info``, streamed too."""
    chat = ChatPagedCore.from_engine(timed, max_tokens=4, temperature=1.0, seed=1, sampling={"n": 2})
    result = chat.generate([[HumanMessage("abc")]])
    assert [len((one.generation_info or {})["itl_s"]) for one in result.generations[0]] == [3, 3]
    llm = PagedCoreLLM.from_engine(timed, max_tokens=4)
    (whole,) = llm.generate(["xyz"]).generations[0]
    assert times(whole.generation_info or {}) == [0.0, 2.0, [1.0, 1.0, 1.0]]
    last = list(llm._stream("xyz"))[-1]
    assert times(last.generation_info or {}) == [0.0, 1.0, [1.0, 1.0, 1.0]]
