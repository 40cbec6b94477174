"""Other weights for a running engine: checked, made ready, and in the place of the old ones between two steps.

Owns the order, and what becomes of requests. The old prefix cache cannot be found any more before the first new number
is written, and a request that goes on has its positions computed again, so that no token is drawn from two versions.
What weights are and how they are read, ``models/new_weights.py`` knows.
"""

from __future__ import annotations

import os
import secrets
import threading
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from pagedcore.config.field_rules import matching, one_of
from pagedcore.errors import (
    EngineInUse,
    ForkedProcess,
    InvalidRequest,
    InvalidWeights,
    MemoryBudgetExceeded,
    WeightsIncomplete,
)
from pagedcore.outputs import WeightsVersion
from pagedcore.sessions.session_file import WeightsMark

if TYPE_CHECKING:
    from pagedcore.config.memory_budget import MemoryLease
    from pagedcore.engine.builder import EngineComponents
    from pagedcore.engine.step import StepRunner
    from pagedcore.models.new_weights import Weights
    from pagedcore.models.transformers_model import TransformersModel
    from pagedcore.requests.output_processor import OutputProcessor

Running = Literal["wait", "abort", "keep"]
Way = Literal["staged", "in_place"]
_RUNNING: Final = one_of("wait", "abort", "keep")
_WAY: Final = one_of("staged", "in_place")
_LABEL: Final = matching(r"[\w.:-]{0,64}", "at most 64 letters, digits, dots, colons and dashes")
_NO_ROOM: Final = 'For a second copy of the weights there has to be so much; way="in_place" needs none.'
_numbers: Final = count(1)
"""Of this process: no two loads have the same, in whatever engine."""


class WeightsHolder:
    """What loads of weights change of one engine, and who loads."""

    def __init__(self, steps: StepRunner, outputs: OutputProcessor, components: EngineComponents) -> None:
        self.steps, self.outputs = steps, outputs
        self._first_form, self._first_identity = components.kv_format, components.identity
        self.format = components.kv_format
        """As ``kv_format`` of the weights that there are now, by what they are alone, however they came."""
        self._lock, self._owner, self._process_id = threading.Lock(), "", os.getpid()

    def identity(self, kv_format: str, version: WeightsVersion) -> str:
        """Return what ``Engine.identity`` is with other weights."""
        rest = self._first_identity.removeprefix(self._first_form)
        return f"{kv_format}{rest}-{version.number}-{version.label}"

    def claim(self) -> None:
        """Let no other load begin until ``release``. Raises ``EngineInUse`` if one has."""
        if os.getpid() != self._process_id:
            # Why: a fork has none of the threads that load in its parent.
            self._lock, self._process_id = threading.Lock(), os.getpid()
        if not self._lock.acquire(blocking=False):
            raise EngineInUse(self._owner, threading.current_thread().name)
        self._owner = threading.current_thread().name

    def release(self) -> None:
        """Let others load."""
        self._lock.release()


class NewWeights:
    """A load of other weights, made by ``Engine.new_weights``: a context, in which ``load`` is called once.

    Invariant: until the first write in place, and with staged weights until the end, whatever fails changes nothing.
    """

    def __init__(self, engine: Any, version: str, running: Running, way: Way) -> None:
        """Take an ``Engine``, and the arguments of its ``new_weights``."""
        self._engine, self._holder, self._label = engine, engine.weights_holder, _LABEL.check("version", version)
        self._running: str = _RUNNING.check("running", running)
        self._way: str = _WAY.check("way", way)
        self._ready: TransformersModel | None = None
        self._second: MemoryLease | None = None
        self._is_staging, self._lock = False, threading.Lock()
        self._is_done = self._is_open = False
        self._process_id = os.getpid()

    def __enter__(self) -> Self:
        self._holder.claim()
        self._is_open = True
        try:
            self._engine.requests.require_awake()
        except BaseException:
            self.close()
            raise
        return self

    def load(self, weights: Weights) -> None:
        """Take other weights of the same model: staged, they wait for the end of the context; in place, they are
        written now.

        Args:
            weights: tensors by name, as ``state_dict()`` of a model of transformers returns them, in any floating
                format; or a directory, a GGUF file or a name on the hub, as for ``Engine.from_pretrained``. Tensors may
                be changed again when this returns.

        Raises:
            InvalidWeights: they are not of the same model, not finite, or written to meanwhile.
            InvalidConfig, MemoryError: they cannot be read, or there is no room; as ``Engine.from_pretrained``.
            MemoryBudgetExceeded: staged, and the budget, which counts weights, has not room for them twice.
            EngineInUse: in place, another thread is in a call of the engine.
        """
        if self._way == "staged":
            self.stage(weights)
        else:
            self._write(weights)

    def stage(self, weights: Weights) -> None:
        """Make weights ready beside the old ones; on any thread, while the engine computes. Raises as ``load``."""
        from pagedcore.models.new_weights import make_ready
        from pagedcore_kernels.cpu.runtime.float_state import DefaultFloatState
        from pagedcore_kernels.cpu.runtime.openmp import usable_torch
        from pagedcore_kernels.cpu.runtime.threads import num_threads_of_torch

        with self._lock:
            self._require_first()
            self._second, self._is_staging = self._draw_second(), True
        try:
            with DefaultFloatState(num_threads_of_torch()), usable_torch():
                self._ready = make_ready(self._backend, weights)
        finally:
            with self._lock:
                self._is_staging = False
                if self._ready is None:
                    self._drop()
                if not self._is_open:
                    self._leave()

    @property
    def is_staged(self) -> bool:
        """Whether nothing is written before the end."""
        return self._way == "staged"

    @property
    def waits(self) -> bool:
        """Whether requests are to end before the weights change."""
        return self._running == "wait"

    def commit(self) -> None:
        """Compute with the staged weights from the next step on. Raises ``EngineInUse``; then nothing changed."""
        self._require_open()
        ready = self._ready
        if ready is None:
            if not self._is_done:
                raise InvalidWeights("weights", "none", "a call of load in the context", is_described=True)
            return
        engine = self._engine
        with engine.exclusive():
            self._settle()
            with self._holder.steps.undisturbed():
                version = self._next_version()
                self._forget_computed(version)
                self._backend.become(ready)
                self._name(version)

    def close(self) -> None:
        """End the load; what was staged and not committed is dropped, and no other load begins while another thread
        stages still. A second call does nothing.
        """
        with self._lock:
            was_open, self._is_open = self._is_open, False
            # Why not always: whoever awaited the other thread has left, and it still has the memory.
            if was_open and not self._is_staging:
                self._leave()

    def _leave(self) -> None:
        self._drop()
        self._holder.release()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.commit()
        finally:
            self.close()

    @property
    def _backend(self) -> TransformersModel:
        from pagedcore.models.transformers_model import TransformersModel

        backend = self._engine.components.runner.backend
        if not isinstance(backend, TransformersModel):
            raise InvalidWeights("model", "a backend of your own", "one that the engine has loaded", is_described=True)
        return backend

    def _require_open(self) -> None:
        if os.getpid() != self._process_id:
            raise ForkedProcess(self._process_id)
        if not self._is_open:
            raise InvalidRequest("new_weights", "a context that is not open", "calls within it", is_described=True)

    def _require_first(self) -> None:
        self._require_open()
        if self._ready is not None or self._is_done:
            raise InvalidWeights("weights", "a second load", "one load in a context", is_described=True)

    def _draw_second(self) -> MemoryLease | None:
        try:
            second: MemoryLease | None = self._engine.components.memory.draw_second()
            return second
        except MemoryBudgetExceeded as error:
            raise MemoryBudgetExceeded(error.asked, error.left, error.total, _NO_ROOM) from None

    def _drop(self) -> None:
        """Forget what was staged, and give back what was drawn for it."""
        self._ready = None
        if self._second is not None:
            self._second.close()

    def _write(self, weights: Weights) -> None:
        """Write weights over the old ones."""
        from pagedcore.models.new_weights import write_over
        from pagedcore_kernels.cpu.runtime.float_state import DefaultFloatState
        from pagedcore_kernels.cpu.runtime.openmp import usable_torch
        from pagedcore_kernels.cpu.runtime.threads import num_threads_of_torch

        self._require_first()
        backend, steps, table, version = self._backend, self._holder.steps, self._engine.requests, self._next_version()
        floats = DefaultFloatState(num_threads_of_torch())
        with self._engine.exclusive(), ExitStack() as stack, floats, usable_torch():

            def begin() -> None:
                self._settle()
                stack.enter_context(steps.undisturbed())
                self._forget_computed(version)
                table.lacks_weights = True

            try:
                backend.become(write_over(backend, weights, begin))
            except BaseException:
                if table.lacks_weights:
                    with steps.change():
                        self._holder.outputs.end_live(WeightsIncomplete())
                raise
            table.lacks_weights, self._is_done = False, True
            self._name(version)

    def _next_version(self) -> WeightsVersion:
        return WeightsVersion(next(_numbers), self._label)

    def _settle(self) -> None:
        """Let running requests end, in the way that was chosen."""
        engine = self._engine
        if self._running == "abort":
            for request in engine.requests:
                engine.abort_request(request.request_id)
        while self._running == "wait" and engine.has_pending_requests():
            engine.sessions.step()

    def _forget_computed(self, version: WeightsVersion) -> None:
        self._holder.steps.forget_computed(lambda: self._engine.requests.take_weights(version))

    def _name(self, version: WeightsVersion) -> None:
        """Let everything that says which model this is say it anew."""
        from pagedcore.models.fingerprint import backend_fingerprint, kv_format

        engine, holder, backend = self._engine, self._holder, self._backend
        mark = WeightsMark(secrets.token_hex(32), version.number, version.label)
        before = engine.components
        fingerprint = backend_fingerprint(backend)
        holder.format = kv_format(backend, before.info.block_size)
        form = kv_format(backend, before.info.block_size, mark.id)
        engine.components = replace(
            before, fingerprint=fingerprint, kv_format=form, identity=holder.identity(form, version))
        engine.sessions.take_weights(fingerprint, mark, form)
        for one in engine.observers:
            one.weights_taken()
