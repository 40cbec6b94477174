"""Draws two prompts with one beginning over KV blocks and states, as the scheduler ran them: docs/recurrent.svg."""

from __future__ import annotations

from typing import NamedTuple

from architecture.svg import Picture
from pagedcore.kv_cache.hybrid_blocks import HybridBlocks
from support.doubles import make_scheduler, make_sequence, run_step

BLOCK, NUM_SHARED = 64, 256
#: Name, own tokens, and tokens that are generated.
REQUESTS = (("A", 120, 8), ("B", 200, 8))
_WIDTH, _LEFT, _SCALE, _TOP, _GROUP = 860, 60, 1.5, 104, 126


class Row(NamedTuple):
    """What one step computed of a request, and whether the state behind it can be found."""

    step: int
    start: int
    end: int
    is_kept: bool


class Story(NamedTuple):
    """One request: where it began, its rows, and the positions of its states that are kept in the end."""

    name: str
    num_found: int
    rows: list[Row]
    kept: list[int]


def run() -> list[Story]:
    """Run both requests at once; return what happened to each."""
    scheduler = make_scheduler(64, BLOCK, max_num_seqs=4, max_num_batched_tokens=512, num_states=16)
    blocks = scheduler.kv_cache.device
    assert isinstance(blocks, HybridBlocks)
    sequences, rows = [], dict[int, list[Row]]()
    for number, (_, num_own, max_tokens) in enumerate(REQUESTS):
        own = range(1000 * (number + 1), 1000 * (number + 1) + num_own)
        sequences.append(make_sequence([*range(NUM_SHARED), *own], max_tokens, sequence_id=number))
        rows[number] = []
    scheduler.add_sequences(*sequences)
    step = 0
    while scheduler.has_work:
        step += 1
        for row in run_step(scheduler).rows:
            rows[row.sequence.sequence_id].append(Row(step, row.start, row.end, row.keeps_state))
    stories = []
    for one, (name, _, _) in zip(sequences, REQUESTS, strict=True):
        kept = [end for end in range(1, len(one.token_ids)) if blocks.find(one, end).num_tokens == end]
        stories.append(Story(name, rows[one.sequence_id][0].start, rows[one.sequence_id], kept))
    return stories


def draw() -> str:
    """Return the picture."""
    stories = run()
    picture = Picture(_WIDTH, _TOP + _GROUP * len(stories) + 62, "KV blocks and states of two prompts that begin alike")
    picture.words(24, 34, "Two prompts that begin alike, and their states", "loud", size=18, bold=True, anchor="start")
    head = (f"Blocks of {BLOCK} tokens; each bar is what a step computes, the last one a token a step. A numbered",
            "state can be found by whoever begins with the same tokens, at exactly this position; all others are "
            "overwritten in turns.")
    for y, words in zip((56, 73), head, strict=True):
        picture.words(24, y, words, "quiet", size=12.5, anchor="start")
    numbers: dict[tuple[str, int], int] = {}
    for place, story in enumerate(stories):
        for end in story.kept:
            numbers.setdefault((story.name if end > NUM_SHARED else "", end), len(numbers) + 1)
        own = {end: number for (name, end), number in numbers.items() if name in ("", story.name)}
        _draw_story(picture, _TOP + place * _GROUP, story, own)
    y = _TOP + len(stories) * _GROUP + 20
    for x, kind, words in ((24, "memory", "KV blocks that both share"), (238, "request", "KV blocks of one's own")):
        picture.box(x, y - 13, 22, 18, kind)
        picture.words(x + 32, y, words, "loud", size=12.5, anchor="start")
    picture.dot(446, y - 4, 1, "compute")
    picture.words(466, y, "a state that is kept, with the block that ends there", "loud", size=12.5, anchor="start")
    foot = "Each running request has two states for a step, one that it reads and one that it writes, and one between."
    picture.words(24, y + 24, foot, "quiet", size=12.5, anchor="start")
    return picture.text


def _x(position: float) -> float:
    return _LEFT + position * _SCALE


def _draw_story(picture: Picture, top: float, story: Story, numbers: dict[int, int]) -> None:
    last = story.rows[-1].end
    picture.words(24, top + 27, story.name, "loud", size=15, bold=True, anchor="start")
    for start in range(0, last, BLOCK):
        kind = "memory" if start < NUM_SHARED else "request"
        width = (min(last, start + BLOCK) - start) * _SCALE - 3
        picture.box(_x(start), top + 6, width, 34, kind)
        if width > 60:
            picture.words(_x(start) + width / 2, top + 28, f"{start} – {start + BLOCK - 1}", f"{kind}-text", size=12)
    for end, number in numbers.items():
        picture.dot(_x(end) - 1.5, top + 54, number, "compute")
    if story.num_found:
        picture.gap(_x(0), top + 74, story.num_found * _SCALE - 3, 24)
        picture.words(_x(story.num_found / 2), top + 91, f"found, and goes on from state {numbers[story.num_found]}",
                      "quiet", size=12)
    prefill = [row for row in story.rows if row.end - row.start > 1]
    for row in prefill:
        width = (row.end - row.start) * _SCALE - 3
        picture.bar(_x(row.start), top + 74, width, 24, "engine")
        words = f"step {row.step}: {row.end - row.start} tokens" if width > 100 else f"{row.step}"
        picture.words(_x(row.start) + width / 2, top + 91, words, "panel", size=12, bold=True)
    decode = story.rows[len(prefill) :]
    x, width = _x(decode[0].start), (last - decode[0].start) * _SCALE
    picture.bar(x, top + 74, width, 24, "door")
    words = f"steps {decode[0].step}–{decode[-1].step}"
    picture.words(x + width + 6, top + 91, words, "quiet", size=12, anchor="start")
