"""Makes the metrics of one daemon, and keeps what is to be said of each."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricInfo:
    """One metric as it is documented. daemons: who serves it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    daemons: tuple[str, ...]
    help_text: str


class MetricMaker:
    """daemon: metrics that others serve are made, and may be set, but are in no registry; empty = all are served.

    `by` of every method: the daemons that serve the metric, separated by blanks, or "all".
    """

    def __init__(self, daemon: str) -> None:
        self.registry = CollectorRegistry()
        self.infos: list[MetricInfo] = []
        self._daemon = daemon

    def counter(self, name: str, by: str, help_text: str, labels: Sequence[str] = ()) -> Counter:
        """A total that only rises."""
        return Counter(name, help_text, labels, registry=self._noted(name, "counter", by, help_text, labels))

    def gauge(self, name: str, by: str, help_text: str, labels: Sequence[str] = ()) -> Gauge:
        """A value of now."""
        return Gauge(name, help_text, labels, registry=self._noted(name, "gauge", by, help_text, labels))

    def histogram(
        self, name: str, by: str, help_text: str, buckets: Sequence[float], labels: Sequence[str] = ()
    ) -> Histogram:
        """A distribution; buckets are upper bounds."""
        registry = self._noted(name, "histogram", by, help_text, labels)
        return Histogram(name, help_text, labels, buckets=buckets, registry=registry)

    def fast_histogram(self, name: str, by: str, help_text: str, buckets: Sequence[float]) -> FastHistogram:
        """A distribution that is observed once per output and frame."""
        histogram = FastHistogram(name, help_text, buckets)
        registry = self._noted(name, "histogram", by, help_text, ())
        if registry is not None:
            registry.register(histogram)
        return histogram

    def _noted(self, name: str, kind: str, by: str, help_text: str, labels: Sequence[str]) -> CollectorRegistry | None:
        daemons = tuple(by.split())
        info = MetricInfo(name=name, kind=kind, labels=tuple(labels), daemons=daemons, help_text=help_text)
        self.infos.append(info)
        return self.registry if self._daemon in ("", *daemons) or "all" in daemons else None


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
