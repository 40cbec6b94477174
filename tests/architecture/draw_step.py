"""Draws one step as the flat arrays that the model reads, made by the scheduler itself: docs/step.svg."""

from __future__ import annotations

from architecture.svg import Picture
from pagedcore.execution.ragged_batch import RaggedBatch, build_batch
from pagedcore.scheduler.plan import ScheduledRow
from support.doubles import make_scheduler, make_sequence, next_plan, run_step

BLOCK_SIZE, TOKEN_BUDGET = 4, 6
#: Tokens of the three prompts; the last one does not fit into one step.
PROMPTS = {"A": 5, "B": 3, "C": 11}
KINDS = {"A": "engine", "B": "request", "C": "memory"}
_WIDTH, _LEFT, _NAMES = 900, 36, 170


def step() -> tuple[list[tuple[str, ScheduledRow]], RaggedBatch, int]:
    """Run steps until two sequences decode beside a prompt's chunk. Returns rows, arrays, and the step's number."""
    scheduler = make_scheduler(block_size=BLOCK_SIZE, max_num_batched_tokens=TOKEN_BUDGET)
    names = {}
    for place, (name, length) in enumerate(PROMPTS.items()):
        sequence = make_sequence([10 * (place + 1) + token for token in range(length)])
        names[sequence.sequence_id] = name
        scheduler.add_sequences(sequence)
    for number in range(1, 10):
        plan = next_plan(scheduler)
        if [row.is_decode for row in plan.rows] == [True, True, False]:
            scheduler.reserve(plan)
            rows = [(names[row.sequence.sequence_id], row) for row in plan.rows]
            return rows, build_batch(plan.rows, scheduler.kv_cache.device), number
        run_step(scheduler, token_id=7)
    raise AssertionError("no such step")


def draw() -> str:
    """Return the picture."""
    rows, batch, number = step()
    picture = Picture(_WIDTH, 668, "One step of three sequences as flat arrays")
    picture.words(_LEFT, 38, f"Step {number}: two sequences decode, one computes a part of its prompt", "loud", size=18,
                  bold=True, anchor="start")
    picture.words(_LEFT, 60, f"token budget {TOKEN_BUDGET}, blocks of {BLOCK_SIZE} tokens", "quiet", size=12.5,
                  anchor="start")
    _title(picture, 96, "1", "The scheduler plans rows, and their blocks are reserved: all or none")
    for place, (name, row) in enumerate(rows):
        _draw_row(picture, 112 + place * 36, name, row, batch.block_tables[place].tolist())
    _title(picture, 252, "2", "The plan becomes flat arrays, without padding")
    owners = [name for name, row in rows for _ in range(row.num_tokens)]
    for line, array in enumerate(("token_ids", "positions", "slot_mapping")):
        _draw_array(picture, 268 + line * 38, array, getattr(batch, array).tolist(), owners)
    _draw_array(picture, 268 + 3 * 38, "query_start", batch.query_start.tolist(), None)
    _draw_array(picture, 268 + 4 * 38, "kv_lens", batch.kv_lens.tolist(), [name for name, _ in rows])
    _title(picture, 492, "3", "One forward pass computes all of them")
    picture.box(_LEFT, 506, _WIDTH - 2 * _LEFT, 50, "compute")
    picture.words(_WIDTH / 2, 527, f"linear layers: one product of {batch.num_tokens} rows", "compute-text", size=13.5,
                  bold=True)
    picture.words(_WIDTH / 2, 546, "attention: writes K and V to the slots, reads each row's blocks through its table",
                  "compute-text", size=12.5)
    _title(picture, 594, "4", "Rows that reach their last known token get a next one, then the step is committed")
    sampled = [name for name, row in rows if row.num_sampled]
    for place, name in enumerate(sampled):
        picture.box(_LEFT + place * 232, 610, 216, 32, KINDS[name])
        picture.words(_LEFT + place * 232 + 108, 631, f"{name} samples its next token", f"{KINDS[name]}-text", size=13)
    rest = ", ".join(name for name, row in rows if not row.num_sampled)
    picture.words(_LEFT + len(sampled) * 232 + 8, 631, f"{rest} goes on with its prompt in the next step", "quiet",
                  size=13, anchor="start")
    return picture.text


def _title(picture: Picture, y: float, number: str, words: str) -> None:
    picture.words(_LEFT, y, f"{number}  {words}", "loud", size=14.5, bold=True, anchor="start")


def _draw_row(picture: Picture, y: float, name: str, row: ScheduledRow, table: list[int]) -> None:
    what = "decode" if row.is_decode else "prefill"
    span = f"position {row.start}" if row.num_tokens == 1 else f"positions {row.start} to {row.end - 1}"
    blocks = ", ".join(str(block) for block in table if block >= 0)
    picture.box(_LEFT, y, _WIDTH - 2 * _LEFT, 30, KINDS[name])
    for x, words in ((20, name), (80, what), (_NAMES, span), (_NAMES + 190, f"of {len(row.sequence.token_ids)} known"),
                     (_NAMES + 370, f"block table {blocks}")):
        picture.words(_LEFT + x, y + 20, words, f"{KINDS[name]}-text", size=13, bold=x == 20, anchor="start")


def _draw_array(picture: Picture, y: float, name: str, values: list[int], owners: list[str] | None) -> None:
    picture.words(_LEFT, y + 20, name, "loud mono", size=13, anchor="start")
    for place, value in enumerate(values):
        kind = "ground" if owners is None else KINDS[owners[place]]
        width = (_WIDTH - 2 * _LEFT - _NAMES + 40) / 7
        x = _LEFT + _NAMES - 40 + place * width
        picture.box(x, y, width - 6, 30, kind)
        picture.words(x + (width - 6) / 2, y + 20, str(value), f"{kind}-text", size=13)
