"""What an observed step did, with reasons: made only where there is an observer of steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pagedcore.requests.output_processor import OutputProcessor
from pagedcore.requests.stats import EngineStats, StepStats
from pagedcore.scheduler.plan import SchedulePlan
from pagedcore.scheduler.scheduler import Scheduler
from pagedcore.scheduler.stats import waits_after


class _Totals(NamedTuple):
    preemptions: Mapping[str, int]
    evictions: Mapping[str, int]


@dataclass(slots=True)
class StepReport:
    """Reports the steps of one engine; preemptions and evictions of steps that computed nothing count for the next."""

    scheduler: Scheduler
    outputs: OutputProcessor
    _before: _Totals | None = field(default=None, init=False)

    def begin(self) -> None:
        """Note what was counted before the first step that is observed."""
        if self._before is None:
            self._before = self._totals()

    def describe(self, plan: SchedulePlan, engine_stats: Callable[[], EngineStats]) -> StepStats:
        """Describe a step that was computed since the last report; ``engine_stats`` puts everything else together."""
        before, self._before = self._before or self._totals(), self._totals()
        started, self.outputs.started = self.outputs.started, []
        waits_s = [wait_s for _, wait_s in started]
        num_prefill_tokens, num_decode_tokens, num_kv_tokens = plan.work
        return StepStats(
            num_steps=self.outputs.counters.num_steps, num_tokens=plan.num_tokens, num_rows=len(plan.rows),
            num_decode_tokens=num_decode_tokens, num_prefill_tokens=num_prefill_tokens,
            num_kv_tokens=num_kv_tokens,
            num_started=len(started), num_input_tokens=sum(num_tokens for num_tokens, _ in started),
            mean_wait_s=sum(waits_s) / max(1, len(started)), longest_wait_s=max(waits_s, default=0.0),
            waits=waits_after(plan, self.scheduler.waiting, self.scheduler.kv_cache.host),
            preemptions=_growth(before.preemptions, self._before.preemptions),
            evictions=_growth(before.evictions, self._before.evictions),
            num_running=len(self.scheduler.running), num_waiting=len(self.scheduler.waiting),
            plan=plan, engine_stats=engine_stats,
        )

    def _totals(self) -> _Totals:
        kv_cache, counts = self.scheduler.kv_cache, self.scheduler.counters.num_preemptions
        evictions = {"device": kv_cache.device.cache.num_evictions, "host": kv_cache.host.cache.num_evictions}
        return _Totals({kind.value: count for kind, count in counts.items()}, evictions)


def _growth(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    return {name: count - before[name] for name, count in now.items() if count > before[name]}
