"""Conversations: a token list that grows by turns, and can wait, fork and leave the process between them.

Owns the caller's handle, the bound on open sessions and their end with the engine. A session computes nothing itself:
its turns are requests like any other, its blocks are those of the prefix cache, and ``parking`` keeps its KV between
turns. What may need a file or a tokenizer is an operation without I/O (see ``operation``), for ``AsyncSession`` too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Literal

from pagedcore.config.field_rules import one_of
from pagedcore.config.limits import MAX_SESSIONS
from pagedcore.errors import (
    AdapterMismatch,
    EngineClosed,
    InvalidRequest,
    InvalidSalt,
    RequestStateError,
    SessionStateError,
    TooManySessions,
)
from pagedcore.lora.registry import LoadedAdapter
from pagedcore.outputs import Delta, RequestOutput
from pagedcore.protocols import Constraint, ModelFingerprint
from pagedcore.request_options import OptionKeywords, RequestOptions, read_options
from pagedcore.requests import validation
from pagedcore.requests.infill import require_no_gap
from pagedcore.requests.input_processor import InputProcessor, ProcessedRequest, Prompt
from pagedcore.requests.pending_output import PendingOutput
from pagedcore.requests.request import Request
from pagedcore.requests.request_table import RequestTable, SequenceSnapshot
from pagedcore.sampling_params import SamplingParams
from pagedcore.sequence import Sequence
from pagedcore.sessions.kv_file import KVCopy, KVSpec
from pagedcore.sessions.operation import Operation, run
from pagedcore.sessions.parking import ParkedFile, ParkedState, Parking
from pagedcore.sessions.session_file import SessionSnapshot, WeightsMark, read_session, write_session


class Session(AbstractContextManager["Session"]):
    """One conversation with one engine, made by ``Engine.session``; usable on the engine's thread.

        with engine.session(SamplingParams(max_tokens=64)) as session:
            print(session.ask("What is 2 + 3?").outputs[0].text)
            session.park("disk")
            print(session.ask("And 4 + 4?").outputs[0].text)

    Between turns it holds no block: its KV stays in the prefix cache until it is evicted, and ``park`` keeps it
    longer. Lost KV is computed again: the completions are the same, bit for bit. All turns draw from one seed, so a
    fork continues like its original until it is given another prompt or another seed.

    Invariant: tokens are only ever appended; a refused turn appends none.
    """

    def __init__(self, store: SessionStore, params: SamplingParams | None, options: RequestOptions) -> None:
        self._store = store
        self._params = params
        self._options = options
        self._request: Request | None = None
        self._is_closed = False

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompts and completions of all turns so far."""
        return tuple(self._request.sequences[0].token_ids) if self._request is not None else ()

    @property
    def is_answering(self) -> bool:
        """Whether a turn has begun and not ended."""
        return self._request is not None and not self._request.is_done

    @property
    def parked(self) -> ParkedState | None:
        """Where the session is parked and how much KV is kept; ``None``: it is not parked."""
        return self._store.parking.state(self._request.sequences[0]) if self._request is not None else None

    def output(self) -> RequestOutput:
        """Describe the latest turn as it stands. Raises ``SessionStateError`` before the first one."""
        if self._request is None:
            raise SessionStateError("output", "empty", "asked something", "Give a prompt.")
        return self._request.output()

    def ask(self, prompt: Prompt | None, params: SamplingParams | None = None) -> RequestOutput:
        """Run a turn and return its completion; all other requests advance meanwhile.

        Args:
            prompt: what follows the conversation so far: text, token ids, or chat messages (the new ones only);
                ``None`` continues a completion that was cut off.
            params: of this turn; ``None``: those of the session.

        Raises:
            SessionStateError: a turn is under way, the session is closed, or there is nothing to complete.
            InvalidRequest: the turn is refused; the session stays as it was.
            EngineOverloaded: the waiting queue is full; the session stays as it was.
        """
        for _ in self.stream(prompt, params):
            pass
        return self.output()

    def stream(self, prompt: Prompt | None, params: SamplingParams | None = None) -> Generator[Delta, None, None]:
        """Run a turn and yield its deltas; leaving early aborts it. Arguments and errors as ``ask``."""
        request = self.extend(prompt, params)
        try:
            while not request.is_done:
                # Why: other requests' deltas are their own readers' to take.
                yield from [one.take_delta() for one in self._store.step() if one.request is request]
        finally:
            # Why: a caller that stops reading, for any reason, wants no further tokens of this turn.
            request.abort()

    def extend(self, prompt: Prompt | None, params: SamplingParams | None = None) -> Request:
        """Begin a turn and return at once; the engine's steps run it. Arguments and errors as ``ask``."""
        return run(self.turn_operation(prompt, params))

    def park(self, tier: Literal["host", "disk"] = "host", ttl_s: float | None = None) -> ParkedState:
        """Keep the KV of the session while it is idle; return where it is, and of how many positions.

        Args:
            tier: "host" pins it in host memory, of which sessions may take half; "disk" writes it to a file and keeps
                nothing in memory. What does not fit on the host goes to the disk, and what cannot be written there is
                not kept.
            ttl_s: seconds after which the KV is freed; the session itself stays. ``None``: no limit.

        Raises:
            SessionStateError: a turn is under way, or the session is closed.
            InvalidRequest: there is no such tier, or ``ttl_s`` is out of range.
        """
        return run(self.park_operation(tier, ttl_s))

    def resume(self) -> int:
        """Copy parked KV back to the device now, if there is room; the next turn does so in any case.

        Returns the positions that the next turn finds; 0 if nothing was parked, or there is no room now.
        """
        return run(self.resume_operation())

    def fork(self) -> Session:
        """Return a second session with the same tokens; both share blocks, and neither changes the other's.

        A fork of a running turn has its completion so far, and ``ask(None)`` continues it. A file with parked KV and
        the label (``request_id``) stay with the original.

        Raises ``SessionStateError`` if the session is closed, ``TooManySessions`` if as many as allowed are open.
        """
        sequence = self._require_open("fork")
        root = self._request.root if self._request is not None else None
        snapshot = SequenceSnapshot.of(sequence) if sequence is not None else None
        # Why: a label belongs to one request; the original keeps it.
        options = replace(self._options, request_id=None)
        adapter = self._request.adapter if self._request is not None else None
        return self._store.open(self._params, options, snapshot, root, adapter=adapter)

    def export(self, path: str | os.PathLike[str], include_kv: bool = True) -> None:
        """Write everything that decides how the session continues, for ``Engine.import_session``.

        Args:
            path: of the file; the KV, if any, is in a second one beside it. Both are written under other names first.
            include_kv: whether to write the KV too, which takes space and saves time.

        Raises:
            SessionStateError: the session is closed.
            InvalidSessionFile, OSError: it would be too large to import or has a ``logits_processor``, or cannot be
                written; ``path`` is as it was.
            UnknownAdapter: it was asked nothing yet, and its ``lora`` is not loaded any more.
        """
        run(self.export_operation(path, include_kv))

    def close(self) -> None:
        """Abort a turn that is under way, and free everything; a second call does nothing."""
        self._store.recover()
        self._is_closed = True
        if self._request is not None and self in self._store.sessions:
            self._store.parking.free_kv(self._request.sequences[0])
            self._request.abort()
            self._request.remove()
        # Why last: after a call that was interrupted, the next one does the rest.
        self._store.sessions.discard(self)

    def __exit__(self, *_: object) -> None:
        self.close()

    def take_past(self, request: Request, kv: KVCopy | None) -> None:
        """Continue a request that was revived for this session, with ``kv`` in the cache."""
        # Why first: what is interrupted later is removed with the session.
        self._request = request
        self._store.requests.adopt(request)
        request.sequences[0].is_in_session = True
        if kv is not None:
            self._store.parking.load_kv(request.sequences[0], kv)

    def turn_operation(self, prompt: Prompt | None, params: SamplingParams | None) -> Operation[Request]:
        """Return ``extend`` as an operation; its only work tokenises the prompt and reads the session's file."""
        sequence, num_known = self._require_idle("ask"), len(self.token_ids)
        num_renewals = self._store.parking.num_renewals
        if prompt is None and sequence is None:
            raise SessionStateError("ask", "empty", "cut off within a completion", "Give a prompt.")
        file = self._store.parking.file_of(sequence) if sequence is not None else None
        prepared, kv = yield partial(self._prepare, prompt, params, file)
        sequence = self._require_idle("ask")
        if len(self.token_ids) != num_known:
            raise SessionStateError("ask", "further on", "as it was when the turn was prepared", "Ask again.")
        if sequence is not None and kv is not None and num_renewals == self._store.parking.num_renewals:
            self._store.parking.load_kv(sequence, kv)
        return self._begin(prepared)

    def params_of_turn(self, prompt: Prompt | None, params: SamplingParams | None) -> SamplingParams | None:
        """Return the parameters of a turn: those given, the session's, or those of the completion that it continues."""
        if prompt is None and self._request is not None:
            return self._request.params
        return self._params if params is None else params

    def park_operation(self, tier: Literal["host", "disk"], ttl_s: float | None) -> Operation[ParkedState]:
        """Return ``park`` as an operation."""
        sequence, ttl_s, parking = self._require_idle("park"), validation.validate_ttl(ttl_s), self._store.parking
        if tier not in ("host", "disk"):
            raise InvalidRequest("tier", tier, '"host" or "disk"')
        if sequence is None:
            return ParkedState("tokens", 0)
        file = parking.file_of(sequence) if tier == "host" and parking.has_room_on_host(sequence) else None
        if file is not None:
            yield from self._read_back(sequence, file, "park")
        present = parking.state(sequence)
        # Why: KV of which the device could take only a part stays on the disk.
        if present is not None and present.tier in (tier, "disk"):
            return parking.renew(sequence, ttl_s)
        if tier == "host" and (state := parking.park_on_host(sequence, ttl_s)) is not None:
            return state
        return (yield from parking.park_on_disk(sequence, ttl_s))

    def resume_operation(self) -> Operation[int]:
        """Return ``resume`` as an operation."""
        sequence, parking = self._require_idle("resume"), self._store.parking
        if sequence is None:
            return 0
        if (file := parking.file_of(sequence)) is not None:
            return (yield from self._read_back(sequence, file, "resume"))
        state = parking.state(sequence)
        return parking.fetch_kv(sequence) if state is not None and state.tier == "host" else 0

    def export_operation(self, path: str | os.PathLike[str], include_kv: bool) -> Operation[None]:
        """Return ``export`` as an operation."""
        sequence = self._require_open("export")
        file = self._store.parking.file_of(sequence) if sequence is not None and include_kv else None
        num_renewals = self._store.parking.num_renewals
        stored = (yield file.read) if file is not None else None
        stored = stored if num_renewals == self._store.parking.num_renewals else None
        yield partial(write_session, Path(path), self._snapshot(stored, include_kv=include_kv))

    def _prepare(
        self, prompt: Prompt | None, params: SamplingParams | None, file: ParkedFile | None
    ) -> tuple[ProcessedRequest | Constraint | None, KVCopy | None]:
        """Process a turn's prompt, or compile the grammar of a completion that is continued; read the parked KV."""
        inputs, params = self._store.input_processor, self.params_of_turn(prompt, params)
        processed: ProcessedRequest | Constraint | None = None
        if prompt is not None:
            validation.require_one_completion(params)
            require_no_gap(prompt)
            known = list(self._request.sequences[0].token_ids) if self._request is not None else None
            processed = inputs.process(prompt, params, self._options, known)
        elif params is not None:
            processed = inputs.constraint_of(params, self._options.owner)
        return processed, file.read() if file is not None else None

    def _begin(self, prepared: ProcessedRequest | Constraint | None) -> Request:
        request = self._request
        if request is None:
            assert isinstance(prepared, ProcessedRequest)  # Invariant: an empty session has no completion to complete
            self._request = request = self._store.accept(prepared)
            request.sequences[0].is_in_session = True
            return request
        with self._store.parking.change():
            if isinstance(prepared, ProcessedRequest):
                self._store.requests.begin_turn(request, prepared)
            else:
                try:
                    self._store.requests.complete_turn(request, prepared)
                except RequestStateError as error:
                    raise SessionStateError("ask", error.given, error.limit, "Give a prompt.") from None
            self._store.parking.unpark(request.sequences[0])
        return request

    def _read_back(self, sequence: Sequence, file: ParkedFile, what: str) -> Operation[int]:
        """Put a file's KV where the next turn finds it; the file is removed if all of it is there."""
        parking = self._store.parking
        num_renewals = parking.num_renewals
        kv: KVCopy | None = yield file.read
        self._require_idle(what)
        num_tokens = parking.load_kv(sequence, kv) if kv is not None and num_renewals == parking.num_renewals else 0
        if num_tokens >= len(file.spec.token_ids) and parking.file_of(sequence) is file:
            parking.unpark(sequence)
        return num_tokens

    def _snapshot(self, stored: KVCopy | None = None, *, include_kv: bool) -> SessionSnapshot:
        """Copy everything that ``export`` writes; ``stored`` may have more KV than the memories."""
        parking, sequence = self._store.parking, self._require_open("export")
        kv = parking.copy_kv(sequence) if sequence is not None and include_kv else None
        if stored is not None and (kv is None or kv.num_tokens < stored.num_tokens):
            kv = stored
        adapter = self._request.adapter if self._request is not None else self._store.find_adapter(self._options)
        digest = b"" if adapter is None else adapter.digest
        return SessionSnapshot(
            model=self._store.fingerprint, weights=self._store.weights, params=self._params,
            priority=self._options.priority, is_salted=self._options.cache_salt is not None,
            history=SequenceSnapshot.of(sequence) if sequence is not None else None, kv=kv,
            kv_spec=self._store.describe_kv(self.token_ids, kv.num_tokens, digest) if kv is not None else None,
            adapter=digest, adapter_name=(self._options.lora or "") if digest else "",
        )

    def _require_open(self, what: str) -> Sequence | None:
        if self._is_closed:
            raise SessionStateError(what, "closed", "open", "Open a new session, or import an exported one.")
        self._store.recover()
        self._store.parking.directory.require_process()
        return self._request.sequences[0] if self._request is not None else None

    def _require_idle(self, what: str) -> Sequence | None:
        sequence = self._require_open(what)
        if self.is_answering:
            raise SessionStateError(what, "answering", "between two turns", "Step until is_answering is false.")
        return sequence


@dataclass(eq=False, repr=False)
class SessionStore:
    """The open sessions of one engine.

    Invariant: a session is in the store from the time it was made until it or the engine is closed.
    """

    accept: Callable[[ProcessedRequest], Request]
    step: Callable[[], list[PendingOutput]]
    recover: Callable[[], None]
    """Undoes what broke off, and raises where the engine may not be called."""
    input_processor: InputProcessor
    requests: RequestTable
    parking: Parking
    fingerprint: ModelFingerprint
    weights: WeightsMark = field(default=WeightsMark(), init=False)
    """Which weights the engine has; of those that it was made with, nothing but the fingerprint."""
    session_key: bytes = b""
    """Authenticates the KV of exported sessions; without it, imported KV is the session's own and never shared."""
    sessions: set[Session] = field(default_factory=set, init=False)
    _is_closed: bool = field(default=False, init=False)

    def __len__(self) -> int:
        return len(self.sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self.sessions))

    def open_checked(self, params: SamplingParams | None, options: RequestOptions) -> Session:
        """Make a session of a caller's arguments. Errors as ``Engine.session``."""
        if params is not None:
            validation.require_one_completion(params)
            validation.check_params_for_model(params, self.input_processor.vocab_size)
        if self.input_processor.defaults.parameters:
            # Why here: they belong to the session, also where another engine continues it.
            params = self.input_processor.with_defaults(params)
        self.input_processor.check_options(options)
        return self.open(params, options)

    def read(self, path: str | os.PathLike[str], other_weights: str = "refuse") -> SessionSnapshot:
        """Read and check a session's files, on any thread. Arguments and errors as ``Engine.import_session``."""
        one_of("refuse", "recompute").check("other_weights", other_weights)
        num_renewals, mark = self.parking.num_renewals, self.weights
        snapshot = read_session(Path(path), self.fingerprint, self.input_processor, self.describe_kv, weights=mark,
                                takes_others=other_weights == "recompute")
        return replace(snapshot, num_renewals=num_renewals)

    def describe_kv(self, token_ids: tuple[int, ...], num_tokens: int | None = None, adapter: bytes = b"") -> KVSpec:
        """Describe the KV of a sequence's first ``num_tokens`` tokens, or all, in a file that travels; ``adapter`` is
        the digest of the one that it was computed with.
        """
        spec = self.parking.spec(token_ids, num_tokens)
        # Safety: without it, KV of one adapter could be loaded as that of another.
        form = sha256(f"{spec.kv_format} {adapter.hex()}".encode()).hexdigest() if adapter else spec.kv_format
        return replace(spec, kv_format=form, key=self.session_key)

    def find_adapter(self, options: RequestOptions) -> LoadedAdapter | None:
        """Return what a session's ``lora`` stands for now. Raises ``UnknownAdapter``."""
        return self.requests.adapters.find(options.lora)

    def _adapter_for(self, snapshot: SessionSnapshot, options: RequestOptions) -> tuple[LoadedAdapter | None, str]:
        """Return the adapter that a file names, and what it is called here. Raises ``AdapterMismatch``."""
        name = options.lora
        if name is None and snapshot.adapter:
            name = self.requests.adapters.name_of(snapshot.adapter)
        found = self.requests.adapters.find(name)
        digest = b"" if found is None else found.digest
        if digest != snapshot.adapter:
            raise AdapterMismatch(snapshot.adapter.hex(), digest.hex(), snapshot.adapter_name)
        return found, name or ""

    def take_in(self, snapshot: SessionSnapshot, given: OptionKeywords) -> Session:
        """Make a session of a file's contents. Errors as ``Engine.import_session``."""
        options = read_options(given)
        if snapshot.num_renewals != self.parking.num_renewals:
            # Why: new weights came since the file was read.
            snapshot = replace(snapshot, kv=None)
        self.input_processor.check_options(options)
        if "priority" not in given:
            options = replace(options, priority=snapshot.priority)
        if snapshot.is_salted and options.cache_salt is None:
            raise InvalidSalt("cache_salt", None, "a salt, because the session was made with one")
        adapter, name = self._adapter_for(snapshot, options)
        if name:
            options = replace(options, lora=name)
        return self.open(snapshot.params, options, snapshot.history, kv=snapshot.kv, adapter=adapter)

    def open(
        self, params: SamplingParams | None, options: RequestOptions, history: SequenceSnapshot | None = None,
        root: bytes | None = None, kv: KVCopy | None = None, *, adapter: LoadedAdapter | None = None,
    ) -> Session:
        """Make a session; one with a history has that ``adapter``, shares the blocks of ``root`` and has ``kv`` put
        into the cache.
        """
        if self._is_closed:
            raise EngineClosed("this engine is closed; make a new one.")
        if len(self.sessions) >= MAX_SESSIONS:
            raise TooManySessions(MAX_SESSIONS)
        session = Session(self, params, options)
        try:
            self.sessions.add(session)
            if history is not None:
                # Safety: without a signature the blocks prove nothing, so that no other request may find them.
                is_shared = kv is None or bool(self.session_key)
                past = self.requests.revive(history, options, root, is_shared=is_shared, adapter=adapter)
                session.take_past(past, kv)
        except BaseException:
            session.close()
            raise
        return session

    def take_weights(self, fingerprint: ModelFingerprint, mark: WeightsMark, kv_format: str) -> None:
        """Say from now on that the model has other weights, and keep nothing that was computed with the old ones."""
        self.fingerprint, self.weights = fingerprint, mark
        self.parking.take_weights(kv_format)

    def close(self) -> None:
        """Close all sessions and remove their files; a second call does nothing."""
        for session in self:
            session.close()
        self._is_closed = True
        self.parking.close()
