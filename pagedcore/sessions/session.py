"""Conversations: a token list that grows by turns, and can wait, fork and leave the process between them.

Owns what a caller holds. A session computes nothing itself: its turns are requests like any other, its blocks are
those of the prefix cache, and where its KV is kept meanwhile is ``parking``'s business. Next: ``session_book``.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pagedcore.errors import InvalidRequest, SessionStateError
from pagedcore.outputs import Delta, RequestOutput
from pagedcore.request_options import RequestOptions
from pagedcore.requests.input_processor import ProcessedRequest, Prompt
from pagedcore.requests.request import Request
from pagedcore.requests.sequence_snapshot import SequenceSnapshot
from pagedcore.requests.validation import require_one_answer, validate_ttl
from pagedcore.sampling_params import SamplingParams
from pagedcore.sequence import Sequence
from pagedcore.sessions.kv_file import KVCopy
from pagedcore.sessions.parking import ParkedFile, ParkedState
from pagedcore.sessions.session_file import SessionSnapshot, write_session

if TYPE_CHECKING:
    from pagedcore.sessions.session_store import SessionStore


@dataclass(frozen=True, slots=True)
class PreparedTurn:
    """A turn that passed the door."""

    prompt: ProcessedRequest | None
    """``None``: the latest answer is completed."""
    num_known: int
    """Tokens that it follows."""


class Session:
    """One conversation with one engine, made by ``Engine.session``; usable on the engine's thread.

        with engine.session(SamplingParams(max_tokens=64)) as session:
            print(session.ask("What is 2 + 3?").outputs[0].text)
            session.park("disk")
            print(session.ask("And 4 + 4?").outputs[0].text)

    Between turns it holds no block: what was computed can be found again as long as nobody needs the room, and
    ``park`` keeps it longer. Whatever is lost is computed again: the answers are the same, bit for bit. All turns
    draw from one seed, so a fork goes on like its original until it is given another prompt or another seed.

    Invariant: tokens are only ever appended; a refused turn appends none.
    """

    def __init__(
        self, book: SessionStore, params: SamplingParams | None, options: RequestOptions,
        request: Request | None = None,
    ) -> None:
        self._book = book
        self._params = params
        self._options = options
        self._request = request
        self._is_closed = False

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Everything said so far: prompts and answers of all turns."""
        return tuple(self._request.sequences[0].token_ids) if self._request is not None else ()

    @property
    def is_answering(self) -> bool:
        """Whether a turn has begun and not ended."""
        return self._request is not None and not self._request.is_done

    @property
    def parked(self) -> ParkedState | None:
        """Where the session is parked and how much is kept; ``None``: it is not."""
        return self._book.parking.state(self._request.sequences[0]) if self._request is not None else None

    def output(self) -> RequestOutput:
        """Describe the latest turn as it stands.

        Raises:
            SessionStateError: there was none yet.
        """
        if self._request is None:
            raise SessionStateError("output", "empty", "asked something", "Give a prompt.")
        return self._request.output()

    def ask(self, prompt: Prompt | None, params: SamplingParams | None = None) -> RequestOutput:
        """Give a turn and wait for its answer; all other requests advance meanwhile.

        Args:
            prompt: what follows the conversation so far: text, token ids, or chat messages (the new ones only);
                ``None`` completes an answer that was cut off.
            params: of this turn; ``None``: those of the session.

        Raises:
            SessionStateError: a turn is under way, the session is closed, or there is nothing to complete.
            InvalidRequest: the turn is refused; the session stays as it was.
            EngineOverloaded: the waiting queue is full; the session stays as it was.
        """
        request = self.extend(prompt, params)
        for _ in self._steps(request):
            pass
        return request.output()

    def stream(self, prompt: Prompt | None, params: SamplingParams | None = None) -> Generator[Delta, None, None]:
        """Give a turn and yield its answer as it comes; leaving early aborts it. Arguments and errors as ``ask``."""
        request = self.extend(prompt, params)
        for deltas in self._steps(request):
            yield from (delta for delta in deltas if delta.request_id == request.request_id)

    def extend(self, prompt: Prompt | None, params: SamplingParams | None = None) -> Request:
        """Give a turn and return at once; the engine's steps answer it. Arguments and errors as ``ask``."""
        turn = self.prepare(prompt, params)
        if (file := self.parked_file()) is not None:
            self.load(file.read())
        return self.begin(turn)

    def park(self, tier: Literal["host", "disk"] = "host", ttl_s: float | None = None) -> ParkedState:
        """Keep what was computed while the session is idle.

        Args:
            tier: "host" pins it in host memory, where sessions may take half of the room; "disk" writes it to a file
                and keeps nothing in memory. What does not fit on the host goes to the disk, and what cannot be
                written there is not kept.
            ttl_s: seconds after which the KV is dropped; the session itself stays. ``None``: no limit.

        Returns:
            What was done, and for how many positions.

        Raises:
            SessionStateError: a turn is under way, or the session is closed.
            InvalidRequest: there is no such tier, or ``ttl_s`` is out of range.
        """
        if (file := self.file_to_move(tier)) is not None:
            self.unpark(file, file.read())
        state, file = self.begin_parking(tier, ttl_s)
        if state is not None:
            return state
        return self.end_parking(file, ttl_s, is_written=file is not None and file.write())

    def resume(self) -> int:
        """Bring what was parked back to the device now, if there is room; the next turn does so in any case.

        Returns:
            Positions that the next turn will find; 0 if nothing was parked, or there is no room now.
        """
        if (file := self.parked_file()) is not None:
            return self.unpark(file, file.read())
        return self.fetch()

    def fork(self) -> Session:
        """Return a second session with the same past; blocks are shared, and neither ever writes to the other's.

        A fork of a running turn has its answer so far, and ``ask(None)`` completes it. What is parked in a file stays
        with the original.

        Raises:
            SessionStateError: the session is closed.
            TooManySessions: as many as allowed are open.
        """
        self._require_open("fork")
        if self._request is None:
            return self._book.open(self._params, self._options)
        sequence = self._request.sequences[0]
        return self._book.adopt(
            SequenceSnapshot.of(sequence), self._params, self._options, cache_root=sequence.cache_root
        )

    def export(self, path: str | os.PathLike[str], include_kv: bool = True) -> None:
        """Write everything that decides how the session goes on, for ``Engine.import_session``.

        Args:
            path: of the file; the KV, if any, is in a second one beside it. Both are written under other names first.
            include_kv: whether to write what was computed too, which costs room and saves time.

        Raises:
            SessionStateError: the session is closed.
            InvalidSessionFile, OSError: it would be too large to import, or cannot be written; what was there stays.
        """
        file = self.parked_file()
        stored = file.read() if file is not None and include_kv else None
        write_session(Path(path), self.snapshot(include_kv=include_kv, stored=stored))

    def close(self) -> None:
        """Abort a turn that is under way, and forget everything; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._book.close_session(self, self._request)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prepare(self, prompt: Prompt | None, params: SamplingParams | None) -> PreparedTurn:
        """Do what of ``extend`` needs no engine; callable from any thread while no turn is under way."""
        sequence = self._require_idle("ask")
        num_known = len(sequence.token_ids) if sequence is not None else 0
        if prompt is None:
            return PreparedTurn(None, num_known)
        params = params if params is not None else self._params
        params = params if params is not None else SamplingParams()
        require_one_answer(params)
        return PreparedTurn(
            self._book.prepare(self._request, prompt, params, self._options), num_known
        )

    def begin(self, turn: PreparedTurn) -> Request:
        """Begin a prepared turn."""
        sequence = self._require_idle("ask")
        if turn.num_known != (len(sequence.token_ids) if sequence is not None else 0):
            raise SessionStateError("ask", "further on", "as it was when the turn was prepared", "Ask again.")
        if turn.prompt is None and sequence is None:
            raise SessionStateError("ask", "empty", "cut off within a completion", "Give a prompt.")
        self._request = self._book.begin(self._request, turn.prompt)
        return self._request

    def begin_parking(self, tier: Any, ttl_s: float | None) -> tuple[ParkedState | None, ParkedFile | None]:
        """Park without any file, or return the one to ``write`` before ``end_parking``."""
        sequence, ttl_s = self._require_idle("park"), validate_ttl(ttl_s)
        if tier not in ("host", "disk"):
            raise InvalidRequest("tier", tier, '"host" or "disk"')
        if sequence is None:
            return ParkedState("tokens", 0), None
        parking = self._book.parking
        present = parking.state(sequence)
        # Why: what did not come back from the disk as a whole stays there.
        if present is not None and present.tier in (tier, "disk"):
            return parking.renew(sequence, ttl_s), None
        if tier == "host" and (state := parking.park_on_host(sequence, ttl_s)) is not None:
            return state, None
        return None, parking.begin_file(sequence)

    def end_parking(self, file: ParkedFile | None, ttl_s: float | None, *, is_written: bool) -> ParkedState:
        """Note what came of the file."""
        assert self._request is not None  # Invariant: an empty session has nothing to write
        return self._book.parking.end_file(self._request.sequences[0], file, ttl_s, is_written=is_written)

    def parked_file(self) -> ParkedFile | None:
        """Return the file the session is parked in."""
        self._require_open("resume")
        return self._book.parking.file_of(self._request.sequences[0]) if self._request is not None else None

    def file_to_move(self, tier: Any) -> ParkedFile | None:
        """Return the file that has to be read before the session can be parked on ``tier``, where there is room."""
        sequence, file = self._require_idle("park"), self.parked_file()
        is_moving = tier == "host" and sequence is not None and self._book.parking.has_room_on_host(sequence)
        return file if is_moving else None

    def load(self, kv: KVCopy | None) -> int:
        """Put what was read where the next turn finds it; return how many positions."""
        sequence = self._require_idle("resume")
        return self._book.parking.load(sequence, kv) if sequence is not None and kv is not None else 0

    def unpark(self, file: ParkedFile, kv: KVCopy | None) -> int:
        """Put what was read of a file where the next turn finds it; the file goes when all of it is there."""
        num_tokens, sequence = self.load(kv), self._require_idle("resume")
        if sequence is not None and num_tokens >= len(file.spec.token_ids):
            self._book.parking.note_going_on(sequence)
        return num_tokens

    def fetch(self) -> int:
        """Begin to bring what is parked on the host to the device; return how many positions."""
        sequence, state = self._require_idle("resume"), self.parked
        is_on_host = state is not None and state.tier == "host"
        return self._book.parking.fetch(sequence) if sequence is not None and is_on_host else 0

    def snapshot(self, *, include_kv: bool, stored: KVCopy | None = None) -> SessionSnapshot:
        """Copy everything that ``export`` writes; what is ``stored`` may be more KV than the memories hold."""
        self._require_open("export")
        sequence = self._request.sequences[0] if self._request is not None else None
        kv = self._book.parking.copy_kv(sequence) if sequence is not None and include_kv else None
        if stored is not None and (kv is None or kv.num_tokens < stored.num_tokens):
            kv = stored
        return self._book.snapshot(sequence, kv, self._params, self._options)

    def _steps(self, request: Request) -> Generator[list[Delta], None, None]:
        try:
            while not request.is_done:
                yield self._book.step()
        finally:
            # Why: whoever stops waiting, for whatever reason, wants no more of this answer.
            request.abort()

    def _require_open(self, what: str) -> None:
        if self._is_closed:
            raise SessionStateError(what, "closed", "open", "Open a new session, or import an exported one.")
        self._book.require_open()

    def _require_idle(self, what: str) -> Sequence | None:
        self._require_open(what)
        if self.is_answering:
            raise SessionStateError(what, "answering", "between two turns", "Step until is_answering is false.")
        return self._request.sequences[0] if self._request is not None else None
