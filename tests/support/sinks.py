"""How many sinks the process has: what an engine's thread delivers to."""

from __future__ import annotations

import gc

from pagedcore.serving.stream import CompletionFuture, Stream


def num_sinks() -> int:
    """Count the sinks of all engines, without garbage; the traceback of an earlier test that failed may keep some.

    Those that were left out of collections, as a server's start leaves out all there are, are not counted: to look
    among everything that was imported takes a second each time.
    """
    gc.collect()
    return sum(type(one) in (Stream, CompletionFuture) for one in gc.get_objects())
