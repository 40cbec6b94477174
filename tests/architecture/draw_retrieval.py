"""Draws how a question finds its documents: vectors, a reranker, a chat; docs/retrieval.svg."""

from __future__ import annotations

from architecture.svg import Picture

_WIDTH, _HEIGHT, _LEFT = 900, 372, 36
_STEPS = (
    ("1", "embed", "the question's vector beside", "those of all documents"),
    ("2", "rerank", "the question together with", "each of a few candidates"),
    ("3", "chat", "an answer from the best", "of them"),
)
_COLUMN, _GAP = 252, 36
#: How relevant the candidates are, as bars.
_SCORES = (("B", 0.92), ("A", 0.41), ("C", 0.08))


def draw() -> str:
    """Return the picture."""
    picture = Picture(_WIDTH, _HEIGHT, "Retrieve with vectors, rerank, answer")
    picture.words(_LEFT, 36, "A question finds its documents in three steps", "loud", size=18, bold=True,
                  anchor="start")
    picture.words(_LEFT, 58, "many documents are compared cheaply, a few are read with the question, the best are used",
                  "quiet", size=12.5, anchor="start")
    for place, (number, verb, first, second) in enumerate(_STEPS):
        x = _LEFT + place * (_COLUMN + _GAP)
        picture.box(x, 78, _COLUMN, 62, "door" if verb == "rerank" else "engine")
        kind = "door-text" if verb == "rerank" else "engine-text"
        picture.words(x + 14, 98, f"{number}  engine.{verb}", kind, size=13.5, bold=True, anchor="start")
        picture.words(x + 14, 116, first, kind, size=12, anchor="start")
        picture.words(x + 14, 131, second, kind, size=12, anchor="start")
        if place:
            picture.arrow([(x - _GAP + 3, 109), (x - 3, 109)])
    _documents(picture, _LEFT)
    _candidates(picture, _LEFT + _COLUMN + _GAP)
    _answer(picture, _LEFT + 2 * (_COLUMN + _GAP))
    picture.words(_WIDTH / 2, 352, "1 and 3 may be one engine: vectors are made in the steps of its chats", "quiet",
                  size=12.5)
    return picture.text


def _documents(picture: Picture, x: float) -> None:
    """Many small boxes, of which three are near to the question."""
    picture.words(x, 168, "vectors of all documents", "quiet", size=12, anchor="start")
    near = {(1, 2): "A", (4, 0): "B", (5, 3): "C"}
    for column in range(8):
        for row in range(5):
            name = near.get((column, row))
            picture.box(x + column * 31, 180 + row * 27, 26, 21, "memory" if name else "ground")
            if name:
                picture.words(x + column * 31 + 13, 195 + row * 27, name, "memory-text", size=12, bold=True)
    picture.words(x, 332, "computed once, kept in a store", "quiet", size=12, anchor="start")


def _candidates(picture: Picture, x: float) -> None:
    """Each candidate behind what all share, and its score."""
    picture.words(x, 168, "one text for each candidate", "quiet", size=12, anchor="start")
    for place, (name, score) in enumerate(_SCORES):
        y = 180 + place * 46
        picture.box(x, y, 116, 26, "request")
        picture.words(x + 58, y + 17, "question", "request-text", size=12)
        picture.box(x + 120, y, 40, 26, "memory")
        picture.words(x + 140, y + 17, name, "memory-text", size=12, bold=True)
        picture.bar(x + 170, y + 8, max(3, score * 52), 10, "compute")
        picture.words(x + 252, y + 17, f"{score:.2f}", "loud", size=12, anchor="end")
        picture.words(x, y + 40, "computed once" if place == 0 else "from the prefix cache", "quiet", size=11,
                      anchor="start")
    picture.words(x, 332, "scores, best first", "quiet", size=12, anchor="start")


def _answer(picture: Picture, x: float) -> None:
    """The prompt of the chat, and what it says."""
    picture.words(x, 168, "the prompt", "quiet", size=12, anchor="start")
    for place, (text, kind) in enumerate((("B", "memory"), ("A", "memory"), ("question", "request"))):
        width = 116 if kind == "request" else 62
        left = x + place * 68
        picture.box(left, 180, width, 26, kind)
        picture.words(left + width / 2, 197, text, f"{kind}-text", size=12, bold=kind == "memory")
    picture.arrow([(x + 126, 212), (x + 126, 240)])
    picture.box(x, 246, _COLUMN, 40, "compute")
    picture.words(x + _COLUMN / 2, 271, "the answer", "compute-text", size=13.5, bold=True)
    picture.words(x, 332, "only what is relevant is read", "quiet", size=12, anchor="start")
