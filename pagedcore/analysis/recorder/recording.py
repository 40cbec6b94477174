"""A recording as a file: gzipped lines of JSON, written whole or not at all, and read with limits.

The first line says what it is, the second has the token rows; then each segment has a line with its state and one line
for each event. Reading allocates nothing that the file's own size does not pay for, save what ``token_rows`` bounds.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from pagedcore.analysis.recorder.ring import Event, Segment
from pagedcore.analysis.recorder.token_rows import TokenRows, decode
from pagedcore.errors import RecordingError
from pagedcore.kv_cache.block_hash import KEY_BYTES, BlockHasher
from pagedcore.sequence import long_root
from pagedcore.sessions.session_file import params_as_mapping

FORMAT: Final = "pagedcore recording"
VERSION: Final = 9
_AHEAD: Final = 8
"""What a file says whose steps were taken before the tokens of those before them were known."""
_WITH_STATES: Final = 7
_PLAIN: Final = 6
"""What a file says whose steps were taken one by one, and one whose model keeps no states and got no other weights, so
that earlier versions can read it."""
_READ: Final = (4, 5, _PLAIN, _WITH_STATES, _AHEAD, VERSION)
"""Files of version 5 know no drafts, those of version 4 no sequences that generate nothing either. Those of earlier
versions were decided by other estimates of what steps cost, and cannot be decided again."""
_MOST_REFUSED: Final = 2**53
MAX_FILE_BYTES: Final = 256 * 2**20
MAX_TEXT_BYTES: Final = 1024 * 2**20
"""Of a file that is read, and of its text."""
MAX_BLOCKS: Final = 2**22
_LEVEL: Final = 1  # Why: a tenth of the time of the best level, for a third more bytes


@dataclass(slots=True, eq=False)
class Recording:
    """What a file holds.

    A described sequence has ``row``, the number of one of ``rows``, and ``tokens`` as far as they were known then.
    """

    header: dict[str, Any]
    rows: list[tuple[int, array[int]]]
    """(number of the cache root, tokens or ranks) of every life of a sequence, from its description to its end."""
    segments: list[dict[str, Any]] = field(default_factory=list)
    """Each with ``settings``, ``state``, ``is_continuous``, ``events``."""

    @property
    def has_tokens(self) -> bool:
        """Whether the rows are token ids."""
        return bool(self.header["has_tokens"])


def canonical(value: Any) -> str:
    """Return the one JSON text of a plain value; decisions are compared by it."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True, default=_as_plain, allow_nan=False)


def _as_plain(value: Any) -> Any:
    if isinstance(value, array):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} in a recording")


class _Writer:
    """Turns segments into lines."""

    def __init__(self, hasher: BlockHasher, *, keeps_tokens: bool) -> None:
        self._hasher = hasher
        self._rows = TokenRows(keeps_tokens=keeps_tokens)
        self._keeps_tokens = keeps_tokens
        self._lives: dict[int, array[int]] = {}
        self._roots: dict[bytes, int] = {}
        self._words: dict[Any, str] = {}
        self._has_long = False

    def lines(self, header: Mapping[str, Any], segments: list[Segment]) -> Iterator[str]:
        """Yield the text of a file, line by line."""
        parts = [(self._begin(segment), [canonical(self._event(one)) for one in list(segment.events)])
                 for segment in segments]
        has_states = any("num_states" in begin["settings"] for begin, _ in parts)
        verbs = {name for segment in segments for _, name, *_ in segment.events}
        version = _AHEAD if verbs & {"foresee", "read"} else (
            _WITH_STATES if has_states or "weights" in verbs else _PLAIN)
        if any("windows" in begin["settings"] for begin, _ in parts):
            version = VERSION
        yield canonical({**header, "format": FORMAT, "version": version, "has_tokens": self._keeps_tokens})
        yield canonical(self._rows.encode(self._roots))
        for begin, events in parts:
            # Why last: a key is looked for among those of all rows.
            moves = begin["state"]["moves"]
            moves["left"] = self._places_of(moves["left"])
            yield canonical(begin)
            yield from events

    def _begin(self, segment: Segment) -> dict[str, Any]:
        state, size = segment.state, segment.settings["block_size"]
        self._lives = {}
        described = [self._described(one) for one in state["sequences"]]
        beams = [[numbers, [self._described(one) for one in waiting]] for numbers, waiting in state["beams"]]
        memories = {name: self._memory(state[name], size) for name in ("device", "host")}
        return {
            "settings": segment.settings, "is_continuous": segment.is_continuous,
            "state": {**state, **memories, "moves": {**state["moves"]}, "sequences": described,
                      "beams": beams, "queues": self._queues(state["queues"])},
        }

    def _event(self, event: Event) -> list[Any]:
        now_s, name, arguments, decision = event
        if name in ("commit", "accept", "read"):
            *named, token_ids = arguments
            for number, token_id in zip(named[-1], token_ids, strict=True):
                self._lives[number].append(token_id)
            return [now_s, name, named, decision]
        return [now_s, name, [self._plain(one) for one in arguments], decision]

    def _plain(self, value: Any) -> Any:
        if isinstance(value, dict) and "tokens" in value:
            return self._described(value)
        return [self._plain(one) for one in value] if isinstance(value, list) else value

    def _described(self, described: Mapping[str, Any]) -> dict[str, Any]:
        life = self._lives[described["plain"]["sequence_id"]] = described["tokens"][:]
        plain = {name: self._word(name, value) for name, value in described["plain"].items()}
        self._has_long |= "num_short_tokens" in plain
        found = {"plain": plain, "row": self._rows.add(described["root"], life)}
        for name in ("status", "num_keys", "num_scored", "num_sequences", "num_tokens"):
            found[name] = described[name]
        if "weights" in described:
            found["weights"] = described["weights"]
        if self._keeps_tokens:
            params = described["params"]
            found["params"] = params_as_mapping(params) | (
                # Why: code is in no file, and without it the point is another one.
                {"logits_processor": True} if params.logits_processor is not None else {}
            )
        return found

    def _word(self, name: str, value: Any) -> Any:
        """Replace text that may be a caller's own, such as a tenant, by a number of its own."""
        if not isinstance(value, str | bytes) or name == "finish_reason":
            return value
        return self._words.setdefault(value, f"#{len(self._words)}")

    def _queues(self, queues: Mapping[str, Any] | None) -> dict[str, Any] | None:
        if queues is None:
            return None
        virtual = [[self._word("tenant", tenant), *rest] for tenant, *rest in queues["virtual"]]
        return {**queues, "virtual": virtual}

    def _memory(self, memory: Mapping[str, Any], size: int) -> dict[str, Any]:
        """Give the blocks of a prefix cache rows, one for each end of a chain; the blocks before share it."""
        entries, row_of = memory["entries"], dict[int, int]()
        inner = {entry[1] for entry in entries}
        for end in range(len(entries)):
            if end in inner:
                continue
            chain = [end]
            while (parent := entries[chain[-1]][1]) >= 0:
                chain.append(parent)
            tokens = array("q", [token for place in reversed(chain) for token in memory["tokens"][place]])
            root, is_long = split_root(memory["roots"][chain[-1]])
            self._has_long |= is_long
            row = self._rows.add(root, tokens)
            for place in chain:
                row_of.setdefault(place, row)
        rest = {name: value for name, value in memory.items() if name not in ("tokens", "roots", "entries")}
        lengths = [len(tokens) for tokens in memory["tokens"]]
        # Why if: models with two kinds of angles are few, and files of others stay as they are.
        long = [place for place, root in enumerate(memory["roots"]) if split_root(root)[1]]
        return {**rest, **({"long": long} if long else {}),
                "entries": [[*entry, row_of[n], lengths[n]] for n, entry in enumerate(entries)]}

    def _places_of(self, keys: list[bytes]) -> list[tuple[int, ...] | None]:
        """Return the place of each key as ``_keys_of``, ``None`` where no row of this recording has it."""
        places = _keys_of(self._hasher, self._rows.rows, has_long=self._has_long) if keys else {}
        return list(map(places.get, keys))


def split_root(root: bytes) -> tuple[bytes, bool]:
    """Return a root of short sequences, and whether this one is what ``long_root`` makes of it."""
    return root[:KEY_BYTES], len(root) > KEY_BYTES


def _keys_of(
    hasher: BlockHasher, rows: Iterable[tuple[bytes, array[int]]], *, has_long: bool
) -> dict[bytes, tuple[int, ...]]:
    """Return the place of every key: (row, block), and a third number if it is one of a long sequence."""
    places: dict[bytes, tuple[int, ...]] = {}
    for number, (root, tokens) in enumerate(rows):
        for mark in ((), (1,)) if has_long else ((),):
            keys: list[bytes] = []
            hasher.extend(keys, long_root(root) if mark else root, tokens, len(tokens) // hasher.block_size)
            for block, key in enumerate(keys):
                places.setdefault(key, (number, block, *mark))
    return places


def write_recording(
    path: str | os.PathLike[str], header: Mapping[str, Any], segments: list[Segment], hasher: BlockHasher, *,
    keeps_tokens: bool,
) -> None:
    """Write a file that only its owner can read, in one piece: whatever breaks that off leaves no part of it.

    Raises ``OSError`` if it cannot be written.
    """
    target = Path(path)
    number, temporary = tempfile.mkstemp(prefix=".recording-", dir=target.parent)
    try:
        with (os.fdopen(number, "wb") as file,
              gzip.GzipFile(fileobj=file, mode="wb", compresslevel=_LEVEL, mtime=0) as packed):
            for line in _Writer(hasher, keeps_tokens=keeps_tokens).lines(header, segments):
                packed.write(line.encode() + b"\n")
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def read_recording(path: str | os.PathLike[str]) -> Recording:
    """Read a file.

    Raises:
        RecordingError: it is damaged, is none, is too large, or is of another version.
        OSError: it cannot be read.
    """
    try:
        return _parse(_lines(Path(path)))
    except RecordingError:
        raise
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise RecordingError(f"the file is damaged or cut off ({type(error).__name__})") from None
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise RecordingError(f"the file is none ({type(error).__name__})") from None


def _lines(path: Path) -> Iterator[bytes]:
    if path.stat().st_size > MAX_FILE_BYTES:
        raise RecordingError(f"the file has more than {MAX_FILE_BYTES} bytes")
    num_left = MAX_TEXT_BYTES
    with gzip.open(path, "rb") as file:
        while line := file.readline(num_left + 1):
            num_left -= len(line)
            if num_left < 0:
                raise RecordingError(f"its text has more than {MAX_TEXT_BYTES} bytes")
            yield line


def _parse(lines: Iterator[bytes]) -> Recording:
    header = json.loads(next(lines, b"{}"))
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise RecordingError("the file is none")
    if header.get("version") not in _READ:
        raise RecordingError(f"the file is not of version {' or '.join(map(str, _READ))}, which this pagedcore reads")
    recording = Recording(header, decode(json.loads(next(lines, b"[]"))))
    for line in lines:
        value = json.loads(line)
        if isinstance(value, dict):
            recording.segments.append({**value, "state": _state(value, recording.rows), "events": []})
        else:
            now_s, name, arguments, decision = value
            if name == "refused" and not all(type(one) is int and 0 < one <= _MOST_REFUSED
                                             for counts in arguments for one in counts.values()):
                raise RecordingError("what was turned away is no count")
            known = [_with_tokens(one, recording.rows) for one in arguments]
            recording.segments[-1]["events"].append((float(now_s), str(name), known, decision))
    return recording


def _state(segment: Mapping[str, Any], rows: list[tuple[int, array[int]]]) -> dict[str, Any]:
    state: dict[str, Any] = segment["state"]
    settings = segment["settings"]
    if not all(0 <= settings[name] <= MAX_BLOCKS for name in ("num_blocks", "num_host_blocks")):
        raise RecordingError(f"a pool has more than {MAX_BLOCKS} blocks")
    for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
        if type(settings[name]) is not int or settings[name] < 1:
            raise RecordingError(f"{name} is no number from 1")
    if (num_states := settings.get("num_states")) is not None:
        num_host_states = settings.setdefault("num_host_states", 0)
        is_possible = type(num_states) is int and 2 * settings["max_num_seqs"] <= num_states <= MAX_BLOCKS
        is_possible = is_possible and type(num_host_states) is int and 0 <= num_host_states <= MAX_BLOCKS
        if not is_possible or (num_host_states > 0) != (settings["num_host_blocks"] > 0) or any(
                len(state[memory]["states"]["counts"]) != size for memory, size in
                (("device", num_states), ("host", num_host_states)) if size):
            raise RecordingError("its states are more or fewer than there can be")
    if (windows := settings.get("windows")) is not None:
        is_possible = [type(one) is int and 0 < one <= MAX_BLOCKS for one in windows] == [True, True]
        if not is_possible or settings["num_host_blocks"] or len(state["device"]["windows"]["counts"]) != windows[0]:
            raise RecordingError("its window blocks are more or fewer than there can be")
    for memory, num_blocks in ((state["device"], settings["num_blocks"]), (state["host"], settings["num_host_blocks"])):
        if len(memory["counts"]) != num_blocks:
            raise RecordingError("a pool is not as large as its settings say")
        tokens, roots, long = list[Any](), list[bytes](), set(memory.pop("long", ()))
        for entry in memory["entries"]:
            *_, row_number, length = entry
            # Why first: parents come before what continues them, so this is where they end.
            start = memory["ends"][entry[1]] if entry[1] >= 0 else 0
            root, row = rows[row_number]
            memory.setdefault("ends", []).append(start + length)
            tokens.append(tuple(row[start : start + length]))
            roots.append(long_root(root_of(root)) if len(roots) in long else root_of(root))
        # Why a value: every block of version 4 is one that completions hold.
        memory["entries"] = [[*entry[:6], *(entry[6:-2] or [False])] for entry in memory["entries"]]
        memory["tokens"], memory["roots"] = tokens, roots
        memory.pop("ends", None)
    # Why a value: before version 6 nothing was drafted.
    state["counters"] = {"num_drafted_tokens": 0, "num_accepted_tokens": 0, **state["counters"]}
    state["sequences"] = [_with_tokens(one, rows) for one in state["sequences"]]
    state["beams"] = [[numbers, _with_tokens(waiting, rows)] for numbers, waiting in state["beams"]]
    state["moves"]["left"] = _keys_at(state["moves"]["left"], rows, BlockHasher(settings["block_size"], b""))
    return state


def _keys_at(places: list[Any], rows: list[tuple[int, array[int]]], hasher: BlockHasher) -> list[bytes]:
    """Return the keys of blocks of rows; of an unknown one a key that no block has."""
    has_long, own = any(len(place or ()) > 2 for place in places), [(root_of(root), row) for root, row in rows]
    known = {place: key for key, place in _keys_of(hasher, own, has_long=has_long).items()} if any(places) else {}
    return [known[tuple(place)] if place else sha256(f"unknown {number}".encode()).digest()
            for number, place in enumerate(places)]


def _with_tokens(value: Any, rows: list[tuple[int, array[int]]]) -> Any:
    if isinstance(value, dict) and "row" in value:
        root, row = rows[value["row"]]
        if not 0 <= value["num_tokens"] <= len(row):
            raise RecordingError("a sequence is longer than its row of tokens")
        if not 0 <= value["num_keys"] <= value["num_tokens"] or not 0 <= (value["num_scored"] or 0) <= len(row):
            raise RecordingError("more of a sequence is known than it has tokens")
        return {**value, "root": root_of(root), "tokens": row[: value["num_tokens"]]}
    return [_with_tokens(one, rows) for one in value] if isinstance(value, list) else value


def root_of(number: int) -> bytes:
    """Return the cache root that a replay uses for the root of this number."""
    return sha256(f"pagedcore recorded root {int(number)}".encode()).digest()
