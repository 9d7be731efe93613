"""Plans as messages and back: `StepPlan` <-> `radixmesh.worker.v1.StepPlan`. Arrays are copied once, never walked.

Decoding checks what the bytes alone can tell: lengths that must agree, values that must not be negative, fields that
must be there. What needs a worker's state (slots, pages, vocabulary) is checked where that state lives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.arrays import IntArray, pack_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.hello import check_peer_names
from radixmesh.daemons.runtime.sampling import sampling_from_proto, sampling_to_proto
from radixmesh.daemons.runtime.steps.field_checks import check_at_least, check_int32, check_lengths, ids_from
from radixmesh.daemons.runtime.steps.forward_shape import (
    DISPATCH_MODES,
    DISPATCH_TO_PROTO,
    ONLY_DECODES,
    check_shape,
    missing_field,
)
from radixmesh.daemons.runtime.steps.sections import sections_of
from radixmesh.daemons.runtime.steps.step import (
    Admit,
    Chunk,
    Draft,
    Grant,
    Grants,
    PageCopy,
    PageMove,
    Release,
    StepPlan,
    Task,
)
from radixmesh.worker.v1 import worker_pb2

TASK_TO_PROTO = {
    Task.GENERATE: common_pb2.TASK_GENERATE,
    Task.EMBED: common_pb2.TASK_EMBED,
    Task.SCORE: common_pb2.TASK_SCORE,
}
_UINT32_FIELDS = ("cached_len", "max_total_len", "min_tokens", "logprobs_start")


def encode_plan(plan: StepPlan, group_completed_step: int = 0, num_ranks: int = 1, slots_per_rank: int = 0) -> bytes:
    """Bytes of the `ExecuteRequest` that carries `plan` to every rank of a group. Encoded once, the same for all.

    group_completed_step: the last step of which the results of all ranks are there. num_ranks: data-parallel ranks;
    where there are several, those of `slots_per_rank` slots each, the plan's slots count through all of them.
    """
    return encode_plans([plan], group_completed_step, num_ranks, slots_per_rank)


def encode_plans(
    plans: Sequence[StepPlan], group_completed_step: int = 0, num_ranks: int = 1, slots_per_rank: int = 0
) -> bytes:
    """As `encode_plan`, of plans that follow each other: they are launched, and answered, together."""
    message = worker_pb2.ExecuteRequest()
    for number, plan in enumerate(plans):
        into = message.more_plans.add() if number else message.plan
        _fill_plan(into, plan, num_ranks, slots_per_rank)
        if group_completed_step:
            into.header.group_completed_step = group_completed_step
    return message.SerializeToString()


def admit_bytes(admit: Admit) -> int:
    """About the bytes that an admit takes in a plan's message, never fewer; nothing is encoded for it."""
    numbers = len(admit.prompt_ids) + len(admit.output_ids) + 2 * len(admit.cached_pages) + len(admit.suppressed_ids)
    names = len(admit.request_id) + len(admit.cache_namespace) + len(admit.adapter) + len(admit.trace_context)
    return 256 + 4 * numbers + 8 * len(admit.sampling.logit_bias) + 4 * names  # Characters of four bytes at most.


def plan_to_proto(plan: StepPlan) -> worker_pb2.StepPlan:
    """The plan as one message."""
    message = worker_pb2.StepPlan()
    _fill_header(message.header, plan)
    _fill_rank(message.ranks.add(), plan)
    return message


def plan_from_proto(message: worker_pb2.StepPlan, dp_rank: int = 0) -> StepPlan:
    """Checks and converts the section of a DP rank; arrays are read-only views of the message's bytes.

    Raises MALFORMED_MESSAGE (broken or unequal array lengths), MISSING_FIELD (header, rank, seed, task, op),
    INVALID_ARGUMENT (a negative or impossible value), UNSUPPORTED (input embeddings).
    """
    if not message.HasField("header"):
        raise missing_field("plan.header")
    if len(message.ranks) <= dp_rank:
        raise missing_field(f"plan.ranks[{dp_rank}]")
    header, rank = message.header, message.ranks[dp_rank]
    if header.step_id == 0:
        raise missing_field("header.step_id")
    if not rank.ByteSize() and not header.barrier_ops:
        # Decodes advance and nothing else happens, as in most plans.
        check_shape(header, has_chunks=False)
        return StepPlan(
            epoch=header.epoch,
            step_id=header.step_id,
            group_generation=header.group_generation,
            expected_us=header.expected_us,
            has_forward=header.HasField("shape"),
            max_tokens_per_rank=header.shape.max_tokens_per_rank,
            dispatch=DISPATCH_MODES[header.shape.dispatch],
            may_have_chunks=header.shape.mode not in ONLY_DECODES,
        )
    chunks = _chunks(rank)
    check_shape(header, has_chunks=bool(chunks))
    for op in header.barrier_ops:
        if op.WhichOneof("op") is None:
            raise missing_field("header.barrier_ops.op")
    plan = StepPlan(
        epoch=header.epoch,
        step_id=header.step_id,
        group_generation=header.group_generation,
        barrier_ops=tuple(header.barrier_ops),
        expected_us=header.expected_us,
        releases=_releases(rank),
        admits=tuple(_admit(admit) for admit in rank.admits),
        grants=_grants(rank),
        page_copies=_page_copies(rank),
        chunks=chunks,
        decode_set=ids_from(rank.decode_set.slots, "decode_set.slots") if rank.HasField("decode_set") else None,
        drafts=_drafts(rank),
        has_forward=header.HasField("shape"),
        max_tokens_per_rank=header.shape.max_tokens_per_rank,
        dispatch=DISPATCH_MODES[header.shape.dispatch],
        may_have_chunks=header.shape.mode not in ONLY_DECODES,
    )
    if rank.HasField("saves") or rank.HasField("loads"):
        saves, loads = _page_moves(rank.saves, "saves"), _page_moves(rank.loads, "loads", have_ids=True)
        return replace(plan, saves=saves, loads=loads)
    return plan


def _fill_plan(message: worker_pb2.StepPlan, plan: StepPlan, num_ranks: int, slots_per_rank: int) -> None:
    _fill_header(message.header, plan)
    if num_ranks == 1:
        _fill_rank(message.ranks.add(), plan)
        return
    for section in sections_of(plan, num_ranks, slots_per_rank):
        rank = message.ranks.add()
        if section is None:
            rank.SetInParent()
        else:
            _fill_rank(rank, section)


def _fill_header(header: worker_pb2.PlanHeader, plan: StepPlan) -> None:
    header.SetInParent()
    header.epoch = plan.epoch
    header.step_id = plan.step_id
    header.group_generation = plan.group_generation
    header.expected_us = plan.expected_us
    header.barrier_ops.extend(plan.barrier_ops)
    if plan.has_forward:
        # An earlier plan tells whether slots decode: with chunks, MIXED holds in either case.
        header.shape.mode = worker_pb2.FORWARD_MODE_MIXED if plan.chunks else worker_pb2.FORWARD_MODE_DECODE
        if plan.max_tokens_per_rank:
            header.shape.max_tokens_per_rank = plan.max_tokens_per_rank
        if plan.idle_ranks:
            header.shape.idle_ranks = pack_ints(plan.idle_ranks)
        if plan.dispatch:
            header.shape.dispatch = DISPATCH_TO_PROTO[plan.dispatch]
        if plan.drafts:
            header.shape.max_draft_tokens = max(len(draft.ids) for draft in plan.drafts)


def _fill_rank(rank: worker_pb2.RankPlan, plan: StepPlan) -> None:
    rank.SetInParent()
    if plan.releases:
        rank.release_slots = pack_ints([release.slot for release in plan.releases])
        rank.release_generations = pack_ints([release.generation for release in plan.releases])
    for admit in plan.admits:
        rank.admits.append(_admit_to_proto(admit))
    if plan.grants:
        grants = Grants.of(plan.grants)
        rank.grants.slots = pack_ints(grants.slots)
        rank.grants.counts = pack_ints(grants.counts)
        rank.grants.pages = pack_ints(grants.pages)
    if plan.page_copies:
        rank.page_copies.source_pages = pack_ints([copy.source_page for copy in plan.page_copies])
        rank.page_copies.target_pages = pack_ints([copy.target_page for copy in plan.page_copies])
        rank.page_copies.num_tokens = pack_ints([copy.num_tokens for copy in plan.page_copies])
    if plan.saves:
        _fill_moves(rank.saves, plan.saves)
    if plan.loads:
        _fill_moves(rank.loads, plan.loads)
        rank.loads.op_ids = pack_ints([move.op_id for move in plan.loads])
    if plan.chunks:
        rank.chunks.slots = pack_ints([chunk.slot for chunk in plan.chunks])
        rank.chunks.lengths = pack_ints([chunk.length for chunk in plan.chunks])
    if plan.decode_set is not None:
        rank.decode_set.slots = pack_ints(plan.decode_set)
        rank.decode_set.SetInParent()
    if plan.drafts:
        rank.drafts.slots = pack_ints([draft.slot for draft in plan.drafts])
        rank.drafts.generations = pack_ints([draft.generation for draft in plan.drafts])
        rank.drafts.starts = pack_ints([draft.start for draft in plan.drafts])
        rank.drafts.counts = pack_ints([len(draft.ids) for draft in plan.drafts])
        rank.drafts.ids = pack_ints(np.concatenate([draft.ids for draft in plan.drafts]))


def _fill_moves(message: worker_pb2.PageMoves, moves: Sequence[PageMove]) -> None:
    message.counts = pack_ints([len(move.host_pages) for move in moves])
    message.device_pages = pack_ints(np.concatenate([move.device_pages for move in moves]))
    message.host_pages = pack_ints(np.concatenate([move.host_pages for move in moves]))
    message.previous_pages = pack_ints([move.previous_page for move in moves])


def _admit_to_proto(admit: Admit) -> worker_pb2.Admit:
    return worker_pb2.Admit(
        slot=admit.slot,
        generation=admit.generation,
        request_id=admit.request_id,
        index=admit.index,
        task=TASK_TO_PROTO[admit.task],
        prompt_ids=pack_ints(admit.prompt_ids),
        output_ids=pack_ints(admit.output_ids),
        cached_len=admit.cached_len,
        cached_pages=pack_ints(admit.cached_pages),
        cached_page_generations=pack_ints(admit.cached_page_generations),
        max_total_len=admit.max_total_len,
        sampling=sampling_to_proto(admit.sampling),
        min_tokens=admit.min_tokens,
        suppressed_ids=pack_ints(admit.suppressed_ids),
        logprobs_start=admit.logprobs_start,
        cache_namespace=admit.cache_namespace,
        grammar_hash=admit.grammar_hash,
        adapter=admit.adapter,
        trace_context=admit.trace_context,
    )


def _admit(message: worker_pb2.Admit) -> Admit:
    if message.task not in TASK_TO_PROTO.values():
        raise missing_field("admits.task")
    if message.embeddings:
        raise MeshError(
            common_pb2.ERROR_REASON_UNSUPPORTED, "input embeddings are not offered", {"feature": "embeddings"}
        )
    if not message.HasField("sampling"):
        raise missing_field("admits.sampling")
    check_peer_names(
        request_id=message.request_id,
        cache_namespace=message.cache_namespace,
        grammar_hash=message.grammar_hash,
        adapter=message.adapter,
        trace_context=message.trace_context,
    )
    sampling = sampling_from_proto(message.sampling)
    if sampling.seed is None and not sampling.is_greedy:
        raise missing_field("admits.sampling.seed")
    check_at_least("admits.slot", message.slot, 0)
    check_at_least("admits.generation", message.generation, 1)
    for name in _UINT32_FIELDS:
        check_int32(f"admits.{name}", getattr(message, name))
    pages = ids_from(message.cached_pages, "admits.cached_pages")
    generations = ids_from(message.cached_page_generations, "admits.cached_page_generations")
    check_lengths("admits.cached_pages", (len(pages), len(generations)))
    return Admit(
        slot=message.slot,
        generation=message.generation,
        request_id=message.request_id,
        index=message.index,
        task=Task(message.task),
        prompt_ids=ids_from(message.prompt_ids, "admits.prompt_ids"),
        output_ids=ids_from(message.output_ids, "admits.output_ids"),
        cached_len=message.cached_len,
        cached_pages=pages,
        cached_page_generations=generations,
        max_total_len=message.max_total_len,
        sampling=sampling,
        min_tokens=message.min_tokens,
        suppressed_ids=ids_from(message.suppressed_ids, "admits.suppressed_ids"),
        logprobs_start=message.logprobs_start,
        cache_namespace=message.cache_namespace,
        grammar_hash=message.grammar_hash,
        adapter=message.adapter,
        trace_context=message.trace_context,
    )


def _releases(rank: worker_pb2.RankPlan) -> tuple[Release, ...]:
    columns = _columns("releases", (("slots", rank.release_slots, 0), ("generations", rank.release_generations, 1)))
    return tuple(Release(slot=slot, generation=generation) for slot, generation in columns)


def _grants(rank: worker_pb2.RankPlan) -> tuple[Grant, ...]:
    if not rank.HasField("grants"):
        return ()
    grants = rank.grants
    slots = ids_from(grants.slots, "grants.slots")
    parts = _runs("grants.pages", grants.counts, grants.pages)
    check_lengths("grants", (len(slots), len(parts)))
    return tuple(Grant(slot=slot, pages=pages) for slot, pages in zip(slots.tolist(), parts, strict=True))


def _drafts(rank: worker_pb2.RankPlan) -> tuple[Draft, ...]:
    if not rank.HasField("drafts"):
        return ()
    drafts = rank.drafts
    columns = (("slots", drafts.slots, 0), ("generations", drafts.generations, 1), ("starts", drafts.starts, 1))
    heads, parts = list(_columns("drafts", columns)), _runs("drafts.ids", drafts.counts, drafts.ids)
    check_lengths("drafts", (len(heads), len(parts)))
    return tuple(
        Draft(slot=slot, generation=generation, start=start, ids=ids)
        for (slot, generation, start), ids in zip(heads, parts, strict=True)
    )


def _page_moves(message: worker_pb2.PageMoves, name: str, *, have_ids: bool = False) -> tuple[PageMove, ...]:
    device = _runs(f"{name}.device_pages", message.counts, message.device_pages)
    host = _runs(f"{name}.host_pages", message.counts, message.host_pages)
    previous = ids_from(message.previous_pages, f"{name}.previous_pages", least=-1)
    op_ids = ids_from(message.op_ids, f"{name}.op_ids", least=1)
    check_lengths(name, (len(device), len(previous)))
    check_lengths(f"{name}.op_ids", (len(op_ids), len(device) if have_ids else 0))
    ids = op_ids.tolist() if have_ids else [0] * len(device)
    return tuple(
        PageMove(device_pages=d, host_pages=h, previous_page=p, op_id=i)
        for d, h, p, i in zip(device, host, previous.tolist(), ids, strict=True)
    )


def _runs(field: str, counts: bytes, values: bytes) -> list[IntArray]:
    """An array cut into runs of counts[i] >= 1 values; they are views."""
    lengths = ids_from(counts, f"counts of {field}", least=1)
    array = ids_from(values, field)
    ends = np.cumsum(lengths, dtype=np.int64)
    check_lengths(field, (len(array), int(ends[-1]) if len(ends) else 0))
    return [array[end - length : end] for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)]


def _page_copies(rank: worker_pb2.RankPlan) -> tuple[PageCopy, ...]:
    copies = rank.page_copies
    columns = _columns(
        "page_copies",
        (
            ("source_pages", copies.source_pages, 0),
            ("target_pages", copies.target_pages, 0),
            ("num_tokens", copies.num_tokens, 1),
        ),
    )
    return tuple(PageCopy(source_page=source, target_page=target, num_tokens=num) for source, target, num in columns)


def _chunks(rank: worker_pb2.RankPlan) -> tuple[Chunk, ...]:
    columns = _columns("chunks", (("slots", rank.chunks.slots, 0), ("lengths", rank.chunks.lengths, 1)))
    return tuple(Chunk(slot=slot, length=length) for slot, length in columns)


def _columns(field: str, columns: Sequence[tuple[str, bytes, int]]) -> Iterable[tuple[int, ...]]:
    """Rows of arrays that stand beside each other; a column is (name, bytes, least value)."""
    if not any(data for _, data, _ in columns):
        return ()
    arrays = [ids_from(data, f"{field}.{name}", least) for name, data, least in columns]
    check_lengths(field, [len(array) for array in arrays])
    return zip(*(array.tolist() for array in arrays), strict=True)
