"""The open sessions of one engine.

Owns their making, from parameters or imported files, the bound on their number, and their end with the engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from pagedcore.config.limits import MAX_SESSIONS
from pagedcore.errors import EngineClosed, InvalidSalt, TooManySessions
from pagedcore.outputs import Delta
from pagedcore.protocols import ModelFingerprint
from pagedcore.request_options import RequestOptions
from pagedcore.requests import validation
from pagedcore.requests.input_processor import InputProcessor, ProcessedRequest
from pagedcore.requests.request import Request
from pagedcore.requests.request_table import RequestTable, SequenceSnapshot
from pagedcore.sampling_params import SamplingParams
from pagedcore.sessions.kv_file import KVCopy
from pagedcore.sessions.parking import Parking
from pagedcore.sessions.session import Session, SessionContext
from pagedcore.sessions.session_file import FileRules, SessionSnapshot, read_session


class SessionStore:
    """Open sessions.

    Invariant: a session is in the store from the time it was made until it or the engine is closed.
    """

    def __init__(
        self, accept: Callable[[ProcessedRequest], Request], step: Callable[[], list[Delta]],
        input_processor: InputProcessor, requests: RequestTable, parking: Parking, fingerprint: ModelFingerprint,
    ) -> None:
        self._sessions: set[Session] = set()
        self._is_closed = False
        self._requests = requests
        self._context = SessionContext(
            accept, step, input_processor, requests, parking, fingerprint, self._open, self._sessions.discard
        )
        self._rules = FileRules(fingerprint, input_processor.vocab_size, input_processor.max_model_len, parking.spec)
        self.parking = parking

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self._sessions))

    def open_checked(self, params: SamplingParams | None, options: RequestOptions) -> Session:
        """Make a session of a caller's arguments. Errors as ``Engine.session``."""
        if params is not None:
            validation.require_one_completion(params)
            validation.check_params_for_model(params, self._rules.vocab_size)
        self._context.input_processor.check_options(options)
        return self._open(params, options)

    def read(self, path: str | os.PathLike[str]) -> SessionSnapshot:
        """Read and check a session's files; callable from any thread. Errors as ``Engine.import_session``."""
        return read_session(Path(path), self._rules)

    def take_in(self, snapshot: SessionSnapshot, cache_salt: str | bytes | None) -> Session:
        """Make a session of a file's contents. Errors as ``Engine.import_session``."""
        options = RequestOptions(priority=snapshot.priority, cache_salt=cache_salt)
        if snapshot.is_salted and cache_salt is None:
            raise InvalidSalt("cache_salt", "None", "a salt, because the session was made with one")
        return self._open(snapshot.params, options, snapshot.history, kv=snapshot.kv)

    def close(self) -> None:
        """Close all sessions and remove their files; a second call does nothing."""
        for session in self:
            session.close()
        self._is_closed = True
        self.parking.close()

    def _open(
        self, params: SamplingParams | None, options: RequestOptions, history: SequenceSnapshot | None = None,
        cache_root: bytes | None = None, kv: KVCopy | None = None,
    ) -> Session:
        if self._is_closed:
            raise EngineClosed("this engine is closed; make a new one.")
        if len(self._sessions) >= MAX_SESSIONS:
            raise TooManySessions(MAX_SESSIONS)
        request = None
        if history is not None:
            request = self._requests.adopt(history, options, cache_root)
            request.sequences[0].is_in_session = True
        session = Session(self._context, params, options, request)
        self._sessions.add(session)
        if request is not None and kv is not None:
            self.parking.load_kv(request.sequences[0], kv)
        return session
