"""Draws a step with drafts: where they come from, what is computed, and what is kept: docs/speculation.svg.

The drafts are those that ``Drafts`` proposes for the words of the picture.
"""

from __future__ import annotations

from architecture.svg import Picture
from pagedcore.drafting.drafts import Drafts

PROMPT = ["total", "=", "price", "*", "count", "-", "rebate", ";"]
COMPLETION = ["total", "=", "price"]
#: What the model goes on with.
DRAWN = ["*", "count", "+", "fee", ";"]
MOST = 4
_WIDTH, _LEFT, _CELL, _GAP = 1000, 36, 72, 6


def drafts() -> list[str]:
    """Return the words that are proposed behind the completion."""
    words = list(dict.fromkeys([*PROMPT, *COMPLETION, *DRAWN]))
    tokens = [words.index(word) for word in (*PROMPT, "?", *COMPLETION) if word in words]
    proposer = Drafts()
    proposer.begin(0, b"", tokens)
    return [words[token] for token in proposer.propose(0, tokens, MOST)]


def draw() -> str:
    """Return the picture."""
    guessed = drafts()
    num_right = next(place for place, pair in enumerate(zip(guessed, DRAWN, strict=False)) if pair[0] != pair[1])
    picture = Picture(_WIDTH, 556, "A step with drafts")
    _title(picture, 40, "1", "What followed these words before is guessed to follow again")
    start = len(PROMPT) - len(PROMPT[PROMPT.index("price") + 1 :])
    for place, word in enumerate(PROMPT):
        _cell(picture, place, 58, word, "memory" if start <= place < start + MOST else "ground")
    for place, word in enumerate(COMPLETION, len(PROMPT) + 1):
        _cell(picture, place, 58, word, "engine")
    picture.words(_x(0), 112, "prompt", "quiet", size=12.5, anchor="start")
    picture.words(_x(len(PROMPT) + 1), 112, "completion so far", "quiet", size=12.5, anchor="start")
    _title(picture, 156, "2", "One step computes the last known token and the drafts behind it, and gives a row of "
           "logits for each")
    _line(picture, 174, "computed", [COMPLETION[-1], *guessed], ["engine", *["memory"] * MOST])
    _title(picture, 254, "3", "Each place draws its token, with its own seed and position, while the ones before it "
           "were guessed right")
    drawn = [*DRAWN[: num_right + 1], *["not read"] * (MOST - num_right)]
    _line(picture, 272, "drawn", drawn, ["request"] * (num_right + 1) + [""] * (MOST - num_right))
    _line(picture, 326, "guessed", [*guessed, ""], [*["memory"] * MOST, ""])
    for place in range(MOST):
        is_right = place < num_right
        text = "equal" if is_right else "other" if place == num_right else ""
        picture.words(_x(place + 2) + _CELL / 2 - 3, 378, text, "quiet", size=12.5, bold=not is_right)
    num_new = num_right + 1
    _title(picture, 424, "4", f"The completion has {num_new} more tokens, the very ones that {num_new} steps would "
           "have given it")
    words = [*COMPLETION, *DRAWN[: num_right + 1]]
    _line(picture, 442, "completion", words, ["engine"] * len(COMPLETION) + ["request"] * (num_right + 1))
    picture.words(_LEFT, 512, "A wrong guess costs rows, never a token. What it left in the KV cache is written over "
                  "by the next step, and is never shared.", "quiet", size=13, anchor="start")
    picture.words(_LEFT, 534, "Drafts take what everything else has left of the token budget and of free blocks.",
                  "quiet", size=13, anchor="start")
    return picture.text


def _title(picture: Picture, y: float, number: str, words: str) -> None:
    picture.words(_LEFT, y, f"{number}  {words}", "loud", size=14.5, bold=True, anchor="start")


def _x(place: float) -> float:
    return _LEFT + place * (_CELL + _GAP)


def _cell(picture: Picture, place: float, y: float, word: str, kind: str) -> None:
    if kind:
        picture.box(_x(place), y, _CELL, 34, kind)
    elif word:
        picture.gap(_x(place), y, _CELL, 34)
    if word:
        picture.words(_x(place) + _CELL / 2, y + 22, word, f"{kind}-text mono" if kind else "quiet",
                      size=13.5 if kind else 12)


def _line(picture: Picture, y: float, name: str, words: list[str], kinds: list[str]) -> None:
    picture.words(_LEFT, y + 22, name, "loud", size=13, anchor="start")
    for place, (word, kind) in enumerate(zip(words, kinds, strict=True), 2):
        _cell(picture, place, y, word, kind)
