"""Recordings of toy engines and of simulated schedulers, and what reads them back."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from pagedcore import Engine, SamplingParams
from pagedcore.analysis.recorder.dumps import RecordsEngine
from pagedcore.analysis.recorder.recording import Recording, read_recording, write_recording
from pagedcore.analysis.recorder.ring import FlightRecorder
from pagedcore.engine.builder import build_components
from scheduler_lives.simulator import Simulation
from support.doubles import FakeClock, ToyBackend


def toy_engine(mode: str = "on", backend: Any = None, clock: FakeClock | None = None, **settings: Any) -> Engine:
    """Build a small engine that records, on a clock that stands still."""
    defaults = {"num_kv_blocks": 8, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 8}
    components = build_components(
        backend if backend is not None else ToyBackend(), **{**defaults, "flight_recorder": mode, **settings}
    )
    return Engine(components, clock if clock is not None else FakeClock())


def ring_of(engine: Engine) -> FlightRecorder:
    """Return what an engine with a flight recorder keeps."""
    return next(one.ring for one in engine.observers if isinstance(one, RecordsEngine))


def run_all(engine: Engine, prompts: list[list[int]], **params: Any) -> None:
    """Run prompts to their ends together."""
    wanted = SamplingParams(**{"max_tokens": 6, "ignore_eos": True, **params})
    requests = [engine.add_request(prompt, wanted) for prompt in prompts]
    while engine.has_pending_requests():
        engine.step()
    for request in requests:
        request.remove()


def dumped(engine: Engine, folder: Path) -> Recording:
    """Dump an engine's recording and read it."""
    engine.dump_recording(folder / "recording.gz")
    return read_recording(folder / "recording.gz")


def recorded_life(seed: int, folder: Path, *, max_steps: int, **kinds: bool) -> Path:
    """Record a simulated life of a scheduler; return the file."""
    simulation = Simulation(seed, **kinds)
    recorder = FlightRecorder(simulation.scheduler, simulation.clock, max_steps=max_steps)
    simulation.run()
    hasher = simulation.scheduler.kv_cache.device.hasher
    write_recording(folder / "life.gz", {}, recorder.segments, hasher, keeps_tokens=seed % 4 == 0)
    return folder / "life.gz"


def lines_of(path: Path) -> list[Any]:
    """Return the values of a file's lines."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def write_lines(path: Path, lines: list[Any]) -> None:
    """Write values as a file's lines."""
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
