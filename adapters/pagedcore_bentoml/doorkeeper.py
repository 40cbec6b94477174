"""Counts the calls that are being answered, so that a service can end without cutting any of them off."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from pagedcore_bentoml.refusals import NotServing


class Doorkeeper:
    """Lets calls in until it drains.

    Invariant: ``num_inside`` is the number of ``call`` blocks that were entered and not left.
    Invariant: once it drains nobody enters any more.
    """

    def __init__(self) -> None:
        self.num_inside = 0
        self.is_draining = False
        self._nobody_inside = asyncio.Event()
        self._nobody_inside.set()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Be inside for the length of a block.

        Raises:
            NotServing: the service drains.
        """
        if self.is_draining:
            raise NotServing("this process drains: it answers what it has and takes nothing new; ask another one.")
        self.num_inside += 1
        self._nobody_inside.clear()
        try:
            yield
        finally:
            self.num_inside -= 1
            if not self.num_inside:
                self._nobody_inside.set()

    async def drain(self, timeout_s: float) -> int:
        """Let nobody in any more and wait until all have left; return how many are still inside after that time."""
        self.is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._nobody_inside.wait()
        except TimeoutError:
            pass
        return self.num_inside
