"""Messages of routers and workers as the scheduler's own types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from radixmesh.common.v1 import common_pb2
from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import unpack_ints
from radixmesh.daemons.runtime.common_settings import PredecessorEnd
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.kv_share import MAX_HEADS, WHOLE_KV, KvShare
from radixmesh.daemons.runtime.sampling import sampling_from_proto, stop_from_proto
from radixmesh.daemons.runtime.steps.step import PageRecords, Task
from radixmesh.daemons.scheduler.group.group_info import CacheSnapshot, GroupInfo
from radixmesh.daemons.scheduler.queue.grammars import Grammar, GrammarShelf
from radixmesh.daemons.scheduler.sequence import SequenceKey, Submission
from radixmesh.daemons.scheduler.transfers.kv_target import MAX_TRANSFER_ID_BYTES, KvTarget
from radixmesh.scheduler.v1 import scheduler_pb2
from radixmesh.worker.v1 import worker_pb2

_MAX_INDEX = 2**31 - 1
_PREDECESSOR_ENDS: dict[int, PredecessorEnd] = {
    worker_pb2.PREDECESSOR_END_BY_ITSELF: PredecessorEnd.BY_ITSELF,
    worker_pb2.PREDECESSOR_END_FROM_OUTSIDE: PredecessorEnd.FROM_OUTSIDE,
}
# They travel on, with every admit: names have an end.
_MAX_NAME_BYTES = 1024
_MAX_STORE_ID = 64
_NAMES = ("request_id", "model", "cache_salt", "tenant", "trace_context")


def submission_from_proto(
    message: scheduler_pb2.Submit,
    *,
    owner: int,
    router: str,
    now: float,
    earlier: Mapping[int, Submission] | None = None,
    grammars: GrammarShelf | None = None,
) -> Submission:
    """Checks and converts what can be told without knowing the group. Raises typed errors naming the field.

    earlier: submissions of the same frame by handle, for those that share what they have in common. grammars: has
    those that were sent before.
    """
    _check_numbers(message)
    if message.HasField("shares_with"):
        return _sibling_of(message, (earlier or {}).get(message.shares_with), grammars)
    if not message.request_id:
        raise MeshError(ErrorReason.ERROR_REASON_MISSING_FIELD, "set request_id", {"field": "request_id"})
    for field in _NAMES:
        size = len(getattr(message, field).encode())
        if size > _MAX_NAME_BYTES:
            text = f"{field} has {size} bytes: send at most {_MAX_NAME_BYTES}"
            raise MeshError(
                ErrorReason.ERROR_REASON_INVALID_ARGUMENT, text, {"field": field, "max": str(_MAX_NAME_BYTES)}
            )
    try:
        task = Task(message.task)
    except ValueError as error:
        raise MeshError(
            ErrorReason.ERROR_REASON_MISSING_FIELD, "set task: generate, embed or score", {"field": "task"}
        ) from error
    return Submission(
        key=SequenceKey(message.request_id, message.index, message.tenant),
        attempt=message.attempt,
        owner=owner,
        handle=message.handle,
        router=router,
        tenant=message.tenant,
        priority=message.priority,
        model=message.model,
        task=task,
        prompt_ids=unpack_ints(message.prompt_ids, "prompt_ids"),
        resumed_output_ids=unpack_ints(message.resumed_output_ids, "resumed_output_ids"),
        sampling=sampling_from_proto(message.sampling),
        stop=stop_from_proto(message.stop),
        logprobs_start=min(message.logprobs_start, _MAX_INDEX),
        cache_salt=message.cache_salt,
        deadline_s=now + message.deadline_ms / 1000 if message.HasField("deadline_ms") else None,
        grammar=_grammar_of(message, grammars),
        transfer_id=_transfer_id_of(message),
        send_kv_to=KvTarget.from_proto(message.send_kv_to) if message.HasField("send_kv_to") else None,
        unsupported=_unsupported_in(message),
        trace_context=message.trace_context,
    )


def _check_numbers(message: scheduler_pb2.Submit) -> None:
    if message.index > _MAX_INDEX or message.attempt < 0:
        name = "index" if message.index > _MAX_INDEX else "attempt"
        raise MeshError(
            ErrorReason.ERROR_REASON_INVALID_ARGUMENT, f"{name} must be >= 0 and below 2^31", {"field": name}
        )


def _sibling_of(message: scheduler_pb2.Submit, other: Submission | None, grammars: GrammarShelf | None) -> Submission:
    """Another output of the request of `other`, with the same objects: 128 outputs keep one prompt."""
    if other is None:
        text = f"shares_with names {message.shares_with}, which is no earlier submit of this frame that could be read"
        raise MeshError(ErrorReason.ERROR_REASON_PROTOCOL_VIOLATION, text, {"field": "shares_with"})
    seed = message.sampling.seed if message.sampling.HasField("seed") else None
    return replace(
        other,
        key=replace(other.key, index=message.index),
        attempt=message.attempt,
        handle=message.handle,
        resumed_output_ids=unpack_ints(message.resumed_output_ids, "resumed_output_ids"),
        sampling=replace(other.sampling, seed=seed, prompt_logprobs=message.sampling.prompt_logprobs),
        logprobs_start=min(message.logprobs_start, _MAX_INDEX),
        grammar=_grammar_of(message, grammars),
        transfer_id=_transfer_id_of(message),
        send_kv_to=KvTarget.from_proto(message.send_kv_to) if message.HasField("send_kv_to") else None,
        unsupported=_unsupported_in(message) or other.unsupported,
    )


def _transfer_id_of(message: scheduler_pb2.Submit) -> str:
    if len(message.transfer_id.encode()) > MAX_TRANSFER_ID_BYTES:
        text = f"transfer_id has {len(message.transfer_id.encode())} bytes: send at most {MAX_TRANSFER_ID_BYTES}"
        raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, text, {"field": "transfer_id"})
    return message.transfer_id


def group_from_proto(hello: worker_pb2.WorkerHello) -> GroupInfo:
    """The group that a worker's hello describes. Raises INVALID_ARGUMENT for sizes that allow no plan."""
    caps, model = hello.capabilities, hello.hello.model
    for field in ("page_size", "num_pages", "num_slots", "max_tokens_per_step", "max_plans_in_flight"):
        if getattr(caps, field) < 1:
            raise MeshError(
                ErrorReason.ERROR_REASON_INVALID_ARGUMENT, f"the worker's {field} is 0", {"field": field, "min": "1"}
            )
    for field in ("vocab_size", "max_total_len"):
        if getattr(model, field) < 1:
            raise MeshError(
                ErrorReason.ERROR_REASON_INVALID_ARGUMENT, f"the worker's model.{field} is 0", {"field": field}
            )
    return GroupInfo(
        page_size=caps.page_size,
        num_pages=caps.num_pages,
        num_slots=caps.num_slots,
        num_host_pages=caps.num_host_pages,
        has_kv_store=caps.has_kv_store,
        kv_store_id=caps.kv_store_id[:_MAX_STORE_ID],
        max_tokens_per_step=caps.max_tokens_per_step,
        max_plans_in_flight=caps.max_plans_in_flight,
        max_tokens_per_row=min(max(1, caps.max_tokens_per_row), model.max_total_len),
        vocab_size=model.vocab_size,
        max_total_len=model.max_total_len,
        eos_ids=tuple(t for t in unpack_ints(model.eos_ids, "eos_ids").tolist() if 0 <= t < model.vocab_size),
        weights_version=caps.weights_version,
        tasks=frozenset(task for task in Task if int(task) in {int(t) for t in caps.tasks}),
        barrier_ops=frozenset(caps.barrier_ops),
        model_name=model.name,
        group_generation=caps.group_generation,
        instance_id=hello.hello.instance_id,
        predecessor_end=_PREDECESSOR_ENDS.get(hello.predecessor_end, PredecessorEnd.UNKNOWN),
        weights_digest=caps.weights_digest,
        grammar_format=model.grammar_format,
        kv_dtype=caps.kv_dtype,
        kv_layout=caps.kv_layout,
        has_transfers=caps.HasField("transfer_kv"),
        kv_shares=(kv_share_of(caps.transfer_kv),) if caps.HasField("transfer_kv") else (),
    )


def kv_share_of(kv: worker_pb2.KvFormat) -> KvShare:
    """The heads of a rank. Raises INVALID_ARGUMENT for what is none."""
    if not kv.num_heads:
        return WHOLE_KV
    if not kv.first_head < kv.end_head <= kv.num_heads <= MAX_HEADS:
        message = f"the worker's KV heads are [{kv.first_head}, {kv.end_head}) of {kv.num_heads}"
        raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "transfer_kv"})
    return KvShare(kv.first_head, kv.end_head, kv.num_heads)


def snapshot_of(
    parts: list[PageRecords],
    names: tuple[str, ...],
    pinned: tuple[tuple[int, ...], Mapping[str, tuple[int, ...]]],
    num_pages: int,
) -> CacheSnapshot:
    """Ranges of records as one. pinned: see pinned_from_proto().

    Raises PROTOCOL_VIOLATION unless they cover all pages in order.
    """
    first = 0
    for part in parts:
        if part.first_page != first:
            break
        first += len(part.filled)
    is_all = first == num_pages == sum(len(part.filled) for part in parts)
    if not is_all or not all(_is_sound(part, len(names), num_pages) for part in parts):
        message = f"the worker's page records do not describe its {num_pages} pages: check the versions of both ends"
        raise MeshError(ErrorReason.ERROR_REASON_PROTOCOL_VIOLATION, message)
    columns = ("generations", "filled", "previous_pages", "previous_generations", "namespace_indexes")
    records = PageRecords(
        first_page=0,
        **{name: np.concatenate([getattr(p, name) for p in parts]) for name in (*columns, "weights_versions", "ids")},
    )
    return CacheSnapshot(records=records, names=names, pinned_pages=pinned[0], pinned_transfers=pinned[1])


def _is_sound(part: PageRecords, num_names: int, num_pages: int) -> bool:
    used = part.filled > 0
    indexes = part.namespace_indexes[used]
    return bool(
        (part.filled >= 0).all()
        and int(part.filled.sum()) == len(part.ids)
        and (indexes >= 0).all()
        and (indexes < max(1, num_names)).all()
        and (part.previous_pages < num_pages).all()
    )


def _grammar_of(message: scheduler_pb2.Submit, grammars: GrammarShelf | None) -> Grammar | None:
    """The grammar that a submit names. Raises UNKNOWN_BLOB, INVALID_ARGUMENT, or what GrammarShelf.add() does."""
    for blob in message.blobs:
        if blob.hash != message.grammar_hash:
            text = f"the submit brings the blob {blob.hash[:64]!r} and does not name it: send what grammar_hash names"
            raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, text, {"field": "blobs"})
    if not message.grammar_hash:
        return None
    if grammars is None:
        text = "this scheduler takes no grammars: leave grammar_hash out"
        raise MeshError(ErrorReason.ERROR_REASON_UNSUPPORTED, text, {"feature": "grammar"})
    for blob in message.blobs:
        return grammars.add(blob.hash, blob.data)
    return grammars.find(message.grammar_hash)


def _unsupported_in(message: scheduler_pb2.Submit) -> str:
    if message.embeddings:
        return "embeddings"
    return ""


def model_identity_of(hello: worker_pb2.WorkerHello) -> common_pb2.ModelIdentity:
    """A copy of the identity that the worker announced; the scheduler serves the same."""
    identity = common_pb2.ModelIdentity()
    identity.CopyFrom(hello.hello.model)
    return identity
