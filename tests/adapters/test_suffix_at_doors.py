"""Text behind a completion, at every door: one prompt with the model's marks, one answer, or one refusal by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import adapters.bentoml.home  # noqa: F401  # Why first: BentoML reads its home when it is imported.

pytest.importorskip("bentoml")
pytest.importorskip("langchain_core")

from langchain_core.caches import InMemoryCache
from tokenizers import AddedToken

from adapters.bentoml.asgi_caller import App
from adapters.bentoml.asgi_caller import serving as serving_bentoml
from pagedcore import AsyncEngine, Infill, SamplingParams
from pagedcore.analysis.replay.decisions import replay_decisions
from pagedcore.config.limits import MAX_TEXT_BYTES_PER_TOKEN
from pagedcore.demo_model import DEMO_MODEL_DIR
from pagedcore.engine.engine import Engine
from pagedcore.errors import InvalidPrompt, InvalidRequest, InvalidSampling, TextTooLong
from pagedcore.request_options import NO_OPTIONS
from pagedcore.tokenizer.quick_tokenizer import read_tokenizer
from pagedcore.tokenizer.tokenizer import HFTokenizer
from pagedcore_asyncgen import AsyncTextGenerator
from pagedcore_bentoml import EventParser
from pagedcore_langchain import ChatPagedCore, PagedCoreLLM
from pagedcore_openai import openai_app
from support.doubles import ToyBackend
from support.engine_builders import make_engine
from support.recordings import dumped

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")
PREFIX, SUFFIX, MIDDLE = "def f(x):\n    return ", "\n\nprint(f(1))\n", "x + 1"


def tokenizer_with_marks() -> HFTokenizer:
    tokenizer = read_tokenizer(DEMO_MODEL_DIR)
    assert tokenizer is not None
    # Why not special: so it is with Qwen's.
    tokenizer.backend.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    tokenizer.added_tokens_decoder = tokenizer.backend.get_added_tokens_decoder()
    return HFTokenizer(tokenizer, is_shared=False)


class Filling(ToyBackend):
    """Writes ``MIDDLE`` behind the mark, and then the family's end token for ever; anywhere else the letter a."""

    eos_token_ids = frozenset({2})
    vocab_size = 2048 + len(MARKS)

    def __init__(self, tokenizer: HFTokenizer) -> None:
        super().__init__()
        encode = tokenizer._tokenizer.backend.encode
        self._mark, self._end = (encode(mark).ids[0] for mark in MARKS[2:])
        self._middle, self._other = encode(MIDDLE).ids, encode("a").ids[0]

    def logits_after(self, token_ids: Any) -> Any:
        tokens, logits = token_ids.tolist(), np.zeros(self.vocab_size, np.float32)
        written = tokens[tokens.index(self._mark) + 1 :] if self._mark in tokens else None
        following = self._other if written is None else [*self._middle, self._end][min(len(written), len(self._middle))]
        logits[following] = 50
        return logits


def filling(**settings: Any) -> Engine:
    tokenizer = tokenizer_with_marks()
    return make_engine(Filling(tokenizer), tokenizer=tokenizer, num_kv_blocks=256, block_size=16, max_model_len=256,
                       **settings)


@pytest.fixture
def engine() -> Iterator[AsyncEngine]:
    with AsyncEngine(filling(), stream_interval_s=0.0) as engine:
        yield engine


def sent(engine: AsyncEngine) -> list[int]:
    """What has to arrive at the model, by the tokenizer's own parts."""
    backend: Any = engine.tokenizer._tokenizer.backend  # type: ignore[union-attr]
    pieces = (MARKS[0], PREFIX, MARKS[1], SUFFIX, MARKS[2])
    return [one for piece in pieces for one in backend.encode(piece, add_special_tokens=False).ids]


async def test_every_door_fills_the_gap(engine: AsyncEngine) -> None:
    """In Python by ``Infill``, elsewhere by ``suffix``: the text between, ended by the family's end token, which is no
    part of it."""
    gap, params = Infill(PREFIX, SUFFIX), SamplingParams(max_tokens=12)
    output = await engine.complete(gap, params)
    (one,) = output.outputs
    assert (one.text, one.finish_reason, list(output.prompt_token_ids)) == (MIDDLE, "stop", sent(engine))
    assert (one.stop_reason, one.token_ids[-1]) == (None, engine.encode(MARKS[3])[0])
    assert engine.encode(gap) == sent(engine)
    texts = ["".join([delta.text async for delta in engine.generate(gap, params)]),
             "".join([delta.text async for delta in AsyncTextGenerator(engine, owns_engine=False)(gap, params)])]
    llm = PagedCoreLLM.from_engine(engine, max_tokens=12)
    texts += [await llm.ainvoke(PREFIX, suffix=SUFFIX), llm.bind(suffix=SUFFIX).invoke(PREFIX),
              "".join(llm.stream(PREFIX, suffix=SUFFIX)), *llm.batch([PREFIX] * 2, suffix=SUFFIX),
              "".join([text async for text in PagedCoreLLM.from_engine(engine, suffix=SUFFIX).astream(PREFIX)])]
    async with serving_bentoml(engine) as app:
        body = {"prompt": PREFIX, "suffix": SUFFIX, "sampling": {"max_tokens": 12}}
        texts.append(json.loads((await app.call("/generate", body)).text)["outputs"][0]["text"])
        texts.append("".join(event.data["text"] for event in EventParser().feed((await app.call("/stream", body)).text)
                             if not event.name))
        texts.append((await app.runner.complete(None, gap, {"max_tokens": 12})).outputs[0].text)
        openai: Any = App(openai_app(engine, name="m"), app.runner, engine)
        asked = {"prompt": [PREFIX, PREFIX], "suffix": SUFFIX, "max_tokens": 12, "temperature": 0}
        whole = json.loads((await openai.call("/v1/completions", {**asked, "return_token_ids": True})).text)
        assert [one["prompt_token_ids"] for one in whole["choices"]] == [sent(engine)] * 2
        texts += [one["text"] for one in whole["choices"]]
        events = (await openai.call("/v1/completions", {**asked, "prompt": PREFIX, "stream": True})).text
        texts.append("".join(json.loads(line[6:])["choices"][0]["text"] for line in events.splitlines()
                             if line.startswith("data: {")))
        plain = [(await openai.call("/v1/completions", {**asked, "suffix": suffix})).text for suffix in ("", None)]
        assert [json.loads(text)["choices"][0]["text"] for text in plain] == ["a" * 12] * 2
    assert texts == [MIDDLE] * len(texts)
    assert len(texts) == 14


async def test_what_no_gap_can_be_in_is_refused_by_name(engine: AsyncEngine) -> None:
    """Token ids, a prompt that is cut, an echo, a further turn, and a model that has no marks."""
    params = SamplingParams(max_tokens=2)
    for wrong in ([1, 2], None, b"x"):
        with pytest.raises(InvalidPrompt, match=r"^suffix"):
            Infill("a", wrong)  # type: ignore[arg-type]
        with pytest.raises(InvalidPrompt, match=r"^prompt"):
            Infill(wrong, "a")  # type: ignore[arg-type]
    most = "x" * (MAX_TEXT_BYTES_PER_TOKEN * engine.stats().max_model_len)
    for prefix, suffix, named in ((most + "x", "", "text"), ("", most + "x", "suffix"), (most, "x", "suffix")):
        with pytest.raises(TextTooLong, match=f"^{named}"):
            engine.submit(Infill(prefix, suffix), params).result(60)
    with pytest.raises(InvalidSampling, match=r"^truncate_prompt_tokens"):
        engine.submit(Infill("a", "b"), SamplingParams(truncate_prompt_tokens=3)).result(60)
    with pytest.raises(InvalidRequest, match="suffix"):
        ChatPagedCore.from_engine(engine).invoke("hi", suffix="x")
    with filling() as blocking:
        (output,) = blocking.generate(["a"], params)
        (gap,) = blocking.generate(Infill(PREFIX, SUFFIX), params)
        assert list(gap.prompt_token_ids) == sent(engine)
        with pytest.raises(InvalidPrompt, match=r"^suffix"):
            blocking.input_processor.process_further(output, 0, Infill("a", "b"), params, NO_OPTIONS)
        with blocking.session() as session, pytest.raises(InvalidPrompt, match=r"^suffix"):
            session.ask(Infill("a", "b"), params)
    async with serving_bentoml(engine) as app:
        openai: Any = App(openai_app(engine, name="m"), app.runner, engine)
        for body, what in (({"prompt": [1, 2]}, "prompt"), ({"prompt": "a", "echo": True}, "suffix"),
                           ({"prompt": "a", "truncate_prompt_tokens": 2}, "truncate_prompt_tokens")):
            refused = await openai.call("/v1/completions", {"suffix": "b", **body})
            assert (refused.status, refused.error["param"]) == (400, what)
        refused = await app.call("/generate", {"prompt": [1], "suffix": "b"})
        assert (refused.status, refused.error["what"]) == (400, "prompt")
    for tokenizer in (None, HFTokenizer.from_directory(DEMO_MODEL_DIR)):
        with make_engine(ToyBackend(), tokenizer=tokenizer) as none, pytest.raises(InvalidPrompt, match=r"^suffix"):
            none.add_request(Infill("a", "b"), params)


async def test_a_suffix_is_a_part_of_what_caches_distinguish(engine: AsyncEngine) -> None:
    """LangChain's cache of answers gives none for another suffix."""
    llm = PagedCoreLLM.from_engine(engine, max_tokens=3, cache=InMemoryCache())
    first = llm.invoke(PREFIX)
    assert llm.invoke(PREFIX, suffix=SUFFIX) == llm.invoke(PREFIX, suffix=SUFFIX) != first
    assert llm.invoke(PREFIX, suffix="") == first


def test_an_ordinary_end_stays_one(tmp_path: Path) -> None:
    """The end tokens of the family end no other prompt, nor one that ignores ends; recordings have them."""
    with filling(flight_recorder="tokens") as engine:
        ignoring = SamplingParams(max_tokens=8, ignore_eos=True)
        (output,) = engine.generate([Infill(PREFIX, SUFFIX)], ignoring)
        assert output.outputs[0].finish_reason == "length"
        # Why with its text: so it is of a plain prompt too, whose answers are what they were.
        assert MARKS[3] in output.outputs[0].text
        written = "".join((MARKS[0], PREFIX, MARKS[1], SUFFIX, MARKS[2]))
        (output,) = engine.generate([written], SamplingParams(max_tokens=8))
        assert (output.outputs[0].finish_reason, MARKS[3] in output.outputs[0].text) == ("length", True)
        (output,) = engine.generate([Infill(PREFIX, SUFFIX)], SamplingParams(max_tokens=8))
        assert output.outputs[0].finish_reason == "stop"
        recording = dumped(engine, tmp_path)
    assert replay_decisions(recording).difference is None


async def test_who_guesses_both_texts_learns_nothing_of_another_tenant(engine: AsyncEngine) -> None:
    """Under another salt nothing is found of the same gap, nor by who writes the marks out; under its own it is."""
    gap, params = Infill(PREFIX, SUFFIX), SamplingParams(max_tokens=2)
    typed = f"{MARKS[0]}{PREFIX}{MARKS[1]}{SUFFIX}{MARKS[2]}"
    found = [(await engine.complete(prompt, params, cache_salt=salt)).num_cached_tokens
             for prompt, salt in ((gap, "blue"), (gap, "green"), (typed, "red"), (gap, None), (gap, "blue"))]
    assert found[:4] == [0] * 4
    assert found[4] > 0
