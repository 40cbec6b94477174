"""Random lives of an engine with its async layer on one thread: callers, loop, scheduler, store and faults of one seed.

What is real: ``AsyncEngine`` and everything below it, asyncio's tasks and futures, files. What is simulated: time,
threads, the model, the memories. Callers act between steps and in the middle of them. A run has a phase with faults and
a phase without, in which everything must end; then the engine must be empty. A failing seed is one command::

    PYTHONPATH=.:kernels:tests python -m scheduler_lives.engine_simulator SEED [--faults] [--states]
"""

from __future__ import annotations

import gc
import random
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any

from pagedcore import AsyncEngine
from pagedcore.engine.builder import build_components
from pagedcore.engine.engine import Engine
from pagedcore.errors import EngineClosed, QueueTimeout
from pagedcore.protocols import RaggedRows
from pagedcore.requests.output_processor import PendingOutput
from scheduler_lives.clients import FAILURES, PROMPT_TOKENS, Client
from scheduler_lives.faults import Faults, RudeObserver, SimBackend, SimHybrid, SimTokenizer, SimWindowed, silence
from scheduler_lives.laws import SimulationFailure, failure_of, require, short_prompts_leave_states
from scheduler_lives.one_thread import Turns, one_thread
from support.ahead import launched_ahead
from support.doubles import VOCAB_SIZE, FakeClock, toy_answer
from support.drafts import Adversary, Mistaken, assert_forgotten, draft_model, let_guess

QUIET_TURNS = 5
MOST_TURNS = 5000


class EngineSimulation:
    """One life, from an engine without callers to an engine without callers."""

    def __init__(
        self, seed: int, has_faults: bool = False, has_formation: bool = False, has_drafts: bool = False,
        keeps_states: bool = False, is_ahead: bool = False, has_windows: bool = False,
    ) -> None:
        self.seed, self.has_faults, self.has_drafts, self.keeps_states = seed, has_faults, has_drafts, keeps_states
        self.rng = rng = random.Random(f"engine {seed}")
        self.clock = FakeClock()
        self.turns = Turns(rng, self.clock)
        self.turns.before_sleep = self._direct
        self.faults = Faults(random.Random(f"faults {seed}"), has_faults)
        self.trace: list[str] = []
        self.failures: list[str] = []
        self.clients: list[Client] = []
        kind = SimHybrid if keeps_states else SimWindowed if has_windows else SimBackend
        self.backend = (launched_ahead(kind) if is_ahead else kind)(rng, self.faults, self._in_step)
        self.has_text = rng.random() < 0.5
        self.settings = self._draw_settings()
        if isinstance(self.backend, SimWindowed):
            self.backend.windows.window = 1 + seed % 4
            self.settings["host_kv_memory"] = None
        if isinstance(self.backend, SimHybrid):
            self.backend.has_attention = seed % 4 > 0
            copy_rng = random.Random(f"copies of states {seed}")
            self.backend.may_copy = lambda: not (self.faults.is_on and copy_rng.random() < 0.1)  # type: ignore[method-assign]
        if has_formation:
            self._draw_formation(random.Random(f"formation {seed}"))
        self.has_priorities = self.settings["scheduling_policy"] == "priority"
        self.has_queue_timeout = "clock jumps" in self.faults.armed or self.settings["queue_timeout_s"] is not None
        pool = self.settings["num_kv_blocks"] * self.settings["block_size"]
        self.longest = min(pool, rng.randint(8, 28))
        self.prefix = [rng.randrange(PROMPT_TOKENS) for _ in range(rng.randint(1, 10))]
        self.num_clients, self.arrival_interval_s = rng.randint(10, 50), rng.choice([0.03, 0.1, 0.3])
        self._next_arrival_s = 0.0
        self.closes_early = rng.random() < 0.15
        self.is_draining = self.is_closing = False
        self.num_errors = 0
        self._cancelled: set[Any] = set()
        self._is_resting = False
        # Why weak: an error has frames, and those the sessions that are to be lost.
        self._errors: weakref.WeakSet[Exception] = weakref.WeakSet()
        self._num_spawned = self._num_turns = self._num_quiet = self._most_steps = 0

    def _draw_settings(self) -> dict[str, Any]:
        rng, block_size = self.rng, self.rng.randint(1, 4)
        num_blocks, num_seqs = rng.randint(24 // block_size, 60 // block_size), rng.randint(1, 5)
        return {
            "block_size": block_size,
            "num_kv_blocks": num_blocks,
            "host_kv_memory": rng.choice([None, num_blocks, 3 * num_blocks]),
            "max_num_seqs": num_seqs,
            "max_num_batched_tokens": num_seqs + rng.choice([0, 1, 4, 12]),
            "max_num_waiting": rng.randint(2, 8),
            "queue_timeout_s": rng.choice([None, 20.0]),
            "scheduling_policy": rng.choice(["fcfs", "fcfs", "priority", "static"]),
            "admission": rng.choice(["optimistic", "optimistic", "guaranteed"]),
            "preemption": rng.choice(["auto", "swap", "swap", "shrink", "recompute", "wait"]),
            "eviction_policy": rng.choice(["lru", "lfu", "fifo"]),
            "enable_prefix_caching": rng.random() < 0.8,
            "session_key": rng.choice([None, "a secret of 16 bytes"]),
            "check_invariants": True,
        }

    def _draw_formation(self, rng: random.Random) -> None:
        # Why a generator of its own: a seed without formation means what it meant.
        self.settings |= {
            "min_batch_size": rng.randint(1, self.settings["max_num_seqs"]), "max_wait_ms": rng.choice([None, 0, 900]),
            **rng.choice([{}, {"phases": "separate"}, {"prefill_share": 0.3}]),
        }

    def run(self) -> EngineSimulation:
        """Live to the end.

        Raises:
            SimulationFailure: something is not as it has to be; the message is the command that shows it again.
        """
        try:
            with (silence(), one_thread(self.turns) as threads, tempfile.TemporaryDirectory() as folder,
                  short_prompts_leave_states(is_wanted=self.keeps_states)):
                self.folder = Path(folder)
                self._build()
                self._worker = threads[0].target.__self__  # type: ignore[attr-defined]
                threads[0].target()
                self._end()
                for loop in self.turns.loops:
                    loop.close()
        except Exception as error:
            when = f"after {len(self.trace)} events"
            name = "scheduler_lives.engine_simulator" + " --states" * self.keeps_states
            raise failure_of(error, when, name, self.seed, has_faults=self.has_faults) from error
        return self

    @property
    def num_steps(self) -> int:
        """Forwards that were computed or tried."""
        return self.backend.num_steps

    def count_error(self, error: Exception | None) -> None:
        """Note that a request ended with an error, which a fault must explain."""
        require(isinstance(error, FAILURES), f"a request ended with {error!r}")
        if isinstance(error, QueueTimeout):
            require(self.has_queue_timeout, "a request waited too long although there is no limit")
            return
        if error in self._errors:
            # Why: one request has several completions, which end with its one error.
            return
        self._errors.add(error)
        self.num_errors += 1
        most = self.faults.num_endable
        require(self.num_errors <= most, f"{self.num_errors} requests failed ({error!r}), faults explain {most}")

    def _build(self) -> None:
        num_host_blocks = self.settings["host_kv_memory"]
        block_bytes = self.settings["block_size"] * self.backend.kv_bytes_per_token
        host = None if num_host_blocks is None else num_host_blocks * block_bytes
        self.faults.is_on = False
        self.engine = Engine(build_components(
            self.backend, tokenizer=SimTokenizer(self.faults) if self.has_text else None,
            plugins=[RudeObserver(self.faults)], **{"speculation": "off", **self.settings, "host_kv_memory": host},
        ), self.clock)
        if self.has_drafts:
            self.drafts = Adversary(toy_answer, VOCAB_SIZE, self.seed, promises=self.seed % 2 or 0.5)
            self.model = draft_model(Mistaken())
            let_guess(self.engine, self.drafts, VOCAB_SIZE, model=self.model)
        self.faults.is_on = self.has_faults
        self._step_pending, self.engine.step_pending = self.engine.step_pending, self._step  # type: ignore[method-assign]
        self.async_engine = AsyncEngine(self.engine, stream_interval_s=self.rng.choice([0.0, 0.05, 1.0]))

    # What happens ------------------------------------------------------------------------------------------------

    def _step(self) -> list[PendingOutput]:
        self._require_aborts_are_done()
        # Why here: the engine may sleep through many turns of its callers, and books nothing meanwhile.
        self._num_quiet += self._is_resting
        self._direct()
        self.turns.run_some(6)
        self.clock.advance(self.rng.uniform(0.0, 0.3))
        return self._step_pending()

    def _require_aborts_are_done(self) -> None:
        """A reader that left before the step before this one has neither a request nor a place."""
        worker = self._worker
        present = {sink for sink in (*worker._requests, *worker._held) if sink.is_cancelled}
        require(not (kept := present & self._cancelled), f"{len(kept)} requests go on without their readers")
        self._cancelled = present

    def _in_step(self, batch: RaggedRows) -> None:
        rows = " ".join(f"{one}:{end}" for one, end in zip(batch.seq_ids.tolist(), batch.kv_lens.tolist(), strict=True))
        self.trace.append(f"{self.clock.now():.6f} step {rows}")
        self.turns.run_some(3)

    def _direct(self) -> None:
        """Decide what callers begin, and when it is enough; runs between two steps."""
        self._num_turns += 1
        require(not self.failures, "; ".join(self.failures))
        require(self._num_turns < MOST_TURNS, f"after {self._num_turns} turns not all have ended")
        if self.is_closing:
            return
        if not self.is_draining:
            self._let_callers_come()
        elif all(client.is_done for client in self.clients) and not self.turns.jobs:
            self._rest()
        else:
            steps = self.num_steps
            require(steps <= self._most_steps, f"without faults not all have ended after {steps} steps")

    def _let_callers_come(self) -> None:
        rng, now_s = self.rng, self.clock.now()
        while self._num_spawned < self.num_clients and self._next_arrival_s <= now_s:
            if rng.random() < 0.05:
                prompt = [*self.prefix, 1][: max(1, self.longest // 4)]
                for _ in range(rng.randint(5, 12)):
                    self._spawn(prompt)
            self._spawn()
            self._next_arrival_s += rng.expovariate(1.0 / self.arrival_interval_s)
        live = [client for client in self.clients if not client.task.done()]
        if live and rng.random() < 0.05:
            rng.choice(live).task.cancel()
        if self.faults.fires("clock jumps"):
            jump_s = rng.choice([0.0, 0.001, 3600.0])
            self.clock.advance(jump_s)
            self._next_arrival_s += jump_s
        if self._num_spawned >= self.num_clients:
            self._drain()

    def _spawn(self, prompt: list[int] | None = None) -> None:
        self.clients.append(Client(self, len(self.clients), prompt))
        self._num_spawned += 1

    def _drain(self) -> None:
        """From now on there are no faults and nobody begins anything."""
        self.is_draining, self.faults.is_on = True, False
        gc.collect()
        if self.closes_early:
            self._close()
        num_live = sum(not client.is_done for client in self.clients)
        self._most_steps = self.num_steps + 100 + 20 * self.longest * num_live

    def _rest(self) -> None:
        """Nobody wants anything any more: after a few turns nothing is left."""
        store = self.backend.cache_store
        store.end_all()  # type: ignore[attr-defined]
        if not self._is_resting:
            self._is_resting = True
            gc.collect()
        if self._num_quiet > QUIET_TURNS and not self.engine.has_pending_requests():
            self._require_empty()
            self._close()

    def _close(self) -> None:
        self.trace.append(f"{self.clock.now():.6f} close")
        self.is_closing = True
        self.async_engine.close()

    def _require_empty(self) -> None:
        engine, worker = self.engine, self._worker
        stats = engine.stats()
        require(stats.num_blocks_used == 0, f"{stats.num_blocks_used} blocks are referenced when all callers are gone")
        require(stats.num_host_blocks_used == 0, f"{stats.num_host_blocks_used} host blocks are referenced at the end")
        num_states = stats.num_states_used + stats.num_host_states_used
        require(num_states == 0, f"{num_states} states are referenced at the end")
        require((stats.num_running, stats.num_waiting) == (0, 0), "a sequence waits or runs when all callers are gone")
        require(len(engine.sessions) == 0, f"{len(engine.sessions)} sessions are left")
        require(not list(engine.requests), f"{len(list(engine.requests))} requests are left")
        require(not engine.sessions.parking.directory.files, "parked files are left")
        forgets = self.has_drafts and engine.scheduler.speculation.failure is None  # type: ignore[union-attr]
        require(not forgets or not self.drafts.live, "a source of drafts remembers sequences that are gone")
        if forgets:
            assert_forgotten(self.model)
        commands = worker._commands
        parts = [vars(one) for one in (worker, worker._flusher, commands, commands.places)]
        for name, value in [item for part in parts for item in part.items()]:
            is_kept = hasattr(value, "__len__") and not isinstance(value, str)
            require(not (is_kept and len(value)), f"the engine's thread keeps {name}")

    def _end(self) -> None:
        """The thread has ended: every caller learns of it, and the memories are free."""
        while self.turns.run_one():
            pass
        self.turns.sleep_until(lambda: all(client.is_done for client in self.clients), 10_000.0)
        require(not self.failures, "; ".join(self.failures))
        left = [client.number for client in self.clients if not client.is_done]
        require(not left, f"clients {left} wait for an engine that has ended")
        stats = self.engine.stats()
        require(stats.num_running + stats.num_waiting + len(self.engine.sessions) == 0, "work is left after the end")
        try:
            self.async_engine.submit([1])
        except EngineClosed:
            return
        raise SimulationFailure("a closed engine takes requests")


def hybrid_engine(seed: int, has_faults: bool) -> EngineSimulation:
    """A life of an engine whose model keeps states, with formation and drafts, in turns."""
    return EngineSimulation(seed, has_faults, has_formation=seed % 3 == 0, has_drafts=seed % 5 < 2, keeps_states=True)


if __name__ == "__main__":
    flags = [one for one in sys.argv[1:] if one.startswith("--")]
    make = hybrid_engine if "--states" in flags else EngineSimulation
    simulation = make(next(int(one) for one in sys.argv[1:] if one not in flags), has_faults="--faults" in flags)
    try:
        simulation.run()
    finally:
        print(simulation.settings, simulation.faults.armed, dict(simulation.faults.fired), *simulation.trace, sep="\n")
