"""Draws the rooms and which of them import which, from the imports of the shipped files: docs/architecture.svg.

An arrow is an import. One that a way of other arrows shows already is left out; one against the order is red. The
places are given by hand, the arrows find their ways between the boxes.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator

import pagedcore
from architecture.rooms import ORDER, ROOM_OF, imported_modules, room_imports
from architecture.sources import SOURCES
from architecture.svg import Picture, Point

#: Row and column of every room and package, its colour, and what it owns.
PLACES: dict[str, tuple[int, int, str, str]] = {
    "pagedcore_asyncgen": (0, 0, "door", "one callable, async generators"),
    "pagedcore_langchain": (0, 1, "door", "chat and completion models"),
    "pagedcore_bentoml": (0, 2, "door", "an engine as a BentoML service"),
    "pagedcore_openai": (1, 1, "door", "OpenAI's interface, and serve"),
    "pagedcore_otel": (3, 3, "door", "spans for OpenTelemetry"),
    "pagedcore_ray": (2, 3, "door", "replicas on Ray Serve"),
    "pagedcore_http": (0, 3, "door", "what every HTTP door shares"),
    "pagedcore_pytest": (1, 3, "door", "a real model in tests"),
    "cli": (1, 0, "door", "the command pagedcore"),
    "metrics": (1, 2, "engine", "what is measured and shown"),
    "bench": (2, 0, "door", "workloads and reports"),
    "simulation": (2, 2, "engine", "load on a virtual clock"),
    "serving": (2, 1, "engine", "the engine on a thread of its own"),
    "engine": (3, 1, "engine", "the step loop and its construction"),
    "replay": (3, 0, "door", "recorded steps, taken again"),
    "recorder": (4, 1, "engine", "decisions, kept for a replay"),
    "plugins": (4, 2, "engine", "named tables, observing hooks"),
    "sessions": (4, 0, "request", "conversations: wait, fork, travel"),
    "tool_calls": (4, 1, "request", "calls of tools, reasoning"),
    "requests": (5, 0, "request", "one request, prompt to output"),
    "structured": (6, 0, "request", "grammars, and masks by them"),
    "models": (5, 2, "compute", "a model becomes a ModelBackend"),
    "execution": (6, 2, "compute", "a planned step becomes tokens"),
    "scheduler": (7, 1, "memory", "who runs next"),
    "kv_cache": (8, 1, "memory", "which block holds what, for whom"),
    "tokenizer": (7, 0, "request", "text to tokens and back"),
    "vocabulary": (9, 1, "request", "sampling parameters, sequences"),
    "demo_model": (6, 3, "ground", "shipped weights, its questions"),
    "config": (10, 1, "ground", "what operators set, and limits"),
    "ground": (11, 1, "ground", "failures, results, ports"),
    "pagedcore_ptxsim": (11, 3, "compute", "runs PTX on a CPU, for the tests"),
    "pagedcore_kernels": (11, 2, "compute", "attention, products, sampling"),
}
KERNELS = "pagedcore_kernels"
_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _LEFT, _TOP = 222, 52, 56, 34, 40, 92
_LEGEND = {
    "door": "doors: adapters and commands", "engine": "engine: loop, threads, plugins",
    "request": "requests: text, conversations", "memory": "decisions: who runs, which block",
    "compute": "computation: models and kernels", "ground": "ground: settings, errors, ports",
}

Graph = dict[str, set[str]]


def graph() -> Graph:
    """Return what every room and every package imports; adapters import the rooms behind the public names."""
    found: Graph = defaultdict(set, room_imports())
    for source in SOURCES:
        if source.package != "pagedcore":
            modules = {*imported_modules(source), *(pagedcore._HOMES.get(name, "") for _, name in source.imports())}
            for module in filter(None, modules):
                package, _, rest = module.partition(".")
                room = ROOM_OF.get(rest.partition(".")[0], "")
                found[source.package].add(room if package == "pagedcore" else package)
            found[source.package] -= {source.package, ""}
    return found


def rank(name: str) -> int:
    """A number by which imports only go down: kernels, rooms in their order, adapters."""
    return -1 if name == KERNELS else ORDER.index(name) if name in ORDER else len(ORDER)


def shown(edges: Graph) -> Iterator[tuple[str, str]]:
    """Yield the imports that no way of other imports shows; a room's own use of the kernels always is one."""
    down = {name: {other for other in others if rank(other) < rank(name) or rank(other) == len(ORDER) != rank(name)}
            for name, others in edges.items()}
    down["ground"] = down.get("ground", set()) - {KERNELS}
    for name, others in sorted(edges.items()):
        for other in sorted(others):
            if not any(other in _reach(down, via) for via in down.get(name, set()) - {other}):
                yield name, other


def _reach(edges: Graph, start: str) -> set[str]:
    found, open_ = set[str](), [start]
    while open_:
        new = edges.get(open_.pop(), set()) - found
        found |= new
        open_ += new
    return found


def _rectangle(name: str) -> tuple[float, float, float, float]:
    row, column, _, _ = PLACES[name]
    x, y = _LEFT + column * (_WIDTH + _GAP_X), _TOP + row * (_HEIGHT + _GAP_Y)
    return x, y, x + _WIDTH, y + _HEIGHT


class _Router:
    """Leads arrows through the gaps; each one takes the shortest way that crosses no box and lies on no other arrow."""

    def __init__(self, names: list[str]) -> None:
        self._boxes = {name: _rectangle(name) for name in names}
        self._taken: list[tuple[Point, Point]] = []

    def way(self, start: str, end: str) -> list[Point]:
        middles = [sum(self._boxes[name][::2]) / 2 for name in (start, end)]
        ways = sorted(self._ways(start, end), key=lambda way: (_cost(way, middles), way))
        chosen = next((way for way in ways if self._is_free(way)), ways[0])
        self._taken += itertools.pairwise(chosen)
        return chosen

    def _ways(self, start: str, end: str) -> Iterator[list[Point]]:
        left, top, right, bottom = self._boxes[start]
        left2, top2, right2, bottom2 = self._boxes[end]
        if top == top2:
            yield from ([(right, y), (left2, y)] if left < left2 else [(left, y), (right2, y)]
                        for y in _spread(top, bottom))
        out, into = ((bottom, top2) if top2 > top else (top, bottom2))
        down = 1 if top2 > top else -1
        for x, x2 in itertools.product(_spread(left, right), _spread(left2, right2)):
            if x == x2:
                yield [(x, out), (x, into)]
            for bend in (17 * down, 11 * down, 23 * down):
                yield [(x, out), (x, out + bend), (x2, out + bend), (x2, into)]
                yield [(x, out), (x, into - bend), (x2, into - bend), (x2, into)]
                for lane in self._lanes():
                    ends = (x2, into - bend), (x2, into)
                    yield [(x, out), (x, out + bend), (lane, out + bend), (lane, into - bend), *ends]

    def _lanes(self) -> Iterator[float]:
        for column in range(5):
            middle = _LEFT + column * (_WIDTH + _GAP_X) - _GAP_X / 2
            yield from (middle + shift for shift in (0, -12, 12))

    def _is_free(self, way: list[Point]) -> bool:
        return not any(_crosses(line, box) for line in itertools.pairwise(way) for box in self._boxes.values()) and (
            not any(_overlap(line, other) for line in itertools.pairwise(way) for other in self._taken))


def _spread(low: float, high: float) -> list[float]:
    middle = (low + high) / 2
    return [middle] + [middle + sign * share * (high - low) for share in (0.2, 0.36, 0.1) for sign in (-1, 1)]


def _cost(way: list[Point], middles: list[float]) -> float:
    """Length, corners, and how far from the middles of its boxes it begins and ends."""
    length = sum(abs(x - x0) + abs(y - y0) for (x0, y0), (x, y) in itertools.pairwise(way))
    return length + 30 * len(way) + 1.2 * (abs(way[0][0] - middles[0]) + abs(way[-1][0] - middles[1]))


def _crosses(line: tuple[Point, Point], box: tuple[float, float, float, float]) -> bool:
    (x0, y0), (x1, y1) = line
    left, top, right, bottom = box
    return max(x0, x1) > left and min(x0, x1) < right and max(y0, y1) > top and min(y0, y1) < bottom


def _overlap(line: tuple[Point, Point], other: tuple[Point, Point]) -> bool:
    """Whether two lines of one direction lie on each other or nearly so."""
    for axis in (0, 1):
        low, high = sorted((line[0][1 - axis], line[1][1 - axis]))
        low2, high2 = sorted((other[0][1 - axis], other[1][1 - axis]))
        flat = line[0][axis] == line[1][axis] and other[0][axis] == other[1][axis]
        if flat and abs(line[0][axis] - other[0][axis]) < 6 and low < high2 + 4 and low2 < high + 4:
            return True
    return False


def draw() -> str:
    """Return the picture."""
    edges = graph()
    names = [name for name in PLACES if name in {*ORDER, KERNELS, *edges}]
    width = 2 * _LEFT + 4 * _WIDTH + 3 * _GAP_X
    height = _TOP + 12 * (_HEIGHT + _GAP_Y)
    picture = Picture(width, height, "The rooms of pagedcore and which of them import which")
    picture.words(_LEFT, 40, "The rooms of pagedcore", "loud", size=21, bold=True, anchor="start")
    arrows = sorted(shown(edges), key=lambda edge: (_far(*edge), edge))
    caption = "An arrow is an import. Imports that a path of arrows already shows are left out."
    caption += " Red: against the order." * any(rank(start) < rank(end) for start, end in arrows)
    picture.words(_LEFT, 63, caption, "quiet", anchor="start")
    router = _Router(names)
    for start, end in arrows:
        picture.arrow(router.way(start, end), wrong=rank(start) < rank(end))
    for name in names:
        _draw_box(picture, name)
    for number, (kind, words) in enumerate(_LEGEND.items()):
        y = _TOP + 1.2 * (_HEIGHT + _GAP_Y) + 24 * number
        picture.box(_LEFT + 3 * (_WIDTH + _GAP_X) - 24, y, 20, 14, kind)
        picture.words(_LEFT + 3 * (_WIDTH + _GAP_X) + 6, y + 11.5, words, "quiet", size=12.5, anchor="start")
    return picture.text


def _far(start: str, end: str) -> int:
    return abs(PLACES[start][0] - PLACES[end][0]) + abs(PLACES[start][1] - PLACES[end][1])


def _draw_box(picture: Picture, name: str) -> None:
    left, top, right, bottom = _rectangle(name)
    _, _, kind, sentence = PLACES[name]
    x, y = (left + right) / 2, (top + bottom) / 2
    picture.box(left, top, right - left, bottom - top, kind)
    picture.words(x, y - 4, name, f"{kind}-text", size=15, bold=True)
    picture.words(x, y + 15, sentence, f"{kind}-text", size=12)
