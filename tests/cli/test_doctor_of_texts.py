"""``pagedcore doctor MODEL`` says what a model makes of texts: what an engine of the same directory does."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedcore.cli.doctor import diagnosis
from support.classifiers import write_classifier
from support.embedders import write_embedder
from support.rerankers import write_reranker


@pytest.mark.parametrize(("write", "embeds", "classifies", "reranks"), [
    (lambda path: write_embedder(path, pooling="pooling_mode_mean_tokens", normalizes=False),
     "yes: pooling 'mean', of any length", "no", "no: it has no head for that"),
    (write_classifier, "yes: pooling 'last', of length 1", "yes: 3 classes, 'joy', 'anger', 'neither'; it generates",
     "no: its head has 3 classes"),
    (lambda path: write_classifier(path, labels=["relevant"]), "yes", "yes: 1 class,", "yes: by its class"),
    (write_reranker, "no: its modules.json lists 'Transformer, LogitScore'", "no", "yes: by the logits of the tokens"),
    (lambda path: write_reranker(path, head={"true_token_id": 10**6}), "no", "no", "no: its LogitScore names tokens"),
], ids=["embedder", "classifier", "one class", "yes or no", "no such token"])
def test_what_a_directory_is_good_for(
    write: object, embeds: str, classifies: str, reranks: str, tmp_path: Path
) -> None:
    """From its files alone, and why not."""
    write(tmp_path)  # type: ignore[operator]
    facts = diagnosis(str(tmp_path))
    assert facts["runs here"] == "yes"
    for name, words in (("embeds", embeds), ("classifies", classifies), ("reranks", reranks)):
        assert facts[name].startswith(words), facts[name]
