"""Shape of a step: said once for all ranks. What tried to say another one to a single rank."""

from __future__ import annotations

import pytest
from google.protobuf.descriptor import Descriptor
from hypothesis import given, settings
from hypothesis import strategies as st

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import DispatchMode, StepPlan
from radixmesh.daemons.runtime.steps.step_codec import plan_from_proto
from radixmesh.daemons.scheduler.group.group_info import GroupInfo
from radixmesh.daemons.scheduler.planning.experts.dispatch import DISPATCH_CHOICES, DispatchChoice
from radixmesh.worker.v1 import worker_pb2

NUM_RANKS = 3
_SHAPE_TYPES = {"ForwardShape", "PlanHeader", "ExpertDispatch", "ForwardMode"}


def types_within(message: Descriptor) -> set[str]:
    """Names of all messages and enums that a message may hold."""
    found: set[str] = set()
    waiting = [message]
    while waiting:
        for field in waiting.pop().fields:
            of = field.message_type or field.enum_type
            if of is not None and of.name not in found:
                found.add(of.name)
                waiting += [field.message_type] if field.message_type else []
    return found


def test_a_section_of_a_rank_has_no_place_for_a_shape() -> None:
    """The contract has one header for a plan, and one shape in it."""
    assert not types_within(worker_pb2.RankPlan.DESCRIPTOR) & _SHAPE_TYPES
    assert not worker_pb2.StepPlan.DESCRIPTOR.fields_by_name["header"].is_repeated
    assert not worker_pb2.PlanHeader.DESCRIPTOR.fields_by_name["shape"].is_repeated


sections = st.builds(
    worker_pb2.RankPlan,
    release_slots=st.binary(max_size=8),
    release_generations=st.binary(max_size=8),
    chunks=st.builds(worker_pb2.Chunks, slots=st.binary(max_size=8), lengths=st.binary(max_size=8)),
    decode_set=st.builds(worker_pb2.DecodeSet, slots=st.binary(max_size=12)),
)
shapes = st.builds(
    worker_pb2.ForwardShape,
    mode=st.sampled_from([worker_pb2.FORWARD_MODE_DECODE, worker_pb2.FORWARD_MODE_MIXED]),
    dispatch=st.sampled_from(list(worker_pb2.ExpertDispatch.values())),
    max_tokens_per_rank=st.integers(0, 2**32 - 1),
)


@settings(deadline=None)
@given(shape=shapes, parts=st.lists(sections, min_size=NUM_RANKS, max_size=NUM_RANKS), unknown=st.binary(max_size=40))
def test_ranks_that_take_a_plan_take_one_shape(
    shape: worker_pb2.ForwardShape, parts: list[worker_pb2.RankPlan], unknown: bytes
) -> None:
    """Whatever the sections hold, bytes that no field names too: ranks agree on the shape, or refuse the plan."""
    header = worker_pb2.PlanHeader(epoch=1, step_id=1, shape=shape)
    message = worker_pb2.StepPlan(header=header, ranks=parts)
    try:
        message.ranks[1].MergeFromString(unknown)
    except Exception:
        return
    taken: list[StepPlan] = []
    for rank in range(NUM_RANKS):
        try:
            taken.append(plan_from_proto(message, rank))
        except MeshError:
            continue
    assert len({(plan.has_forward, plan.dispatch, plan.max_tokens_per_rank) for plan in taken}) <= 1


def test_a_mode_that_nobody_knows_is_refused() -> None:
    header = worker_pb2.PlanHeader(epoch=1, step_id=1)
    header.shape.mode = worker_pb2.FORWARD_MODE_DECODE
    header.shape.dispatch = 7  # type: ignore[assignment]
    with pytest.raises(MeshError, match="send NORMAL or LOW_LATENCY"):
        plan_from_proto(worker_pb2.StepPlan(header=header, ranks=[worker_pb2.RankPlan()]))


def group(ep_size: int) -> GroupInfo:
    return GroupInfo(
        page_size=1,
        num_pages=8,
        num_slots=8,
        dp_size=2,
        ep_size=ep_size,
        max_tokens_per_step=512,
        max_plans_in_flight=1,
        vocab_size=8,
        max_total_len=8,
    )


@pytest.mark.parametrize(
    ("choice", "tokens", "has_chunks", "mode"),
    [
        ("auto", 128, False, DispatchMode.LOW_LATENCY),
        ("auto", 129, False, DispatchMode.NORMAL),
        ("auto", 1, True, DispatchMode.NORMAL),
        ("normal", 1, False, DispatchMode.NORMAL),
        ("low-latency", 500, True, DispatchMode.LOW_LATENCY),
    ],
)
def test_the_mode_of_a_step(choice: str, tokens: int, has_chunks: bool, mode: DispatchMode) -> None:
    chosen = DispatchChoice(mode=DISPATCH_CHOICES[choice])
    assert chosen.of(group(2), tokens, has_chunks=has_chunks) is mode
    assert chosen.of(group(1), tokens, has_chunks=has_chunks) is DispatchMode.UNSPECIFIED
