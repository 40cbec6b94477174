"""Which adapters are in the slots of a model, which are on their way, and which leave for others.

A slot is memory too: an adapter in one takes its bytes, one without takes none. Pure bookkeeping: it reads no file and
touches no model; whoever does tells it here. ``lora/loader`` carries out what ``moves`` asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from pagedcore.config.limits import MAX_LOADING_ADAPTERS, MAX_OVERTAKING
from pagedcore.errors import InternalError
from pagedcore.sequence import Sequence

Keeps = Callable[[Sequence], bool]
"""Whether a waiting sequence has blocks, or blocks on their way, so that its adapter has to stay."""


class AdapterMoves(NamedTuple):
    """What has to be done before waiting sequences can start, by the numbers of adapters."""

    take_out: tuple[int, ...] = ()
    load: tuple[int, ...] = ()


NO_MOVES: Final = AdapterMoves()


class AdapterSlots:
    """The slots of one model.

    Invariant: adapters that are in a slot or on their way to one are at most ``num_slots``, of ``num_bytes`` together.
    Invariant: the adapter of a running sequence, or of a waiting one that keeps blocks, is in a slot.
    """

    def __init__(self, num_slots: int = 0, num_bytes: int = 0) -> None:
        """Have so many empty slots for so many bytes; 0: no sequence has an adapter."""
        self.num_slots, self.num_bytes = num_slots, num_bytes
        self.sizes: dict[int, int] = {}
        """Bytes of every known adapter, by number."""
        self.slot_of: dict[int, int] = {}
        """Of the adapters that rows can be computed with; the least recently used one comes first."""
        self.loading: dict[int, int] = {}
        """The slots of those that are on their way."""
        self.pinned: set[int] = set()
        """Those that may not be there to be read again: they stay in their slots while a sequence waits for them."""
        self.load_s = 0.0
        """How long the latest ones took to come, in seconds."""

    @property
    def num_held_bytes(self) -> int:
        """Bytes of what is in slots or on its way."""
        return sum(self.sizes[number] for number in (*self.slot_of, *self.loading))

    def has_room(self, num_bytes: int) -> bool:
        """Whether an adapter of so many bytes could come without another one leaving."""
        num_held = len(self.slot_of) + len(self.loading)
        return num_held < self.num_slots and self.num_held_bytes + num_bytes <= self.num_bytes

    def add_adapter(self, number: int, num_bytes: int) -> None:
        """Know another adapter, in no slot. Raises ``InternalError`` if it could never be in one."""
        if num_bytes > self.num_bytes or not self.num_slots:
            raise InternalError(f"adapter {number} of {num_bytes} bytes can never be in a slot")
        self.sizes[number] = num_bytes

    def remove_adapter(self, number: int) -> int | None:
        """Forget an adapter that no sequence has; return the slot that it leaves."""
        slot = self.slot_of.pop(number, None)
        self.loading.pop(number, None)
        self.pinned.discard(number)
        del self.sizes[number]
        return slot

    def pin_adapter(self, number: int) -> None:
        """Keep an adapter that is in a slot there while any sequence with it waits, whatever comes before it."""
        if number in self.slot_of:
            self.pinned.add(number)

    def begin_load(self, number: int) -> int:
        """Keep a slot for a known adapter that is in none, and return it. Raises ``InternalError`` without room."""
        if number in self.slot_of or number in self.loading or not self.has_room(self.sizes[number]):
            raise InternalError(f"adapter {number} is in a slot, or there is no room for it")
        taken = {*self.slot_of.values(), *self.loading.values()}
        slot = next(one for one in range(1, self.num_slots + 1) if one not in taken)
        self.loading[number] = slot
        return slot

    def end_load(self, number: int, is_ok: bool, seconds: float = 0.0) -> None:
        """Note that an adapter is in its slot, ``seconds`` after ``begin_load``; or that it will not come."""
        slot = self.loading.pop(number, None)
        if slot is not None and is_ok:
            self.slot_of[number] = slot
            self.load_s = seconds

    def take_out(self, number: int) -> int:
        """Empty the slot of an adapter, and return it."""
        return self.slot_of.pop(number)

    def note_used(self, numbers: Iterable[int | None]) -> None:
        """Note which adapters a step has used."""
        for number in dict.fromkeys(numbers):
            if number is not None and (slot := self.slot_of.pop(number, None)) is not None:
                self.slot_of[number] = slot

    def startable(self, waiting: Iterable[Sequence], keeps: Keeps) -> tuple[list[Sequence], tuple[int, ...]]:
        """Return the sequences that need no adapter, or have it in a slot, in order; and the ids of the others.

        Later arrivals may overtake a sequence that waits for a slot, but with adapters of their own only
        ``MAX_OVERTAKING`` of them: those in slots would never leave, if requests for them kept coming.
        """
        ready, awaiting, first = list[Sequence](), list[int](), None
        for one in waiting:
            number = one.adapter
            if number is None or keeps(one):
                ready.append(one)
            elif number not in self.slot_of or (first is not None and one.arrival - first > MAX_OVERTAKING):
                awaiting.append(one.sequence_id)
                if first is None and number not in self.slot_of and number not in self.loading:
                    first = one.arrival
            else:
                ready.append(one)
        return ready, tuple(awaiting)

    def moves(self, running: Iterable[Sequence], waiting: Iterable[Sequence], keeps: Keeps) -> AdapterMoves:
        """Decide which adapters come, in the order of the queue, and which leave for them; nothing changes.

        The first waiting sequences have a claim to as many slots as running ones leave. What nobody has a claim to
        leaves if need be, the least recently used one first: so none comes and leaves again before it is used.
        """
        waiting = [one for one in waiting if one.adapter is not None]
        if all(one.adapter in self.slot_of for one in waiting):
            return NO_MOVES
        users = (*running, *(one for one in waiting if one.adapter in self.pinned or keeps(one)))
        claimed = {one.adapter for one in users if one.adapter is not None}.union(self.loading)
        num_bytes, wanted = sum(self.sizes[number] for number in claimed), list[int]()
        for number in dict.fromkeys(one.adapter for one in waiting):
            if number is None or number in claimed:
                continue
            num_bytes += self.sizes[number]
            # Why it ends here: if smaller ones overtook a large one, it could starve.
            if len(claimed) >= self.num_slots or num_bytes > self.num_bytes:
                break
            claimed.add(number)
            if number not in self.slot_of:
                wanted.append(number)
        wanted = wanted[: max(0, MAX_LOADING_ADAPTERS - len(self.loading))]
        return AdapterMoves(self._leaving(wanted, claimed), tuple(wanted)) if wanted else NO_MOVES

    def _leaving(self, wanted: list[int], claimed: set[int]) -> tuple[int, ...]:
        """Return what has to leave so that the wanted ones have room."""
        num_free = self.num_slots - len(self.slot_of) - len(self.loading) - len(wanted)
        bytes_free = self.num_bytes - self.num_held_bytes - sum(self.sizes[number] for number in wanted)
        leaving = list[int]()
        for number in self.slot_of:
            if num_free >= 0 and bytes_free >= 0:
                break
            if number not in claimed:
                leaving.append(number)
                num_free, bytes_free = num_free + 1, bytes_free + self.sizes[number]
        return tuple(leaving)

    def carry_out(self, moves: AdapterMoves) -> None:
        """Let adapters come and leave at once, where there is no model."""
        for number in moves.take_out:
            self.take_out(number)
        for number in moves.load:
            self.begin_load(number)
            self.end_load(number, True)

    def snapshot(self) -> dict[str, Any]:
        """Copy which adapters are known, in slots, on their way and pinned, as plain values."""
        return {"sizes": [list(pair) for pair in self.sizes.items()],
                "slots": [list(pair) for pair in self.slot_of.items()],
                "loading": [list(pair) for pair in self.loading.items()], "pinned": sorted(self.pinned),
                "load_s": self.load_s}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Be as it was copied."""
        self.sizes, self.slot_of, self.loading = (
            {int(number): int(value) for number, value in state[name]} for name in ("sizes", "slots", "loading"))
        self.pinned, self.load_s = set(state["pinned"]), state["load_s"]
