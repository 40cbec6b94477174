"""Records what happens in an engine and shows it as Prometheus metrics.

    text = engine_metrics_text(engine)         # the text of a /metrics page

Owns the values. Fed by the observing hooks, once per step and once per request, never per token. Which metrics there
are is in ``definitions.py``, how they are written in ``prometheus.py``; prometheus-client is needed only for that.
"""

from __future__ import annotations

import math
import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from pagedcore.engine.engine import Engine
from pagedcore.errors import EngineClosed, MissingDependency
from pagedcore.metrics import definitions
from pagedcore.metrics.definitions import ITERATION_TOKENS, REQUEST_HISTOGRAMS, STEP_INTERVAL
from pagedcore.outputs import RequestOutput
from pagedcore.plugins.hookspecs import EngineInfo, hookimpl
from pagedcore.plugins.manager import PluginManager
from pagedcore.protocols import Clock, MonotonicClock
from pagedcore.requests.stats import EngineStats, StepStats
from pagedcore.serving.async_engine import AsyncEngine

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_REFRESH_S: Final = 0.2
"""How old what a scrape shows may be if the engine thread does not come to the end of its step in time."""
_PATIENCE_S: Final = 5.0
"""How long a reader of metrics waits for the engine thread to come to the end of its step."""


class EngineMetrics:
    """The metrics of one engine; a plugin of its hooks. ``engine_metrics`` makes and attaches one.

    Recording happens on the engine's thread, reading on any other.

    Invariant: counters and histogram counts never decrease.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock if clock is not None else MonotonicClock()
        self._lock = threading.Lock()
        self._info: EngineInfo | None = None
        self._stats: EngineStats | None = None
        self._stats_s = -math.inf
        self._last_step: tuple[float, int, int] | None = None
        """When it ended, its number, and how many ran after it; ``None`` once all of them have ended."""
        self._finished = dict.fromkeys(definitions.FINISH_REASONS, 0)
        self._distributions: dict[str, tuple[definitions.Histogram, definitions.Distribution]] = {}

    @hookimpl
    def pagedcore_engine_start(self, engine: EngineInfo) -> None:
        """Make empty distributions that suit the model."""
        self._info = engine
        for one in (*REQUEST_HISTOGRAMS, ITERATION_TOKENS, STEP_INTERVAL):
            bounds = definitions.bounds_of(one, engine.max_model_len)
            self._distributions[one.name] = one, definitions.Distribution(bounds)

    @hookimpl
    def pagedcore_step(self, stats: StepStats) -> None:
        """Count a step; look at everything else now and then, and when nothing is left to do."""
        now = self._clock.now()
        with self._lock:
            self._distributions[ITERATION_TOKENS.name][1].observe(stats.num_tokens)
            if self._last_step is not None and self._last_step[2]:
                self._distributions[STEP_INTERVAL.name][1].observe(now - self._last_step[0])
            self._last_step = now, stats.num_steps, stats.num_running
        if now - self._stats_s >= _REFRESH_S or not (stats.num_running or stats.num_waiting):
            self._stats_s = now
            self.refresh(stats.engine_stats())

    @hookimpl
    def pagedcore_request_finished(self, request: RequestOutput) -> None:
        """Count a request whose every completion has ended."""
        reasons = {one.finish_reason for one in request.outputs}
        reason = next(reason for reason in reversed(definitions.FINISH_REASONS) if reason in reasons)
        with self._lock:
            self._finished[reason] += 1
            for one in REQUEST_HISTOGRAMS:
                if (value := one.read(request)) is not None and (weight := one.weigh(request)):
                    self._distributions[one.name][1].observe(value, weight)

    def refresh(self, stats: EngineStats) -> None:
        """Take a newer snapshot of the engine's own numbers, for what changed between steps."""
        with self._lock:
            # Why: the engine may have made another step since ``stats`` was taken, and counters must not go back.
            if self._stats is None or stats.num_steps >= self._stats.num_steps:
                self._stats = stats
            if self._last_step is not None and stats.num_steps >= self._last_step[1] and not stats.num_running:
                # Why: all that ran have ended since; the time to the next step is no pause between two of their tokens.
                self._last_step = None

    def snapshot(self) -> definitions.Snapshot | None:
        """Copy everything at one moment; ``None`` before the engine has started. Callable from any thread."""
        if self._info is None:
            return None
        with self._lock:
            copies = [(one, distribution.copy()) for one, distribution in self._distributions.values()]
            return definitions.Snapshot(self._info, self._stats, self._finished.copy(), copies)

    def registry(self, *, vllm_names: bool = True) -> CollectorRegistry:
        """Return a registry of prometheus-client with these metrics alone, for servers that want one.

        It shows the numbers of the last ``refresh``; by itself that happens five times a second, and at the end of
        all work.

        Raises:
            MissingDependency: prometheus-client is not installed.
        """
        try:
            from prometheus_client import CollectorRegistry

            from pagedcore.metrics.prometheus import EngineCollector
        except ImportError as error:
            raise MissingDependency("metrics: prometheus_client is missing. Install pagedcore[metrics].") from error
        registry = CollectorRegistry(auto_describe=False)
        registry.register(EngineCollector(self.snapshot, vllm_names))
        return registry

    def text(self, *, vllm_names: bool = True) -> str:
        """Return the metrics in Prometheus' text format, ``text/plain; version=0.0.4``. Raises as ``registry``."""
        registry = self.registry(vllm_names=vllm_names)
        from prometheus_client import generate_latest

        return generate_latest(registry).decode()


_attached: weakref.WeakKeyDictionary[Engine | AsyncEngine, EngineMetrics] = weakref.WeakKeyDictionary()
_attaching = threading.Lock()


def engine_metrics(engine: Engine | AsyncEngine) -> EngineMetrics:
    """Return the metrics of an engine, the same ones every time.

    The first call begins to record, so make it before the first request; until then an engine records nothing.
    Of an ``Engine`` that call belongs on the engine's own thread.

    Raises:
        EngineClosed: at the first call, if the engine was closed.
    """
    with _attaching:
        if engine not in _attached:
            metrics = EngineMetrics()
            if isinstance(engine, AsyncEngine):
                engine.observe(metrics)
            else:
                manager = PluginManager()
                manager.add(metrics, "metrics")
                engine.hooks.add(manager)
            _attached[engine] = metrics
        return _attached[engine]


def engine_metrics_text(engine: Engine | AsyncEngine, *, vllm_names: bool = True) -> str:
    """Return an engine's metrics, as they stand, in Prometheus' text format.

    Args:
        engine: of an ``Engine`` on its own thread, of an ``AsyncEngine`` on any; this blocks for a step at most.
        vllm_names: whether to repeat them under the names that vLLM's dashboards ask for.

    Raises:
        EngineClosed: recording never began (see ``engine_metrics``) and the engine was closed.
        MissingDependency: prometheus-client is not installed.
    """
    metrics = engine_metrics(engine)
    # Why: a scrape after the end, or during a very long step, still gets numbers.
    with suppress(EngineClosed):
        metrics.refresh(engine.stats(_PATIENCE_S) if isinstance(engine, AsyncEngine) else engine.stats())
    return metrics.text(vllm_names=vllm_names)
