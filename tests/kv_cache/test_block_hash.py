"""Content keys: equal exactly when everything that decides keys and values is equal."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedcore.kv_cache.block_hash import KEY_BYTES, BlockHasher

TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6)
EXTRAS = st.dictionaries(st.sampled_from(["salt", "request", "adapter"]), st.binary(max_size=6), max_size=3)
COMPONENTS: dict[str, st.SearchStrategy[Any]] = {
    "secret": st.binary(max_size=4), "block_size": st.integers(1, 64), "extras": EXTRAS, "past": TOKENS,
    "tokens": TOKENS,
}


def key_of(secret: bytes, block_size: int, extras: dict[str, bytes], past: list[int], tokens: list[int]) -> bytes:
    hasher = BlockHasher(block_size, secret)
    return hasher.key(hasher.key(hasher.root(extras), past), tokens)


@given(some=st.fixed_dictionaries(COMPONENTS), others=st.fixed_dictionaries(COMPONENTS))
def test_key_changes_when_any_component_changes(some: dict[str, Any], others: dict[str, Any]) -> None:
    """Two keys are equal exactly when secret, block size, extras, past and tokens all are."""
    assert (key_of(**some) == key_of(**others)) == (some == others)
    for name in COMPONENTS:
        changed = {**some, name: others[name]}
        assert (key_of(**changed) == key_of(**some)) == (some[name] == others[name])


@given(salt=st.binary(max_size=8), other=st.binary(max_size=8))
def test_a_salt_cannot_be_taken_for_another_kind_of_extra(salt: bytes, other: bytes) -> None:
    """Kinds and values are length-prefixed: no salt, however chosen, has the root of another extra."""
    hasher = BlockHasher(4, b"")
    assert hasher.root({"salt": salt}) != hasher.root({"adapter": salt})
    assert hasher.root({"salt": salt}) != hasher.root({"salt": salt, "adapter": other})
    assert hasher.root({"salt": salt + b"adapter" + other}) != hasher.root({"salt": salt, "adapter": other})


@pytest.mark.parametrize(
    ("some", "others"), [({"a": b"bc"}, {"ab": b"c"}), ({"a": b""}, {}), ({"a": b"b", "c": b"d"}, {"a": b"bcd"})]
)
def test_boundaries_between_parts_count(some: dict[str, bytes], others: dict[str, bytes]) -> None:
    """The same bytes split in another way are another root."""
    hasher = BlockHasher(4, b"")
    assert hasher.root(some) != hasher.root(others)


def test_full_digest_is_the_key() -> None:
    """Keys and roots are whole SHA-256 digests, never shortened."""
    hasher = BlockHasher(2, b"secret")
    assert len(hasher.root({})) == len(hasher.key(hasher.root({}), [1, 2])) == KEY_BYTES == 32


def test_same_prompt_same_key_within_one_secret_only() -> None:
    """Another process has another secret and other keys, which cannot be computed from outside."""
    keys = {key_of(secret, 4, {}, [1], [2]) for secret in (b"one", b"two", b"one")}
    assert len(keys) == 2


def test_extend_makes_the_chain_block_by_block() -> None:
    """Keys are appended for full blocks only, each over the one before, from any length on."""
    hasher, tokens = BlockHasher(2, b""), [5, 6, 7, 8, 9]
    root = hasher.root({})
    keys: list[bytes] = []
    hasher.extend(keys, root, tokens, 1)
    first = list(keys)
    hasher.extend(keys, root, tokens, 2)
    assert keys[:1] == first == [hasher.key(root, [5, 6])]
    assert keys[1:] == [hasher.key(keys[0], [7, 8])]
    hasher.extend(keys, root, tokens, 1)
    assert len(keys) == 2
