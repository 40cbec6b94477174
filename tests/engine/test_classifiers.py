"""Classes of texts: those of transformers on the same directory, the same numbers whatever the schedule."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedcore import AsyncEngine
from pagedcore.convert.conversion import convert
from pagedcore.convert.packing import pack
from pagedcore.engine.engine import Engine
from pagedcore.errors import (
    InvalidConfig,
    InvalidRequest,
    InvalidText,
    ModelNotSupported,
    ModelTakenOver,
    PagedcoreError,
    PromptTooLong,
)
from pagedcore.plugins.manager import create_plugin_manager
from pagedcore.sampling_params import SamplingParams
from support.classifiers import LABELS, write_classifier
from support.embedders import change_file
from support.engine_builders import assert_all_free, make_engine

#: The last one ends with the token that is the padding of all these models.
TEXTS = ["the quick brown fox", "a", "jumps over the lazy dog and on and on", "naïve café", "ok , yes ?<eos>", "<eos>"]


def engine_of(model: Any, **settings: Any) -> Engine:
    return Engine.from_pretrained(
        str(model) if isinstance(model, Path) else model,
        **{"num_kv_blocks": 64, "block_size": 16, "dtype": "float32", **settings})


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier with three classes."""
    path = tmp_path_factory.mktemp("classifier")
    write_classifier(path)
    return path


@pytest.mark.parametrize(("family", "changes"), [
    ("qwen3", {"tie_word_embeddings": True}), ("llama", {}), ("gpt2", {}), ("gemma3_text", {"pad_token_id": None}),
])
def test_classes_are_those_of_transformers(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Also where a text ends with padding, and whether the directory or the loaded model is given."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    write_classifier(tmp_path, family=family, **changes)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    with engine_of(tmp_path) as engine:
        found = engine.classify(TEXTS, show_progress=False)
    for text, own in zip(TEXTS, found, strict=True):
        with torch.inference_mode():
            logits = theirs(**tokenizer(text, return_tensors="pt")).logits[0]
        torch.testing.assert_close(torch.tensor(own.logits), logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(torch.tensor(own.probs), logits.softmax(-1), rtol=1e-4, atol=1e-5)
        assert (own.label, own.num_classes) == (LABELS[int(logits.argmax())], 3)
    with engine_of(theirs, tokenizer=tokenizer) as engine:
        again = engine.classify(TEXTS, show_progress=False)
        with pytest.raises(ModelTakenOver):
            theirs.load_state_dict(theirs.state_dict())
    np.testing.assert_allclose([one.logits for one in again], [one.logits for one in found], rtol=1e-5)


@pytest.mark.parametrize(("labels", "changes"), [
    (LABELS, {"problem_type": "multi_label_classification"}),
    (LABELS, {"problem_type": "regression"}),
    (LABELS, {"problem_type": "single_label_classification"}),
    (["relevant"], {}),
])
def test_what_makes_probabilities_is_as_the_configuration_says(
    labels: list[str], changes: dict[str, Any], tmp_path: Path
) -> None:
    """As transformers' own pipeline has it."""
    from transformers import pipeline

    write_classifier(tmp_path, labels=labels, **changes)
    theirs = pipeline("text-classification", model=str(tmp_path), dtype=torch.float32, device="cpu", top_k=None)
    with engine_of(tmp_path) as engine:
        for text, own in zip(TEXTS, engine.classify(TEXTS, show_progress=False), strict=True):
            expected = {one["label"]: one["score"] for one in theirs([text])[0]}
            assert dict(zip(own.labels, own.probs, strict=True)) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_files_of_sentence_transformers_say_it_where_no_problem_is_named(tmp_path: Path) -> None:
    """Identity leaves the numbers of several classes as they are."""
    write_classifier(tmp_path, sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"})
    with engine_of(tmp_path) as engine:
        (one,) = engine.classify("a", show_progress=False)
    assert one.probs == one.logits


def test_classes_are_the_same_numbers_for_any_schedule(directory: Path) -> None:
    """Alone, in company, in chunks and with cached beginnings."""
    with engine_of(directory, enable_prefix_caching=False) as engine:
        alone = [engine.classify(text, show_progress=False)[0].logits for text in TEXTS]
    with engine_of(directory, max_num_batched_tokens=6, max_num_seqs=3, block_size=4) as engine:
        for _ in range(2):
            found = engine.classify(TEXTS, show_progress=False)
            assert [one.logits for one in found] == alone
        assert any(one.num_cached_tokens for one in found)
        other = engine.classify(TEXTS[2], cache_salt="another tenant's", show_progress=False)
        assert (other[0].logits, other[0].num_cached_tokens) == (alone[2], 0)
        assert_all_free(engine)


def test_a_classifier_generates_nothing_and_others_have_no_classes(directory: Path) -> None:
    """Whoever asks for the other thing is told what there is."""
    with engine_of(directory) as engine:
        with pytest.raises(InvalidRequest, match=r"without an output layer, allowed is asked for classes, by classify"):
            engine.generate(["a"], SamplingParams(max_tokens=1), show_progress=False)
        for text, error in (("", InvalidText), ([], PagedcoreError), ([1] * 300, PromptTooLong), (5.0, InvalidRequest),
                            ("\ud800", InvalidText), ([10**9], InvalidRequest)):
            with pytest.raises(error):
                engine.classify([text], show_progress=False)  # type: ignore[list-item]
        assert not engine.has_pending_requests()
        assert len(engine.classify(iter(["a", [3, 4]]), show_progress=False)) == 2
    with make_engine() as engine, pytest.raises(InvalidRequest, match="without classes"):
        engine.classify([[1]], show_progress=False)


def test_a_bulk_is_classified_on_an_engine_of_its_own_thread(directory: Path) -> None:
    """In the same order; and such an engine is warmed up without a completion."""
    texts = [text + str(number) for number in range(30) for text in TEXTS[:3]]
    with engine_of(directory) as engine:
        wanted = [one.logits for one in engine.classify(texts, show_progress=False)]

    async def main() -> None:
        async with AsyncEngine(engine_of(directory)) as engine:
            engine.warm_up().result(240)
            assert [one.logits for one in await engine.classify(texts)] == wanted
            with pytest.raises(InvalidText):
                await engine.classify(["a", ""])

    asyncio.run(main())


def test_classifiers_are_neither_converted_nor_packed(tmp_path: Path) -> None:
    """There is no place for the head in what would be written, which would generate then."""
    write_classifier(tmp_path / "model", tie_word_embeddings=True)
    with pytest.raises(ModelNotSupported, match="a classifier, whose head"):
        pack(str(tmp_path / "model"), tmp_path / "packed", create_plugin_manager().registry.load)
    with pytest.raises(ModelNotSupported, match="a classifier, whose head"):
        convert(str(tmp_path / "model"), tmp_path / "converted", quantization="w8a8")
    assert [one.name for one in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(("changes", "error", "words"), [
    ({"id2label": {"0": "joy", "1": "anger"}}, InvalidConfig, r"2 classes \(id2label\), and score.weight"),
    ({"id2label": {"0": "joy", "1": "anger", "7": "x"}}, InvalidConfig, "one by one"),
    ({"id2label": {"0": "joy", "1": "anger", "2": 5}}, InvalidConfig, "allowed is text"),
    ({"id2label": None}, InvalidConfig, "2 classes"),
    ({"architectures": ["LlamaForSequenceClassification"]}, ModelNotSupported, "of a class of its own"),
    ({"architectures": ["Qwen3ForTokenClassification"]}, ModelNotSupported, "its head, of Qwen3ForTokenClass"),
    ({"auto_map": {"AutoModel": "x.Y"}}, ModelNotSupported, "auto_map"),
    ({"use_bidirectional_attention": True}, ModelNotSupported, "behind it too"),
], ids=["fewer names", "gap", "number", "no names", "another class", "tokens", "code", "both sides"])
def test_a_configuration_that_lies_is_refused(
    changes: dict[str, Any], error: type[Exception], words: str, directory: Path, tmp_path: Path
) -> None:
    """Nothing is guessed of classes; and a head that is not computed makes no model that generates."""
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    change_file(tmp_path / "config.json", tie_word_embeddings=True, **changes)
    with pytest.raises(error, match=words):
        engine_of(tmp_path)


@pytest.mark.parametrize(("more", "words"), [
    ({"score.bias": torch.zeros(3)}, "score.bias too"),
    ({"score.weight": torch.full((3, 64), torch.nan)}, "not finite"),
    ({"score.weight": torch.zeros(3, 63)}, "score.weight is F32 of shape"),
    ({"score.weight": torch.zeros(3, 64, dtype=torch.int32)}, "score.weight is I32"),
    ({"score.weight": None}, "score.weight in its files"),
])
def test_a_head_of_another_form_is_refused(
    more: dict[str, Any], words: str, directory: Path, tmp_path: Path
) -> None:
    """Before anything is computed with it."""
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = {**load_file(tmp_path / "model.safetensors"), **more}
    save_file({name: one for name, one in tensors.items() if one is not None}, tmp_path / "model.safetensors",
              {"format": "pt"})
    with pytest.raises((InvalidConfig, ModelNotSupported), match=words):
        engine_of(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["id2label"]["2"] == "neither"
