"""What may watch an engine: everything that is told of requests and steps, without a say in them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from pagedcore.scheduler.policy_queues import StepObserver

if TYPE_CHECKING:
    from pagedcore.requests.request import Request
    from pagedcore.scheduler.plan import SchedulePlan
    from pagedcore.sequence import Sequence

News = deque[Callable[[], object]]
"""What observers will be told, and calls that were put off, oldest first, once nothing is being changed."""


class EngineObserver(StepObserver):
    """Watches one engine, on its thread; each observer overrides what it wants to know.

    It is told between two changes, and may call the engine; but ``request_comes`` is told within one.
    """

    def request_comes(self, request: Request) -> None:
        """Look at a request that is about to wait, whose sequences are in no queue yet; the engine may not be called
        but for ``abort``, which it then carries out when the request waits.
        """

    def request_accepted(self, request: Request) -> None:
        """Note a request whose turn has begun, with its sequences."""

    def request_ended(self, request: Request) -> None:
        """Note a request of which nothing more comes: done, or removed; one that is done is told again when removed."""

    def step_ended(self) -> None:
        """Look at the engine between two steps."""

    def weights_taken(self) -> None:
        """Note that the engine has other weights from now on."""

    def note_trouble(self, why: str, errors: Iterable[BaseException] = ()) -> None:
        """Keep what helps to find out why; may add notes to the errors that callers get.

        ``why`` is "failed-step", "broken-step", "stall" or "hang". Callable on any thread for the last one.
        """

    def statistics(self) -> Mapping[str, int]:
        """Return its part of ``EngineStats``, by field."""
        return {}


class ToldLater(StepObserver):
    """Tells an observer what the scheduler, amid its work, has to say."""

    def __init__(self, observer: EngineObserver, news: News) -> None:
        self._observer, self._news = observer, news

    def step_timed(self, plan: SchedulePlan, seconds: float) -> None:
        """As the observer's."""
        self._news.append(partial(self._observer.step_timed, plan, seconds))

    def completion_ended(self, sequence: Sequence) -> None:
        """As the observer's."""
        self._news.append(partial(self._observer.completion_ended, sequence))
