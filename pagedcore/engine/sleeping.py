"""An engine that is not needed for a while gives its memory back, and takes it again when it is.

Owns the order. Whatever breaks a wake off leaves an engine that sleeps, with all memory given back, and whatever breaks
``sleep`` off before requests have ended leaves one that is awake. What the weights are and where they come from,
``models/origin.py`` knows.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from pagedcore.config.field_rules import FieldRule, one_of
from pagedcore.engine.new_weights import WeightsHolder
from pagedcore.errors import EngineClosed, InvalidRequest, InvalidWeights
from pagedcore.models.origin import Succession, weight_files
from pagedcore.requests.request_table import RequestTable

if TYPE_CHECKING:
    from pagedcore.engine.builder import EngineComponents
    from pagedcore.engine.step import StepRunner
    from pagedcore.models.transformers_model import TransformersModel
    from pagedcore.sessions.session import SessionStore

Level = Literal[1, 2]
Ending = Literal["wait", "abort"]
_LEVEL: Final[FieldRule[Any]] = FieldRule(
    lambda value: type(value) is int and value in (1, 2), "1 (without the KV pool), or 2 (without the weights too)")
_ENDING: Final = one_of("wait", "abort")


class Sleeps:
    """The part of an ``Engine`` that gives memory back and takes it again."""

    components: EngineComponents
    requests: RequestTable
    sessions: SessionStore
    weights_holder: WeightsHolder
    _steps: StepRunner

    @property
    def sleep_level(self) -> int:
        """What it has given back: 1 its KV pool, 2 its weights too; 0: it is awake. May be read on any thread."""
        return self.requests.sleep_level

    def sleep(self, level: Level = 1, *, running: Ending = "wait") -> None:
        """Give memory back until ``wake``; requests and turns are refused with ``EngineAsleep`` meanwhile.

        Sessions stay open: those that are parked in a file keep it, all others keep their tokens, whose KV is computed
        again, with the same bits. An engine that sleeps at level 1 can go on to 2; otherwise a second call does
        nothing.

        Args:
            level: 1 gives the KV pool and the host tier back, and what was drawn for them from a budget; 2 gives the
                weights back as well, which ``wake`` reads again from the files that they came from.
            running: what becomes of requests that have not ended: "wait" runs them to their ends first, "abort" aborts
                them.

        Raises:
            InvalidRequest: an argument is out of range; or the engine computes on a GPU, or with a backend of your own;
                or level 2 is asked for and the weights were given as a loaded model or as tensors. Nothing changed.
            EngineInUse: another thread is in a call of this engine, or weights are being loaded.
            EngineClosed: after ``close()``.
        """
        backends = self.require_sleep(level, running)
        with self.exclusive():
            self.weights_holder.claim()
            try:
                if level > self.sleep_level:
                    self._end_requests(running)
                    with self._steps.undisturbed():
                        self._steps.forget_computed(lambda: self.mark_asleep(level))
                        give_back(self, backends, level)
            finally:
                self.weights_holder.release()

    def require_sleep(self, level: Level, running: Ending) -> list[TransformersModel]:
        """Return the models that would give memory back. Raises what ``sleep`` refuses, but ``EngineInUse``."""
        self._require_open()
        _LEVEL.check("level", level)
        _ENDING.check("running", running)
        return _sleepers(self, level)

    def wake(self) -> None:
        """Take memory again, and read the weights again where they were given back; nothing if it is awake.

        It is the engine that it was: ``identity``, ``weights``, sessions and answers are the same. The prefix cache is
        empty. Whatever is raised leaves it asleep.

        Raises:
            InvalidWeights: the files are others than those that were read before.
            MemoryBudgetExceeded: the budget has not enough left. InvalidConfig, MemoryError: the machine has not, or
                the files cannot be read.
            EngineInUse: another thread is in a call of this engine. EngineClosed: after ``close()``.
        """
        with self.exclusive():
            wake = self.begin_wake()
            try:
                wake.begin()
                wake.read()
                wake.commit()
            finally:
                wake.close()

    def begin_wake(self) -> Wake:
        """Return the parts of ``wake``, for an owner that reads on another thread. Raises ``EngineClosed``."""
        self._require_open()
        return Wake(self)

    def _end_requests(self, running: Ending) -> None:
        if running == "abort":
            for request in self.requests:
                self.abort_request(request.request_id)
        while self.has_pending_requests():
            self.sessions.step()

    def mark_asleep(self, level: int) -> None:
        """Say what was given back, 0 for nothing; for ``Wake``."""
        self.requests.sleep_level, self.sessions.parking.is_asleep = level, level > 0

    @abstractmethod
    def exclusive(self) -> AbstractContextManager[None]:
        """As ``Engine`` has it."""

    @abstractmethod
    def abort_request(self, request_id: str) -> bool:
        """As ``Engine`` has it."""

    @abstractmethod
    def has_pending_requests(self) -> bool:
        """As ``Engine`` has it."""

    @abstractmethod
    def _require_open(self) -> None:
        """As ``Engine`` has it."""


@dataclass(eq=False)
class Wake:
    """One wake of an engine: ``begin`` and ``commit`` on its thread, ``read`` and ``close`` on any.

    Invariant: what was drawn and read goes back with ``close``, unless ``commit`` has returned.
    """

    engine: Any
    """An ``Engine``."""
    _level: int = 0
    """At which the engine sleeps, from ``begin`` on."""
    _ready: list[tuple[TransformersModel, TransformersModel]] = field(default_factory=list)
    """Backends, and what they are to become."""
    _has_claim: bool = False
    _is_closed: bool = False
    _lock: Any = field(default_factory=threading.Lock)

    def begin(self) -> None:
        """Draw from the budget. Raises ``EngineInUse``, ``MemoryBudgetExceeded``."""
        with self._lock:
            # Why: whoever awaits this may have been cancelled before it began.
            if not self._is_closed and self.engine.sleep_level:
                self.engine.weights_holder.claim()
                self._has_claim, self._level = True, self.engine.sleep_level
                self.engine.components.memory.draw_again()

    def read(self) -> None:
        """Read the weights, if they were given back. Raises as ``Engine.wake``."""
        from pagedcore_kernels.cpu.runtime.float_state import DefaultFloatState
        from pagedcore_kernels.cpu.runtime.openmp import usable_torch
        from pagedcore_kernels.cpu.runtime.threads import num_threads_of_torch

        if self._level == 2:
            with DefaultFloatState(num_threads_of_torch()), usable_torch():
                self._ready = [(one, _read_again(one, self._require_open)) for one in _sleepers(self.engine, 2)]

    def _require_open(self, _: Any = None) -> None:
        # Why: whoever closes a process waits for the thread that reads.
        if self._is_closed:
            raise EngineClosed("wake: it was broken off.")

    def commit(self) -> None:
        """Be awake from now on. Raises ``InvalidConfig`` if there is no memory for the pool, and ``EngineClosed``."""
        engine = self.engine
        if not self._level:
            return
        with engine.exclusive(), engine.weights_holder.steps.undisturbed(), self._lock:
            self._require_open()
            backends = _sleepers(engine, 1)
            try:
                for one in backends:
                    one.resume_kv()
                for one, ready in self._ready:
                    one.become(ready)
                engine.mark_asleep(0)
            except BaseException:
                if engine.sleep_level:
                    give_back(engine, backends, self._level)
                raise

    def close(self) -> None:
        """Give back what was drawn and read, unless the engine is awake; a second call does nothing."""
        with self._lock:
            self._is_closed, self._ready = True, []
            if self._level and self.engine.sleep_level:
                self.engine.components.memory.give_back(self._level)
            if self._has_claim:
                self._has_claim = False
                self.engine.weights_holder.release()


def give_back(engine: Any, backends: list[TransformersModel], level: int) -> None:
    """Free the memory of a level, where it is not free; the engine is marked as asleep."""
    from pagedcore.execution.memory_pages import give_back_freed

    for one in backends:
        one.suspend_kv()
        if level == 2:
            one.lose_weights()
    give_back_freed()
    engine.components.memory.give_back(level)


def _sleepers(engine: Any, level: int) -> list[TransformersModel]:
    """Return the models of an engine. Raises ``InvalidRequest`` if one cannot sleep at this level."""
    from pagedcore.models.transformers_model import TransformersModel

    found = [engine.components.runner.backend, *engine.components.memory.backends[1:]]
    for one in found:
        if not isinstance(one, TransformersModel):
            raise InvalidRequest("sleep", "a backend of your own", "a model that pagedcore computes", is_described=True)
        if one.device_name:
            raise InvalidRequest("sleep", "a model on a GPU", "one on the CPU", is_described=True)
        if level == 2 and (one.origin is None or one.origin.source is None):
            raise InvalidRequest("level", "2 of weights that were given in memory", "1, or weights that were read from "
                                 "files, which can be read again", is_described=True)
    return found


def _read_again(one: TransformersModel, on_packed: Callable[[Any], None]) -> TransformersModel:
    """Return what a backend was before it lost its weights; ``on_packed`` is called after each of them.

    Raises ``InvalidWeights`` if the files are others now.
    """
    from pagedcore.models import new_weights

    origin = one.origin
    assert origin is not None  # Invariant: it was asked before the weights were lost
    assert origin.source is not None
    now = weight_files(origin.source)
    changed = sorted(name for name, known in origin.files.items() if now.get(name) != known)
    if changed:
        raise InvalidWeights("weights", f"{len(changed)} files that were changed or removed since they were read, "
                             f"{changed[0][:80]} among them", "the same files", is_described=True)
    new: TransformersModel = origin.load_files(origin.source, lambda model: None, Succession(one, on_packed))
    new_weights.require_same_form(one, new)
    if new.fingerprint != one.fingerprint:
        raise InvalidWeights("weights", "others than before", "the same ones", is_described=True)
    return new
