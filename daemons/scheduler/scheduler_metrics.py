"""The scheduler's Prometheus metrics: histograms step by step, everything else copied from the planner's counters now
and then."""

from __future__ import annotations

import numpy as np
from prometheus_client import Counter

from radixmesh.daemons.runtime.finish_reason import FinishReason
from radixmesh.daemons.runtime.steps.step import StepResult
from radixmesh.daemons.runtime.telemetry.metrics import Metrics
from radixmesh.daemons.scheduler.planning.planner import Planner
from radixmesh.daemons.scheduler.results.draft_counts import DraftCounts
from radixmesh.daemons.scheduler.tiers.host_cache import TierCounters


class SchedulerMetrics:
    """Feeds the mesh's metrics of one daemon."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._seen: dict[str, float] = {}
        self._device_ns = 0
        self._last_export_s = 0.0

    def planned(self, seconds: float) -> None:
        """A plan was made in that time."""
        self._metrics.plan_seconds.observe(seconds)

    def answered(self, seconds: float) -> None:
        """A plan's result came that long after the plan was sent."""
        self._metrics.round_trip_seconds.observe(seconds)

    def processed(self, result: StepResult, num_rows: int, seconds: float) -> None:
        """A result of so many rows was processed in that time."""
        metrics = self._metrics
        device_ns = max(0, result.device_end_ns - result.device_start_ns)
        self._device_ns += device_ns
        metrics.step_seconds.observe(device_ns / 1e9)
        metrics.device_busy_seconds.inc(device_ns / 1e9)
        metrics.batch_size.observe(num_rows)
        metrics.process_seconds.observe(seconds)

    def export(self, planner: Planner, now: float) -> None:
        """Brings everything else up to date; call about twice a second."""
        metrics, counters = self._metrics, planner.counters
        self._export_rates(counters.output_tokens - self._seen.get("output", 0.0), now)
        metrics.requests_running.set(planner.num_running)
        metrics.requests_queued.set(planner.num_waiting)
        metrics.plans_in_flight.set(planner.num_in_flight)
        metrics.queued_tokens.set(planner.waiting_tokens)
        metrics.requests_waiting_for_prefix.set(planner.queue.num_waiting_for_prefix)
        metrics.cache_hit_ratio.set(counters.hit_rate)
        metrics.decode_reserve_tokens.set(planner.decode_reserve_tokens)
        metrics.expert_balancedness.set(counters.expert_load.balancedness)
        metrics.expert_placement_balancedness.set(planner.experts.balancedness())
        metrics.expert_move_longest_seconds.set(planner.experts.longest_s)
        self._add("placements", metrics.expert_placements, planner.experts.num_placed)
        arrivals = planner.arrivals
        for outcome, num in (
            ("handed_over", planner.handovers.num_started),
            ("arrived", arrivals.num_arrived),
            ("failed", arrivals.num_failed),
        ):
            self._add(f"transfers {outcome}", metrics.kv_transfers.labels(outcome), num)
        for failure, num in list(arrivals.failures.items()):
            self._add(f"transfers failed {failure}", metrics.kv_arrival_failures.labels(failure), num)
        for stage, seconds in list(arrivals.seconds.items()):
            self._add(f"transfers {stage} s", metrics.kv_arrival_seconds.labels(stage), seconds)
        metrics.kv_reservations_queued.set(arrivals.num_queued)
        self._add("transfer tokens", metrics.kv_transfer_tokens, arrivals.num_tokens)
        self._add("steps", metrics.steps, counters.num_steps)
        self._add("prefill", metrics.step_tokens.labels("prefill"), counters.prefilled_tokens)
        self._add("decode", metrics.step_tokens.labels("decode"), counters.output_tokens)
        self._add("output", metrics.output_tokens, counters.output_tokens)
        self._add("started", metrics.requests_started, counters.num_submitted)
        self._add("prompt", metrics.prompt_tokens, counters.prompt_tokens)
        self._add("cached", metrics.cached_tokens, counters.cached_tokens)
        self._add("retracted", metrics.requests_retracted, counters.num_retracted)
        self._add("preempted", metrics.requests_preempted, counters.num_preempted)
        self._add("deduplications", metrics.prefix_deduplications, counters.num_prefix_deduplications)
        self._add("held", metrics.prefills_held, counters.num_held_plans)
        self._add("rejected", metrics.requests_rejected, counters.num_rejected)
        self._add("stale", metrics.stale_results, counters.stale_results)
        self._add("violations", metrics.page_invariant_violations, counters.num_page_violations)
        self._export_drafts(counters.drafts)
        for reason, num in list(counters.finished.items()):
            name = FinishReason(reason).name.lower()
            self._add(f"finished {name}", metrics.requests_finished.labels(name), num)
        self._export_pages(planner)

    def _export_drafts(self, drafts: DraftCounts) -> None:
        """Positions that no worker has drafted yet are not told, but the first, which begins at 0."""
        num = max(1, int(np.count_nonzero(drafts.drafted_by_position)))
        both = zip(drafts.drafted_by_position[:num].tolist(), drafts.accepted_by_position[:num].tolist(), strict=True)
        for position, (drafted, accepted) in enumerate(both, 1):
            labels = str(position)
            self._add(f"drafted {labels}", self._metrics.drafted_tokens.labels(labels), drafted)
            self._add(f"accepted {labels}", self._metrics.accepted_draft_tokens.labels(labels), accepted)

    def _export_rates(self, num_tokens: float, now: float) -> None:
        """num_tokens: output since the last time."""
        if now > self._last_export_s > 0:
            seconds = now - self._last_export_s
            self._metrics.gpu_idle_ratio.set(max(0.0, 1.0 - self._device_ns / 1e9 / seconds))
            self._metrics.tokens_per_second.set(num_tokens / seconds)
        self._device_ns, self._last_export_s = 0, now

    def _export_pages(self, planner: Planner) -> None:
        state = planner.state
        evicted = planner.counters.evicted_pages
        if state is not None:
            evicted += state.num_evicted
            for page_state, num in state.page_counts().items():
                self._metrics.pages.labels(page_state.name.lower()).set(num)
            self._metrics.kv_usage_ratio.set(1.0 - state.num_available / state.num_pages)
        self._add("evicted", self._metrics.page_evictions, evicted)
        self._export_host(planner)

    def _export_host(self, planner: Planner) -> None:
        total, hosts = TierCounters(), planner.state.hosts if planner.state is not None else ()
        total.add(planner.counters.tiers)
        for host in hosts:
            total.add(host.counters)
        for what in ("saved", "loaded", "evicted", "skipped"):
            self._add(f"host {what}", self._metrics.host_kv_pages_moved.labels(what), getattr(total, what))
        self._metrics.host_kv_pages.set(sum(host.pages.num_used for host in hosts))
        loads = planner.loads
        self._add("host loads", self._metrics.host_kv_loads.labels("loaded"), loads.num_loads)
        self._add("host late", self._metrics.host_kv_loads.labels("late"), loads.num_late)
        self._add("host wait", self._metrics.host_kv_load_seconds, loads.wait_s)
        self._add("host tokens", self._metrics.host_kv_tokens, loads.num_tokens)
        fetches = planner.fetches
        for outcome, num in (("fetched", fetches.num_filled), ("empty", fetches.num_empty), ("late", fetches.num_late)):
            self._add(f"fetches {outcome}", self._metrics.kv_fetches.labels(outcome), num)
        self._add("fetch wait", self._metrics.kv_fetch_seconds, fetches.wait_s)
        self._add("fetch tokens", self._metrics.kv_fetch_tokens, fetches.num_tokens)

    def _add(self, name: str, counter: Counter, total: float) -> None:
        """Counters only rise: by what came since the last time."""
        counter.inc(max(0.0, total - self._seen.get(name, 0.0)))
        self._seen[name] = total
