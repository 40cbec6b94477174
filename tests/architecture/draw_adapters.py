"""Draws how adapters come into slots and who runs meanwhile, as a scheduler decides it: docs/lora.svg."""

from __future__ import annotations

from architecture.svg import Picture
from pagedcore.kv_cache.kv_cache_manager import KVCacheManager
from pagedcore.sampling_params import SamplingParams
from pagedcore.scheduler.adapter_slots import AdapterSlots
from pagedcore.scheduler.policies import fcfs
from pagedcore.scheduler.scheduler import Scheduler
from pagedcore.sequence import Sequence

NAMES = ["", "fr", "de", "it"]
#: The adapter of each request, 0 for none, and how many tokens it asks for, in the order of their arrival.
REQUESTS = [(1, 3), (0, 4), (2, 2), (3, 2), (0, 3), (1, 2)]
#: Files that have arrived before each step.
ARRIVALS: list[tuple[int, ...]] = [(1,), (2,), (), (3,), ()]
_WIDTH, _LEFT, _CELL, _GAP, _ROW = 1000, 36, 62, 6, 86


def steps() -> list[tuple[dict[int, int], dict[int, int], dict[int, str]]]:
    """Return of each step which adapters are in slots and on their way, and what each request does, by its place."""
    slots = AdapterSlots(2, 2)
    for number in range(1, len(NAMES)):
        slots.add_adapter(number, 1)
    scheduler = Scheduler(KVCacheManager(64, 4), fcfs(), max_num_seqs=8, max_num_batched_tokens=64, max_num_waiting=16,
                          max_scored_tokens=64, adapters=slots)
    sequences = [
        Sequence(place, [place, 1, 2], SamplingParams(), max_tokens=most, seed=0, arrival=place, adapter=number or None)
        for place, (number, most) in enumerate(REQUESTS)
    ]
    scheduler.add_sequences(*sequences)
    found = []
    for arrived in ARRIVALS:
        _move(scheduler)
        for number in arrived:
            slots.end_load(number, True)
        plan = scheduler.schedule()
        does = {one.sequence_id: "ended" for one in sequences if one.finish_reason}
        does |= dict.fromkeys(plan.awaiting, "waits") | {row.sequence.sequence_id: "runs" for row in plan.rows}
        found.append((dict(slots.slot_of), dict(slots.loading), does))
        scheduler.reserve(plan)
        scheduler.commit(plan, {row.sequence.sequence_id: 3 for row in plan.rows})
    return found


def _move(scheduler: Scheduler) -> None:
    """Begin the loads that are due; one at a time here."""
    moves = scheduler.adapter_moves()
    for number in moves.take_out:
        scheduler.adapters.take_out(number)
    for number in moves.load:
        scheduler.adapters.begin_load(number)


def draw() -> str:
    """Return the picture."""
    picture = Picture(_WIDTH, 132 + _ROW * len(ARRIVALS), "Adapters come into slots while others run")
    picture.words(_LEFT, 40, "Two slots, three adapters: who runs in each step, and who waits for files or for a slot",
                  "loud", size=14.5, bold=True, anchor="start")
    for number, (inside, coming, does) in enumerate(steps()):
        y = 66 + number * _ROW
        picture.words(_LEFT, y + 30, f"step {number + 1}", "loud", size=13, bold=True, anchor="start")
        by_slot = {slot: (NAMES[one], "memory") for one, slot in inside.items()}
        by_slot |= {slot: (f"{NAMES[one]} ...", "ground") for one, slot in coming.items()}
        for slot in (1, 2):
            _cell(picture, _LEFT + 70 + (slot - 1) * (_CELL + _GAP), y, *by_slot.get(slot, ("empty", "")))
        picture.words(_LEFT + 70 + _CELL, y + 64, "slots", "quiet", size=12, anchor="middle")
        for place, (one, _) in enumerate(REQUESTS):
            kind = {"runs": "engine", "waits": "ground"}.get(does.get(place, ""), "")
            _cell(picture, _LEFT + 260 + place * (_CELL + _GAP), y, NAMES[one] or "base", kind)
            picture.words(_LEFT + 260 + place * (_CELL + _GAP) + _CELL / 2, y + 64, does.get(place, "waits"), "quiet",
                          size=12, anchor="middle")
    for place, line in enumerate(("A request that waits has no row and no KV block, and stops nobody.",
                                  "An adapter that runs keeps its slot; the least recently used other one leaves.")):
        picture.words(_LEFT, 88 + 20 * place + _ROW * len(ARRIVALS), line, "quiet", size=13, anchor="start")
    return picture.text


def _cell(picture: Picture, x: float, y: float, word: str, kind: str) -> None:
    if kind:
        picture.box(x, y, _CELL, 46, kind)
        picture.words(x + _CELL / 2, y + 28, word, f"{kind}-text", size=13, mono=True)
    else:
        picture.gap(x, y, _CELL, 46)
        picture.words(x + _CELL / 2, y + 28, word, "quiet", size=13, mono=True)
