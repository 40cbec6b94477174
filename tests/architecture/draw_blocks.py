"""Draws three sequences over one pool of blocks, as the block manager arranges them: docs/blocks.svg."""

from __future__ import annotations

from typing import NamedTuple

from architecture.svg import Picture
from pagedcore import SamplingParams
from pagedcore.kv_cache.block_manager import BlockManager
from pagedcore.kv_cache.reservation import Demand
from pagedcore.sequence import Sequence
from support.doubles import make_sequence

BLOCK_SIZE, NUM_BLOCKS = 4, 6
_FIRST = ["You", "are", "a", "guide", "Where", "is", "Oslo", "?", "Answer", "briefly"]
#: Name, colour, prompt, and what has been generated. The third is a second completion of the first one's prompt.
PROMPTS = (
    ("A", "engine", _FIRST, ["Norway"]),
    ("B", "request", ["You", "are", "a", "guide", "Which", "river", "flows", "through", "Rome", "?"], ["The"]),
    ("C", "memory", _FIRST, ["In"]),
)
NOTES = ("computes its prompt in three blocks", "begins like A: shares one block",
         "a second completion of A's prompt: shares two blocks, copies the third")
_WIDTH, _LEFT, _BLOCK, _TABLES, _POOL = 940, 40, 145, 92, 330


class Layout(NamedTuple):
    """Where everything is."""

    tables: list[list[int]]
    contents: dict[int, list[str]]
    """The words in each block that is held."""
    copies: list[tuple[int, int]]
    """Source and destination of each copied block."""
    num_holders: list[int]
    """Of each block."""


def arrange() -> Layout:
    """Let the block manager give the three sequences their blocks, one after another."""
    manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    words = sorted({word for _, _, prompt, _ in PROMPTS for word in prompt})
    tables, contents, copies = list[list[int]](), dict[int, list[str]](), list[tuple[int, int]]()
    for _, _, prompt, generated in PROMPTS:
        sequence = make_sequence([words.index(word) for word in prompt])
        sequence.params = SamplingParams(max_tokens=4, n=2)
        copies += _compute(manager, sequence, len(prompt) + len(generated))
        table = manager.table(sequence.sequence_id).block_ids.tolist()
        tables.append(table)
        for place, block in enumerate(table):
            contents[block] = (prompt + generated)[place * BLOCK_SIZE : (place + 1) * BLOCK_SIZE]
    return Layout(tables, contents, copies, list(manager.bookkeeping().device.reference_counts))


def _compute(manager: BlockManager, sequence: Sequence, num_tokens: int) -> tuple[tuple[int, int], ...]:
    """Compute the prompt, then hold ``num_tokens`` positions. Returns the blocks copied."""
    num_prompt = sequence.num_prompt_tokens
    reservation = manager.reserve([Demand(sequence.sequence_id, num_prompt, manager.match(sequence))])
    assert reservation is not None
    reservation.commit()
    sequence.num_computed_tokens = num_prompt
    manager.register(sequence, num_prompt)
    further = manager.reserve([Demand(sequence.sequence_id, num_tokens)])
    assert further is not None
    further.commit()
    return reservation.copies


def draw() -> str:
    """Return the picture."""
    layout = arrange()
    picture = Picture(_WIDTH, _POOL + 232, "Block tables of three sequences over one pool of blocks")
    picture.words(_LEFT, 36, "Blocks, sharing and copies", "loud", size=18, bold=True, anchor="start")
    picture.words(_LEFT, 58, f"A block holds keys and values of {BLOCK_SIZE} tokens. A block with two holders is never "
                  "written.", "quiet", size=12.5, anchor="start")
    picture.words(_LEFT, _TABLES + 12, "Block tables", "loud", size=14.5, bold=True, anchor="start")
    for place, ((name, kind, _, _), table) in enumerate(zip(PROMPTS, layout.tables, strict=True)):
        y = _TABLES + 28 + place * 54
        picture.words(_LEFT, y + 25, f"sequence {name}", "loud", size=13.5, bold=True, anchor="start")
        for column, block in enumerate(table):
            picture.box(_LEFT + 110 + column * 62, y, 54, 40, kind)
            picture.words(_LEFT + 137 + column * 62, y + 25, str(block), f"{kind}-text", size=14, bold=True)
        picture.words(_LEFT + 320, y + 25, NOTES[place], "quiet", size=13, anchor="start")
    picture.words(_LEFT, _POOL - 24, "The pool", "loud", size=14.5, bold=True, anchor="start")
    for block in range(NUM_BLOCKS):
        _draw_block(picture, block, layout)
    for source, destination in layout.copies:
        start, end = (_LEFT + block * _BLOCK + _BLOCK / 2 - 5 for block in (source, destination))
        picture.arrow([(start, _POOL), (start, _POOL - 30), (end, _POOL - 30), (end, _POOL)])
        picture.words((start + end) / 2, _POOL - 38, "copied before the step that writes to the copy", "quiet", size=12)
    return picture.text


def _draw_block(picture: Picture, block: int, layout: Layout) -> None:
    x, words = _LEFT + block * _BLOCK, layout.contents.get(block, [])
    holders = [kind for (_, kind, _, _), table in zip(PROMPTS, layout.tables, strict=True) if block in table]
    picture.box(x, _POOL, _BLOCK - 12, 178, holders[0] if len(holders) == 1 else "ground")
    text = f"{holders[0] if len(holders) == 1 else 'ground'}-text"
    picture.words(x + (_BLOCK - 12) / 2, _POOL + 22, f"block {block}", text, size=13.5, bold=True)
    for slot in range(BLOCK_SIZE):
        y = _POOL + 32 + slot * 35
        picture.gap(x + 10, y, _BLOCK - 32, 29)
        if slot < len(words):
            picture.words(x + (_BLOCK - 12) / 2, y + 19, words[slot], text, size=13)
    number = layout.num_holders[block]
    names = [name for (name, *_), table in zip(PROMPTS, layout.tables, strict=True) if block in table]
    assert number == len(names)
    picture.words(x + (_BLOCK - 12) / 2, _POOL + 200, f"held by {', '.join(names)}" if names else "free", "quiet",
                  size=12.5)
