"""What needs no Ray: which replica a prompt is sent to, by a table against a model that forgets nothing."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pagedcore_ray
from pagedcore import expose
from pagedcore.errors import MissingDependency
from pagedcore_ray.prefix_table import MAX_DEPTH, PrefixTable, prefix_hashes

PROMPTS = st.lists(st.integers(0, 1), max_size=40)
NAMES = st.sampled_from("abc")


@given(PROMPTS, PROMPTS, st.sampled_from([b"", b"one", b"two"]), st.sampled_from([b"", b"one", b"two"]))
def test_hashes_are_equal_where_salt_and_tokens_so_far_are(
    first: list[int], second: list[int], salt: bytes, other: bytes
) -> None:
    """Two prompts share the hashes of their common whole blocks, and no other; of two tenants, none."""
    pairs = zip(prefix_hashes(b"k", first, salt, 4), prefix_hashes(b"k", second, other, 4), strict=False)
    for place, (one, another) in enumerate(pairs, start=1):
        assert (one == another) == (salt == other and first[: 4 * place] == second[: 4 * place])
    assert len(prefix_hashes(b"k", first, salt, 4)) == len(first) // 4


def test_hashes_have_a_secret() -> None:
    """Without the key nobody can look for two prompts with equal hashes; what is hashed of a prompt is bounded."""
    assert set(prefix_hashes(b"k", [1] * 64, b"", 4)).isdisjoint(prefix_hashes(b"l", [1] * 64, b"", 4))
    assert len(prefix_hashes(b"k", [1] * 8 * MAX_DEPTH, b"", 4)) == MAX_DEPTH


@given(st.lists(st.tuples(PROMPTS, NAMES), max_size=20), PROMPTS, st.dictionaries(NAMES, st.integers(0, 6), min_size=1))
def test_the_longest_known_prefix_wins_while_loads_are_balanced(
    seen: list[tuple[list[int], str]], prompt: list[int], loads: dict[str, int]
) -> None:
    """The home of the longest prefix is first unless it is too busy; all replicas are ranked once, idle before busy."""
    table, homes = PrefixTable[str](4, max_imbalance=3), dict[tuple[int, ...], str]()
    for one, name in seen:
        table.remember(table.hashes_of(one, b""), name)
        homes |= {tuple(one[: 4 * blocks]): name for blocks in range(1, len(one) // 4 + 1)}
    ranks = table.rank(table.hashes_of(prompt, b""), loads)
    prefixes = (tuple(prompt[: 4 * blocks]) for blocks in range(len(prompt) // 4, 0, -1))
    home = next((homes[one] for one in prefixes if homes.get(one) in loads), None)
    least = min(loads.values())
    if home is not None and loads[home] <= least + 3:
        assert ranks[0] == [home]
        ranks = ranks[1:]
        loads = {name: load for name, load in loads.items() if name != home}
    assert sorted(one for group in ranks for one in group) == sorted(loads)
    assert [max(loads[one] for one in group) for group in ranks] == sorted(
        max(loads[one] for one in group) for group in ranks)
    if ranks:
        assert all(loads[one] == min(loads.values()) for one in ranks[0]) or least not in loads.values()


def test_the_table_is_bounded_and_forgets_what_is_gone() -> None:
    """The least recently used prefixes go first, and those of replicas that are gone go at once."""
    table = PrefixTable[str](1, max_imbalance=0, max_prefixes=10)
    for number in range(30):
        table.remember(table.hashes_of([number], b""), "a")
        table.remember(table.hashes_of([0], b""), "b")
    assert len(table) == 10
    assert table.rank(table.hashes_of([0, 5], b""), {"a": 0, "b": 0})[0] == ["b"]
    table.forget_others({"a"})
    assert len(table) == 9
    assert table.rank(table.hashes_of([0, 5], b""), {"a": 0, "b": 0}) == [["a", "b"]]


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Using a name of the package says what to install; the package and its plugin import nothing of Ray."""
    for name in ("application", "remote_engine", "router"):
        monkeypatch.delitem(sys.modules, f"pagedcore_ray.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependency, match=r"pagedcore\[ray\]"):
        expose("ray", model="demo")
    with pytest.raises(MissingDependency, match=r"needs ray. Install pagedcore\[ray\]"):
        pagedcore_ray.__getattr__("llm_app")
