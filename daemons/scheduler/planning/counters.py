"""Counters of the planner, and the check of the page invariant after every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import StepResult
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.scheduler.pages.integrity import (
    find_deep_violation,
    find_violation,
    holders_of,
    quarantine_doubtful,
)
from radixmesh.daemons.scheduler.planning.epoch_state import EpochState
from radixmesh.daemons.scheduler.results.draft_counts import DraftCounts
from radixmesh.daemons.scheduler.results.expert_load import ExpertLoad
from radixmesh.daemons.scheduler.results.in_flight import PlannedStep
from radixmesh.daemons.scheduler.sequence import Sequence
from radixmesh.daemons.scheduler.tiers.host_cache import TierCounters

log = get_logger(__name__)

_HIT_WEIGHT = 0.05


@dataclass(slots=True)
class PlannerCounters:
    """Since the process started."""

    num_submitted: int = 0
    """Accepted."""
    prompt_tokens: int = 0
    """Of those accepted."""
    num_rejected: int = 0
    evicted_pages: int = 0
    """In epochs that are over."""
    num_steps: int = 0
    num_plans: int = 0
    stale_results: int = 0
    prefilled_tokens: int = 0
    output_tokens: int = 0
    adopted_tokens: int = 0
    cached_tokens: int = 0
    """Found in the cache at admission."""
    hit_rate: float = 0.0
    """Share of tokens found there, recent admissions weighing most."""
    num_retracted: int = 0
    """Times a running request gave up its pages and waited again, for whatever reason."""
    num_preempted: int = 0
    """Of them, for a higher priority."""
    num_prefix_deduplications: int = 0
    """Times a request waited for a prefix that another computed."""
    num_compared_tokens: int = 0
    """Compared with those of other prompts, to find whom to wait for."""
    num_held_plans: int = 0
    """Plans that admitted nobody, so that prompts of several ranks begin together."""
    num_page_violations: int = 0
    """Checks after a step that failed, however many pages were wrong."""
    num_short_rows: int = 0
    """Decode rows that came back without a token."""
    finished: dict[int, int] = field(default_factory=dict)
    """Ended outputs by FinishReason."""
    tiers: TierCounters = field(default_factory=TierCounters)
    """Host tiers of epochs that are over."""
    expert_load: ExpertLoad = field(default_factory=ExpertLoad)
    drafts: DraftCounts = field(default_factory=DraftCounts)

    def admitted(self, num_tokens: int, num_cached: int) -> None:
        self.cached_tokens += num_cached
        self.hit_rate += _HIT_WEIGHT * (num_cached / num_tokens - self.hit_rate)

    def planned(self, num_chunk_tokens: int) -> None:
        self.num_plans += 1
        self.prefilled_tokens += num_chunk_tokens

    def processed(self, step: PlannedStep, result: StepResult) -> None:
        self.num_steps += 1
        self.output_tokens += len(result.ids)
        if len(result.drafted):
            self.drafts.add(result)
        if result.expert_rows:
            self.expert_load.add(result.expert_rows)
        if step.num_decodes and len(result.ids) < len(result.counts):
            self.num_short_rows += int((result.counts[: step.num_decodes] == 0).sum())


def check_pages(
    state: EpochState,
    counters: PlannerCounters,
    *,
    is_strict: bool,
    retract: Callable[[EpochState, Sequence], None] | None = None,
) -> None:
    """Checks the page invariant. A violation is counted and logged with the last plans, and the pages in doubt are
    quarantined; strict, it fails instead (and every page is looked at).

    retract: for requests that hold such pages; their KV may be another's, so it is computed anew elsewhere.

    Raises INTERNAL if the books do not balance even then: a new epoch builds them from the worker's page records.
    """
    find = find_deep_violation if is_strict else find_violation
    for rank, pages in enumerate(state.ranks):
        violation = find(pages.pool, pages.cache, state.table, rank)
        if pages.host is not None and (of_host := pages.host.find_violation()):
            raise MeshError(ErrorReason.ERROR_REASON_INTERNAL, f"{of_host}: a new epoch builds them from the records")
        if violation or pages.pool.num_misplaced:
            assert not is_strict, (rank, violation, pages.pool.num_misplaced)
            _quarantine(state, counters, rank, violation, retract)


def _quarantine(
    state: EpochState,
    counters: PlannerCounters,
    rank: int,
    violation: str,
    retract: Callable[[EpochState, Sequence], None] | None,
) -> None:
    pages = state.ranks[rank]
    counters.num_page_violations += 1
    pages.pool.num_misplaced = 0
    doubtful = quarantine_doubtful(pages.pool, state.table, rank)
    log.error(
        "page_invariant_violation",
        violation=violation or "a page moved from a state that it was not in",
        quarantined=len(doubtful),
        epoch=state.epoch,
        dp_rank=rank,
        last_plans=[_summary(step) for step in state.in_flight.last_steps()],
    )
    if retract is not None:
        for sequence in holders_of(doubtful, state.table, rank):
            retract(state, sequence)
    left = find_violation(pages.pool, pages.cache, state.table, rank)
    if left:
        raise MeshError(
            ErrorReason.ERROR_REASON_INTERNAL, f"the page books are beyond repair ({left}): a new epoch follows"
        )


def _summary(step: PlannedStep) -> str:
    plan = step.plan
    admits = [(a.slot, a.generation, a.cached_len) for a in plan.admits]
    grants = [(g.slot, g.pages.tolist()) for g in plan.grants]
    releases = [(r.slot, r.generation) for r in plan.releases]
    return f"step {plan.step_id}: releases {releases} admits {admits} grants {grants} rows {len(step.rows)}"
