"""The live view of one model's batch, as events for the page: who sees what, in which lane, at most ten times a second.

A ``LiveView`` takes looks at the engine while it has viewers (``pagedcore.metrics.live``), and each ``Scope`` makes one
frame of a look for all viewers that see the same. Frames hold times, labels made for the view, and numbers; no text, no
token, no id of the engine or of a caller.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

from pagedcore import AsyncEngine
from pagedcore.errors import EngineClosed
from pagedcore.metrics.live import LiveRows, Look, Progress, Stretch
from pagedcore_http.events import frame
from pagedcore_http.refusals import RefusedAtTheDoor

INTERVAL_S: Final = 0.1
"""Time between two frames, in seconds."""
QUIET_S: Final = 2.5
"""The same while nothing happens: longer than an idle engine takes until it frees its helper threads."""
MAX_FRAMES: Final = 16
"""Frames that are kept for a viewer that reads slowly; it misses older ones."""
MAX_STRETCHES: Final = 1024
"""Most stretches of one frame; the latest count."""
MAX_QUEUE: Final = 100
"""Most waiting sequences that a frame names; all are counted."""
MAX_VIEWERS: Final = 32
"""Most viewers of one model."""
MAX_TENANTS_VIEWERS: Final = 8
"""Most of these that see one tenant's part, so that a tenant cannot take the places of all."""
_OVER: Final = frame({}, "done")


class TooManyViewers(RefusedAtTheDoor):
    """As many viewers look at a model as may."""

    def __init__(self, limit: int) -> None:
        super().__init__(HTTPStatus.TOO_MANY_REQUESTS, "viewers", limit + 1, f"at most {limit}")


@dataclass(slots=True)
class _Lane:
    sequence_id: int
    free_s: float | None = None
    """Since when the lane is free; ``None`` while its sequence has it."""


@dataclass(eq=False)
class Scope:
    """What some viewers see of an engine: all of it, or one tenant's part.

    Lanes and numbers are those of the scope, so that a gap tells nothing of others.

    Invariant: a frame depends on no sequence whose salt is not seen, except by times and reasons of those that are.
    """

    sees: Callable[[bytes], bool] | None
    """Whether a salt is among those seen; ``None``: all are."""
    origin_s: float | None = None
    lanes: list[_Lane] = field(default_factory=list)
    labels: dict[str, dict[int, str]] = field(default_factory=dict)
    """By request, then by sequence."""
    num_requests: int = 0

    def frame(self, look: Look) -> dict[str, Any]:
        """Return what is shown of a look."""
        if self.origin_s is None:
            self.origin_s = look.now_s
        ended, running = self._seen(look.ended)[-MAX_STRETCHES:], self._seen(look.running)
        waiting = self._seen(look.waiting)
        placed = {id(one): self._lane_of(one) for one in sorted([*ended, *running], key=lambda one: one.start_s)}
        told = {
            "t": self._time(look.now_s), "max_rows": look.stats.max_num_seqs,
            "ended": [[placed[id(one)], *self._entry(one), one.ending] for one in ended],
            "rows": [[placed[id(one)], *self._entry(one), one.num_blocks] for one in running],
            "queue": [[self._label(one), one.reason, round(one.waited_s, 3), one.num_prompt_tokens, one.is_preempted]
                      for one in waiting[:MAX_QUEUE]],
            "num_waiting": len(waiting), "blocks": self._blocks(look, running), **self._progress(look),
        }
        self._forget({one.request_id for one in (*running, *waiting)}, {one.sequence_id for one in running})
        return told

    def _seen(self, all_of_them: Iterable[Any]) -> list[Any]:
        sees = self.sees
        return [one for one in all_of_them if sees is None or sees(one.salt)]

    def _time(self, seconds: float) -> float:
        return round(seconds - (self.origin_s or 0.0), 4)

    def _entry(self, one: Stretch) -> tuple[Any, ...]:
        return self._label(one), one.kind, self._time(one.start_s), self._time(one.end_s), one.num_tokens

    def _label(self, one: Any) -> str:
        if (own := self.labels.get(one.request_id)) is None:
            self.num_requests += 1
            own = self.labels[one.request_id] = {-1: str(self.num_requests)}
        if one.sequence_id not in own:
            number = own[-1]
            own[one.sequence_id] = number if len(own) == 1 else f"{number}.{len(own)}"
        return own[one.sequence_id]

    def _lane_of(self, one: Stretch) -> int:
        """Return the lane of a sequence, or give it the first that is free when its stretch begins."""
        place = next((place for place, lane in enumerate(self.lanes)
                      if lane.sequence_id == one.sequence_id and lane.free_s is None), None)
        if place is None:
            place = next((place for place, lane in enumerate(self.lanes)
                          if lane.free_s is not None and lane.free_s <= one.start_s), len(self.lanes))
            self.lanes[place : place + 1] = [_Lane(one.sequence_id)]
        if one.ending:
            self.lanes[place].free_s = one.end_s
        return place

    def _forget(self, requests: set[str], sequences: set[int]) -> None:
        """Forget labels of requests that have ended, and free lanes whose ends were dropped."""
        self.labels = {name: own for name, own in self.labels.items() if name in requests}
        for lane in self.lanes:
            if lane.free_s is None and lane.sequence_id not in sequences:
                lane.free_s = 0.0
        while self.lanes and self.lanes[-1].free_s is not None:
            self.lanes.pop()

    def _blocks(self, look: Look, running: list[Stretch]) -> dict[str, int]:
        stats = look.stats
        if self.sees is not None:
            # Safety: what is free or cached tells how much the others have.
            return {"total": stats.num_blocks, "yours": sum(one.num_blocks for one in running)}
        return {"total": stats.num_blocks, "running": stats.num_blocks_used, "cached": stats.num_blocks_cached,
                "host": stats.num_host_blocks, "host_used": stats.num_host_blocks_used,
                "host_cached": stats.num_host_blocks_cached}

    def _progress(self, look: Look) -> dict[str, Any]:
        sees = self.sees
        seen: list[Progress] = [one for salt, one in look.progress.items() if sees is None or sees(salt)]
        return {"sampled": sum(one.num_sampled for one in seen),
                "ttft": [round(ttft_s, 4) for one in seen for ttft_s in one.ttfts_s][-MAX_QUEUE:],
                "itl": [round(sum(one.intervals_s for one in seen), 4), sum(one.num_intervals for one in seen)]}


@dataclass(eq=False)
class _Channel:
    """A scope, its viewers, and the frames that they may not have read yet."""

    scope: Scope
    viewers: set[asyncio.Event] = field(default_factory=set)
    frames: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=MAX_FRAMES))
    number: int = 0
    was_quiet: bool = False
    shown_s: float = 0.0

    def show(self, look: Look) -> None:
        """Publish what the scope sees of a look, unless it has seen nothing for a while."""
        told = self.scope.frame(look)
        is_quiet = not (told["ended"] or told["rows"] or told["queue"])
        # Safety: what others do must not show in how often a tenant gets a frame.
        if is_quiet and self.was_quiet and look.now_s - self.shown_s < QUIET_S:
            return
        self.was_quiet, self.shown_s = is_quiet, look.now_s
        self.number += 1
        self.frames.append((self.number, frame(told)))
        self.tell()

    def tell(self) -> None:
        for viewer in self.viewers:
            viewer.set()


class LiveView:
    """Shows the batch of one engine to viewers, on one event loop.

    Invariant: the engine is observed exactly while there is a viewer.
    Invariant: what is kept is bounded by the number of scopes with viewers, however slowly these read.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._channels: dict[Hashable, _Channel] = {}
        self._task: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()
        """Set by a new viewer, and by the first step after a quiet time."""
        self._is_over = False

    @property
    def num_viewers(self) -> int:
        """How many look."""
        return sum(len(channel.viewers) for channel in self._channels.values())

    def end(self) -> None:
        """End the streams of all viewers, now and from now on."""
        self._is_over = True
        self._tell_all()

    async def events(self, key: Hashable, sees: Callable[[bytes], bool] | None) -> AsyncGenerator[str, None]:
        """Yield the frames of a scope as events, until ``end``; closing this leaves.

        Args:
            key: viewers with the same one share frames.
            sees: as in ``Scope``.

        Raises:
            TooManyViewers: at the first iteration.
            EngineClosed: the engine was closed.
        """
        if self.num_viewers >= MAX_VIEWERS:
            raise TooManyViewers(MAX_VIEWERS)
        if sees is not None and key in self._channels and len(self._channels[key].viewers) >= MAX_TENANTS_VIEWERS:
            raise TooManyViewers(MAX_TENANTS_VIEWERS)
        channel, news = self._channels.setdefault(key, _Channel(Scope(sees))), asyncio.Event()
        channel.viewers.add(news)
        channel.was_quiet = False
        self._woken.set()
        read = channel.number
        try:
            while not self._is_over:
                self._start()
                await news.wait()
                news.clear()
                for number, text in [one for one in channel.frames if one[0] > read]:
                    read = number
                    yield text
            yield _OVER
        finally:
            channel.viewers.discard(news)
            self._leave(key, channel)

    def _start(self) -> None:
        """Watch the engine, unless that happens already. Raises what has ended the watching."""
        if self._task is not None and self._task.done():
            task, self._task = self._task, None
            task.result()
        if self._task is None:
            self._task = asyncio.ensure_future(self._watch())
            self._task.add_done_callback(lambda _: self._tell_all())

    def _leave(self, key: Hashable, channel: _Channel) -> None:
        if not channel.viewers and self._channels.get(key) is channel:
            del self._channels[key]
        if not self._channels and self._task is not None:
            self._task.cancel()
            self._task = None

    def _tell_all(self) -> None:
        for channel in self._channels.values():
            channel.tell()

    async def _watch(self) -> None:
        loop, woken = asyncio.get_running_loop(), self._woken

        def wake() -> None:
            # Why: the loop may be closed while the engine lives on.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(woken.set)

        rows = LiveRows(wake)
        try:
            await self._engine.call(rows.attach)
            while True:
                look = await self._engine.call(lambda _: rows.look())
                for channel in self._channels.values():
                    channel.show(look)
                await asyncio.sleep(INTERVAL_S)
                if look.is_quiet:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(woken.wait(), QUIET_S)
                woken.clear()
        finally:
            # Why also when it was not attached: the call that attaches may be under way.
            with suppress(EngineClosed):
                self._engine.send(rows.detach)
