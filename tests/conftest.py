"""One compute thread for all tests and what they start, unless the caller says otherwise; quick garbage collections and
compilers; interrupts that arrive; no limit for the time of an example.

Tiny models gain nothing from threads, and processes side by side whose threads wait for each other lose much to them.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from support.apart import Apart

# Why here: OpenMP reads it once, when torch is imported, which no test has done yet.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Why: Numba paints the messages of all overloads that it tries and leaves, an eighth of the time of compiling a kernel.
os.environ.setdefault("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING", "1")

# Why: a shell starts its background jobs with SIGINT ignored, and Python leaves it so; tests interrupt themselves.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Why: how long an example takes depends on what else runs here; one that hangs meets the limit of every test.
# Why derandomised: a change is refused for what it does, not for an example that nobody had met before.
settings.register_profile("repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")

# Why: compiling a kernel makes very many objects and no garbage; looking for some took a seventh of its time.
gc.set_threshold(100_000, 20, 100)


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> None:
    """Keep what earlier tests imported out of the collections that tests ask for: a tenth of the time remains."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    """Programs in processes of their own."""
    one = Apart(tmp_path_factory.mktemp("apart"))
    yield one
    one.close()


def pytest_sessionfinish() -> None:
    """Keep everything out of the five full collections that pytest makes at its end: each took half a second."""
    gc.freeze()
