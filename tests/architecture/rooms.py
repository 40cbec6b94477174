"""The rooms of ``pagedcore`` in their order, and which of them import which."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from architecture.sources import SOURCES, Source

ROOMS: dict[str, tuple[str, ...]] = {
    "ground": ("_version", "errors", "lazy_names", "outputs", "protocols"),
    "demo_model": ("demo_model",),
    "config": ("config",),
    "vocabulary": ("request_options", "sampling_params", "sequence", "structured_output"),
    "tokenizer": ("tokenizer",),
    "kv_cache": ("kv_cache",),
    "scheduler": ("scheduler",),
    "execution": ("execution",),
    "models": ("models",),
    "structured": ("structured",),
    "requests": ("requests",),
    "tool_calls": ("tool_calls",),
    "sessions": ("sessions",),
    "recorder": ("recorder",),
    "plugins": ("plugins",),
    "engine": ("engine",),
    "simulation": ("simulation",),
    "serving": ("serving",),
    "replay": ("replay",),
    "metrics": ("metrics",),
    "bench": ("bench",),
    "cli": ("cli", "__main__"),
}
"""Every room and the modules or folders of ``pagedcore`` that it has. A room imports only rooms before it."""
ROOM_OF = {part: room for room, parts in ROOMS.items() for part in parts}
ORDER = list(ROOMS)


def room_of(source: Source) -> str | None:
    """Return a file's room, ``None`` outside of the core and for the package's own ``__init__``."""
    return ROOM_OF.get(source.part) if source.package == "pagedcore" else None


def imported_modules(source: Source) -> Iterator[str]:
    """Yield the module of this project behind everything that a file imports."""
    modules = {one.module for one in SOURCES}
    for module, name in source.imports():
        full = f"{module}.{name}"
        if full in modules:
            yield full
        elif module in modules:
            yield module


def room_imports() -> dict[str, set[str]]:
    """Return the rooms, and the packages beside the core, that each room imports."""
    found: dict[str, set[str]] = defaultdict(set)
    by_module = {one.module: one for one in SOURCES}
    for source in SOURCES:
        room = room_of(source)
        for module in imported_modules(source) if room is not None else ():
            other = by_module[module]
            if (name := room_of(other) or other.package) not in (room, "pagedcore"):
                found[room or ""].add(name)
    return found


def circles() -> list[list[str]]:
    """Return every set of files that import each other in a ring."""
    graph = {source.module: set(imported_modules(source)) - {source.module} for source in SOURCES}
    found, index, low, stack, order = [], dict[str, int](), dict[str, int](), list[str](), [0]

    def visit(node: str) -> None:
        # Tarjan's strongly connected components (1972).
        index[node] = low[node] = order[0]
        order[0] += 1
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            ring = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(ring) > 1:
                found.append(sorted(ring))

    for node in graph:
        if node not in index:
            visit(node)
    return found
