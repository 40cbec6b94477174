"""Writes a snapshot as families of prometheus-client, under our names and, where there is one, under vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pagedcore.metrics.definitions import SCALARS, Histogram, Scalar, Snapshot

PREFIX = "pagedcore_"
VLLM_PREFIX = "vllm:"


class EngineCollector(Collector):
    """One engine's metrics, for one registry."""

    def __init__(self, take: Callable[[], Snapshot | None], vllm_names: bool) -> None:
        self._take = take
        self._vllm_names = vllm_names

    def collect(self) -> Iterator[Metric]:
        """Yield every family with its present values; none before the engine has started."""
        snapshot = self._take()
        if snapshot is None:
            return
        labels = [snapshot.info.model]
        if snapshot.stats is not None:
            for one in SCALARS:
                kind = GaugeMetricFamily if one.kind == "gauge" else CounterMetricFamily
                for name in self._names(one):
                    family = kind(name, one.help, labels=["model_name"])
                    family.add_metric(labels, one.read(snapshot.stats))
                    yield family
        for histogram, values in snapshot.distributions:
            upper = [*map(str, values.bounds), "+Inf"]
            buckets = list(zip(upper, map(float, accumulate(values.counts)), strict=True))
            for name in self._names(histogram):
                distribution = HistogramMetricFamily(name, histogram.help, labels=["model_name"])
                distribution.add_metric(labels, buckets, values.total)
                yield distribution
        yield _finished(PREFIX + "requests_finished", "finish_reason", snapshot)
        yield _info(PREFIX + "engine_info", asdict(snapshot.info), snapshot)
        if self._vllm_names:
            yield _finished(VLLM_PREFIX + "request_success", "finished_reason", snapshot)
            sizes = {"block_size": snapshot.info.block_size, "num_gpu_blocks": snapshot.info.num_blocks}
            yield _info(VLLM_PREFIX + "cache_config_info", sizes, snapshot)

    def _names(self, one: Scalar | Histogram) -> list[str]:
        has_alias = self._vllm_names and one.vllm_name
        return [PREFIX + one.name, VLLM_PREFIX + one.vllm_name] if has_alias else [PREFIX + one.name]


def _finished(name: str, label: str, snapshot: Snapshot) -> Metric:
    family = CounterMetricFamily(name, "Requests that ended, by reason.", labels=["model_name", label])
    for reason, count in snapshot.finished.items():
        family.add_metric([snapshot.info.model, reason], count)
    return family


def _info(name: str, facts: Mapping[str, object], snapshot: Snapshot) -> Metric:
    labels = {"model_name": snapshot.info.model, **{key: str(value) for key, value in facts.items() if key != "model"}}
    family = GaugeMetricFamily(name, "What was chosen when the engine was built; always 1.", labels=list(labels))
    family.add_metric(list(labels.values()), 1)
    return family
