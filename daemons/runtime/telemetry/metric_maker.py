"""Makes the metrics of one daemon, and keeps the documentation of each.

A renamed metric keeps its old name for one release: `deprecated="radixmesh_old_seconds"` exports the same values under
both names, and docs/observability.md marks the old one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricInfo:
    """One metric as it is documented. daemons: who serves it. replaced_by: empty unless the name is deprecated."""

    name: str
    kind: str
    labels: tuple[str, ...]
    daemons: tuple[str, ...]
    help_text: str
    replaced_by: str = ""


class MetricMaker:
    """daemon: metrics that others serve are made, and may be set, but are in no registry; empty = all are served.

    `by` of every method: the daemons that serve the metric, separated by blanks, or "all".
    `deprecated` of every method: the metric's name in the release before, exported in addition.
    """

    def __init__(self, daemon: str) -> None:
        self.registry = CollectorRegistry()
        self.infos: list[MetricInfo] = []
        self._daemon = daemon

    def counter(
        self, name: str, by: str, help_text: str, labels: Sequence[str] = (), *, deprecated: str = ""
    ) -> Counter:
        """A total that only rises."""
        metric = Counter(name, help_text, labels, registry=None)
        self._add(metric, _info(name, "counter", by, help_text, labels), deprecated)
        return metric

    def gauge(self, name: str, by: str, help_text: str, labels: Sequence[str] = (), *, deprecated: str = "") -> Gauge:
        """The value at the time of the scrape."""
        metric = Gauge(name, help_text, labels, registry=None)
        self._add(metric, _info(name, "gauge", by, help_text, labels), deprecated)
        return metric

    def histogram(
        self,
        name: str,
        by: str,
        help_text: str,
        buckets: Sequence[float],
        labels: Sequence[str] = (),
        *,
        deprecated: str = "",
    ) -> Histogram:
        """A distribution; buckets are upper bounds."""
        metric = Histogram(name, help_text, labels, buckets=buckets, registry=None)
        self._add(metric, _info(name, "histogram", by, help_text, labels), deprecated)
        return metric

    def fast_histogram(
        self, name: str, by: str, help_text: str, buckets: Sequence[float], *, deprecated: str = ""
    ) -> FastHistogram:
        """A distribution that is observed once per output and frame."""
        metric = FastHistogram(name, help_text, buckets)
        self._add(metric, _info(name, "histogram", by, help_text, ()), deprecated)
        return metric

    def _add(self, metric: Collector, info: MetricInfo, deprecated: str) -> None:
        is_served = self._daemon in ("", *info.daemons) or "all" in info.daemons
        self.infos.append(info)
        if is_served:
            self.registry.register(metric)
        if deprecated:
            self.infos.append(replace(info, name=deprecated, replaced_by=info.name))
            if is_served:
                self.registry.register(RenamedMetric(metric, info.name, deprecated))


def _info(name: str, kind: str, by: str, help_text: str, labels: Sequence[str]) -> MetricInfo:
    return MetricInfo(name=name, kind=kind, labels=tuple(labels), daemons=tuple(by.split()), help_text=help_text)


class RenamedMetric(Collector):
    """The samples of another metric under a deprecated name. Names of counters end in _total."""

    def __init__(self, metric: Collector, name: str, deprecated: str) -> None:
        self._metric = metric
        self._use = name
        self._family = name.removesuffix("_total")
        self._deprecated = deprecated.removesuffix("_total")

    def collect(self) -> Iterable[Metric]:
        """For the registry."""
        for family in self._metric.collect():
            renamed = Metric(self._deprecated, f"Deprecated: {self._use} has the same values.", family.type)
            renamed.samples = [
                sample._replace(name=self._deprecated + sample.name.removeprefix(self._family))
                for sample in family.samples
            ]
            yield renamed


class FastHistogram(Collector):
    """A histogram without labels or locks: one thread observes, a scrape may read half of an observation.

    A third of what Histogram.observe() costs, which is much at 40,000 observations a second.
    """

    def __init__(self, name: str, help_text: str, buckets: Sequence[float]) -> None:
        self._name = name
        self._help = help_text
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """For the registry."""
        total, buckets = 0, []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        yield HistogramMetricFamily(self._name, self._help, buckets=buckets, sum_value=self._sum)
