"""What arrives: random loads with the moments that were asked for, and traces that are read strictly or refused."""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedcore.analysis.load_simulation import traces
from pagedcore.analysis.load_simulation.results import Latencies
from pagedcore.analysis.load_simulation.traces import read_trace
from pagedcore.analysis.load_simulation.workload import RandomLoad, faster
from pagedcore.errors import InvalidConfig, InvalidRequest

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:03.9799600,4808,0
"""
MOONCAKE = [
    {"timestamp": 1500, "input_length": 1100, "output_length": 50, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "input_length": 600, "output_length": 3, "hash_ids": [0, 9]},
]


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(("burstiness", "low", "high"), [(0.0, 0.0, 1e-6), (1.0, 0.9, 1.1), (3.0, 2.5, 3.5)])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness: float, low: float, high: float) -> None:
    """Intervals have the mean 1 / rate, and their deviation over it is the burstiness: 0, Poisson's 1, or more."""
    times = [one.arrival_s for one in RandomLoad(rate=20, num_requests=5000, burstiness=burstiness).requests()]
    intervals = np.diff([0.0, *times])
    assert intervals.mean() == pytest.approx(0.05, rel=0.1)
    assert low <= intervals.std() / intervals.mean() <= high


def test_lengths_have_the_mean_and_the_spread() -> None:
    """Prompts and completions have the mean length, and the deviation that was asked for; 0 makes all alike."""
    requests = RandomLoad(rate=1, num_requests=5000, input_tokens=300, output_tokens=100, length_spread=0.8).requests()
    for lengths, mean in (([one.num_input for one in requests], 300), ([one.num_output for one in requests], 100)):
        assert statistics.mean(lengths) == pytest.approx(mean, rel=0.05)
        assert statistics.pstdev(lengths) / mean == pytest.approx(0.8, rel=0.15)
    alike = RandomLoad(rate=1, num_requests=50, input_tokens=300, length_spread=0).requests()
    assert {one.num_input for one in alike} == {300}


def test_prompts_share_what_was_asked_for() -> None:
    """Prompts with the same prefix begin with the same tokens, all differ after it, and every prefix occurs."""
    requests = RandomLoad(rate=1, num_requests=200, prefix_tokens=32, num_prefixes=4).requests()
    beginnings = {tuple(one.token_ids()[:32]) for one in requests}
    assert len(beginnings) == 4
    assert len({one.token_ids()[32] for one in requests}) == 200
    assert all(len(one.token_ids()) == one.num_input for one in requests)


def test_a_trace_names_tenants(tmp_path: Path) -> None:
    """Columns of either format say whose a request is, and with which weight; without them it has no tenant."""
    rows = AZURE.replace("GeneratedTokens", "GeneratedTokens,Tenant,Weight").replace(",8\n", ",8,ann,2.5\n")
    first, second = read_trace(written(tmp_path / "a.csv", rows.replace(",0\n", ",0,bob,\n")))
    assert (first.options.tenant, first.options.weight) == ("bob", 1.0)
    assert (second.options.tenant, second.options.weight) == ("ann", 2.5)
    lines = [MOONCAKE[0] | {"tenant": "ann", "weight": 3}, MOONCAKE[1]]
    first, second = read_trace(written(tmp_path / "m.jsonl", "\n".join(map(json.dumps, lines))))
    assert (first.options.tenant, first.options.weight, second.options.tenant) == ("ann", 3.0, "")


@pytest.mark.parametrize(("tenant", "weight"), [
    ("ann", "nan"), ("ann", "inf"), ("ann", "-1"), ("ann", "1e9"), ("ann", "two"), ("a" * 129, "1"), ("a\x07b", "1"),
    ("ann", "9" * 400),
])
def test_another_tenant_or_weight_is_refused(tmp_path: Path, tenant: str, weight: str) -> None:
    """The row is named, in both formats, and at a random load."""
    rows = f"TIMESTAMP,ContextTokens,GeneratedTokens,Tenant,Weight\n2023-11-16 18:17:04,5,8,{tenant},{weight}\n"
    with pytest.raises(InvalidConfig, match="row 2, allowed is a name of 1 to 128"):
        read_trace(written(tmp_path / "a.csv", rows))
    with pytest.raises(InvalidConfig, match="row 1, allowed is a name of 1 to 128"):
        read_trace(written(tmp_path / "m.jsonl", json.dumps(MOONCAKE[0] | {"tenant": tenant, "weight": weight})))


@pytest.mark.parametrize("value", [None, 3, [], {}, True])
def test_a_tenant_of_another_type_is_refused(tmp_path: Path, value: object) -> None:
    """JSON that is no text is no tenant, and what is no number is no weight."""
    with pytest.raises(InvalidConfig, match="row 1, allowed is a name"):
        read_trace(written(tmp_path / "m.jsonl", json.dumps(MOONCAKE[0] | {"tenant": value})))


def test_random_requests_are_shared_among_tenants() -> None:
    """Each tenant gets about as many, with its weight; without tenants the load is what it was."""
    options = [one.options for one in RandomLoad(rate=1, num_requests=300, tenants=(("a", 1.0), ("b", 4.0))).requests()]
    assert {one.tenant: one.weight for one in options} == {"a": 1.0, "b": 4.0}
    assert 100 < sum(one.tenant == "a" for one in options) < 200
    with pytest.raises(InvalidRequest, match="weight: got"):
        RandomLoad(rate=1, tenants=(("a", 0.0),))


def test_a_seed_gives_one_load() -> None:
    """The same seed draws the same requests, another one others."""
    assert RandomLoad(rate=3, seed=7).requests() == RandomLoad(rate=3, seed=7).requests()
    assert RandomLoad(rate=3, seed=7).requests() != RandomLoad(rate=3, seed=8).requests()


@pytest.mark.parametrize("field", [
    {"rate": 0}, {"rate": float("nan")}, {"burstiness": -1}, {"num_requests": 0}, {"num_requests": 10**7},
    {"input_tokens": 2**21}, {"output_tokens": 0}, {"length_spread": 11}, {"prefix_tokens": -1}, {"num_prefixes": 0},
    {"seed": -1}, {"seed": 1.5},
])
def test_a_load_out_of_range_is_refused(field: dict[str, float]) -> None:
    """The error names the field, before anything is drawn."""
    with pytest.raises(InvalidConfig, match=f"{next(iter(field))}: got"):
        RandomLoad(**{"rate": 1.0, **field})  # type: ignore[arg-type]


def test_azure_traces_are_read(tmp_path: Path) -> None:
    """Arrivals count from the earliest, in order; prompts share nothing; no generated token counts as one."""
    first, second = read_trace(written(tmp_path / "azure.csv", AZURE))
    assert (first.arrival_s, first.num_input, first.num_output) == (0.0, 4808, 1)
    assert (second.arrival_s, second.num_input, second.num_output) == (pytest.approx(0.052), 3180, 8)
    assert first.token_ids()[0] != second.token_ids()[0]
    assert read_trace(tmp_path / "azure.csv", 1)[0].num_input == 3180


def test_mooncake_traces_are_read(tmp_path: Path) -> None:
    """Milliseconds become seconds, and prompts with the same first hash ids begin with the same tokens."""
    path = written(tmp_path / "mooncake.jsonl", "\n".join(map(json.dumps, MOONCAKE)) + "\n\n")
    first, second = read_trace(path)
    assert (first.arrival_s, second.arrival_s) == (0.0, 1.5)
    assert (len(first.token_ids()), len(second.token_ids())) == (1100, 600)
    assert first.token_ids()[:512] == second.token_ids()[:512]
    assert first.token_ids()[512] != second.token_ids()[512]
    assert [one.arrival_s for one in faster(read_trace(path), 3.0)] == [0.0, 0.5]


@pytest.mark.parametrize(("name", "text", "words"), [
    ("t.csv", "", "no column TIMESTAMP in row 1"),
    ("t.csv", "TIMESTAMP,ContextTokens\n", "no column GeneratedTokens in row 1"),
    ("t.csv", AZURE + "2023-11-16 18:17:04,x7,1\n", "row 4, column ContextTokens, allowed is an integer from 1"),
    ("t.csv", AZURE + "2023-11-16 18:17:04,0,1\n", "got 0 in row 4, column ContextTokens"),
    ("t.csv", AZURE + "2023-11-16 18:17:04,7,-1\n", "row 4, column GeneratedTokens"),
    ("t.csv", AZURE + f"2023-11-16 18:17:04,7,{2**20 + 1}\n", "got 1048577 in row 4, column GeneratedTokens"),
    ("t.csv", AZURE + "yesterday,7,1\n", "row 4, column TIMESTAMP, allowed is a date and time"),
    ("t.csv", AZURE + "2023-11-16 18:17:04,7\n", "got 2 columns in row 4"),
    ("t.csv", AZURE.splitlines()[0], "no request"),
    ("t.jsonl", "", "no request"),
    ("t.jsonl", "{}\n", "got None in row 1, column timestamp"),
    ("t.jsonl", "[1]\n", "row 1, allowed is one JSON object"),
    ("t.jsonl", "{\n", "no JSON in row 1"),
    ("t.jsonl", "[" * 100_000, "no JSON in row 1"),
    ("t.jsonl", json.dumps(MOONCAKE[0] | {"timestamp": True}), "got True in row 1, column timestamp"),
    ("t.jsonl", json.dumps(MOONCAKE[0] | {"timestamp": float("nan")}), "got nan in row 1, column timestamp"),
    ("t.jsonl", json.dumps(MOONCAKE[0] | {"hash_ids": [0, 1]}), "got 2 entries in row 1, column hash_ids, .* of 3"),
    ("t.jsonl", json.dumps(MOONCAKE[0] | {"hash_ids": [0, 1, "x"]}), "row 1, column hash_ids"),
    ("t.jsonl", json.dumps(MOONCAKE[0] | {"hash_ids": [0, 1, 2**40]}), "row 1, column hash_ids"),
    ("t.jsonl", json.dumps(MOONCAKE[0] | {"input_length": 0}), "got 0 in row 1, column input_length"),
    ("t.jsonl", "x" * (2**20 + 2), "a longer line in row 1"),
    ("t.txt", AZURE, "another ending"),
])
def test_a_bad_trace_is_refused(tmp_path: Path, name: str, text: str, words: str) -> None:
    """The error names row, column, what was found and what is allowed, and no path."""
    with pytest.raises(InvalidConfig, match=words) as caught:
        read_trace(written(tmp_path / name, text))
    assert str(tmp_path) not in str(caught.value)


def test_what_is_no_readable_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing files, directories, pipes, other encodings and files beyond the limit are refused without waiting."""
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "latin.csv").write_bytes(AZURE.encode() + "2023-11-16 18:17:04,7,1ä".encode("latin-1"))
    for name, words in (("none.csv", "FileNotFoundError"), ("pipe.csv", "regular file"), ("latin.csv", "UTF-8")):
        with pytest.raises(InvalidConfig, match=words):
            read_trace(tmp_path / name)
    monkeypatch.setattr(traces, "MAX_TRACE_BYTES", 10)
    with pytest.raises(InvalidConfig, match="allowed is up to 10"):
        read_trace(written(tmp_path / "azure.csv", AZURE))


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 5)), min_size=1, max_size=30))
def test_weighted_percentiles_are_those_of_the_repeated_values(pairs: list[tuple[float, int]]) -> None:
    """A time with a count is the same as the time that often; percentiles are those of NumPy."""
    seconds, counts = zip(*pairs, strict=True)
    found, repeated = Latencies.of(seconds, counts), np.repeat(seconds, counts)
    wanted = np.percentile(repeated, (50, 90, 99), method="inverted_cdf")
    assert (found.p50_s, found.p90_s, found.p99_s) == tuple(wanted)
    assert found.mean_s == pytest.approx(repeated.mean())
