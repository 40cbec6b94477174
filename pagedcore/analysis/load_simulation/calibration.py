"""What a step of a real engine costs: measured with a load of every size, and kept in a file of a few numbers."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final

from pagedcore.analysis.load_simulation.costs import LoadTimes, Step, WorkObserver, fit_costs
from pagedcore.analysis.load_simulation.replica import SimulatedModel
from pagedcore.analysis.load_simulation.simulator import SimulatedEngine
from pagedcore.config import field_rules as rules
from pagedcore.config.config_file import read_settings
from pagedcore.config.engine_config import EngineConfig
from pagedcore.errors import InvalidConfig, describe
from pagedcore.plugins.manager import PluginManager
from pagedcore.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pagedcore.engine.engine import Engine

_VERSION: Final = 1
_LONGEST_PROMPT: Final = 512
_LONGEST_COMPLETION: Final = 48
_TIMES_STEADY: Final = 4
_NUM_TOKEN_IDS: Final = 256
_RULES: Final[dict[str, rules.FieldRule[Any]]] = {
    "model": rules.NAME, "num_steps": rules.integer(0, 2**53), "mean_error": rules.number(0),
    "max_model_len": rules.COUNT, "block_size": rules.COUNT, "num_kv_blocks": rules.COUNT,
    "is_schedule_invariant": rules.BOOLEAN,
    **dict.fromkeys(("num_states", "window", "kv_bytes", "kv_bytes_per_token", "window_bytes_per_token"),
                    rules.integer(0, 2**53)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Costs of one model's steps on one machine, and what its engine was.

    Raises:
        InvalidConfig: a field is out of its range.
    """

    model: str
    times: LoadTimes
    num_steps: int
    """Steps that were measured."""
    mean_error: float
    """Mean of |measured - predicted| seconds over the mean of measured seconds."""
    max_model_len: int
    block_size: int
    num_kv_blocks: int
    is_schedule_invariant: bool
    num_states: int = 0
    """State blocks of a model with recurrent layers; 0: it has none."""
    window: int = 0
    """As of ``SimulatedModel``, like the bytes of a token; 0: all layers of the engine kept all positions."""
    kv_bytes: int = 0
    """Of the pool, if it has window blocks and was not given in blocks, else 0."""
    kv_bytes_per_token: int = 1
    window_bytes_per_token: int = 1

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            rule.check(name, getattr(self, name), rules.invalid_setting)

    def engine(self, config: EngineConfig) -> SimulatedEngine:
        """Return what is simulated: this model under ``config``, with the calibrated pool if that names none."""
        if config.num_kv_blocks is None and config.kv_cache_memory is None:
            size = config.block_size or self.block_size
            in_blocks = {"num_kv_blocks": max(1, self.num_kv_blocks * self.block_size // size)}
            # Why bytes: with other settings an engine divides them differently among its two kinds of blocks.
            pool: dict[str, Any] = {"kv_cache_memory": self.kv_bytes} if self.kv_bytes else in_blocks
            config = replace(config, **pool)
        names = {one.name for one in fields(SimulatedModel)} & {one.name for one in fields(self)}
        model = SimulatedModel(**{name: getattr(self, name) for name in names})
        return SimulatedEngine(times=self.times, model=model, config=config)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file. Raises ``OSError``."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"version": _VERSION, **asdict(self)}, file, indent=2)
            file.write("\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Read what ``save`` has written.

        Raises:
            InvalidConfig: the file cannot be read, or is no calibration; the message names the field.
        """
        data = read_settings(path)
        names, costs = {one.name for one in fields(cls)}, {one.name for one in fields(LoadTimes)}
        if data.pop("version", None) != _VERSION or not isinstance(data.get("times"), dict):
            raise InvalidConfig("step times: got another kind of file, allowed is one that "
                                "`pagedcore simulate --calibrate` has written.")
        # Why: a file that was written by hand may leave out what prompts cost on top, and what few models have.
        data = {one.name: one.default for one in fields(cls) if one.default is not MISSING} | data
        data["times"] = {one.name: 0.0 for one in fields(LoadTimes)[4:]} | data["times"]
        for wanted, found in ((names, set(data)), (costs, set(data["times"]))):
            if wanted != found:
                raise InvalidConfig(f"step times: got {len(found)} fields, allowed are {', '.join(sorted(wanted))}.")
        return cls(**{**data, "times": LoadTimes(**data["times"])})


def calibrate(
    engine: Engine, name: str, *, seconds: float = 20.0, seed: int = 0,
    on_progress: Callable[[float], object] = lambda share: None,
) -> Calibration:
    """Measure the steps of an idle engine that this call has for itself, and fit their costs.

    One to ``max_num_seqs`` requests of random lengths run at a time until the time is over: all at once, or a new one
    whenever one has ended, as under a steady load; or twice as many come as can run. So steps have every number of
    rows, with a prompt, with several and with none, early and late in a sequence, with a queue and without.

    Args:
        engine: what is measured; its requests are withdrawn afterwards.
        name: what to call the model.
        seconds: how long to measure, from 0.1 to 3600; the first load, a fifth of the time at most, warms up and is not
            counted.
        seed: of the lengths and tokens.
        on_progress: called after each step with the seconds it took.
    """
    rules.number(0.1, 3600).check("seconds", seconds, rules.invalid_setting)
    observer, rng, steps = WorkObserver(), random.Random(seed), list[Step]()
    manager = PluginManager()
    manager.add(observer, "calibration")
    forget = engine.hooks.add(manager)
    stats, deadline_s = engine.stats(), time.perf_counter() + seconds
    loads, accepts_s, removals_s = list[tuple[int, int]](), list[float](), list[float]()
    longest, is_warm = min(stats.max_model_len, stats.num_blocks * stats.block_size), False
    while time.perf_counter() < deadline_s:
        loads = loads or _loads(stats.max_num_seqs, rng)
        size, num_left = loads.pop()
        while (num_left or engine.has_pending_requests()) and time.perf_counter() < deadline_s:
            if num_left and len(list(engine.requests)) < size and engine.can_accept():
                num_left -= 1
                _submit(engine, longest, rng, accepts_s)
                continue
            start_s = time.perf_counter()
            engine.step_pending()
            elapsed_s = time.perf_counter() - start_s
            ended = [request for request in engine.requests if request.is_done]
            is_warm = is_warm or start_s > deadline_s - 0.8 * seconds
            if (work := observer.take()) is not None and is_warm:
                steps.append((work, len(ended), elapsed_s))
            on_progress(elapsed_s)
            for request in ended:
                removals_s.append(_seconds_of(request.remove))
        for request in list(engine.requests):
            engine.abort_request(request.request_id)
            request.remove()
        accepts_s, removals_s, is_warm = accepts_s if is_warm else [], removals_s if is_warm else [], True
    forget()
    times, error = fit(steps)
    request_s = times.request_s + sum(sum(each) / max(1, len(each)) for each in (accepts_s, removals_s))
    return Calibration(
        model=name, times=replace(times, request_s=request_s), num_steps=len(steps), mean_error=error,
        **facts_of(engine),
    )


def facts_of(engine: Engine) -> dict[str, Any]:
    """Return what a ``Calibration`` says of an engine, beside what its steps cost."""
    stats, memory = engine.stats(), engine.components.memory
    names = ("max_model_len", "block_size", "is_schedule_invariant", "num_states")
    facts = {"num_kv_blocks": stats.num_blocks, **{name: getattr(stats, name) for name in names}}
    if stats.num_windows:
        windows, num_tokens, size = memory.windows, stats.num_blocks * stats.block_size, stats.block_size
        kept, left = -(-(memory.num_bytes - windows.num_bytes) // num_tokens), -(-windows.block_bytes // size)
        facts |= {"window": windows.window, "kv_bytes_per_token": kept, "window_bytes_per_token": left}
        if engine.components.config.num_kv_blocks is None:
            facts["kv_bytes"] = kept * num_tokens + left * windows.num_windows * size
    return facts


def fit(steps: list[Step]) -> tuple[LoadTimes, float]:
    """Fit costs to measured steps as ``fit_costs`` does; return them and the mean error, as ``Calibration.mean_error``.

    Raises:
        InvalidConfig: there are fewer than 50 steps.
    """
    if len(steps) < 50:
        raise InvalidConfig(f"steps: got {describe(len(steps))}, allowed is 50 or more; measure for longer.")
    times = fit_costs(steps)
    errors_s = [abs(seconds - times.load_seconds(work) - times.request_s * num_ended)
                for work, num_ended, seconds in steps]
    return times, sum(errors_s) / sum(one[2] for one in steps)


def _loads(most: int, rng: random.Random) -> list[tuple[int, int]]:
    """Return pairs (requests at a time, requests in all): all at once, or a new one whenever one has ended.

    Those of one load are more than run at a time, so that the others wait.
    """
    sizes = {min(1 << power, most) for power in range(most.bit_length() + 1)}
    steady = [(size, times * size) for size in sorted(sizes) for times in (1, _TIMES_STEADY)]
    loads = [*steady, (2 * most, 2 * most)]
    rng.shuffle(loads)
    return loads


def _submit(engine: Engine, longest: int, rng: random.Random, accepts_s: list[float]) -> None:
    """Add a request, and note how long that took. Every other prompt is short, drawn by its logarithm."""
    num_ids, most = min(_NUM_TOKEN_IDS, engine.input_processor.vocab_size), max(1, min(_LONGEST_PROMPT, longest // 2))
    num_prompt = rng.choice((rng.randint(1, most), int(most ** rng.random())))
    num_output = rng.randint(1, max(1, min(_LONGEST_COMPLETION, longest - num_prompt)))
    prompt = [rng.randrange(num_ids) for _ in range(num_prompt)]
    params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
    accepts_s.append(_seconds_of(lambda: engine.add_request(prompt, params)))


def _seconds_of(call: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s
