"""The page of guarantees says of each kind of model what such models say of themselves."""

from __future__ import annotations

import re

import pytest

from docs.pages import ROOT
from pagedcore.models.decoders.fused import best_decoder
from pagedcore.models.transformers_model import TransformersModel
from pagedcore_kernels.cpu.attention.backend import NumbaCpuAttention
from support.families import FAMILIES, tiny_model

PAGE = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
KINDS = re.findall(r"^\| (?:dense decoders|mixtures of experts)\b([^|]*)\| (made|none)", PAGE, flags=re.MULTILINE)
EXAMPLES = [(family, promise) for words, promise in KINDS for family in re.findall(r"`(\w+)`", words)
            if family in FAMILIES]


@pytest.mark.parametrize(("family", "promise"), EXAMPLES)
def test_a_named_architecture_promises_what_the_page_says(family: str, promise: str) -> None:
    """A model of each architecture that is named declares itself schedule invariant or not, as the page says."""
    model = TransformersModel(tiny_model(family), NumbaCpuAttention, block_size=16, decoder_factory=best_decoder)
    assert model.is_schedule_invariant == (promise == "made")


def test_every_architecture_is_counted() -> None:
    """The page's numbers add up to the architectures that are tried, and both kinds have examples."""
    counts = re.findall(r"^\| (?:dense|mixtures)[^:]*: (?:the )?(\d+) (?:of|others)", PAGE, flags=re.MULTILINE)
    numbers = [int(number) for number in counts]
    assert sum(numbers) == len(FAMILIES) == int(re.findall(r"of the (\d+) architectures", PAGE)[0])
    assert {promise for _, promise in EXAMPLES} == {"made", "none"}


def test_the_place_for_the_figures_is_there() -> None:
    """The table of ``benchmarks/fixed_order.py`` has its place between two marks."""
    between = PAGE.partition("<!-- fixed-order figures: begin -->")[2].partition("<!-- fixed-order figures: end -->")[0]
    assert between.strip()
