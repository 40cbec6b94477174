"""Runs work that recurses deeply in a library, on a thread of its own and for a limited time."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar
from weakref import WeakSet

from pagedcore.config import limits
from pagedcore.errors import GrammarsBusy
from pagedcore.shares import Shares

_T = TypeVar("_T")
STACK_BYTES: Final = 2**28
"""Of address space: a compiler of grammars takes some kilobytes for each reference that it follows."""
_STARTING: Final = threading.Lock()
"""Held while the stack size of new threads, which is the process's, is another one."""
_threads: WeakSet[threading.Thread] | None = WeakSet()
"""All that were started; ``None`` when the interpreter ends."""


@atexit.register
def _wait_for_the_end() -> None:
    """Start no more, and wait for what runs, for as long as that may take.

    Why: a library that comes back to an interpreter which has ended takes the whole process down.
    """
    global _threads
    with _STARTING:
        left, _threads = _threads or (), None
        end = time.monotonic() + limits.MAX_COMPILING_S
    for thread in left:
        if thread.ident is not None:
            thread.join(max(0.0, end - time.monotonic()))


class DeepStack:
    """Threads with deep stacks, a few at a time; while there are several, no owner of work has all of them.

    Work that takes too long keeps its thread until it ends: a library cannot be interrupted.
    """

    def __init__(self, num_threads: int, limit_s: float) -> None:
        self._shares, self._changed, self._limit_s = Shares(num_threads), threading.Condition(), limit_s

    def run(self, work: Callable[[], _T], owner: bytes = b"") -> _T:
        """Run and return or raise what ``work`` does.

        Raises:
            TimeoutError: it takes longer than the limit; its thread stays busy until it ends.
            GrammarsBusy: no thread was free for this owner for as long.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._shares.take(owner), self._limit_s):
                raise GrammarsBusy("no thread that compiles grammars was free")
        results, failures, has_begun = list[_T](), list[BaseException](), threading.Lock()

        def run() -> None:
            if not has_begun.acquire(blocking=False):
                return
            try:
                results.append(work())
            except BaseException as error:  # of any kind: the caller gets it
                failures.append(error)
            finally:
                self._give_back(owner)

        thread = threading.Thread(target=run, name="pagedcore-grammar", daemon=True)
        try:
            with _STARTING:
                if _threads is None:
                    raise GrammarsBusy("the interpreter ends")
                before = threading.stack_size(STACK_BYTES)
                try:
                    # Why first: an interrupt that comes in between must not leave a thread that nobody waits for.
                    _threads.add(thread)
                    thread.start()
                finally:
                    threading.stack_size(before)
        except BaseException as error:
            # Why so: a thread that is interrupted in its start may still begin, and does nothing then.
            if has_begun.acquire(blocking=False):
                self._give_back(owner)
            if isinstance(error, RuntimeError):
                raise GrammarsBusy("no thread could be started") from error
            raise
        thread.join(self._limit_s)
        for failure in failures:
            raise failure
        if not results:
            raise TimeoutError
        return results[0]

    def _give_back(self, owner: bytes) -> None:
        with self._changed:
            self._shares.give_back(owner)
            self._changed.notify_all()
