"""Vectors of texts: those of transformers, the same bytes whatever the schedule, and no other bits for completions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedcore.analysis.recorder.recording import read_recording
from pagedcore.analysis.replay.decisions import replay_decisions
from pagedcore.engine.builder import build_components
from pagedcore.engine.engine import Engine
from pagedcore.errors import (
    InternalError,
    InvalidLogits,
    InvalidPrompt,
    InvalidRequest,
    InvalidText,
    InvalidToken,
    ModelNotSupported,
    PromptEmpty,
    PromptTooLong,
    UnknownParameter,
)
from pagedcore.outputs import Embedding
from pagedcore.request_options import NO_OPTIONS
from pagedcore.requests.embedding import TextEncoder
from pagedcore.requests.pooling import TextReader
from pagedcore.sampling_params import SamplingParams
from support.doubles import FakeClock, ToyBackend, toy_answer, toy_logits
from support.embedders import TEXTS, change_file, write_embedder
from support.engine_builders import assert_all_free, make_engine, run

POOLINGS = ["last", "mean"]
CHAT = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.7, seed=3)
#: A model may choose such tokens itself, without logits.
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
#: The self-test's bound in float32, of a vector's length.
TOLERANCE = 2e-3


def rows_of(embeddings: list[Embedding]) -> list[bytes]:
    return [one.vector.tobytes() for one in embeddings]


def vector_of_toy(tokens: list[int], pooling: str, normalize: bool = True) -> np.ndarray[Any, Any]:
    """What a toy's hidden states, the logits of each next token, make of a text."""
    states = [toy_logits(np.array(tokens[: end + 1])).astype(float) for end in range(len(tokens))]
    mean = states[-1] if pooling == "last" else np.mean(states, axis=0)
    return mean / np.linalg.norm(mean) if normalize else mean


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that chats and embeds; a text ends with a token that the tokenizer appends."""
    path = tmp_path_factory.mktemp("embedder")
    write_embedder(path, has_head=True)
    return path


def engine_of(directory: Path, **settings: Any) -> Engine:
    return Engine.from_pretrained(str(directory), **{"num_kv_blocks": 64, "block_size": 16, **settings})


@pytest.mark.parametrize(("files", "asked"), [
    ({}, {}),
    ({"pooling": "pooling_mode_mean_tokens", "normalizes": False, "has_head": True}, {"dimensions": 16}),
    ({"family": "mistral", "prompts": {"query": "Find what follows: "}, "appends": False}, {"prompt_name": "query"}),
    ({"pooling": "pooling_mode_mean_tokens", "prompts": {"q": "ask "}, "includes_prompt": False,
      "more": {"default_prompt_name": "q"}}, {}),
    ({"family": "gemma3_text", "pooling": "pooling_mode_cls_token"}, {"pooling": "mean", "normalize": False}),
], ids=["last", "mean of a model with a head", "a prompt", "without the prompt's tokens", "as the caller says"])
def test_vectors_are_those_of_transformers(files: dict[str, Any], asked: dict[str, Any], tmp_path: Path) -> None:
    """Of the hidden states of the model on the same directory, pooled as its files say: with the tokens that the
    tokenizer appends, its prompts, and a length of 1 where they say so."""
    from transformers import AutoModel, AutoTokenizer

    write_embedder(tmp_path, **files)
    model, tokenizer = AutoModel.from_pretrained(tmp_path, dtype=torch.float32), AutoTokenizer.from_pretrained(tmp_path)
    prompts = files.get("prompts", {})
    prompt = prompts.get(asked.get("prompt_name", files.get("more", {}).get("default_prompt_name")), "")
    takes_mean = asked.get("pooling") == "mean" or files.get("pooling") == "pooling_mode_mean_tokens"
    num_skipped = len(tokenizer(prompt)["input_ids"]) - 1 if files.get("includes_prompt") is False else 0
    with engine_of(tmp_path, dtype="float32") as engine:
        found = engine.embed(TEXTS, show_progress=False, **asked)
    for text, own in zip(TEXTS, found, strict=True):
        ids = tokenizer(prompt + text, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            states = model(ids).last_hidden_state[0].double().numpy()
        expected = (states[num_skipped:].mean(0) if takes_mean else states[-1])[: asked.get("dimensions")]
        if asked.get("normalize", files.get("normalizes", True)):
            expected /= np.linalg.norm(expected)
        assert own.num_prompt_tokens == ids.shape[1]
        assert own.vector.shape == expected.shape
        assert np.linalg.norm(own.vector - expected) < TOLERANCE * np.linalg.norm(expected)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_vectors_are_the_same_bytes_for_any_schedule(pooling: str, directory: Path) -> None:
    """Alone, in company with chats, in chunks, with cached prefixes, preempted and computed again; and the chats beside
    them are what they are alone."""
    alone, prompts = [], ["tell me of the quick brown fox", "and of the dog"]
    with engine_of(directory, enable_prefix_caching=False) as engine:
        for text in TEXTS:
            alone += rows_of(engine.embed([text], pooling=pooling, show_progress=False))
        answers = [engine.generate([one], how, show_progress=False)[0].outputs[0].token_ids
                   for how in (CHAT, GREEDY) for one in prompts]
    for settings in ({}, {"max_num_batched_tokens": 8, "max_num_seqs": 4},
                     {"num_kv_blocks": 8, "block_size": 8, "max_num_batched_tokens": 16,
                      "max_num_seqs": 8, "preemption": "recompute"}):
        with engine_of(directory, **settings) as engine:
            found = []
            for how in (CHAT, GREEDY):
                chats = [engine.add_request(one, how) for one in prompts]
                assert rows_of(engine.embed(TEXTS, pooling=pooling, show_progress=False)) == alone, settings
                run(engine)
                found += [one.output().outputs[0].token_ids for one in chats]
            assert found == answers, settings
            again = engine.embed(TEXTS, pooling=pooling, show_progress=False)
            assert rows_of(again) == alone, settings
            assert_all_free(engine)
            if not settings:
                # Why: a mean reads every position, so that nothing of it is found.
                assert any(one.num_cached_tokens for one in again) == (pooling == "last")


@pytest.mark.parametrize("pooling", POOLINGS)
def test_preempted_texts_are_read_on(pooling: str) -> None:
    """Where chats grow into the blocks of texts that are half computed, each vector is that of its text."""
    with make_engine(num_kv_blocks=12, max_num_batched_tokens=3, max_num_seqs=3, preemption="recompute") as engine:
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        chats = [engine.add_request([3 + number] * 4, params) for number in range(2)]
        texts = [[1 + (i * place) % 29 for place in range(1, 14 + i)] for i in range(6)]
        encoder = TextEncoder.of(engine.input_processor, pooling)
        readers = [engine.accept(encoder.process(text, NO_OPTIONS)) for text in texts]
        run(engine)
        assert sum(one.sequences[0].num_preemptions for one in readers) > 0
        for text, reader in zip(texts, readers, strict=True):
            vector = reader.output().vector
            assert vector is not None
            np.testing.assert_allclose(vector, vector_of_toy(text, pooling), rtol=1e-5, atol=1e-6)
        for chat in chats:
            assert list(chat.output().outputs[0].token_ids) == toy_answer(chat.prompt_token_ids, 20)
        assert_all_free(engine)


def test_a_text_keeps_its_blocks_only_while_it_is_computed() -> None:
    """Afterwards a chat finds its beginning in the cache; and where memory is short, the blocks of texts go first."""
    with make_engine(num_kv_blocks=10) as engine:
        chat = [7] * 9
        engine.generate([chat], SamplingParams(max_tokens=1), show_progress=False)
        for number in range(3):
            engine.embed([[8 + number] * 16], show_progress=False)
            assert engine.stats().num_blocks_used == 0
        for known in (chat, [10] * 16):
            (found,) = engine.generate([[*known, 1]], SamplingParams(max_tokens=1), show_progress=False)
            assert found.num_cached_tokens == len(known)


def test_texts_of_different_salts_share_nothing() -> None:
    """Neither the cache nor what usage says of it tells one tenant of another's texts."""
    with make_engine() as engine:
        text = [5, 6] * 6
        first = engine.embed([text], cache_salt="one", show_progress=False)
        other, same = (engine.embed([text], cache_salt=salt, show_progress=False) for salt in ("other", "one"))
        assert (other[0].num_cached_tokens, same[0].num_cached_tokens) == (0, len(text) - 1)
        assert rows_of(first) == rows_of(other) == rows_of(same)


@pytest.mark.parametrize(("texts", "asked", "error", "words"), [
    ([""], {}, InvalidText, "text: got a string of 0 characters"),
    ([[]], {}, PromptEmpty, "at least 1 token"),
    (["ok", 5], {}, InvalidPrompt, "text: got 5"),
    ([[1, True]], {}, InvalidPrompt, "a list with True"),
    ([[10**6]], {}, InvalidToken, "1000000"),
    ([[1] * 101], {}, PromptTooLong, "text: got 101, allowed is at most 100"),
    (["a" * 10**6], {}, InvalidText, "a string of 1000000"),
    (7, {}, InvalidPrompt, "texts: got 7"),
    (["a"], {"pooling": "cls"}, InvalidRequest, "pooling: got a string of 3 characters, allowed is one of last, mean"),
    (["a"], {"dimensions": 65}, InvalidRequest, "dimensions: got 65, allowed is an integer from 1 to 64"),
    (["a"], {"dimensions": 0}, InvalidRequest, "dimensions: got 0"),
    (["a"], {"normalize": 1}, InvalidRequest, "normalize: got 1"),
    (["a"], {"prompt_name": "none"}, InvalidRequest, "prompt_name: got 'none', allowed is 'query'"),
    (["a"], {"priority": 1}, InvalidRequest, "priority"),
    (["a"], {"poolin": "last"}, UnknownParameter, "pooling"),
])
def test_what_cannot_be_embedded_is_refused(
    texts: Any, asked: dict[str, Any], error: type[Exception], words: str, embedder: Engine
) -> None:
    """With a typed error that has name, value and limit; nothing was started."""
    with pytest.raises(error, match=words):
        embedder.embed(texts, show_progress=False, **asked)
    assert not embedder.has_pending_requests()
    assert len(list(embedder.requests)) == 0


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An engine with a model that has no output layer."""
    path = tmp_path_factory.mktemp("base")
    write_embedder(path, family="mistral", prompts={"query": "ask: "})
    with engine_of(path) as engine:
        yield engine


def test_a_model_without_an_output_layer_embeds_only(embedder: Engine) -> None:
    """Whoever asks it for a completion is told so; its tokens can be counted."""
    for ask in (lambda: embedder.generate(["a"], show_progress=False), lambda: embedder.add_request([1, 2]),
                lambda: embedder.chat([{"role": "user", "content": "a"}])):
        with pytest.raises(InvalidRequest, match="without an output layer, allowed is asked for embeddings"):
            ask()
    assert len(embedder.encode("the quick")) == embedder.embed("the quick", show_progress=False)[0].num_prompt_tokens


def test_a_backend_without_hidden_states_embeds_nothing() -> None:
    """It is told from others by its protocol."""

    class OnlyLogits(ToyBackend):
        hidden_size = 0

    with make_engine(OnlyLogits()) as engine, pytest.raises(InvalidRequest, match="returns no hidden states"):
        engine.embed([[1, 2]], show_progress=False)


@pytest.mark.parametrize(("changes", "words"), [
    ({"modules.json": [{"type": "sentence_transformers.models.Transformer", "path": ""},
                       {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
                       {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]}, "Dense"),
    ({"modules.json": [{"type": "my_code.Transformer", "path": ""}]}, "modules.json"),
    ({"1_Pooling/config.json": {"pooling_mode_cls_token": True}}, "'cls', as the model's directory says"),
    ({"1_Pooling/config.json": {"pooling_mode": ["mean", "max"]}}, "pooling"),
    ({"sentence_bert_config.json": {"do_lower_case": True}}, "lower case"),
    ({"modules.json": None}, "modules.json"),
    ({"modules.json": [{"type": "sentence_transformers.models.Transformer", "path": ""},
                       {"type": "sentence_transformers.models.Pooling", "path": "../1_Pooling"}]}, "cannot be read"),
    ({"1_Pooling/config.json": []}, "cannot be read"),
], ids=["dense", "foreign", "cls", "two", "lower case", "no modules", "elsewhere", "no pooling"])
def test_what_the_files_ask_beyond_that_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    """With the first text: the model may be here for its completions. Nothing is guessed of files that say nothing."""
    write_embedder(tmp_path, has_head=True)
    for name, content in changes.items():
        (tmp_path / name).write_text(json.dumps(content))
    with engine_of(tmp_path) as engine:
        engine.generate(["a"], SamplingParams(max_tokens=1), show_progress=False)
        with pytest.raises(InvalidRequest, match=words):
            engine.embed(["a"], show_progress=False)


def test_a_default_prompt_of_another_type_is_none(tmp_path: Path) -> None:
    """As one that the file does not have."""
    write_embedder(tmp_path, has_head=True, prompts={"q": "ask: "}, more={"default_prompt_name": {}})
    with engine_of(tmp_path) as engine:
        one, other = engine.embed(["a"], show_progress=False)[0], engine.embed(["a"], prompt_name="")[0]
    assert one.vector.tobytes() == other.vector.tobytes()


@pytest.mark.parametrize("fields", [{"is_causal": False}, {"use_bidirectional_attention": True}])
def test_a_model_that_looks_at_both_sides_is_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    """By what its configuration says, whatever its architecture is called."""
    write_embedder(tmp_path)
    change_file(tmp_path / "config.json", **fields)
    with pytest.raises(ModelNotSupported, match="a token looks at those behind it too"):
        engine_of(tmp_path)


def test_code_that_does_not_run_makes_no_vectors(tmp_path: Path) -> None:
    """A directory that names code for its model may compute otherwise than the class of the same name."""
    write_embedder(tmp_path, has_head=True)
    change_file(tmp_path / "config.json", auto_map={"AutoModel": "modeling.OwnModel"})
    with engine_of(tmp_path) as engine, pytest.raises(InvalidRequest, match="auto_map"):
        engine.embed(["a"], show_progress=False)


def test_a_reader_takes_each_position_once() -> None:
    """What a step that broke off has read already counts once when it comes again, whatever the pieces; a gap is a
    defect."""
    states = np.random.default_rng(0).normal(size=(9, 5)).astype(np.float32)
    whole, pieces = TextReader(3, None, normalize=False), TextReader(3, None, normalize=False)
    assert whole.read(3, states[3:])
    for start, end in ((3, 4), (3, 6), (5, 9), (8, 9)):
        assert pieces.read(start, states[start:end])
    assert np.array_equal(pieces.vector(), whole.vector())
    np.testing.assert_allclose(whole.vector(), states[3:].mean(0), rtol=1e-6)
    with pytest.raises(InternalError):
        TextReader(3, None, normalize=False).read(4, states[4:])


def test_states_that_are_not_finite_end_their_text_alone() -> None:
    """The other texts of the step have their vectors."""
    backend = ToyBackend()
    whole = backend.forward_hidden

    def broken(batch: Any, rows: Any) -> Any:
        logits, hidden = whole(batch, rows)
        hidden[np.isin(batch.token_ids[rows], [9])] = np.nan
        return logits, hidden

    backend.forward_hidden = broken  # type: ignore[method-assign]
    with make_engine(backend) as engine:
        encoder = TextEncoder.of(engine.input_processor, "mean", normalize=False)
        good, bad = (engine.accept(encoder.process(text, NO_OPTIONS)) for text in ([1, 2, 3], [4, 9, 5]))
        run(engine)
        np.testing.assert_allclose(good.output().vector, vector_of_toy([1, 2, 3], "mean", normalize=False), rtol=1e-5)
        assert bad.output().vector is None
        with pytest.raises(InvalidLogits, match="not finite"):
            bad.output().raise_for_error()
        assert_all_free(engine)


def test_recordings_have_texts_too(tmp_path: Path) -> None:
    """A run of texts and chats is decided again as it was."""
    engine = Engine(build_components(ToyBackend(), num_kv_blocks=12, block_size=4, max_num_seqs=4,
                                     max_num_batched_tokens=8, flight_recorder="tokens"), FakeClock())
    encoder = TextEncoder.of(engine.input_processor, "mean")
    for number in range(5):
        engine.accept(encoder.process([number + 1] * (6 + number), NO_OPTIONS))
        engine.add_request([number] * 5, SamplingParams(max_tokens=6))
    run(engine)
    engine.dump_recording(tmp_path / "one.gz")
    replayed = replay_decisions(read_recording(tmp_path / "one.gz"))
    assert replayed.difference is None
    assert replayed.num_steps > 5


def test_metrics_count_texts_as_prompts() -> None:
    """Tokens of texts are prompt tokens; a text has no token of its own, and no time to the first one."""
    with make_engine() as engine:
        (one,) = engine.embed([[1, 2, 3]], show_progress=False)
        stats = engine.stats()
        assert (stats.num_prompt_tokens, stats.num_generated_tokens, stats.num_finished) == (3, 0, 1)
        assert (one.metrics.ttft_s, one.metrics.finished_s is None) == (None, False)
        assert np.array([one, one]).shape == (2, 32)


@pytest.mark.parametrize(("family", "named", "is_tied"), [
    ("gpt2", "GPT2LMHeadModel", True), ("mistral", "MistralModel", False), ("qwen3", "Qwen3Model", True),
])  # fmt: skip
def test_a_model_whose_files_have_an_output_layer_generates(
    family: str, named: str, is_tied: bool, tmp_path: Path
) -> None:
    """Whatever its configuration calls it: what counts is the layer, its own or the embedding's."""
    write_embedder(tmp_path, family=family, has_head=True, tie_word_embeddings=is_tied)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": [named]}))
    with engine_of(tmp_path) as engine:
        assert engine.generate(["the"], SamplingParams(max_tokens=2), show_progress=False)[0].outputs[0].token_ids
