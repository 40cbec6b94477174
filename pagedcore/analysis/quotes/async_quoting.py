"""Quotes of an engine that runs on another thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, Unpack

from pagedcore.engine.engine import Engine
from pagedcore.errors import EngineOverloaded
from pagedcore.outputs import Quote
from pagedcore.request_options import OptionKeywords, read_options
from pagedcore.requests.input_processor import InputProcessor, Prompt
from pagedcore.sampling_params import SamplingParams
from pagedcore.serving.long_prompts import is_long, is_structured

MAX_QUOTING: Final = 8
"""Quotes that are made at a time."""


class AsyncQuoting:
    """The part of an ``AsyncEngine`` that quotes."""

    _input_processor: InputProcessor
    call: Callable[[Callable[[Engine], Any]], Coroutine[Any, Any, Any]]

    def __init__(self) -> None:
        self._quoting = threading.BoundedSemaphore(MAX_QUOTING)

    async def quote(
        self, prompt: Prompt, params: SamplingParams | None = None, *, exact: bool = False,
        **options: Unpack[OptionKeywords],
    ) -> Quote:
        """Say when a request would start, have its first token and end if it came now; as ``Engine.quote``.

        The prompt is prepared before the engine thread is asked, and a dry run (``exact``) has a thread of its own. At
        most eight quotes at a time, so that they cannot keep steps from being made.

        Raises:
            InvalidRequest: as ``generate``.
            EngineOverloaded: as many quotes are being made as may be.
            EngineClosed: the engine is closed.
        """
        if not self._quoting.acquire(blocking=False):
            raise EngineOverloaded(MAX_QUOTING, MAX_QUOTING)
        is_running = False
        try:
            prepare = partial(self._input_processor.process, prompt, params, read_options(options, "exact"))
            is_slow = is_long(prompt) or is_structured(params)
            processed = await asyncio.to_thread(prepare) if is_slow else prepare()
            make: Callable[[], Quote] = await self.call(lambda engine: engine.prepare_quote(processed, exact=exact))
            if not exact:
                return make()
            # Why: a dry run goes on when its caller is cancelled, and counts until it ends.
            quote = Future[Quote]()
            quote.set_running_or_notify_cancel()
            threading.Thread(target=self._finish, args=(make, quote), name="pagedcore-quote", daemon=True).start()
            is_running = True
            return await asyncio.wrap_future(quote)
        finally:
            if not is_running:
                self._quoting.release()

    def _finish(self, make: Callable[[], Quote], quote: Future[Quote]) -> None:
        try:
            quote.set_result(make())
        except Exception as error:
            quote.set_exception(error)
        finally:
            self._quoting.release()
