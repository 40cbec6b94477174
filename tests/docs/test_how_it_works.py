"""The page that explains the engine: its names exist, and its figures are what the scheduler does."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re

import pytest

from architecture import draw_slots
from docs.pages import ROOT

PAGE = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
NAMES = re.findall(r"^\| [^|]+ \| `([\w.]+)`[^|]* \| `([\w/]+)\.py` \|$", PAGE, flags=re.MULTILINE)
SOURCES = {
    "step engine": "OgaEngine::Create AddRequest HasPendingRequests Step GetNewTokens Done Remove SequenceGroup",
    "batch queue": "BatchConfig BatchRequest with_priority try_form_batch total_input_tokens avg_wait_time max_wait_ms",
    "notes": "llama_batch kv_cache_memory prefill",
    "iteration-level": "ContinuousBatchScheduler active_requests waiting_queue decode_step callback get_output",
    "ragged attention": "PagedAttentionV3 SequenceInfo compute_attention_batch append_kv_batch get_batch",
}
"""Names that a reader of each description comes with."""


def has(owner: object, name: str) -> bool:
    """Whether objects of a class, or a module, have the name."""
    if hasattr(owner, name):
        return True
    if not inspect.isclass(owner):
        return False
    fields = {field.name for field in dataclasses.fields(owner)} if dataclasses.is_dataclass(owner) else set()
    return name in fields or re.search(rf"\bself\.{name}\b[^=\n]*=", inspect.getsource(owner)) is not None


@pytest.mark.parametrize(("name", "file"), sorted(set(NAMES)))
def test_a_name_of_ours_is_where_the_page_says(name: str, file: str) -> None:
    """Each name of the second column is in the file of the third."""
    module = importlib.import_module(file.removeprefix("kernels/").replace("/", "."))
    owner, _, member = name.partition(".")
    found = getattr(module, owner)
    assert found.__module__ == module.__name__
    assert not member or has(found, member)


def test_every_row_of_the_tables_is_checked() -> None:
    """No row of the tables of names escapes the pattern above."""
    tables = PAGE.partition("## Names elsewhere")[2]
    rows = [row for row in tables.splitlines() if row.startswith("| ") and not row.startswith("| there")]
    assert len(rows) == len(NAMES) > 80


@pytest.mark.parametrize("source", SOURCES)
def test_names_of_each_description_are_in_its_table(source: str) -> None:
    """A reader who knows a name from elsewhere finds it on the page."""
    assert [name for name in SOURCES[source].split() if name not in PAGE.partition("## Names elsewhere")[2]] == []


def test_the_figures_of_the_slots_are_those_of_the_engine() -> None:
    """24 of 36 places of a static batch and 34 of 36 of a continuous one are useful, and the page says so."""
    shares = {policy: draw_slots.useful(draw_slots.slots(policy, lengths)) for policy, _, lengths in draw_slots.RUNS}
    assert shares == {"static": (4 + 12 + 8, 12 * 3), "fcfs": (4 + 12 + 8 + 4 + 4 + 2, 12 * 3)}
    assert all(f"{used / places:.0%}".replace("%", " %") in PAGE for used, places in shares.values())
