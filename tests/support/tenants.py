"""A tenant that guesses another one's prompt digit by digit, and everything that it gets to see.

The secret is four digits, each the end of a block of its own, so that a right guess would be one more cached block. The
guesses follow one secret whatever the other tenant asked: if nothing leaks, the transcript is the same for any secret.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from pagedcore.protocols import FloatArray, RaggedRows
from support.doubles import ToyBackend

DIGITS: Final = range(10)
SECRET: Final = (7, 3)
OTHER_SECRET: Final = (2, 8)
BLOCK_SIZE: Final = 4
MAX_TOKENS: Final = 3
_WORDS: Final = [20, 21, 22]
_END: Final = [23, 24]

Ask = Callable[[list[int]], Awaitable[dict[str, Any]]]


def prompt_with(digits: tuple[int, ...]) -> list[int]:
    """Return the prompt that has these digits at the ends of its blocks."""
    return [token for digit in digits for token in (*_WORDS, digit)] + _END


async def guess_all(ask: Ask) -> list[dict[str, Any]]:
    """Ask with every candidate for every digit of ``SECRET``, knowing those before; return all that was seen."""
    return [await ask(prompt_with((*SECRET[:place], digit))) for place in range(len(SECRET)) for digit in DIGITS]


def digits_found(seen: list[dict[str, Any]], figure: Callable[[dict[str, Any]], int]) -> tuple[int, ...]:
    """Return the candidates that a figure tells from the nine others of their place; -1 where it tells none."""
    found = []
    for place in range(len(SECRET)):
        figures = [figure(one) for one in seen[place * 10 : place * 10 + 10]]
        best = max(figures)
        found.append(figures.index(best) if figures.count(best) == 1 else -1)
    return tuple(found)


class PacedBackend(ToyBackend):
    """A toy model that computes a stream's next token when the last one was received, so that no deltas are joined."""

    def __init__(self) -> None:
        super().__init__()
        self.num_received: Callable[[], int] | None = None
        """How many tokens the reader of the present stream has; ``None`` without one."""
        self._num_sampled = 0

    def pace(self, num_received: Callable[[], int] | None) -> None:
        """Begin or end a stream."""
        self._num_sampled, self.num_received = 0, num_received

    def forward(self, batch: RaggedRows) -> FloatArray:
        """Wait for the reader, and compute."""
        if self.num_received is not None:
            end_s = time.monotonic() + 60.0
            while self.num_received() < self._num_sampled:
                assert time.monotonic() < end_s, "a token was not received"
                time.sleep(0.0002)
            self._num_sampled += len(batch.logits_rows)
        return super().forward(batch)
