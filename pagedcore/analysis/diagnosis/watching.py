"""What an engine can say about itself: why a request waits, and a recording of what was decided; and when it says so
unasked: after a failed step, after a defect, and when nothing progresses although there is work.
"""

from __future__ import annotations

import logging
import math
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pagedcore._version import __version__
from pagedcore.analysis.diagnosis.explanation import Explanation, WaitLog, explain
from pagedcore.analysis.recorder.recording import write_recording
from pagedcore.analysis.recorder.ring import FlightRecorder
from pagedcore.errors import RecordingError
from pagedcore.execution.machine import this_machine
from pagedcore.protocols import Clock
from pagedcore.requests.candidate_groups import CandidateGroups
from pagedcore.requests.request import Request
from pagedcore.requests.request_table import RequestTable
from pagedcore.scheduler.plan import SchedulePlan
from pagedcore.scheduler.scheduler import Scheduler
from pagedcore.sessions.parking import Parking

if TYPE_CHECKING:
    from pagedcore.engine.builder import EngineComponents
    from pagedcore.engine.step import StepRunner

_log = logging.getLogger("pagedcore")

STALL_S: Final = 5.0
"""Seconds without a computed step, although there is work that waits for no company, after which the log says why."""
MAX_DUMPS: Final = 4
"""Recordings that one engine writes unasked, each at least a minute after the one before."""
_PAUSE_S: Final = 60.0


class Diagnosis:
    """The part of an engine that watches and explains it."""

    scheduler: Scheduler
    requests: RequestTable
    identity: str
    _components: EngineComponents
    _clock: Clock
    _steps: StepRunner

    def _begin_diagnosis(self, parking: Parking, groups: CandidateGroups) -> None:
        mode = self._components.config.flight_recorder
        self._recorder = None if mode == "off" else FlightRecorder(self.scheduler, self._clock)
        if self._recorder is not None:
            self._recorder.begin_anew_after(parking, "load_kv")
            self._recorder.watch_beams(groups)
        self._wait_log = WaitLog()
        self._idle_since_s: float | None = None
        self._num_dumps, self._next_dump_s = 0, -math.inf

    def _noted(self, request: Request) -> Request:
        """Return a request whose sequences are new, recorded if there is a recorder."""
        if self._recorder is not None:
            self._recorder.note_request(request)
        return request

    def explain(self, request_id: str) -> Explanation:
        """Say where a request stands and, if it waits, why, for how long, and who holds what it lacks.

        For operators: the answer names other requests. ``request_id`` is the engine's id or the caller's own label; an
        id that is not known gives the state "unknown".

        Raises ``EngineInUse`` if another thread is in a call of this engine, ``InvalidRequest`` for an id that is no
        text.
        """
        with self._steps.exclusive():
            if self._steps.is_torn:
                self._steps.recover()
            request = self.requests.find(request_id) or next(
                (one for one in self.requests if one.client_request_id == request_id), None
            )
            if request is None:
                return Explanation(request_id, "unknown")
            return explain(request, self.requests, self.scheduler, self._wait_log, self._clock.now())

    def dump_recording(self, path: str | os.PathLike[str]) -> None:
        """Write what the flight recorder has to a file that only its owner can read; see ``pagedcore replay``.

        Without ``flight_recorder="tokens"`` it has no token ids and nothing that a guess of a prompt can be checked by.

        Raises:
            RecordingError: the flight recorder is off, or nothing was recorded yet.
            ForkedProcess: this process is a fork of the engine's.
            OSError: the file cannot be written; then there is none.
        """
        self.take_recording()(path)

    def take_recording(self) -> Callable[[str | os.PathLike[str]], None]:
        """Return a function that writes the recording as it is now, once, on any thread. Raises as ``dump_recording``.

        For an engine that must not wait for compression and a disk.
        """
        recorder = self._recorder
        if recorder is None:
            raise RecordingError('the flight recorder is off; build the engine with flight_recorder="on"')
        recorder.require_owner()
        if not recorder.segments:
            raise RecordingError("nothing was recorded yet")
        # Why copies: both lists grow with every step.
        segments = [replace(one, events=one.events.copy()) for one in recorder.segments]
        return partial(
            write_recording, header=self.recording_header(), segments=segments,
            hasher=self.scheduler.kv_cache.device.hasher,
            keeps_tokens=self._components.config.flight_recorder == "tokens",
        )

    def recording_header(self) -> dict[str, Any]:
        """Say what the engine's bits depend on, as a recording does in its first line."""
        info, config = self._components.info, self._components.config
        return {
            "pagedcore": __version__, "identity": self._components.kv_format, "max_model_len": info.max_model_len,
            "processor": this_machine().instruction_sets, "is_schedule_invariant": info.is_schedule_invariant,
            "engine": {
                "dtype": info.dtype, "block_size": info.block_size, "attention_backend": config.attention_backend,
                "linear_backend": config.linear_backend, "kv_cache_dtype": config.kv_cache_dtype,
                "quantization": config.quantization, "model_backend": config.model_backend,
                "max_model_len": info.max_model_len,
            },
        }

    def dump_unasked(self, why: str) -> str | None:
        """Write a recording of its own accord, seldom and to a new directory of this user; return its path.

        ``None``: the flight recorder is off, there are enough such files, or it cannot be written; no error is raised.
        """
        now_s = self._clock.now()
        if self._recorder is None or self._num_dumps >= MAX_DUMPS or now_s < self._next_dump_s:
            return None
        self._next_dump_s = now_s + _PAUSE_S
        with suppress(Exception):
            path = str(Path(tempfile.mkdtemp(prefix="pagedcore-recording-")) / f"{why}.jsonl.gz")
            self.dump_recording(path)
            self._num_dumps += 1
            _log.warning("flight recorder: the last steps are in %s", path)
            return path
        return None

    def _mention_recording(self, error: BaseException, why: str) -> None:
        if (path := self.dump_unasked(why)) is not None:
            error.add_note(f"The flight recorder's last steps are in {path}")

    def _look_at(self, plan: SchedulePlan) -> None:
        """Note what stops the queue, whether the model failed, and whether nothing was computed for long."""
        if plan.stopped_by != self._wait_log.reason:
            self._wait_log.note(self._clock.now(), plan.stopped_by)
        if self._steps.has_failed:
            failed = {row.sequence.sequence_id for row in plan.rows}
            errors = [one.error for one in self.requests if one.error is not None
                      and failed.intersection(each.sequence_id for each in one.sequences)]
            if errors and (path := self.dump_unasked("failed-step")) is not None:
                for error in errors:
                    error.add_note(f"The flight recorder's last steps are in {path}")
        if plan.rows or not self._steps.is_stalled:
            self._idle_since_s = None
            return
        now_s = self._clock.now()
        if self._idle_since_s is None:
            self._idle_since_s = now_s
        elif now_s - self._idle_since_s >= STALL_S:
            self._idle_since_s = now_s
            self._report_stall()

    def _report_stall(self) -> None:
        head = next(iter(self.scheduler.waiting), None) or next(iter(self.scheduler.running))
        request = next((one for one in self.requests if head in one.sequences), None)
        text = str(self.explain(request.request_id)) if request is not None else "a candidate waits"
        _log.warning("no step has computed anything for %g s although there is work. The first request: %s",
                     STALL_S, text)
        self.dump_unasked("stall")
