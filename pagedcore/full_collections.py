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

#: The threshold of the oldest generation meanwhile, in units of 7,000 new objects: an engine takes 20. A number that no
#: host chooses, so that it tells who set it.
_PUT_OFF: Final = 41
#: What the host had when ours was set last. No lock: an interrupt may leave one held, and all later imports would wait.
_of_host: Final = [0]


@contextmanager
def full_collections_put_off() -> Iterator[None]:
    """Have no full collection start by itself until this block is left, or until 287,000 objects have come.

    A block inside of another, or of a thread that comes while another is inside, changes nothing. What the host sets
    meanwhile (``gc.set_threshold``, ``gc.disable``) stays, and ``gc.collect`` collects.
    """
    first, second, third = gc.get_threshold()
    if third >= _PUT_OFF:
        yield
        return
    try:
        try:
            # Why first: an interrupt may come between any two lines, and the host's number must be known then.
            _of_host[0] = third
            gc.set_threshold(first, second, _PUT_OFF)
            yield
        finally:
            _restore()
    finally:
        # Why again: an interrupt may have come into the first one.
        _restore()


def _restore() -> None:
    first, second, third = gc.get_threshold()
    if third == _PUT_OFF:
        if gc.get_count()[2] > _of_host[0] and not gc.get_freeze_count():
            # Why: what is there becomes old and the count begins anew, as after a full collection that finds nothing.
            # It would come with the next young ones otherwise, in the first request.
            try:
                gc.freeze()
            finally:
                gc.unfreeze()
        gc.set_threshold(first, second, *_of_host)


# Why: the other threads that were inside do not exist in a child.
os.register_at_fork(after_in_child=_restore)
