"""The rooms of ``pagedcore`` in their order, and which of them import which."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from architecture.sources import SOURCES, Source

STOREYS: dict[str, dict[str, tuple[str, ...]]] = {
    "ground": {
        "ground": ("_version", "embedding_defaults", "errors", "lazy_names", "outputs", "protocols", "shares",
                   "text_head"),
        "demo_model": ("demo_model",),
        "config": ("config",),
        "vocabulary": (
            "generation_defaults", "request_options", "sampling_params", "sequence", "structured_output"),
    },
    "text": {
        "tokenizer": ("tokenizer",),
        "structured": ("structured",),
        "tool_calls": ("tool_calls",),
    },
    "scheduling": {
        "drafting": ("drafting",),
        "kv_cache": ("kv_cache",),
        "scheduler": ("scheduler",),
    },
    "computing": {
        "execution": ("execution",),
        "updates": ("models.lora",),
        "linears": ("models.linears",),
        "attention": ("models.attention",),
        "families": ("models.families",),
        "checkpoints": ("models.checkpoints",),
        "decoders": ("models.decoders",),
        "models": ("models",),
    },
    "requests": {
        "lora": ("lora",),
        "requests": ("requests",),
        "sessions": ("sessions",),
    },
    "engine": {
        "plugins": ("plugins",),
        "engine": ("engine",),
        "serving": ("serving",),
    },
    "analysis": {
        "metrics": ("metrics",),
        "diagnosis": ("analysis.diagnosis",),
        "recorder": ("analysis.recorder",),
        "quotes": ("analysis.quotes",),
        "load_simulation": ("analysis.load_simulation",),
        "replay": ("analysis.replay",),
    },
    "tools": {
        "convert": ("convert",),
        "bench": ("bench",),
        "cli": ("cli", "__main__"),
    },
}
"""Every storey, its rooms, and the modules or folders of ``pagedcore`` that each room has. A room imports only rooms
before it; a folder inside of another is named by both, and belongs to its own room."""
ROOM_OF = {part: room for rooms in STOREYS.values() for room, parts in rooms.items() for part in parts}
ORDER = [room for rooms in STOREYS.values() for room in rooms]


def room_of(module: str) -> str | None:
    """Return the room of a module, ``None`` outside of the core and for the package's own ``__init__``."""
    package, *names = module.split(".")
    if package == "pagedcore":
        for length in range(len(names), 0, -1):
            if (room := ROOM_OF.get(".".join(names[:length]))) is not None:
                return room
    return None


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
    for source in SOURCES:
        room = room_of(source.module)
        for module in imported_modules(source) if room is not None else ():
            if (name := room_of(module) or module.partition(".")[0]) not in (room, "pagedcore"):
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
