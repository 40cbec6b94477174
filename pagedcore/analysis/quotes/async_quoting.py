"""Quotes of an engine that runs on another thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Final
from weakref import WeakKeyDictionary

from pagedcore.analysis.quotes.quoting import prepare_quote
from pagedcore.errors import EngineOverloaded
from pagedcore.outputs import Quote
from pagedcore.request_options import OptionKeywords, read_options
from pagedcore.requests.input_processor import Prompt
from pagedcore.sampling_params import SamplingParams
from pagedcore.serving.async_engine import AsyncEngine
from pagedcore.serving.long_prompts import is_long, is_structured

MAX_QUOTING: Final = 8
"""Quotes of one engine that are made at a time."""
_PLACES: Final = WeakKeyDictionary[AsyncEngine, threading.BoundedSemaphore]()
_LOCK: Final = threading.Lock()


async def quote(
    engine: AsyncEngine, prompt: Prompt, params: SamplingParams | None, options: OptionKeywords, *, exact: bool
) -> Quote:
    """As ``AsyncEngine.quote``."""
    with _LOCK:
        places = _PLACES.setdefault(engine, threading.BoundedSemaphore(MAX_QUOTING))
    if not places.acquire(blocking=False):
        raise EngineOverloaded(MAX_QUOTING, MAX_QUOTING)
    is_running = False
    try:
        prepare = partial(engine.input_processor.process, prompt, params, read_options(options, "exact"))
        is_slow = is_long(prompt) or is_structured(params)
        processed = await asyncio.to_thread(prepare) if is_slow else prepare()
        make: Callable[[], Quote] = await engine.call(lambda one: prepare_quote(one, processed, exact=exact))
        if not exact:
            return make()
        # Why: a dry run goes on when its caller is cancelled, and counts until it ends.
        made = Future[Quote]()
        made.set_running_or_notify_cancel()
        threading.Thread(target=_finish, args=(make, made, places), name="pagedcore-quote", daemon=True).start()
        is_running = True
        return await asyncio.wrap_future(made)
    finally:
        if not is_running:
            places.release()


def _finish(make: Callable[[], Quote], made: Future[Quote], places: threading.BoundedSemaphore) -> None:
    try:
        try:
            quoted = make()
        finally:
            # Why first: who has its quote may ask for the next one at once.
            places.release()
        made.set_result(quoted)
    except Exception as error:
        made.set_exception(error)
