"""Faults of a run, in words. None = it passed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from endurance.baseline import BaselineDecode
from endurance.mesh import EnduranceMesh, Kill
from endurance.samples import Drift, Life
from radixmesh.scheduler.v1 import scheduler_pb2

# Shorter lives are still growing into their size.
_LEAST_LIFE_S = 170.0
_MORE_FDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """mb_min: growth of a process. gpu_mb: growth of the GPU's memory in use over the run. drift: share by which steps
    may be slower in the end."""

    mb_min: float
    gpu_mb: float
    drift: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AtRest:
    """The mesh when all requests are over. state: before the cache was flushed; flushed: after."""

    state: scheduler_pb2.GetStateResponse
    flushed: scheduler_pb2.GetStateResponse
    journal_requests: float
    journal_bytes: float
    detokenizer_entries: float

    def fields(self) -> dict[str, int | float]:
        load = self.state.load
        return {
            "running": load.num_running,
            "waiting": load.num_waiting,
            "total_pages": load.total_pages,
            "free_pages": load.free_pages,
            "cached_pages": load.cached_pages,
            "owned_pages": self.state.owned_pages,
            "leased_pages": self.state.leased_pages,
            "quarantined_pages": self.state.quarantined_pages,
            "free_pages_after_flush": self.flushed.load.free_pages,
            "num_page_violations": self.state.num_page_violations,
            "journal_requests": self.journal_requests,
            "journal_bytes": self.journal_bytes,
            "detokenizer_entries": self.detokenizer_entries,
        }

    def faults(self) -> list[str]:
        load, faults = self.state.load, []
        if load.num_running or load.num_waiting:
            faults.append(f"{load.num_running} running and {load.num_waiting} waiting requests that nobody asked for")
        if not load.total_pages or load.free_pages + load.cached_pages != load.total_pages:
            faults.append(f"{load.free_pages} free and {load.cached_pages} cached of {load.total_pages} pages")
        if self.flushed.load.free_pages != self.flushed.load.total_pages:
            faults.append(f"{self.flushed.load.free_pages} of {load.total_pages} pages free in an empty cache")
        if self.state.num_page_violations:
            faults.append(f"{self.state.num_page_violations} violations of the page invariant")
        if self.journal_requests or self.detokenizer_entries:
            faults.append(
                f"{self.journal_requests:g} requests in the router, {self.detokenizer_entries:g} in the detokenizer"
            )
        return faults


def request_faults(
    counts: Counter[str], failures: Sequence[str], num_open: int, oldest: Sequence[str] = ()
) -> list[str]:
    """Observations of the clients. oldest: some of the open requests, in words."""
    faults = [f"a request failed: {failure}" for failure in failures[:10]]
    if counts["failed"] or len(failures) > 10:
        faults.append(f"{max(counts['failed'], len(failures))} failures in all")
    if num_open:
        faults.append(f"{num_open} requests did not end: {'; '.join(oldest) or 'no names'}")
    if counts["resumed"]:
        faults.append(f"{counts['resumed']} streams broke, though no router was killed")
    if not counts["finished"]:
        faults.append("no request finished")
    lost = counts["begun"] - counts["finished"] - counts["aborted"] - counts["failed"] - num_open
    if lost > 0:
        faults.append(f"{lost} requests of which nobody knows")
    return faults


def kill_faults(kills: Sequence[Kill]) -> list[str]:
    """Weights and KV outlive a scheduler."""
    faults = []
    for number, kill in enumerate(kills, 1):
        if kill.service == "scheduler" and not kill.same_worker:
            faults.append(f"kill {number}: the worker did not outlive its scheduler")
        elif kill.service == "scheduler" and not kill.adopted_tokens:
            faults.append(f"kill {number}: no KV was taken over")
    return faults


def mesh_faults(mesh: EnduranceMesh) -> list[str]:
    """Errors that the daemons logged, and daemons that ended by themselves."""
    faults = [f"logged: {line}" for line in mesh.logs.errors[:5]]
    if len(mesh.logs.errors) > 5:
        faults.append(f"{len(mesh.logs.errors)} errors logged")
    return faults + [f"{name} was started {num} times unasked" for name, num in mesh.unasked_restarts.items()]


def growth_faults(lives: Sequence[Life], gpu: Mapping[str, float] | None, bounds: Bounds) -> list[str]:
    """Memory and files of processes that lived long enough to tell."""
    faults = []
    for life in (life for life in lives if life.seconds >= _LEAST_LIFE_S):
        if (life.growth_mb_min or 0.0) > bounds.mb_min:
            faults.append(f"{life.service} grows by {life.growth_mb_min} MiB a minute")
        if life.last_fds - life.first_steady_fds > _MORE_FDS and (life.growth_fds_min or 0.0) > 1.0:
            faults.append(f"{life.service} opens {life.growth_fds_min} files a minute")
    if gpu is not None and gpu["last_mb"] - gpu["first_steady_mb"] > bounds.gpu_mb:
        faults.append(f"the GPU's memory in use grew from {gpu['first_steady_mb']} to {gpu['last_mb']} MiB")
    return faults


def drift_faults(drift: Drift | None, baseline: Sequence[BaselineDecode], bounds: Bounds) -> list[str]:
    """Steps that became slower, and slots that nobody gets any more."""
    faults = []
    if drift is not None and drift.normalised_ratio > 1 + bounds.drift:
        faults.append(f"steps of the last third took {drift.normalised_ratio} times those of the first")
    before, after = baseline[0].ms_per_step, baseline[-1].ms_per_step
    if before and after and after > (1 + bounds.drift) * before:
        faults.append(f"decode steps of all rows took {before} ms before and {after} ms after")
    few = (run for run in baseline if run.peak_running != run.rows)
    return faults + [f"{run.peak_running} of {run.rows} slots were in use when all were asked for" for run in few]
