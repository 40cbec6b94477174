"""What a step of a real engine costs: measured with a load of every size, and kept in a file of a few numbers."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final

from pagedcore.config import field_rules as rules
from pagedcore.config.config_file import read_settings
from pagedcore.config.engine_config import EngineConfig
from pagedcore.errors import InvalidConfig, describe
from pagedcore.plugins.hookspecs import hookimpl
from pagedcore.plugins.manager import PluginManager
from pagedcore.sampling_params import SamplingParams
from pagedcore.scheduler.step_time import StepTimeModel, StepTimes
from pagedcore.simulation.replica import SimulatedModel
from pagedcore.simulation.simulator import SimulatedEngine

if TYPE_CHECKING:
    from pagedcore.engine.engine import Engine
    from pagedcore.requests.stats import StepStats

_VERSION: Final = 1
_LONGEST_PROMPT: Final = 512
_LONGEST_COMPLETION: Final = 48
_NUM_TOKEN_IDS: Final = 256
_RULES: Final[dict[str, rules.FieldRule[Any]]] = {
    "model": rules.NAME, "num_steps": rules.integer(0, 2**53), "mean_error": rules.number(0),
    "max_model_len": rules.COUNT, "block_size": rules.COUNT, "num_kv_blocks": rules.COUNT,
    "is_schedule_invariant": rules.BOOLEAN,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Costs of one model's steps on one machine, and what its engine was.

    Raises:
        InvalidConfig: a field is out of its range.
    """

    model: str
    times: StepTimes
    num_steps: int
    """Steps that were measured."""
    mean_error: float
    """Mean of |measured - predicted| seconds over the mean of measured seconds."""
    max_model_len: int
    block_size: int
    num_kv_blocks: int
    is_schedule_invariant: bool

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            rule.check(name, getattr(self, name), rules.invalid_setting)

    def engine(self, config: EngineConfig) -> SimulatedEngine:
        """Return what is simulated: this model under ``config``, with the calibrated pool if that names none."""
        if config.num_kv_blocks is None and config.kv_cache_memory is None:
            size = config.block_size or self.block_size
            config = replace(config, num_kv_blocks=max(1, self.num_kv_blocks * self.block_size // size))
        model = SimulatedModel(max_model_len=self.max_model_len, block_size=self.block_size,
                               is_schedule_invariant=self.is_schedule_invariant)
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
        names, costs = {one.name for one in fields(cls)}, {one.name for one in fields(StepTimes)}
        if data.pop("version", None) != _VERSION or not isinstance(data.get("times"), dict):
            raise InvalidConfig("step times: got another kind of file, allowed is one that "
                                "`pagedcore simulate --calibrate` has written.")
        for wanted, found in ((names, set(data)), (costs, set(data["times"]))):
            if wanted != found:
                raise InvalidConfig(f"step times: got {len(found)} fields, allowed are {', '.join(sorted(wanted))}.")
        return cls(**{**data, "times": StepTimes(**data["times"])})


class _Observer:
    def __init__(self) -> None:
        self.stats: StepStats | None = None

    @hookimpl
    def pagedcore_step(self, stats: StepStats) -> None:
        self.stats = stats


def calibrate(
    engine: Engine, name: str, *, seconds: float = 20.0, seed: int = 0,
    on_progress: Callable[[float], object] = lambda share: None,
) -> Calibration:
    """Measure the steps of an idle engine that this call has for itself, and fit their costs.

    Batches of one to ``max_num_seqs`` requests of random lengths run until the time is over, so that steps have every
    number of rows, with and without prompts, early and late in a sequence.

    Args:
        engine: what is measured; its requests are withdrawn afterwards.
        name: what to call the model.
        seconds: how long to measure, from 0.1 to 3600; the first batch warms up and is not counted.
        seed: of the lengths and tokens.
        on_progress: called after each step with the seconds it took.
    """
    rules.number(0.1, 3600).check("seconds", seconds, rules.invalid_setting)
    observer, rng, steps = _Observer(), random.Random(seed), list[tuple[int, int, int, float]]()
    manager = PluginManager()
    manager.add(observer, "calibration")
    engine.hooks.add(manager)
    stats, deadline_s, is_warm = engine.stats(), time.perf_counter() + seconds, False
    sizes = list[int]()
    while time.perf_counter() < deadline_s:
        sizes = sizes or _batch_sizes(stats.max_num_seqs, rng)
        _submit(engine, sizes.pop(), min(stats.max_model_len, stats.num_blocks * stats.block_size), rng)
        while engine.has_pending_requests() and (start_s := time.perf_counter()) < deadline_s:
            observer.stats = None
            engine.step_pending()
            elapsed_s, done = time.perf_counter() - start_s, observer.stats
            if done is not None and is_warm:
                steps.append((done.num_prefill_tokens, done.num_decode_tokens, done.num_kv_tokens, elapsed_s))
            on_progress(elapsed_s)
        for request in engine.requests:
            engine.abort_request(request.request_id)
            request.remove()
        is_warm = True
    times, error = fit(steps, rng)
    return Calibration(
        model=name, times=times, num_steps=len(steps), mean_error=error, max_model_len=stats.max_model_len,
        block_size=stats.block_size, num_kv_blocks=stats.num_blocks,
        is_schedule_invariant=stats.is_schedule_invariant,
    )


def fit(steps: list[tuple[int, int, int, float]], rng: random.Random) -> tuple[StepTimes, float]:
    """Fit costs to measured steps (prefill tokens, decode rows, KV tokens, seconds); return them and their error.

    The costs are scaled so that all steps together take as long as they did, slow ones that fitted no cost among them.

    Raises:
        InvalidConfig: there are fewer than 50 steps.
    """
    if len(steps) < 50:
        raise InvalidConfig(f"steps: got {describe(len(steps))}, allowed is 50 or more; measure for longer.")
    model, order = StepTimeModel(forgetting=1.0), list(steps)
    # Why: in their own order the first ones would decide what counts as an outlier.
    rng.shuffle(order)
    for step in order:
        model.observe(*step)
    measured_s = sum(seconds for *_, seconds in steps)
    factor = measured_s / max(sum(model.predict(*work) for *work, _ in steps), 1e-9)
    times = StepTimes(*[factor * cost for cost in astuple(model.times)])
    return times, sum(abs(seconds - times.seconds(*work)) for *work, seconds in steps) / measured_s


def _batch_sizes(most: int, rng: random.Random) -> list[int]:
    sizes = sorted({min(1 << power, most) for power in range(most.bit_length() + 1)})
    rng.shuffle(sizes)
    return sizes


def _submit(engine: Engine, count: int, longest: int, rng: random.Random) -> None:
    num_ids = min(_NUM_TOKEN_IDS, engine.input_processor.vocab_size)
    for _ in range(count):
        if not engine.can_accept():
            return
        num_prompt = rng.randint(1, max(1, min(_LONGEST_PROMPT, longest // 2)))
        num_output = rng.randint(1, max(1, min(_LONGEST_COMPLETION, longest - num_prompt)))
        prompt = [rng.randrange(num_ids) for _ in range(num_prompt)]
        engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True))
