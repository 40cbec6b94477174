"""Draws the way of one request through the rooms, in eight steps: docs/request.svg. The steps are those of the page."""

from __future__ import annotations

from architecture.svg import Picture

#: What happens, how, the file that does it, and the colour of its room; docs/architecture.md has the same files.
STEPS = (
    ("accept", "one method for every door", "engine/engine.py", "engine"),
    ("tokenise, validate", "refuse what is out of bounds", "requests/input_processor.py", "request"),
    ("plan a step", "who runs, who gives up blocks", "scheduler/scheduler.py", "memory"),
    ("reserve blocks", "all of the step's, or none", "kv_cache/block_manager.py", "memory"),
    ("build the batch", "flat arrays, no padding", "execution/ragged_batch.py", "compute"),
    ("one forward", "the whole batch at once", "execution/model_runner.py", "compute"),
    ("sample", "each by its own seed", "execution/sampler.py", "compute"),
    ("commit, decode text", "finished ones free their blocks", "requests/output_processor.py", "request"),
)
_WIDTH, _HEIGHT, _GAP, _LEFT, _CALLER = 206, 92, 26, 24, 104
_ROWS = (34, 34 + _HEIGHT + 62)


def draw() -> str:
    """Return the picture."""
    width, height = _x(3) + _WIDTH + _LEFT, _ROWS[1] + _HEIGHT + 30
    picture = Picture(width, height, "The way of one request through the rooms of pagedcore")
    for number in range(1, len(STEPS)):
        _arrow_to(picture, number)
    middle, loop = _x(2) + _WIDTH / 2, _ROWS[0] + _HEIGHT + 31
    for row, (start, end) in enumerate(((_LEFT + _CALLER, _x(0)), (_x(0), _LEFT + _CALLER))):
        picture.arrow([(start, _ROWS[row] + _HEIGHT / 2), (end, _ROWS[row] + _HEIGHT / 2)])
    picture.arrow([(_x(0) + _WIDTH / 2, _ROWS[1]), (_x(0) + _WIDTH / 2, loop), (middle, loop),
                   (middle, _ROWS[0] + _HEIGHT)], dashed=True)
    picture.words((_x(0) + _WIDTH / 2 + middle) / 2, loop - 8, "not finished: the next step, one token more", "quiet")
    picture.box(_LEFT, _ROWS[0], _CALLER, _ROWS[1] + _HEIGHT - _ROWS[0], "door")
    for line, words in enumerate(("your", "program", "", "Python, asyncio,", "LangChain,", "BentoML")):
        picture.words(_LEFT + _CALLER / 2, _ROWS[0] + 80 + 20 * line, words, "door-text",
                      size=16 if line < 2 else 11.5, bold=line < 2)
    for number in range(len(STEPS)):
        _draw_step(picture, number)
    return picture.text


def _x(column: int) -> int:
    return _LEFT + _CALLER + _GAP + column * (_WIDTH + _GAP)


def _corner(number: int) -> tuple[int, int]:
    """Four steps to the right, four back."""
    return _x(min(number, 7 - number)), _ROWS[number // 4]


def _arrow_to(picture: Picture, number: int) -> None:
    (x0, y0), (x, y) = _corner(number - 1), _corner(number)
    if y0 != y:
        picture.arrow([(x + _WIDTH / 2, y0 + _HEIGHT), (x + _WIDTH / 2, y)])
    else:
        picture.arrow([(x0 + _WIDTH * (x > x0), y + _HEIGHT / 2), (x + _WIDTH * (x < x0), y + _HEIGHT / 2)])


def _draw_step(picture: Picture, number: int) -> None:
    what, how, file, kind = STEPS[number]
    x, y = _corner(number)
    picture.box(x, y, _WIDTH, _HEIGHT, kind)
    picture.dot(x + 1, y + 1, number + 1, kind)
    picture.words(x + _WIDTH / 2, y + 31, what, f"{kind}-text", size=16, bold=True)
    picture.words(x + _WIDTH / 2, y + 53, how, f"{kind}-text", size=12.5)
    picture.words(x + _WIDTH / 2, y + 76, file, f"{kind}-text", size=11, mono=True)
