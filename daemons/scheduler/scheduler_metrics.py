"""The scheduler's Prometheus metrics: histograms step by step, everything else copied from the planner's counters now
and then."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from radixmesh.daemons.runtime.metrics import Metrics
from radixmesh.daemons.runtime.step import StepResult
from radixmesh.daemons.scheduler.planner import Planner
from radixmesh.daemons.scheduler.stop_conditions import FinishReason

_HOST_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1)


class SchedulerMetrics:
    """Feeds the mesh's metrics, and those that only a scheduler has, of one daemon."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        registry = metrics.registry
        self._process_seconds = Histogram(
            "radixmesh_process_seconds", "Host time to process a step's result.", buckets=_HOST_S, registry=registry
        )
        self._hit_rate = Gauge(
            "radixmesh_cache_hit_ratio", "Share of tokens found in the cache at late admissions.", registry=registry
        )
        self._queued_tokens = Gauge("radixmesh_queued_tokens", "Tokens of requests that wait.", registry=registry)
        self._held = Gauge(
            "radixmesh_requests_held", "Requests that wait for a prefix which another computes.", registry=registry
        )
        self._growth = Gauge(
            "radixmesh_expected_growth_tokens", "Tokens that a running request may need still.", registry=registry
        )
        self._breaches = Counter("radixmesh_page_breaches_total", "Breaches of the page invariant.", registry=registry)
        self._preemptions = Counter(
            "radixmesh_requests_preempted_total", "Times a request gave way to a higher priority.", registry=registry
        )
        self._held_back = Counter(
            "radixmesh_requests_held_back_total", "Times a request was held for another's prefix.", registry=registry
        )
        self._rejected = Counter("radixmesh_requests_rejected_total", "Submits that were rejected.", registry=registry)
        self._stale_results = Counter(
            "radixmesh_stale_results_total", "Results of plans that counted no more.", registry=registry
        )
        self._seen: dict[str, float] = {}
        self._device_ns = 0
        self._last_export_s = 0.0

    def planned(self, seconds: float) -> None:
        """A plan was made in that time."""
        self._metrics.plan_seconds.observe(seconds)

    def processed(self, result: StepResult, num_rows: int, seconds: float) -> None:
        """A result of so many rows was processed in that time."""
        metrics = self._metrics
        device_ns = max(0, result.device_end_ns - result.device_start_ns)
        self._device_ns += device_ns
        metrics.step_seconds.observe(device_ns / 1e9)
        metrics.batch_size.observe(num_rows)
        self._process_seconds.observe(seconds)

    def export(self, planner: Planner, now: float) -> None:
        """Brings everything else up to date; call about twice a second."""
        metrics, counters = self._metrics, planner.counters
        metrics.requests_running.set(planner.num_running)
        metrics.requests_queued.set(planner.num_waiting)
        metrics.plans_in_flight.set(planner.num_in_flight)
        self._queued_tokens.set(planner.waiting_tokens)
        self._held.set(planner.num_held)
        self._hit_rate.set(counters.hit_rate)
        self._growth.set(planner.expected_growth_tokens)
        self._add("steps", metrics.steps, counters.num_steps)
        self._add("prefill", metrics.step_tokens.labels("prefill"), counters.prefilled_tokens)
        self._add("decode", metrics.step_tokens.labels("decode"), counters.output_tokens)
        self._add("output", metrics.output_tokens, counters.output_tokens)
        self._add("started", metrics.requests_started, counters.num_submitted)
        self._add("prompt", metrics.prompt_tokens, counters.prompt_tokens)
        self._add("cached", metrics.cached_tokens, counters.cached_tokens)
        self._add("retracted", metrics.requests_retracted, counters.num_retracted)
        self._add("preempted", self._preemptions, counters.num_preempted)
        self._add("held", self._held_back, counters.num_held)
        self._add("rejected", self._rejected, counters.num_rejected)
        self._add("stale", self._stale_results, counters.stale_results)
        self._add("breaches", self._breaches, counters.num_breaches)
        for reason, num in list(counters.finished.items()):
            name = FinishReason(reason).name.lower()
            self._add(f"finished {name}", metrics.requests_finished.labels(name), num)
        self._export_pages(planner)
        if now > self._last_export_s > 0:
            busy = self._device_ns / 1e9 / (now - self._last_export_s)
            metrics.device_idle_ratio.set(max(0.0, 1.0 - busy))
        self._device_ns, self._last_export_s = 0, now

    def _export_pages(self, planner: Planner) -> None:
        state = planner.state
        evicted = planner.counters.evicted_pages
        if state is not None:
            evicted += state.pages.num_evicted
            for page_state, num in state.pages.pool.counts().items():
                self._metrics.pages.labels(page_state.name.lower()).set(num)
        self._add("evicted", self._metrics.page_evictions, evicted)

    def _add(self, name: str, counter: Counter, total: float) -> None:
        """Counters only rise: by what came since the last time."""
        counter.inc(max(0.0, total - self._seen.get(name, 0.0)))
        self._seen[name] = total
