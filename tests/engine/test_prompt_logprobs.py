"""Log-probabilities of prompts: those of the model alone, each delivered once, in any batch and any memory."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from pagedcore.config.limits import MAX_SCORED_BYTES
from pagedcore.engine.builder import max_scored_tokens
from pagedcore.engine.engine import Engine
from pagedcore.errors import InvalidLogits, InvalidRequest
from pagedcore.outputs import RequestOutput, TokenLogprobs, TokenText
from pagedcore.protocols import FloatArray, RaggedRows
from pagedcore.requests.request import Request
from pagedcore.sampling_params import SamplingParams
from pagedcore.serving.async_engine import AsyncEngine
from support.doubles import VOCAB_SIZE, FlakyBackend, ToyBackend, toy_answer, toy_logits
from support.engine_builders import assert_all_free, make_engine, run
from support.families import VOCAB, tiny_model
from support.toy_sessions import make

MODES = ("auto", "swap", "shrink", "recompute", "wait")
SCORED = SamplingParams(max_tokens=6, prompt_logprobs=2, ignore_eos=True)
PLAIN = SamplingParams(max_tokens=6, ignore_eos=True)
WAYS: dict[str, dict[str, Any]] = {
    "n": {"n": 3, "temperature": 1.0}, "best_of": {"n": 2, "best_of": 4, "temperature": 1.0},
    "beams": {"n": 2, "beam_width": 3},
}


class CountingBackend(ToyBackend):
    """A toy model that notes which positions it computed, and how many rows of logits each step had."""

    def __init__(self) -> None:
        super().__init__()
        self.computed: list[tuple[int, int]] = []
        self.num_logits: list[int] = []

    def forward(self, batch: RaggedRows) -> FloatArray:
        """Note, and compute."""
        for row, sequence_id in enumerate(batch.seq_ids.tolist()):
            first, last = batch.query_start[row : row + 2].tolist()
            self.computed += [(sequence_id, position) for position in batch.positions[first:last].tolist()]
        self.num_logits.append(len(batch.logits_rows))
        return super().forward(batch)


def log_softmax(logits: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    return torch.log_softmax(torch.as_tensor(logits, dtype=torch.float64), -1).numpy()


def entries_of(output: RequestOutput, num_prompt_tokens: int) -> list[TokenLogprobs]:
    """The entries of a whole prompt, the first one, which has none, left out."""
    assert output.prompt_logprobs is not None
    first, *entries = output.prompt_logprobs
    assert (first, len(entries)) == (None, num_prompt_tokens - 1)
    return [entry for entry in entries if entry is not None]


def assert_scored(output: RequestOutput, expected: np.ndarray[Any, Any], num_top: int, tolerance: float) -> None:
    """Compare with the log-probabilities [positions, vocabulary] of what follows each token of the prompt."""
    prompt = output.prompt_token_ids
    for entry, token_id, row in zip(entries_of(output, len(prompt)), prompt[1:], expected, strict=False):
        assert entry.token_id == token_id
        assert entry.logprob == pytest.approx(row[token_id], abs=tolerance)
        assert len(entry.top) == num_top
        assert [value for _, value in entry.top] == pytest.approx(np.sort(row)[::-1][:num_top], abs=tolerance)
        assert [value for _, value in entry.top] == pytest.approx([row[i] for i, _ in entry.top], abs=tolerance)


def assert_toy_scored(request: Request) -> None:
    output = request.output()
    prompt = list(output.prompt_token_ids)
    rows = [log_softmax(toy_logits(np.array(prompt[: i + 1], np.int64))) for i in range(len(prompt) - 1)]
    assert_scored(output, np.array(rows), request.params.prompt_logprobs or 0, 1e-5)


@pytest.mark.parametrize("num_batched_tokens", [3, 8, 64])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "qwen2", "deepseek_v3"])
def test_they_are_the_log_softmax_of_transformers(family: str, num_batched_tokens: int) -> None:
    """In chunks of any size, among requests that ask for none, each entry is the model's own to 1e-4."""
    oracle, served = tiny_model(family), tiny_model(family)
    rng = random.Random(f"{family} {num_batched_tokens}")
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (2, 19, 33, 9, 1)]
    tops = [0, 5, 1, None, 20]
    with Engine.from_pretrained(served, attention_backend="reference", num_kv_blocks=40, block_size=4, max_num_seqs=3,
                                max_num_batched_tokens=num_batched_tokens) as engine:
        outputs = engine.generate(prompts, [SamplingParams(max_tokens=3, prompt_logprobs=top) for top in tops])
    for prompt, top, output in zip(prompts, tops, outputs, strict=True):
        if top is None:
            assert output.prompt_logprobs is None
            continue
        with torch.inference_mode():
            assert_scored(output, log_softmax(oracle(torch.tensor([prompt])).logits[0]), top, 1e-4)


def ask_several(engine: Engine, params: list[SamplingParams]) -> list[Request]:
    rng = random.Random(4)
    beginning = [rng.randrange(3, 30) for _ in range(9)]
    prompts = [[*beginning, *(rng.randrange(3, 30) for _ in range(rng.randint(1, 14)))] for _ in params]
    return [engine.add_request(*one) for one in zip(prompts, params, strict=True)]


@pytest.mark.parametrize("mode", MODES)
def test_a_small_pool_changes_no_entry(mode: str) -> None:
    """Preempted within the prompt or the answer, in every way, each position is delivered once, with the same value."""
    engine = make_engine(num_kv_blocks=13, max_num_seqs=5, max_num_batched_tokens=7, preemption=mode,
                         host_kv_memory=64 * 12, max_num_waiting=32)
    longer = SamplingParams(max_tokens=20, ignore_eos=True, prompt_logprobs=1)
    requests = ask_several(engine, [SCORED, PLAIN, longer] * 5)
    run(engine)
    for request in requests:
        if request.params.prompt_logprobs is not None:
            assert_toy_scored(request)
        expected = toy_answer(request.prompt_token_ids, request.params.max_tokens or 0)
        assert request.output().outputs[0].token_ids == tuple(expected)
    assert engine.stats().num_preemptions > 0
    assert_all_free(engine)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_prompt_that_is_interrupted_goes_on_where_it_was(mode: str) -> None:
    """Preempted in mid-prompt, what was delivered stays; what was computed and kept is not computed again for it."""
    backend = CountingBackend()
    engine = make_engine(backend, num_kv_blocks=12, max_num_batched_tokens=6, max_num_seqs=2, preemption=mode,
                         host_kv_memory=64 * 32, scheduling_policy="priority")
    first = engine.add_request([3] * 5, SamplingParams(max_tokens=40, ignore_eos=True), priority=1)
    for _ in range(12):
        engine.step()
    second = engine.add_request([5, 6] * 14, SamplingParams(max_tokens=1, prompt_logprobs=1))
    num_delivered, was_interrupted = 0, False
    while engine.has_pending_requests():
        engine.step()
        known = len(second.prompt_logprobs or ())
        assert known >= num_delivered
        was_interrupted |= second.sequences[0].num_preemptions > 0 and 1 < num_delivered < 28
        num_delivered = known
    assert was_interrupted
    assert first.is_done
    assert_toy_scored(second)
    positions = [position for sequence_id, position in backend.computed if sequence_id == 2]
    assert (len(positions) > 28) == (mode == "recompute")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_nobody_elses_tokens_change(family: str) -> None:
    """Sampled tokens and their log-probabilities are the same bits with and without a neighbour that asks."""
    drawn = SamplingParams(max_tokens=12, temperature=1.2, seed=3, logprobs=3, ignore_eos=True)
    rng = random.Random(9)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (7, 21, 12)]

    def answers(asks: bool) -> list[Any]:
        with Engine.from_pretrained(tiny_model(family), block_size=16, max_num_batched_tokens=16,
                                    num_kv_blocks=16, max_num_seqs=4) as engine:
            assert engine.stats().is_schedule_invariant
            scored = SamplingParams(max_tokens=12, temperature=1.2, seed=3, logprobs=3, ignore_eos=True,
                                    prompt_logprobs=4 if asks else None)
            outputs = engine.generate(prompts, [drawn, scored, drawn])
            assert (outputs[1].prompt_logprobs is not None) == asks
            return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]

    assert answers(asks=True) == answers(asks=False)


def test_entries_are_the_same_bits_however_the_prompt_is_computed() -> None:
    """Alone, in other chunks, in company, and with a pool that is too small, every float is the same."""
    rng = random.Random(2)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (40, 33, 18)]
    params = SamplingParams(max_tokens=20, prompt_logprobs=3, ignore_eos=True)
    settings: list[dict[str, Any]] = [
        {}, {"max_num_batched_tokens": 8, "max_num_seqs": 8}, {"num_kv_blocks": 6}, {"max_num_seqs": 1}
    ]
    delivered = []
    for one in settings:
        with Engine.from_pretrained(tiny_model("llama"), block_size=16, **{"num_kv_blocks": 32, **one}) as engine:
            delivered.append([output.prompt_logprobs for output in engine.generate(prompts, params)])
    assert all(one == delivered[0] for one in delivered)


def test_what_is_cached_is_computed_again_and_serves_others() -> None:
    """A reported prompt finds nothing and is delivered in full; a request that does not ask for it finds its blocks."""
    backend = CountingBackend()
    engine = make_engine(backend, num_kv_blocks=32)
    prompt = [5, 9, 4, 3] * 4
    outputs = []
    for params in (PLAIN, SCORED, PLAIN, SCORED):
        request = engine.add_request(prompt, params)
        run(engine)
        outputs.append(request.output())
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 15, 0]
    assert len({output.outputs[0].token_ids for output in outputs}) == 1
    cold = make_engine(num_kv_blocks=32)
    first, second = cold.add_request(prompt, SCORED), cold.add_request(prompt, PLAIN)
    run(cold)
    assert second.output().num_cached_tokens == 15
    assert first.output().prompt_logprobs == outputs[1].prompt_logprobs


def test_two_that_report_the_same_prompt_do_not_wait_for_each_other() -> None:
    """Neither could use what the other computes, so both are computed side by side."""
    engine = make_engine(num_kv_blocks=32, max_num_batched_tokens=64)
    requests = [engine.add_request([4] * 12, SCORED) for _ in range(2)]
    engine.step()
    assert [len(request.prompt_logprobs or ()) for request in requests] == [12, 12]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_blocks", [24, 64])
def test_several_answers_report_their_prompt_once(way: str, num_blocks: int) -> None:
    """With n, best_of and beams the prompt is computed and delivered once; completions are those without the option."""
    prompt = [7, 3, 9] * 5
    params: dict[str, Any] = {"max_tokens": 5, "seed": 2, "ignore_eos": True, **WAYS[way]}
    outputs, counts = [], []
    for num_top in (None, 2):
        backend = CountingBackend()
        engine = make_engine(backend, num_kv_blocks=num_blocks, max_num_batched_tokens=6)
        request = engine.add_request(prompt, SamplingParams(prompt_logprobs=num_top, **params))
        run(engine)
        outputs.append(request.output())
        counts.append(sum(position < len(prompt) - 1 for _, position in backend.computed))
        if num_top is not None:
            assert_toy_scored(request)
        assert_all_free(engine)
    assert outputs[0].outputs == outputs[1].outputs
    assert num_blocks == 24 or counts[0] == counts[1] <= 14 + 3


def test_further_turns_report_everything_before_the_answer() -> None:
    """A turn that asks as the one before computes only what was not delivered; one that asks anew computes all."""
    backend = CountingBackend()
    engine = make_engine(backend, num_kv_blocks=32)
    request = engine.add_request([5, 9, 4] * 3, SCORED)
    run(engine)
    expected = [(SCORED, 9 - 1), (SamplingParams(max_tokens=2, prompt_logprobs=0), 0), (PLAIN, None), (SCORED, 0)]
    for params, num_found in expected:
        request.extend([6, 8], params)
        run(engine)
        if params.prompt_logprobs is None:
            assert request.output().prompt_logprobs is None
            assert request.output().num_cached_tokens > 10
        else:
            assert_toy_scored(request)
            assert request.output().num_cached_tokens == num_found
    assert_all_free(engine)


def test_sessions_report_across_parking_forks_and_completion() -> None:
    """Parked or forked, cut off in mid-prompt and completed, every entry of the conversation is delivered."""
    with make() as engine, engine.session(SCORED) as session:
        session.ask([5, 9, 4, 3, 7])
        session.park("host")
        output = session.ask([8, 8, 2])
        assert len(entries_of(output, 5 + 6 + 3)) == 13
        request = session.extend([9] * 12)
        engine.step()
        fork = session.fork()
        assert 13 < len(fork.output().prompt_logprobs or ()) < 14 + 6 + 12
        request.abort()
        outputs = [session.ask(None), fork.ask(None)]
        assert len(entries_of(outputs[0], 14 + 6 + 12)) == 31
        assert outputs[0].prompt_logprobs == outputs[1].prompt_logprobs


def test_an_imported_session_reports_what_is_asked_of_it(tmp_path: Any) -> None:
    """A file has no entries of prompts; the next turn computes the conversation again and tells all of them."""
    with make() as engine:
        session = engine.session(SCORED)
        session.ask([5, 9, 4, 3, 7])
        session.export(tmp_path / "chat.json")
        imported = engine.import_session(tmp_path / "chat.json")
        assert imported.output().prompt_logprobs == (None,)
        outputs = [one.ask([2, 2]) for one in (session, imported)]
        assert outputs[0].prompt_logprobs == outputs[1].prompt_logprobs
        assert len(entries_of(outputs[1], 5 + 6 + 2)) == 12


def test_the_logits_of_a_step_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many prompts are reported at once, a step has the rows that fit the bound, and one for each sequence."""
    assert max_scored_tokens(151_936) * 607_744 <= MAX_SCORED_BYTES < (max_scored_tokens(151_936) + 1) * 607_744
    assert max_scored_tokens(2**31) == 1
    monkeypatch.setattr("pagedcore.engine.builder.MAX_SCORED_BYTES", 4 * VOCAB_SIZE * 5)
    backend = CountingBackend()
    engine = make_engine(backend, num_kv_blocks=64, max_num_batched_tokens=64)
    requests = ask_several(engine, [SCORED, PLAIN, SCORED, SCORED])
    run(engine)
    for request in (requests[0], *requests[2:]):
        assert_toy_scored(request)
    assert 5 <= max(backend.num_logits) <= 5 + 4


def test_unusable_logits_of_a_prompt_end_its_request_alone() -> None:
    """A row that is NaN within a reported prompt is an error of this request; its neighbour's answer is its own."""
    engine = make_engine(FlakyBackend(nan_on=(2, 2)), num_kv_blocks=32)
    neighbour = engine.add_request([2], PLAIN)
    request = engine.add_request([3] * 20, SCORED)
    deltas = []
    while engine.has_pending_requests():
        deltas += engine.step()
    ends = [delta for delta in deltas if delta.request_id == request.request_id]
    assert [(delta.finish_reason, type(delta.error)) for delta in ends] == [("error", InvalidLogits)]
    assert neighbour.output().outputs[0].token_ids == tuple(toy_answer([2], 6))
    assert_all_free(engine)


class PlainTokenizer:
    """As little as a tokenizer of the user's own has to have, for one-shot decoding."""

    eos_token_ids: frozenset[int] = frozenset()

    def decode(self, token_ids: list[int]) -> str:
        """A letter for each token, part of a character for one, nothing for another."""
        return "".join({0: "", 1: "\ufffd"}.get(token_id, chr(95 + token_id)) for token_id in token_ids)

    def new_detokenizer(self) -> None:
        """Fail: no test here asks for one."""


def test_every_engine_can_say_what_a_token_stands_for() -> None:
    """With a tokenizer of any kind, or nothing to say without one; a token that does not exist is refused."""
    with make_engine(tokenizer=PlainTokenizer()) as engine:
        texts = [engine.token_text(token_id) for token_id in (0, 1, 2)]
        assert texts == [TokenText("", None), TokenText("\ufffd", None), TokenText("a", b"a")]
        for wrong in (-1, VOCAB_SIZE, True, "a", 10**400):
            with pytest.raises(InvalidRequest):
                engine.token_text(wrong)  # type: ignore[arg-type]
    with AsyncEngine(make_engine()) as engine_on_a_thread:
        assert engine_on_a_thread.token_text(3) == TokenText("", None)


async def test_they_come_with_the_last_delta_and_with_whole_answers() -> None:
    """A stream tells them once, with its usage, also where the reader is slow; a future's output has them."""
    with AsyncEngine(make_engine(num_kv_blocks=32)) as engine:
        deltas = [delta async for delta in engine.generate([5, 9, 4, 3], SCORED)]
        assert [delta.prompt_logprobs is not None for delta in deltas] == [delta.usage is not None for delta in deltas]
        whole = engine.submit([5, 9, 4, 3], SCORED).result(timeout=60)
        assert deltas[-1].prompt_logprobs == whole.prompt_logprobs
        assert len(entries_of(whole, 4)) == 3
        assert [delta.prompt_logprobs async for delta in engine.generate([5, 9], PLAIN)][-1] is None
