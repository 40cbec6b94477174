"""Runs work that recurses deeply in a library, on a thread of its own and for a limited time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, TypeVar

from pagedcore.errors import GrammarsBusy

_T = TypeVar("_T")
_STACK_BYTES: Final = 2**28
"""Of address space: a compiler of grammars takes some kilobytes for each reference that it follows."""
_STARTING: Final = threading.Lock()
"""Held while the stack size of new threads, which is the process's, is another one."""


class DeepStack:
    """Threads with deep stacks, a few at a time.

    Work that takes too long keeps its thread until it ends: a library cannot be interrupted.
    """

    def __init__(self, num_threads: int, limit_s: float) -> None:
        self._free, self._limit_s = threading.Semaphore(num_threads), limit_s

    def run(self, work: Callable[[], _T]) -> _T:
        """Run and return or raise what ``work`` does.

        Raises:
            TimeoutError: it takes longer than the limit; its thread stays busy until it ends.
            GrammarsBusy: all threads were busy for as long.
        """
        if not self._free.acquire(timeout=self._limit_s):
            raise GrammarsBusy("no thread that compiles grammars was free")
        results, failures = list[_T](), list[BaseException]()

        def run() -> None:
            try:
                results.append(work())
            except BaseException as error:  # of any kind: the caller gets it
                failures.append(error)
            finally:
                self._free.release()

        thread = threading.Thread(target=run, name="pagedcore-grammar", daemon=True)
        try:
            with _STARTING:
                before = threading.stack_size(_STACK_BYTES)
                try:
                    thread.start()
                finally:
                    threading.stack_size(before)
        except BaseException as error:
            if thread.ident is None:
                self._free.release()
            if isinstance(error, RuntimeError):
                raise GrammarsBusy("no thread could be started") from error
            raise
        thread.join(self._limit_s)
        for failure in failures:
            raise failure
        if not results:
            raise TimeoutError
        return results[0]
