"""Full garbage collections of the process, put off while objects come into being that stay.

Python looks through all objects of a process each time that those of long life have become a quarter more. Beside
torch that takes a tenth of a second. Importing and building an engine makes a hundred thousand objects of long life, so
that it happened once or twice in the middle, and found nothing. Younger objects are collected as always.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

#: The threshold of the oldest generation meanwhile, in units of 7,000 new objects: an engine takes 20.
_PUT_OFF: Final = 40
_holders: Final[set[object]] = set()
_of_host: list[int] = []


@contextmanager
def full_collections_put_off() -> Iterator[None]:
    """Have no full collection start by itself until the last block is left, or until 280,000 objects have come.

    What the host sets meanwhile (``gc.set_threshold``, ``gc.disable``) stays, and ``gc.collect`` collects.
    """
    holder = object()
    try:
        _holders.add(holder)
        first, second, third = gc.get_threshold()
        if third < _PUT_OFF:
            # Why first: an interrupt may come between any two lines, and the host's number must be known then.
            _of_host[:] = [third]
            gc.set_threshold(first, second, _PUT_OFF)
        yield
    finally:
        _holders.discard(holder)
        _restore()


def _restore() -> None:
    first, second, third = gc.get_threshold()
    if not _holders and _of_host:
        if third == _PUT_OFF:
            gc.set_threshold(first, second, *_of_host)
        _of_host.clear()


def _after_fork() -> None:
    # Why: the other threads that were inside do not exist in a child.
    _holders.clear()
    _restore()


os.register_at_fork(after_in_child=_after_fork)
