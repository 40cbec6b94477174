"""Draws the storeys and their rooms, and tells them as a table, from the list that the layer test checks:
docs/architecture.svg and docs/architecture.md."""

from __future__ import annotations

import ast

from architecture.rooms import STOREYS
from architecture.sources import ROOT
from architecture.svg import Picture

#: What each room owns, in the fewest words.
WORDS: dict[str, str] = {
    "pagedcore_asyncgen": "async generators", "pagedcore_langchain": "LLM and chat model",
    "pagedcore_bentoml": "a BentoML service", "pagedcore_openai": "OpenAI's interface",
    "pagedcore_ray": "Ray Serve replicas", "pagedcore_otel": "spans", "pagedcore_pytest": "a model in tests",
    "pagedcore_http": "for HTTP doors", "pagedcore_trl": "rollouts for TRL",
    "cli": "the command pagedcore", "bench": "workloads, reports", "convert": "makes quantised files",
    "metrics": "what is measured", "load_simulation": "load, virtual clock", "replay": "recordings again",
    "quotes": "when, and promises", "diagnosis": "why, and laws",
    "recorder": "decisions, kept", "plugins": "named tables, hooks", "engine": "the step loop",
    "serving": "an engine on a thread", "lora": "adapters by name",
    "requests": "from prompt to output", "tool_calls": "calls and reasoning", "sessions": "wait, fork, travel",
    "execution": "a plan becomes tokens", "updates": "adapters of rows", "linears": "weights, products",
    "attention": "paged attention",
    "families": "known kinds", "checkpoints": "files to weights", "decoders": "modules to a step",
    "models": "a ModelBackend",
    "drafting": "what may follow", "kv_cache": "which block holds what", "scheduler": "who runs next",
    "tokenizer": "text, tokens, chats", "structured": "grammars and masks",
    "ground": "errors, outputs, ports", "demo_model": "weights in the wheel", "config": "settings, limits",
    "vocabulary": "parameters, sequences",
}
#: Of rooms without a folder.
OWNS = {
    "ground": "What is said: failures, results, ports; names that are imported when they are used, and places for work "
              "of several owners",
    "vocabulary": "What one request wants, and one sequence with its legal moves",
}
DOORS = [name for name in WORDS if name.startswith("pagedcore_")]
KERNELS = "pagedcore_kernels"
CORE = ROOT / "pagedcore"
#: The colour of each storey, and what it says of itself.
BANDS: dict[str, tuple[str, str]] = {
    "doors": ("door", "packages of their own, over public names"),
    "tools": ("ground", "programs over public names"),
    "analysis": ("engine", "what watches, predicts, records or replays an engine"),
    "engine": ("engine", "the loop, its construction, its thread"),
    "requests": ("request", "one request, one conversation; never steps"),
    "computing": ("compute", "one planned step becomes tokens and moved bytes"),
    "scheduling": ("memory", "who runs next, on which blocks; knows no device, clock or text"),
    "text": ("request", "text, grammars and calls, from and to tokens"),
    "ground": ("ground", "what is said: failures, results, ports, settings, one sequence"),
}
_WIDTH, _LEFT, _TOP, _BAND, _GAP = 1280, 74, 84, 104, 12


def draw() -> str:
    """Return the picture: a band for each storey, the highest first."""
    bands = {"doors": DOORS, **{storey: list(STOREYS[storey]) for storey in reversed(STOREYS)}}
    height = _TOP + len(bands) * (_BAND + _GAP) + _BAND // 2 + 28
    picture = Picture(_WIDTH, height, "The storeys of pagedcore and their rooms")
    picture.words(_LEFT, 38, "The storeys of pagedcore", "loud", size=21, bold=True, anchor="start")
    picture.words(_LEFT, 62, "A file imports from its own room, from rooms to its left, and from storeys below; no two "
                  "files import each other.", "quiet", size=14, anchor="start")
    for place, (storey, rooms) in enumerate(bands.items()):
        _draw_band(picture, _TOP + place * (_BAND + _GAP), storey, *BANDS[storey], rooms)
    _draw_band(picture, _TOP + len(bands) * (_BAND + _GAP), KERNELS, "compute",
               "attention, products, sampling and copies, compiled by Numba; a package that imports none of these", [])
    picture.arrow([(36, _TOP + 8), (36, height - 32)])
    return picture.text


def table() -> str:
    """Return the rooms as a table, the lowest first: a folder's sentence is its own."""
    lines = ["| storey | room | owns |", "|---|---|---|"]
    for storey, rooms in STOREYS.items():
        for place, (room, parts) in enumerate(rooms.items()):
            lines.append(f"| {storey if not place else ''} | {_name(parts)} | {_sentence(room, parts)} |")
    return "\n".join(lines) + "\n"


def _name(parts: tuple[str, ...]) -> str:
    files = [part for part in parts if (CORE / f"{part}.py").is_file() and not part.startswith("_")]
    folders = [part.replace(".", "/") + "/" for part in parts if part not in files and not part.startswith("_")]
    return " ".join(f"`{name}`" for name in (*folders, *(f"{file}.py" for file in files)))


def _sentence(room: str, parts: tuple[str, ...]) -> str:
    file = CORE / parts[0].replace(".", "/") / "__init__.py"
    if not file.is_file():
        return OWNS[room]
    doc = str(ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))).partition("\n")[0]
    return doc.replace("``", "`").rstrip(".")


def _draw_band(picture: Picture, top: float, name: str, kind: str, sentence: str, rooms: list[str]) -> None:
    picture.box(_LEFT, top, _WIDTH - _LEFT - 28, _BAND if rooms else _BAND / 2, "panel")
    picture.bar(_LEFT, top, 6, _BAND if rooms else _BAND / 2, kind)
    picture.words(_LEFT + 20, top + 24, name, "loud", size=16, bold=True, anchor="start")
    picture.words(_LEFT + 36 + 10.2 * len(name), top + 24, sentence, "quiet", size=13.5, anchor="start")
    room_width = (_WIDTH - _LEFT - 28 - 32) / max(4, len(rooms))
    for place, room in enumerate(rooms):
        left = _LEFT + 20 + place * room_width
        picture.box(left, top + 38, room_width - 8, 54, kind)
        middle = left + (room_width - 8) / 2
        picture.words(middle, top + 61, room.removeprefix("pagedcore_"), f"{kind}-text", size=15, bold=True)
        picture.words(middle, top + 80, WORDS[room], f"{kind}-text", size=12.5)
