"""Full garbage collections of the process, put off while objects come into being that stay.

Python looks through all objects of a process each time that those of long life have become a quarter more. Beside
torch that takes a tenth of a second. Importing and building an engine makes a hundred thousand objects of long life, so
that it happened once or twice in the middle, and found nothing. Younger objects are collected as always.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

#: The threshold of the oldest generation meanwhile, in units of 7,000 new objects: an engine takes 20.
_PUT_OFF: Final = 40


class _Holder:
    """A block that is not left yet."""


#: Weak, as an interrupt may come before a block is taken out here; then the next block that is left restores.
_holders: Final[weakref.WeakSet[_Holder]] = weakref.WeakSet()
_of_host: list[int] = []
#: Reentrant, as a finaliser or a signal's handler may come in while it is held.
_lock = threading.RLock()


@contextmanager
def full_collections_put_off() -> Iterator[None]:
    """Have no full collection start by itself until the last block is left, or until 280,000 objects have come.

    What the host sets meanwhile (``gc.set_threshold``, ``gc.disable``) stays, and ``gc.collect`` collects.
    """
    holder = _Holder()
    try:
        with _lock:
            _holders.add(holder)
            first, second, third = gc.get_threshold()
            if third < _PUT_OFF:
                # Why first: an interrupt may come between any two lines, and the host's number must be known then.
                _of_host[:] = [third]
                gc.set_threshold(first, second, _PUT_OFF)
        yield
    finally:
        _leave([holder])


def _leave(holders: Iterable[_Holder]) -> None:
    with _lock:
        _holders.difference_update(holders)
        first, second, third = gc.get_threshold()
        if not _holders and _of_host:
            if third == _PUT_OFF:
                gc.set_threshold(first, second, *_of_host)
            _of_host.clear()


def _after_fork() -> None:
    # Why: the other threads that were inside, or had the lock, do not exist in a child.
    global _lock
    _lock = threading.RLock()
    _leave(list(_holders))


os.register_at_fork(after_in_child=_after_fork)
