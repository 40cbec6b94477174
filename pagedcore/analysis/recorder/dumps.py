"""The flight recorder of an engine: records its decisions, and writes them to a file when asked, or after trouble."""

from __future__ import annotations

import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from pagedcore._version import __version__
from pagedcore.analysis.recorder.recording import write_recording
from pagedcore.analysis.recorder.ring import FlightRecorder
from pagedcore.engine.engine import Engine
from pagedcore.errors import RecordingError
from pagedcore.execution.machine import this_machine
from pagedcore.requests.observers import EngineObserver
from pagedcore.requests.request import Request

_log = logging.getLogger("pagedcore")

MAX_DUMPS: Final = 4
"""Recordings that one engine writes unasked, each at least a minute after the one before."""
_PAUSE_S: Final = 60.0


class RecordsEngine(EngineObserver):
    """Records one engine, which it takes over from its beginning."""

    def __init__(self, engine: Engine) -> None:
        self.ring = FlightRecorder(engine.scheduler, engine.clock)
        self.ring.begin_anew_after(engine.sessions.parking, "load_kv")
        self.ring.watch_beams(engine.requests.outputs.groups)
        self._engine = engine
        self._num_dumps, self._next_dump_s = 0, -math.inf
        self.ring.weights = self._weights()

    def _weights(self) -> list[Any]:
        version = self._engine.weights
        return [version.number, version.label, self._engine.weights_holder.format]

    def weights_taken(self) -> None:
        """Note which weights the next step is computed with."""
        self.ring.note_weights(self._weights())

    def request_accepted(self, request: Request) -> None:
        """Note which sequences a request has, and when it arrived."""
        self.ring.note_request(request)

    def note_trouble(self, why: str, errors: Iterable[BaseException] = ()) -> None:
        """Write a recording of its own accord, seldom and to a new directory of this user, and say where it is.

        No error is raised: there is no file if there are enough of them, or it cannot be written.
        """
        now_s = self._engine.clock.now()
        if self._num_dumps >= MAX_DUMPS or now_s < self._next_dump_s:
            return
        self._next_dump_s = now_s + _PAUSE_S
        with suppress(Exception):
            path = Path(tempfile.mkdtemp(prefix="pagedcore-recording-")) / f"{why}.jsonl.gz"
            self.take()(path)
            self._num_dumps += 1
            _log.warning("flight recorder: the last steps are in %s", path)
            for error in errors:
                error.add_note(f"The flight recorder's last steps are in {path}")

    def take(self) -> Callable[[str | os.PathLike[str]], None]:
        """As ``take_recording``."""
        self.ring.require_owner()
        if not self.ring.segments:
            raise RecordingError("nothing was recorded yet")
        # Why copies: both lists grow with every step.
        segments = [replace(one, events=one.events.copy()) for one in self.ring.segments]
        return partial(
            write_recording, header=header_of(self._engine), segments=segments,
            hasher=self._engine.scheduler.kv_cache.device.hasher,
            keeps_tokens=self._engine.components.config.flight_recorder == "tokens",
        )


def take_recording(engine: Engine) -> Callable[[str | os.PathLike[str]], None]:
    """As ``Engine.take_recording``."""
    for one in engine.observers:
        if isinstance(one, RecordsEngine):
            return one.take()
    raise RecordingError('the flight recorder is off; build the engine with flight_recorder="on"')


def header_of(engine: Engine) -> dict[str, Any]:
    """Say what an engine's bits depend on, as a recording does in its first line."""
    info, config = engine.components.info, engine.components.config
    return {
        "pagedcore": __version__, "identity": engine.weights_holder.format, "max_model_len": info.max_model_len,
        "processor": this_machine().instruction_sets, "is_schedule_invariant": info.is_schedule_invariant,
        "engine": {
            "dtype": info.dtype, "block_size": info.block_size, "attention_backend": config.attention_backend,
            "linear_backend": config.linear_backend, "kv_cache_dtype": config.kv_cache_dtype,
            "quantization": config.quantization, "model_backend": config.model_backend,
            "max_model_len": info.max_model_len,
        },
    }
