"""A worker's answers as messages and back: step results, refusals, page records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from radixmesh.common.v1 import common_pb2
from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import IntArray, empty_ints, pack_floats, pack_ints, unpack_floats, unpack_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.field_checks import check_lengths, ids_from
from radixmesh.daemons.runtime.steps.forward_shape import missing_field
from radixmesh.daemons.runtime.steps.step import (
    MAX_PINNED_TRANSFERS,
    MAX_TRANSFER_ID_BYTES,
    PageRecords,
    Refusal,
    SlotError,
    SlotLogprobs,
    SlotVector,
    StepResult,
    TokenLogprobs,
)
from radixmesh.worker.v1 import worker_pb2


def result_to_proto(result: StepResult) -> worker_pb2.StepResult:
    """The result as a message."""
    return worker_pb2.StepResult(
        epoch=result.epoch,
        step_id=result.step_id,
        counts=pack_ints(result.counts),
        ids=pack_ints(result.ids),
        logprobs=[_slot_logprobs_to_proto(entry) for entry in result.logprobs],
        prompt_logprobs=[_slot_logprobs_to_proto(entry) for entry in result.prompt_logprobs],
        vectors=[
            worker_pb2.SlotVector(slot=v.slot, generation=v.generation, values=pack_floats(v.values))
            for v in result.vectors
        ],
        device_start_ns=result.device_start_ns,
        device_end_ns=result.device_end_ns,
        weights_version=result.weights_version,
        slot_errors=[
            worker_pb2.SlotError(slot=e.slot, generation=e.generation, error=e.error.to_proto())
            for e in result.slot_errors
        ],
        no_token_reasons=pack_ints(result.no_token_reasons),
        drafted=pack_ints(result.drafted),
        accepted=pack_ints(result.accepted),
        released_transfers=result.released_transfers,
        expert_rows=result.expert_rows[0] if result.expert_rows else None,
        expert_loads=pack_ints(result.expert_loads) if len(result.expert_loads) else b"",
        loaded_ops=pack_ints(result.loaded_ops) if result.loaded_ops else b"",
    )


def result_from_proto(message: worker_pb2.StepResult) -> StepResult:
    """Checks and converts; arrays are read-only views. Raises MALFORMED_MESSAGE, MISSING_FIELD or INVALID_ARGUMENT."""
    if message.step_id == 0:
        raise missing_field("result.step_id")
    counts = ids_from(message.counts, "result.counts")
    ids = ids_from(message.ids, "result.ids")
    check_lengths("result.ids", (len(ids), int(np.add.reduce(counts, dtype=np.int64))))
    no_token_reasons = drafted = accepted = empty_ints()
    if message.no_token_reasons or message.drafted or message.accepted:  # Hardly ever, and this is on a token's way.
        no_token_reasons = _beside_counts(message, "no_token_reasons", len(counts))
        drafted = _beside_counts(message, "drafted", len(counts))
        accepted = _beside_counts(message, "accepted", len(counts))
    return StepResult(
        epoch=message.epoch,
        step_id=message.step_id,
        counts=counts,
        ids=ids,
        logprobs=_all_slot_logprobs(message.logprobs),
        prompt_logprobs=_all_slot_logprobs(message.prompt_logprobs),
        vectors=tuple(
            SlotVector(slot=v.slot, generation=v.generation, values=unpack_floats(v.values, "result.vectors"))
            for v in message.vectors
        ),
        device_start_ns=message.device_start_ns,
        device_end_ns=message.device_end_ns,
        weights_version=message.weights_version,
        slot_errors=tuple(_slot_error(error) for error in message.slot_errors),
        released_transfers=tuple(message.released_transfers),
        expert_rows=(message.expert_rows,) if message.HasField("expert_rows") else (),
        expert_loads=ids_from(message.expert_loads, "result.expert_loads") if message.expert_loads else empty_ints(),
        loaded_ops=_ops(message.loaded_ops) if message.loaded_ops else (),
        no_token_reasons=no_token_reasons,
        drafted=drafted,
        accepted=accepted,
    )


def refusal_to_proto(refusal: Refusal) -> worker_pb2.Refusal:
    """The refusal as a message."""
    return worker_pb2.Refusal(epoch=refusal.epoch, step_id=refusal.step_id, error=refusal.error.to_proto())


def refusal_from_proto(message: worker_pb2.Refusal) -> Refusal:
    """Checks and converts. Raises MISSING_FIELD if it gives no reason."""
    if message.error.reason == common_pb2.ERROR_REASON_UNSPECIFIED:
        raise missing_field("refusal.error.reason")
    return Refusal(epoch=message.epoch, step_id=message.step_id, error=MeshError.from_proto(message.error))


def records_to_proto(
    records: PageRecords,
    *,
    is_last: bool = False,
    namespaces: Sequence[str] = (),
    pinned: Mapping[str, IntArray] | None = None,
    tier: worker_pb2.KvTier = worker_pb2.KV_TIER_UNSPECIFIED,
) -> worker_pb2.SnapshotCacheResponse:
    """One range of records as a message. `namespaces`: the next ones.

    pinned: pages by the transfer that holds them; belong into the last message.
    """
    pinned = pinned or {}
    return worker_pb2.SnapshotCacheResponse(
        first_page=records.first_page,
        generations=pack_ints(records.generations),
        filled=pack_ints(records.filled),
        previous_pages=pack_ints(records.previous_pages),
        previous_generations=pack_ints(records.previous_generations),
        namespace_indexes=pack_ints(records.namespace_indexes),
        weights_versions=pack_ints(records.weights_versions),
        ids=pack_ints(records.ids),
        namespaces=namespaces,
        pinned_pages=pack_ints(np.unique(np.concatenate(list(pinned.values()))) if pinned else empty_ints()),
        pinned_transfers=[
            worker_pb2.PinnedTransfer(transfer_id=name, pages=pack_ints(pages)) for name, pages in pinned.items()
        ],
        is_last=is_last,
        tier=tier,
    )


def pinned_from_proto(message: worker_pb2.SnapshotCacheResponse) -> tuple[tuple[int, ...], dict[str, tuple[int, ...]]]:
    """Pages that transfers hold: all of them, and by transfer id. Raises MALFORMED_MESSAGE or PROTOCOL_VIOLATION."""
    transfers = message.pinned_transfers
    if len(transfers) > MAX_PINNED_TRANSFERS or any(
        len(transfer.transfer_id.encode()) > MAX_TRANSFER_ID_BYTES for transfer in transfers
    ):
        text = (
            f"the worker pins pages for {len(transfers)} transfers: {MAX_PINNED_TRANSFERS} at most, with ids of"
            f" {MAX_TRANSFER_ID_BYTES} bytes; restart it"
        )
        raise MeshError(ErrorReason.ERROR_REASON_PROTOCOL_VIOLATION, text, {"max": str(MAX_PINNED_TRANSFERS)})
    by_transfer = {t.transfer_id: tuple(unpack_ints(t.pages, "pinned_transfers.pages").tolist()) for t in transfers}
    pages = unpack_ints(message.pinned_pages, "pinned_pages").tolist()
    return tuple(sorted({*pages, *(page for each in by_transfer.values() for page in each)})), by_transfer


def records_from_proto(message: worker_pb2.SnapshotCacheResponse) -> PageRecords:
    """Checks and converts; arrays are read-only views. `namespaces`, `is_last`, pinned pages stay in the message.

    Raises MALFORMED_MESSAGE (unequal lengths) or INVALID_ARGUMENT (negative values).
    """
    records = PageRecords(
        first_page=message.first_page,
        generations=ids_from(message.generations, "records.generations"),
        filled=ids_from(message.filled, "records.filled"),
        previous_pages=ids_from(message.previous_pages, "records.previous_pages", least=-1),
        previous_generations=ids_from(message.previous_generations, "records.previous_generations"),
        namespace_indexes=ids_from(message.namespace_indexes, "records.namespace_indexes"),
        weights_versions=ids_from(message.weights_versions, "records.weights_versions"),
        ids=ids_from(message.ids, "records.ids"),
    )
    arrays = (
        records.generations,
        records.filled,
        records.previous_pages,
        records.previous_generations,
        records.namespace_indexes,
        records.weights_versions,
    )
    check_lengths("records", [len(array) for array in arrays])
    check_lengths("records.ids", (len(records.ids), int(records.filled.sum(dtype="int64"))))
    return records


def _ops(data: bytes) -> tuple[int, ...]:
    return tuple(ids_from(data, "result.loaded_ops").tolist())


def _beside_counts(message: worker_pb2.StepResult, name: str, num_rows: int) -> IntArray:
    values = ids_from(getattr(message, name), f"result.{name}")
    if len(values):
        check_lengths(f"result.{name}", (len(values), num_rows))
    return values


def _slot_error(message: worker_pb2.SlotError) -> SlotError:
    if message.error.reason == common_pb2.ERROR_REASON_UNSPECIFIED:
        raise missing_field("result.slot_errors.error.reason")
    return SlotError(slot=message.slot, generation=message.generation, error=MeshError.from_proto(message.error))


def _slot_logprobs_to_proto(entry: SlotLogprobs) -> worker_pb2.SlotLogprobs:
    values = entry.logprobs
    return worker_pb2.SlotLogprobs(
        slot=entry.slot,
        generation=entry.generation,
        first_position=entry.first_position,
        logprobs=common_pb2.Logprobs(
            token_logprobs=pack_floats(values.own),
            num_top=values.num_top,
            top_ids=pack_ints(values.top_ids),
            top_logprobs=pack_floats(values.top),
        ),
    )


def _all_slot_logprobs(messages: Iterable[worker_pb2.SlotLogprobs]) -> tuple[SlotLogprobs, ...]:
    return tuple(_slot_logprobs(message) for message in messages)


def _slot_logprobs(message: worker_pb2.SlotLogprobs) -> SlotLogprobs:
    values = message.logprobs
    own = unpack_floats(values.token_logprobs, "logprobs.token_logprobs")
    top_ids = unpack_ints(values.top_ids, "logprobs.top_ids")
    top = unpack_floats(values.top_logprobs, "logprobs.top_logprobs")
    num_top = values.num_top
    check_lengths("logprobs.top", (len(top_ids), len(top), len(own) * num_top))
    return SlotLogprobs(
        slot=message.slot,
        generation=message.generation,
        first_position=message.first_position,
        logprobs=TokenLogprobs(
            own=own,
            num_top=num_top,
            top_ids=top_ids.reshape(len(own), num_top),
            top=top.reshape(len(own), num_top),
        ),
    )
