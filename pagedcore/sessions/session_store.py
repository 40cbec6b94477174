"""The sessions of one engine: which are open, how their turns become requests, and how files become sessions.

Owns the bound on their number and what they all need of the engine; a session's own state is in ``session``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pagedcore.config.limits import MAX_SESSIONS
from pagedcore.errors import EngineClosed, InvalidSalt, RequestStateError, SessionStateError, TooManySessions
from pagedcore.outputs import Delta
from pagedcore.request_options import RequestOptions
from pagedcore.requests import validation
from pagedcore.requests.input_processor import ProcessedRequest, Prompt
from pagedcore.requests.request import Request
from pagedcore.requests.request_table import RequestTable
from pagedcore.requests.sequence_snapshot import SequenceSnapshot
from pagedcore.sampling_params import SamplingParams
from pagedcore.sequence import Sequence
from pagedcore.sessions.kv_file import KVCopy
from pagedcore.sessions.parking import Parking
from pagedcore.sessions.session import Session
from pagedcore.sessions.session_file import FileRules, SessionSnapshot, read_session

if TYPE_CHECKING:
    from pagedcore.engine.builder import EngineComponents
    from pagedcore.engine.engine import Engine


class SessionStore:
    """Open sessions.

    Invariant: a session is in the book from the time it was made until it or the engine is closed.
    """

    def __init__(self, engine: Engine, parts: EngineComponents, requests: RequestTable, parking: Parking) -> None:
        self._engine = engine
        self._input_processor = parts.input_processor
        self._requests = requests
        self._fingerprint = parts.fingerprint
        self._sessions: set[Session] = set()
        self._is_closed = False
        self.parking = parking
        self.rules = FileRules(
            parts.fingerprint, parts.input_processor.vocab_size, parts.input_processor.max_model_len, parking.spec
        )
        """What an imported file is held to."""

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self._sessions))

    def open(
        self, params: SamplingParams | None, options: RequestOptions, request: Request | None = None
    ) -> Session:
        """Make a session.

        Raises:
            EngineClosed: after the engine's end.
            TooManySessions: as many as allowed are open.
        """
        self._require_room()
        session = Session(self, params, options, request)
        self._sessions.add(session)
        return session

    def open_checked(self, params: SamplingParams | None, options: RequestOptions) -> Session:
        """Make a session of what a caller gave; errors as ``Engine.session``."""
        if params is not None:
            validation.require_one_answer(params)
            validation.check_params_for_model(params, self._input_processor.vocab_size)
        self._input_processor.check_options(options)
        return self.open(params, options)

    def adopt(
        self, history: SequenceSnapshot, params: SamplingParams | None, options: RequestOptions,
        cache_root: bytes | None = None,
    ) -> Session:
        """Make a session with a past. Raises as ``open``."""
        self._require_room()
        request = self._requests.adopt(history, options, cache_root)
        request.sequences[0].is_in_session = True
        return self.open(params, options, request)

    def read(self, path: str | os.PathLike[str]) -> SessionSnapshot:
        """Read and prove a session's files; callable from any thread. Errors as ``Engine.import_session``."""
        return read_session(Path(path), self.rules)

    def take_in(self, snapshot: SessionSnapshot, cache_salt: str | bytes | None) -> Session:
        """Make a session of what was read. Errors as ``Engine.import_session``."""
        options = RequestOptions(priority=snapshot.priority, cache_salt=cache_salt)
        if snapshot.is_salted and cache_salt is None:
            raise InvalidSalt("cache_salt", "None", "a salt, because the session was made with one")
        if snapshot.history is None:
            return self.open(snapshot.params, options)
        session = self.adopt(snapshot.history, snapshot.params, options)
        session.load(snapshot.kv)
        return session

    def close_session(self, session: Session, request: Request | None) -> None:
        """Forget a session and what is kept for it."""
        self._sessions.discard(session)
        if request is not None:
            self.parking.forget(request.sequences[0])
            request.abort()
            request.remove()

    def prepare(
        self, request: Request | None, prompt: Prompt, params: SamplingParams, options: RequestOptions
    ) -> ProcessedRequest:
        """Prepare a session's first or next turn."""
        if request is not None:
            return self._requests.process_turn(prompt, request.sequences[0].token_ids, params, options)
        return self._input_processor.process(prompt, params, options)

    def begin(self, request: Request | None, prepared: ProcessedRequest | None) -> Request:
        """Begin a session's turn, and return its request."""
        self.require_open()
        if request is None:
            assert prepared is not None  # Invariant: an empty session has no answer to complete
            request = self._engine.accept(prepared)
            request.sequences[0].is_in_session = True
            return request
        sequence = request.sequences[0]
        if prepared is not None:
            self._requests.begin_turn(request, prepared)
        else:
            self._complete(request)
        self.parking.note_going_on(sequence)
        return request

    def snapshot(
        self, sequence: Sequence | None, kv: KVCopy | None, params: SamplingParams | None, options: RequestOptions
    ) -> SessionSnapshot:
        """Describe a session for its file."""
        history = SequenceSnapshot.of(sequence) if sequence is not None else None
        spec = self.parking.spec(history.token_ids[: kv.num_tokens]) if history is not None and kv is not None else None
        return SessionSnapshot(
            model=self._fingerprint, params=params, priority=options.priority,
            is_salted=options.cache_salt is not None, history=history,
            kv_spec=spec, kv=kv,
        )

    def step(self) -> list[Delta]:
        """Run one step of the engine."""
        return self._engine.step()

    def require_open(self) -> None:
        """Refuse what comes after the engine's end.

        Raises:
            EngineClosed: after ``close``.
        """
        if self._is_closed:
            raise EngineClosed("this engine is closed; make a new one.")

    def close(self) -> None:
        """Forget all sessions and remove their files; a second call does nothing."""
        for session in list(self._sessions):
            session.close()
        self._is_closed = True
        self.parking.close()

    def _complete(self, request: Request) -> None:
        try:
            self._requests.complete_turn(request)
        except RequestStateError as error:
            raise SessionStateError("ask", error.given, error.limit, "Give a prompt.") from None

    def _require_room(self) -> None:
        self.require_open()
        if len(self._sessions) >= MAX_SESSIONS:
            raise TooManySessions(MAX_SESSIONS)
