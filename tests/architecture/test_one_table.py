"""A name that stands for facts is written in the table of these facts; all others ask the table."""

from __future__ import annotations

import ast
import re

from architecture.sources import ROOT, SOURCES
from pagedcore.config.schemes import SCHEMES
from pagedcore.models.families.table import FAMILIES

NAMES_OF_OTHERS = {
    *(("pagedcore.models.checkpoints.gguf_architectures", name)
      for name in ("gemma3_text", "granite", "lfm2", "llama", "mistral", "phi3", "qwen2", "qwen3", "qwen3_5_moe_text",
                   "qwen3_5_text", "qwen3_moe")),
    *(("pagedcore.tokenizer.gguf_tokenizer", name) for name in ("lfm2", "llama", "qwen2")),
    ("pagedcore.plugins.builtin", "mistral"), ("pagedcore.plugins.builtin", "granite"),
}
"""Words of GGUF files, which llama.cpp chose, and the names of formats of tool calls."""


def literals(names: set[str], *homes: str) -> set[tuple[str, str]]:
    """Return which of the names stand as literals in which modules, other than those of their home."""
    return {
        (source.module, node.value)
        for source in SOURCES if source.module not in homes
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names
    }


def test_an_architecture_is_named_in_its_table_only() -> None:
    """No other module of the product decides by ``model_type``."""
    homes = "pagedcore.models.families.table", "pagedcore.models.families.wrappers"
    assert literals({*FAMILIES}, *homes) == NAMES_OF_OTHERS


def test_a_scheme_is_named_in_its_table_only() -> None:
    """Settings, commands, converters and loaders look schemes up, by name or by what they do."""
    assert literals({*SCHEMES}, "pagedcore.config.schemes") == set()


def test_the_page_has_the_schemes_of_the_table() -> None:
    """Each with the sentence that help has."""
    page = (ROOT / "docs" / "quantization.md").read_text(encoding="utf-8")
    rows = re.findall(r'^\| `"(.+?)"` \| (.+?) \|', page, re.MULTILINE)
    assert rows == [(name, scheme.summary) for name, scheme in SCHEMES.items()]
