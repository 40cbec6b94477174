"""Which replica has seen the beginning of a prompt: a bounded table from prefixes to replicas. Knows nothing of Ray.

A prefix is a whole number of KV blocks, as in the prefix caches of the replicas, and stands under a keyed hash of its
tokens and its salt, so that prompts of two tenants never meet in the table.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Final, Generic, TypeVar

Replica = TypeVar("Replica", bound=Hashable)

MAX_PREFIXES: Final = 2**17
"""Prefixes that are remembered, one for each block of each prompt: about 20 MB."""
MAX_DEPTH: Final = 512
"""Blocks of a prompt that are looked at; longer prompts are told apart by these."""


def prefix_hashes(key: bytes, token_ids: Sequence[int], salt: bytes, block_size: int) -> list[bytes]:
    """Hash each prefix of whole blocks, the shortest first; each hash covers all tokens before it.

    Args:
        key: up to 64 secret bytes, so that nobody finds prompts with equal hashes.
        token_ids: the prompt; of its last block only a full one counts.
        salt: the tenant's.
        block_size: tokens of a block.
    """
    digest = hashlib.blake2b(salt, key=key, digest_size=16, person=b"pagedcore-prefix")
    hashes = []
    for end in range(block_size, min(len(token_ids), MAX_DEPTH * block_size) + 1, block_size):
        digest.update(array("q", token_ids[end - block_size : end]).tobytes())
        hashes.append(digest.digest())
    return hashes


class PrefixTable(Generic[Replica]):
    """Chooses a replica for a prompt: where most of it is cached while loads are balanced, else the least loaded one.

    With loads further apart than ``max_imbalance`` requests, affinity would cost more waiting than it saves computing.

    Invariant: there are at most ``max_prefixes`` entries; those that were used least recently go first.
    """

    def __init__(self, block_size: int, *, max_imbalance: int, max_prefixes: int = MAX_PREFIXES) -> None:
        self._block_size, self._max_imbalance, self._max_prefixes = block_size, max_imbalance, max_prefixes
        self._key = secrets.token_bytes(32)
        self._homes: OrderedDict[bytes, Replica] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def hashes_of(self, token_ids: Sequence[int], salt: bytes) -> list[bytes]:
        """Return the hashes that ``rank`` and ``remember`` take."""
        return prefix_hashes(self._key, token_ids, salt, self._block_size)

    def rank(self, hashes: Sequence[bytes], loads: Mapping[Replica, int]) -> list[list[Replica]]:
        """Order the replicas of ``loads``, requests in flight by replica: groups, the preferred one first.

        The home of the longest known prefix comes first, unless it has over ``max_imbalance`` requests more than the
        least loaded replica; then come the least loaded ones, and then the others.
        """
        least = min(loads.values(), default=0)
        home = next((self._homes[one] for one in reversed(hashes) if self._homes.get(one) in loads), None)
        groups: list[list[Replica]] = []
        if home is not None and loads[home] - least <= self._max_imbalance:
            groups.append([home])
        idle = [one for one, load in loads.items() if load == least and [one] not in groups]
        rest = [one for one, load in loads.items() if load != least and [one] not in groups]
        return groups + [group for group in (idle, rest) if group]

    def remember(self, hashes: Sequence[bytes], replica: Replica) -> None:
        """Note that a replica computes a prompt, and so all its prefixes."""
        for one in hashes:
            self._homes[one] = replica
            self._homes.move_to_end(one)
        while len(self._homes) > self._max_prefixes:
            self._homes.popitem(last=False)

    def forget_others(self, replicas: Collection[Replica]) -> None:
        """Forget prefixes of replicas that are not among these."""
        for one in [one for one, home in self._homes.items() if home not in replicas]:
            del self._homes[one]
