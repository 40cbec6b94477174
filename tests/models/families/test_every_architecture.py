"""Whatever transformers can build and write, the engine takes it or refuses it by an error of its own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pagedcore import Engine
from pagedcore.errors import ModelNotSupported
from support.families import tiny_model
from support.mapping_sweep import PAGE, entries, outcome_of

#: Norms without weights, so that quantising leaves no parameter; a router that reads the weight of a layer inside it.
WITHOUT_PARAMETERS = ("olmo", "nanochat")
READS_A_WEIGHT = "longcat_flash"


@pytest.mark.parametrize("entry", [*WITHOUT_PARAMETERS, READS_A_WEIGHT])
@pytest.mark.parametrize("quantization", ["w8a8", "auto-int8"])
def test_an_architecture_runs_with_quantised_weights(entry: str, quantization: str, tmp_path: Path) -> None:
    """Where no parameter is left, and where a module has use for a layer's weight, there are tokens all the same."""
    assert outcome_of(entry, tmp_path, quantization=quantization).word == "runs"


@pytest.mark.parametrize(("entry", "word"), [
    (READS_A_WEIGHT, "equal"), ("kolibri1", "equal"), ("rwkv", "refused"), ("bloom", "refused"),
    ("diffllama", "equal"), ("roberta", "refused"), ("mllama", "equal"), ("lfm3", "equal"), ("gpt_neo", "equal"),
])
def test_an_entry_of_the_mapping_is_equal_or_refused(entry: str, word: str, tmp_path: Path) -> None:
    """One of each kind; all of them are in ``make families``."""
    assert outcome_of(entry, tmp_path).word == word


def test_what_an_architecture_raises_is_a_refusal() -> None:
    """An exception of a model's own code, while it is taken over, is said as what cannot run, with its cause."""
    model = tiny_model("llama")

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("t() expects a tensor with <= 2 dimensions")

    model.model.layers[1].mlp.forward = fails
    with pytest.raises(ModelNotSupported, match="<= 2 dimensions") as caught:
        Engine.from_pretrained(model, dtype="float32", kv_cache_memory="1MiB")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_the_table_of_the_documentation_has_every_entry() -> None:
    """Each entry stands in one row, with the number of the row's entries."""
    rows = [row.split("|")[1:-1] for row in PAGE.read_text(encoding="utf-8").splitlines() if row.startswith("|")][2:]
    written = [re.findall(r"`(\S+)`", which) for _, _, which in rows]
    assert sorted(name for names in written for name in names) == entries()
    assert [int(number) for _, number, _ in rows] == [len(names) for names in written]
    assert not {"raw", "wrong"} & {reason.strip() for reason, _, _ in rows}
