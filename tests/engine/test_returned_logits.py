"""Logits that are returned: the model's own, each token's, whatever else the request asks for, in bounded memory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedcore import AsyncEngine, CompletionOutput, Engine, SamplingParams
from pagedcore.config import limits
from pagedcore.errors import InvalidSampling, RequestTooLarge
from pagedcore.protocols import FloatArray
from support.doubles import VOCAB_SIZE, toy_logits
from support.engine_builders import assert_all_free, make_engine
from support.families import VOCAB, tiny_model

PROMPT = [3, 5, 7, 9, 11]
ASKS: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "return_logits": True}


def assert_toy_logits(prompt: list[int], completion: CompletionOutput) -> None:
    """The toy's row after each token, exactly."""
    expected = [toy_logits(np.array([*prompt, *completion.token_ids[:place]], np.int64))
                for place in range(len(completion.token_ids))]
    assert completion.logits is not None
    assert (completion.logits.dtype, completion.logits.shape) == (np.float32, (len(completion.token_ids), VOCAB_SIZE))
    assert np.array_equal(completion.logits, np.array(expected))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_they_are_the_logits_of_transformers(family: str) -> None:
    """Of prompts in chunks and in company, each token's row is the model's own forward to 1e-4; its token was drawn."""
    oracle, served = tiny_model(family), tiny_model(family)
    prompts = [[(7 * place + 3 * i) % VOCAB for i in range(9 + 8 * place)] for place in range(3)]
    params = SamplingParams(**ASKS, temperature=1.0, seed=5, logit_bias={4: 2.0}, repetition_penalty=1.3)
    with Engine.from_pretrained(served, num_kv_blocks=40, block_size=4, max_num_seqs=3,
                                max_num_batched_tokens=7, attention_backend="reference") as engine:
        outputs = engine.generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        (completion,) = output.outputs
        with torch.inference_mode():
            whole = oracle(torch.tensor([[*prompt, *completion.token_ids]])).logits[0].numpy()
        assert completion.logits is not None
        assert np.abs(completion.logits - whole[len(prompt) - 1 : -1]).max() < 1e-4


def test_they_are_the_same_bits_in_any_company() -> None:
    """Alone in large chunks, and beside others in small ones, every row is equal bit for bit."""
    prompts = [[(7 * place + 3 * i) % VOCAB for i in range(19 + 8 * place)] for place in range(3)]
    found: list[list[Any]] = []
    for settings in ({"max_num_seqs": 1}, {"max_num_batched_tokens": 16, "max_num_seqs": 4}):
        with Engine.from_pretrained(tiny_model("llama"), num_kv_blocks=32, block_size=16, **settings) as engine:
            found.append([output.outputs[0].logits for output in engine.generate(prompts, SamplingParams(**ASKS))])
    for alone, together in zip(*found, strict=True):
        assert alone.tobytes() == together.tobytes()


@pytest.mark.parametrize("more", [
    {"logit_bias": {6: -100.0}, "repetition_penalty": 2.0, "min_tokens": 5, "temperature": 2.0, "top_k": 3, "seed": 1},
    {"logits_processor": lambda ids, row: -row}, {"n": 3, "temperature": 1.0, "seed": 2},
    {"n": 2, "best_of": 4, "temperature": 1.0, "seed": 2}, {"logprobs": 3, "logit_bias": {6: -1.0}},
], ids=["adjusted", "processed", "n", "best_of", "logprobs"])
def test_nothing_that_the_request_asks_for_changes_them(more: dict[str, Any]) -> None:
    """Each completion has its own rows, from before any change; log-probabilities are reported with them."""
    with make_engine(max_num_batched_tokens=7, num_kv_blocks=32) as engine:
        asked, plain = engine.generate([PROMPT] * 2, [SamplingParams(**ASKS, **more),
                                                      SamplingParams(**{**ASKS, "return_logits": False}, **more)])
        assert_all_free(engine)
    for one, other in zip(asked.outputs, plain.outputs, strict=True):
        assert_toy_logits(PROMPT, one)
        assert (one.token_ids, other.logits) == (other.token_ids, None)
        assert one.logprobs is not None
        assert [len(scored.top) for scored in one.logprobs] == [more.get("logprobs", 0)] * 6


def test_preemption_delivers_each_row_once() -> None:
    """In a pool that is too small, whatever is computed again, there is one row for each token, the right one."""
    prompts = [[3 + place, 5, 7, 9, 11, 13, 15, 17] for place in range(5)]
    with make_engine(num_kv_blocks=12, max_num_batched_tokens=5, preemption="recompute") as engine:
        outputs = engine.generate(prompts, SamplingParams(**{**ASKS, "max_tokens": 16}))
        assert engine.stats().num_preemptions > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_toy_logits(prompt, output.outputs[0])


def test_streams_and_sessions_have_them_and_files_do_not(tmp_path: Path) -> None:
    """Deltas bring them with the log-probabilities; a turn that was cut off goes on; an imported one has none."""
    params = SamplingParams(**ASKS)

    async def main() -> None:
        async with AsyncEngine(make_engine(), stream_interval_s=0.0) as served:
            deltas = [delta async for delta in served.generate(PROMPT, params)]
            whole = (await asyncio.wrap_future(served.submit(PROMPT, params))).outputs[0]
        streamed: list[FloatArray | None] = [one.logits for delta in deltas for one in delta.logprobs or ()]
        assert np.array_equal(np.array(streamed), whole.logits)
        assert_toy_logits(PROMPT, whole)

    asyncio.run(main())
    with make_engine(num_kv_blocks=64) as engine, engine.session(params) as session:
        request = session.extend(PROMPT)
        for _ in range(4):
            engine.step()
        request.abort()
        session.export(tmp_path / "chat.json")
        assert_toy_logits(PROMPT, session.ask(None).outputs[0])
        with engine.import_session(tmp_path / "chat.json") as other:
            imported = other.ask(None).outputs[0]
            assert imported.token_ids == session.output().outputs[0].token_ids
            assert imported.logits is None
        assert_toy_logits([*session.token_ids, 4], session.ask([4]).outputs[0])


def test_they_are_its_caller_s_own_and_read_only() -> None:
    """What a caller does to the array changes nothing; the rows themselves refuse."""
    with make_engine() as engine:
        request = engine.add_request(PROMPT, SamplingParams(**ASKS))
        while not request.is_done:
            engine.step()
        first = request.output().outputs[0]
        first.logits[:] = 0.0  # type: ignore[index]
        with pytest.raises(ValueError, match="read-only"):
            first.logprobs[0].logits[0] = 0.0  # type: ignore[index]
        assert_toy_logits(PROMPT, request.output().outputs[0])
        request.remove()


def test_too_many_are_refused_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound counts every sequence's tokens times the vocabulary; what fits is served, one more is not."""
    monkeypatch.setattr("pagedcore.requests.validation.MAX_RETURNED_LOGITS_BYTES", 4 * 6 * 2 * VOCAB_SIZE)
    with make_engine() as engine:
        fits = SamplingParams(**ASKS, n=2)
        assert engine.generate([PROMPT], fits)[0].outputs[1].logits is not None
        for params in (SamplingParams(**ASKS, n=3), SamplingParams(**{**ASKS, "max_tokens": 13}),
                       SamplingParams(return_logits=True)):
            with pytest.raises(RequestTooLarge, match=r"return_logits: got \d+, allowed is at most"):
                engine.add_request(PROMPT, params)
        assert_all_free(engine)
        engine.generate([PROMPT], SamplingParams(max_tokens=13, ignore_eos=True))
    assert limits.MAX_RETURNED_LOGITS_BYTES == 2**28
    for refused in ({"return_logits": 1}, {"return_logits": True, "beam_width": 2}):
        with pytest.raises(InvalidSampling, match="return_logits"):
            SamplingParams(**refused)
    with pytest.raises(InvalidSampling, match="in the engine's process"):
        SamplingParams.from_mapping({"return_logits": True})
