"""By when a call is to be answered, if its model has to be woken first: the wake counts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, Final, cast

from pagedcore.errors import DeadlineMissed, PagedcoreError, RequestTimeout
from pagedcore.request_options import OptionKeywords

_LEAST_S: Final = 0.001
_WAKES: Final = "its model, which sleeps"


class Timed:
    """The part of a call that knows its times."""

    timeout_s: float | None
    """As the body has it."""
    options: OptionKeywords
    _waited_s = 0.0

    @property
    def left_s(self) -> float | None:
        """Seconds that are left of ``timeout_s`` where the engine gets the call."""
        return None if self.timeout_s is None else max(_LEAST_S, self.timeout_s - self._waited_s)

    async def after(self, wake: Coroutine[Any, Any, None]) -> None:
        """Wait for a wake, which is taken off what the engine is told of the call's times.

        Raises ``RequestTimeout`` or ``DeadlineMissed`` if one of them passes meanwhile.
        """
        began_s, deadline_s = time.monotonic(), self.options.get("deadline_s")
        given = [one for one in (self.timeout_s, deadline_s) if one is not None]
        try:
            async with asyncio.timeout(min(given, default=None)):
                await wake
        except TimeoutError:
            if deadline_s is not None and min(given) == deadline_s:
                raise DeadlineMissed(deadline_s, waits_for=_WAKES) from None
            raise RequestTimeout(min(given), waited_for=_WAKES) from None
        self._waited_s = time.monotonic() - began_s

    @property
    def options_left(self) -> OptionKeywords:
        """The options as the engine gets them."""
        taken = {"deadline_s": self._waited_s, "ttft_ms": 1000 * self._waited_s}
        options = cast(dict[str, Any], self.options)
        left = {name: max(_LEAST_S, given - taken[name]) for name in taken if (given := options.get(name)) is not None}
        return cast(OptionKeywords, {**options, **left})

    def as_asked(self, error: PagedcoreError) -> PagedcoreError:
        """Return an error of the engine as one that names the times of the body."""
        deadline_s = self.options.get("deadline_s")
        if isinstance(error, RequestTimeout) and self.timeout_s is not None:
            return RequestTimeout(self.timeout_s, waited_for=error.waited_for)
        if isinstance(error, DeadlineMissed) and deadline_s is not None:
            return DeadlineMissed(deadline_s, waits_for=error.waits_for)
        return error
