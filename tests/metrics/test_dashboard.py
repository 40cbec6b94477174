"""The Grafana dashboard that is shipped: it has Grafana's form, and shows metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client.parser import text_string_to_metric_families

from pagedcore import engine_metrics_text
from pagedcore.sampling_params import SamplingParams
from support.engine_builders import make_engine

SOURCE = (Path(__file__).resolve().parents[2] / "docs" / "grafana" / "pagedcore.json").read_text(encoding="utf-8")
DASHBOARD: dict[str, Any] = json.loads(SOURCE)
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
VARIABLES = DASHBOARD["templating"]["list"]


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """The labels of every sample that an engine exports, by the sample's name."""
    with make_engine() as engine:
        engine_metrics_text(engine)
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4), show_progress=False)
        families = text_string_to_metric_families(engine_metrics_text(engine))
        return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def assert_kept(given: Any, kept: Any, path: str) -> None:
    """Everything in ``given`` is in ``kept``: what the schema does not know would have been dropped."""
    if isinstance(given, dict):
        for key, value in given.items():
            assert key in kept, f"{path}.{key} is unknown to the schema"
            assert_kept(value, kept[key], f"{path}.{key}")
    elif isinstance(given, list):
        assert len(given) == len(kept), path
        for i, pair in enumerate(zip(given, kept, strict=True)):
            assert_kept(*pair, f"{path}[{i}]")
    else:
        assert given == kept, path


def test_the_dashboard_has_grafanas_form() -> None:
    """Read into Grafana's own published types and written again, nothing is missing or different."""
    read = Dashboard.from_json(json.loads(SOURCE))
    assert_kept(DASHBOARD, json.loads(json.dumps(read, cls=JSONEncoder)), "dashboard")


def test_the_form_is_really_checked() -> None:
    """A misspelt field is found by the comparison above."""
    wrong = json.loads(SOURCE)
    wrong["panels"][0]["gridPoss"] = wrong["panels"][0].pop("gridPos")
    kept = json.loads(json.dumps(Dashboard.from_json(json.loads(json.dumps(wrong))), cls=JSONEncoder))
    with pytest.raises(AssertionError, match="gridPoss"):
        assert_kept(wrong, kept, "dashboard")


def test_every_metric_that_is_queried_exists(exported: dict[str, set[str]]) -> None:
    """Each name in each query is a sample of the exposition, and each label it groups by is one of its labels."""
    for query in [*QUERIES, VARIABLES[1]["query"]]:
        names = re.findall(r"\bpagedcore_\w+", query)
        assert names, query
        assert [name for name in names if name not in exported] == [], query
        grouped = {label for labels in re.findall(r"by \(([^)]*)\)", query) for label in labels.split(", ")}
        assert grouped <= exported[names[0]], query


def test_variables_that_are_used_are_defined() -> None:
    """No query or data source refers to a variable that the dashboard does not have."""
    used = set(re.findall(r"\$\{?([a-z]\w*)\}?", SOURCE))
    assert used == {variable["name"] for variable in VARIABLES}


def test_panels_have_their_own_places() -> None:
    """Ids differ, panels lie on the grid of 24 columns, and no two overlap."""
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
