"""What one rendering of a chat template may take: steps, memory, characters, levels and processor time.

Owns the counts and the measures of values; what is counted when, ``template_sandbox.py`` says. Sizes are compared
with what is left before anything of that size is made.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from time import monotonic, thread_time
from typing import Any, Final

from jinja2.utils import Namespace
from psutil import Process

from pagedcore.config.limits import (
    MAX_TEMPLATE_BITS,
    MAX_TEMPLATE_BYTES,
    MAX_TEMPLATE_DEPTH,
    MAX_TEMPLATE_S,
    MAX_TEMPLATE_STEPS,
    MIN_TEMPLATE_STEPS,
)

_STEPS_PER_LOOK: Final = 256
"""Steps between two looks at the clock."""
_CHARACTERS_PER_STEP: Final = 256
"""Characters that are searched or compared in the time of a step."""
_CHARACTER_BYTES: Final = 84
"""Bytes of a character that is an object: in a list, as Python keeps those beyond Latin-1."""
_NUMBER: Final = re.compile("[0-9]+")
_VIEWS: Final[tuple[type, ...]] = (type({}.keys()), type({}.values()), type({}.items()))
_CONTAINERS: Final = (dict, list, tuple, set, *_VIEWS, Namespace, range)
_TEXT_OR_CONTAINER: Final = (str, *_CONTAINERS)


class OverBound(Exception):
    """A template wants more of something than one rendering may have; the message names it, and the limit."""

    def __init__(self, what: str, limit: float) -> None:
        super().__init__(f"It takes more than {limit} {what}. Shorten the conversation, or give the model another one.")


class Budget:
    """Counts what one rendering takes."""

    __slots__ = ("_bytes", "_ends", "_look_at", "_most", "_resident", "_room", "_shown", "_steps", "_time_ends")

    def __init__(self, shown: Any) -> None:
        """Take what the template sees: for more of it there are more steps."""
        self._shown, self._most = shown, min(MIN_TEMPLATE_STEPS, MAX_TEMPLATE_STEPS)
        self._steps = self._bytes = self._resident = 0
        self._look_at, self._room = _STEPS_PER_LOOK, MAX_TEMPLATE_BYTES
        self._ends, self._time_ends = monotonic() + MAX_TEMPLATE_S, thread_time() + MAX_TEMPLATE_S

    def step(self, count: int = 1) -> None:
        """Count steps. Raises ``OverBound``."""
        self._steps += count
        if self._steps >= self._look_at:
            self._look()

    def _look(self) -> None:
        self._look_at = self._steps + _STEPS_PER_LOOK
        if self._steps > self._most:
            self._allow_more()
        # Why both: a process that was stopped, or had no processor, has done nothing meanwhile; and asking for
        # processor time enters the kernel.
        if monotonic() > self._ends and thread_time() > self._time_ends:
            raise OverBound("seconds of processor time", MAX_TEMPLATE_S)

    def _allow_more(self) -> None:
        """Allow the steps of a long chat, once: for each character, and for each pair of messages or other parts."""
        if self._shown is not None:
            shown, self._shown, self._most = self._shown, None, MAX_TEMPLATE_STEPS
            size = measure(shown)
            allowed = MIN_TEMPLATE_STEPS + 64 * size.characters + 4 * size.parts**2
            self._most = min(allowed, MAX_TEMPLATE_STEPS)
        if self._steps > self._most:
            raise OverBound("steps", self._most)

    def require(self, num_bytes: int) -> None:
        """Raise ``OverBound`` unless there is so much memory left."""
        if self._bytes + num_bytes > self._room:
            self._make_room(num_bytes)

    def _make_room(self, num_bytes: int) -> None:
        """Let a rendering that has made much go on where most of that is gone, as where it adds to a text."""
        resident = Process().memory_info().rss
        self._resident = self._resident or resident
        if num_bytes + resident - self._resident > MAX_TEMPLATE_BYTES:
            raise OverBound("bytes of memory", MAX_TEMPLATE_BYTES)
        self._room = self._bytes + num_bytes + MAX_TEMPLATE_BYTES // 4

    def take(self, num_bytes: int) -> None:
        """Count memory. Raises ``OverBound``."""
        self.require(num_bytes)
        self._bytes += num_bytes


_BUDGET: Final = ContextVar[Budget]("pagedcore_template_budget")
budget: Final = _BUDGET.get
"""Return the budget of the rendering that runs here."""


@contextmanager
def new_budget(shown: Any) -> Iterator[None]:
    """Run a compilation and a rendering with a budget for what the template sees."""
    token = _BUDGET.set(Budget(shown))
    try:
        yield
    finally:
        _BUDGET.reset(token)


def made(value: Any) -> Any:
    """Count the memory of a value that was just made, and return it. Raises ``OverBound``."""
    if isinstance(value, (str, list, tuple, dict, set)):
        budget().take(sys.getsizeof(value))
    elif type(value) is int and value.bit_length() > MAX_TEMPLATE_BITS:
        raise OverBound("bits of a number", MAX_TEMPLATE_BITS)
    return value


def scan(length: int) -> None:
    """Count the time in which so many characters are looked at."""
    if length > _CHARACTERS_PER_STEP:
        budget().step(length // _CHARACTERS_PER_STEP)


def text_bytes(*texts: str) -> int:
    """Return how much memory these texts take together, at most."""
    return sum(map(len, texts)) * (1 if all(map(str.isascii, texts)) else 4)


@dataclass(slots=True)
class Size:
    """Of a value with everything in it, each part as often as it is there."""

    parts: int = 0
    characters: int = 0
    """Of texts and numbers; those of texts as they are, without quotes."""
    depth: int = 0


def measure(value: Any) -> Size:
    """Return the size of a value; counts a step for each part.

    Raises:
        OverBound: it has too many parts, as a list of two that are each a list of the same two, or too many levels.
    """
    if isinstance(value, str):
        scan(len(value))
        return Size(1, len(value), 1)
    size, level = Size(), [value]
    while level:
        inner: list[Any] = []
        for one in level:
            if isinstance(one, str):
                size.characters += len(one)
            elif isinstance(one, _CONTAINERS):
                inner += _parts(one)
            else:
                size.characters += 1 + one.bit_length() // 3 if isinstance(one, int) else 32
        size.parts += len(level)
        size.depth += 1
        if size.depth > MAX_TEMPLATE_DEPTH:
            raise OverBound("levels of a value", MAX_TEMPLATE_DEPTH)
        level = inner
    scan(size.characters)
    return size


def _parts(container: Any) -> Any:
    if isinstance(container, Namespace):
        container = container._Namespace__attrs
    budget().step(2 * len(container))
    if isinstance(container, dict):
        return (*container.keys(), *container.values())
    return container


def is_plain(value: Any) -> bool:
    """Whether a value is no text and has no parts."""
    return not isinstance(value, _TEXT_OR_CONTAINER)


def text(value: Any) -> str:
    """Return ``str(value)``. Raises ``OverBound``."""
    if isinstance(value, str):
        return value
    if not is_plain(value):
        size = measure(value)
        budget().require(4 * (size.characters + size.parts))
    made(written := str(value))
    return written


def items(values: Any) -> Any:
    """Return the elements of something that can be gone through once, as a list; anything else as it is."""
    if isinstance(values, Collection):
        budget().step(len(values))
    if isinstance(values, str):
        budget().require(len(values) * (8 if values.isascii() else _CHARACTER_BYTES))
    elif isinstance(values, Iterator):
        found = []
        for value in values:
            budget().step()
            found.append(value)
        return made(found)
    return values


def require_format(template: str, arguments: Any) -> None:
    """Raise ``OverBound`` if ``template % arguments`` may become too large."""
    given = [*arguments.values()] if isinstance(arguments, dict) else arguments
    given = given if isinstance(given, list | tuple) else [given]
    numbers = [abs(one) for one in given if isinstance(one, int)]
    largest = max((measure(one).characters for one in given), default=0)
    # Safety: every number of the text may be a width; how Python reads a key between % and width is not repeated here.
    widths = digits(template) + template.count("*") * max(numbers, default=0)
    budget().require(4 * (len(template) + widths + template.count("%") * (largest + 32)))


def digits(template: str) -> int:
    """Return the sum of the numbers in a text."""
    return sum(int(number[:12]) for number in _NUMBER.findall(template))


def require_pieces(text: str, separator: Any, most: Any) -> None:
    """Raise ``OverBound`` if the parts of a text between separators may take too much memory."""
    count = text.count(separator) if isinstance(separator, str) and separator else len(text) // 2
    if isinstance(most, int) and most >= 0:
        count = min(count, most)
    budget().require(text_bytes(text) + 64 * count)


def require_replace(text: str, old: Any, new: Any, most: Any = None) -> None:
    """Raise ``OverBound`` if a text in which ``new`` stands for ``old`` may become too large."""
    if not isinstance(old, str) or not isinstance(new, str):
        return
    count = text.count(old)
    if isinstance(most, int) and most >= 0:
        count = min(count, most)
    budget().require((len(text) + count * len(new)) * (1 if text.isascii() and new.isascii() else 4))
