"""Content keys of KV blocks: a chain of SHA-256 digests over everything that decides a block's keys and values.

A block's K and V depend on its own tokens and on all tokens before them, so its key covers its parent's key. Keys are
full digests and never shortened; the chain's root says which sequences may share. Source: chained block hashing as in
vLLM's prefix cache, with tagged and length-prefixed extras, so that no salt can be taken for another kind of extra.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as ListOf
from typing import Final

KEY_BYTES: Final = 32
_ROOT, _BLOCK = b"pagedcore root", b"pagedcore block"


class BlockHasher:
    """Makes the keys of one engine.

    Args:
        block_size: tokens of a full block.
        secret: mixed into every root; another secret gives other keys for the same tokens.
    """

    def __init__(self, block_size: int, secret: bytes) -> None:
        self.block_size = block_size
        self._secret = secret

    def root(self, extras: Mapping[str, bytes]) -> bytes:
        """Return the parent of first blocks: [32] bytes, one for every different ``extras``.

        Args:
            extras: what else restricts sharing, by kind, for instance ``{"salt": b"tenant 7"}``.
        """
        parts = [_ROOT, self._secret, struct.pack("<q", self.block_size)]
        for kind in sorted(extras):
            parts += [kind.encode(), extras[kind]]
        return _digest(parts)

    def key(self, parent_key: bytes, token_ids: ListOf[int]) -> bytes:
        """Return the key of a block with these tokens behind ``parent_key``: [32] bytes."""
        return _digest([_BLOCK, parent_key, struct.pack(f"<{len(token_ids)}q", *token_ids)])

    def extend(self, keys: list[bytes], root: bytes, token_ids: ListOf[int], num_blocks: int) -> None:
        """Append the keys of full blocks until ``keys`` has ``num_blocks`` of them."""
        size = self.block_size
        for block in range(len(keys), num_blocks):
            parent_key = keys[block - 1] if block else root
            keys.append(self.key(parent_key, token_ids[block * size : (block + 1) * size]))


def _digest(parts: Iterable[bytes]) -> bytes:
    """Hash parts so that no two lists of parts give the same input."""
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(struct.pack("<q", len(part)))
        hasher.update(part)
    return hasher.digest()
