"""From a draft to the plan that is sent, and its entry among those in flight."""

from __future__ import annotations

from dataclasses import replace
from operator import add

from radixmesh.daemons.runtime.steps.step import StepPlan
from radixmesh.daemons.scheduler.planning.epoch_state import EpochState, PlanDraft
from radixmesh.daemons.scheduler.results.in_flight import PlannedStep, Rows


def plan_of(state: EpochState, draft: PlanDraft, expected_us: int) -> StepPlan:
    """The plan of a finished draft. Takes the releases that wait; the bounds of decoding slots move on."""
    releases, state.releases = tuple(state.releases), []
    if state.table.num_ranks > 1:
        draft.order_by_rank(state.table.slots_per_rank)
    has_forward = bool(len(state.decode_set) or draft.chunks)
    decode_set = state.decode_set.slots if state.is_decode_set_unsent else None
    state.is_decode_set_unsent = False
    state.table.plan_decodes(state.decode_set.slots)
    plan = StepPlan(
        epoch=state.epoch,
        step_id=state.next_step_id,
        group_generation=state.group.group_generation,
        expected_us=expected_us,
        releases=releases,
        admits=tuple(draft.admits),
        grants=draft.grants(),
        chunks=tuple(draft.chunks),
        decode_set=decode_set,
        has_forward=has_forward,
    )
    if has_forward and (state.table.num_ranks > 1 or state.group.ep_size > 1):
        return _with_shape(state, draft, plan)
    return plan


def _with_shape(state: EpochState, draft: PlanDraft, plan: StepPlan) -> StepPlan:
    """The plan with the shape of its forward, said once for all ranks, so that none can take another."""
    tokens = list(map(add, state.decode_set.num_by_rank, draft.rank_tokens))
    return replace(
        plan,
        max_tokens_per_rank=max(tokens),
        idle_ranks=tuple(rank for rank, num in enumerate(tokens) if not num),
        dispatch=state.dispatch.of(state.group, max(tokens), has_chunks=bool(draft.chunks)),
    )


def enter_in_flight(state: EpochState, plan: StepPlan, draft: PlanDraft, now: float) -> None:
    """Notes what each row of the plan's result will mean."""
    decodes = state.decode_set.rows if plan.has_forward else Rows.none()
    finishing = Rows.of(state.table, draft.finishing_slots()) if draft.finishing else Rows.none()
    state.in_flight.sent(
        PlannedStep(
            plan=plan,
            rows=decodes.plus(finishing),
            num_decodes=len(decodes),
            chunks=tuple(draft.planned_chunks),
            num_tokens=most_tokens_of_a_rank(state, draft) if plan.has_forward else 0,
            sent_s=now,
        )
    )
    state.next_step_id += 1


def most_tokens_of_a_rank(state: EpochState, draft: PlanDraft) -> int:
    """Tokens that the rank with the most of them computes: it sets the time of the step."""
    if state.table.num_ranks == 1:
        return len(state.decode_set.slots) + draft.num_chunk_tokens
    most: int = max(map(add, state.decode_set.num_by_rank, draft.rank_tokens))
    return most
