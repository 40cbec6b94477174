"""Draws static and continuous batching over three slots, as the engine ran them: docs/slots.svg."""

from __future__ import annotations

from architecture.svg import COLOURS, Picture
from pagedcore import SamplingParams
from support.engine_builders import make_engine

NUM_SLOTS = 3
#: Policy, title, and the tokens that each request generates; the first three are those of the source of the example.
RUNS = (
    ("static", "Static batching", (4, 12, 8)),
    ("fcfs", "Continuous batching", (4, 12, 8, 4, 4, 2)),
)
_WIDTH, _LEFT, _CELL, _TOP, _GROUP = 760, 110, 50, 92, 226


def slots(policy: str, lengths: tuple[int, ...]) -> list[list[int | None]]:
    """Run requests of these lengths, and return for each slot which of them had it in each step."""
    table: list[list[int | None]] = [[] for _ in range(NUM_SLOTS)]
    with make_engine(max_num_seqs=NUM_SLOTS, num_kv_blocks=64, scheduling_policy=policy) as engine:
        requests = [engine.add_request([1 + number], SamplingParams(max_tokens=length, ignore_eos=True))
                    for number, length in enumerate(lengths)]
        while engine.has_pending_requests():
            engine.step()
            ran = [number for number, request in enumerate(requests) if request.take_new_tokens()]
            kept = [row[-1] if row and row[-1] in ran else None for row in table]
            new = iter([number for number in ran if number not in kept])
            for row, number in zip(table, kept, strict=True):
                row.append(next(new, None) if number is None else number)
    return table


def useful(table: list[list[int | None]]) -> tuple[int, int]:
    """Return the places that computed a token, and all places."""
    places = [number for row in table for number in row]
    return len(places) - places.count(None), len(places)


def draw() -> str:
    """Return the picture."""
    picture = Picture(_WIDTH, _TOP + 2 * _GROUP + 6, "Three slots under static and under continuous batching")
    picture.words(24, 34, "Three slots, twelve steps", "loud", size=18, bold=True, anchor="start")
    picture.words(24, 56, "Each cell is one token that a request computes in a step; a dashed cell is idle.", "quiet",
                  size=12.5, anchor="start")
    for place, (policy, title, lengths) in enumerate(RUNS):
        _draw_run(picture, _TOP + place * _GROUP, title, slots(policy, lengths))
    return picture.text


def _draw_run(picture: Picture, top: float, title: str, table: list[list[int | None]]) -> None:
    kinds, (used, places) = list(COLOURS), useful(table)
    picture.words(24, top + 14, title, "loud", size=14.5, bold=True, anchor="start")
    picture.words(_WIDTH - 24, top + 14, f"{used} of {places} places compute a token: {used / places:.0%}", "loud",
                  size=14.5, bold=True, anchor="end")
    for row, numbers in enumerate(table):
        y = top + 32 + row * 46
        picture.words(_LEFT - 14, y + 25, f"slot {row + 1}", "quiet", size=13, anchor="end")
        for step, number in enumerate(numbers):
            x = _LEFT + step * _CELL
            if number is None:
                picture.gap(x + 2, y, _CELL - 4, 38)
            else:
                picture.box(x + 2, y, _CELL - 4, 38, kinds[number])
                picture.words(x + _CELL / 2, y + 24, f"R{number + 1}", f"{kinds[number]}-text", size=13, bold=True)
    for step in range(len(table[0])):
        picture.words(_LEFT + (step + 0.5) * _CELL, top + 32 + NUM_SLOTS * 46 + 12, str(step + 1), "quiet", size=11.5)
    picture.words(_LEFT - 14, top + 32 + NUM_SLOTS * 46 + 12, "step", "quiet", size=11.5, anchor="end")
