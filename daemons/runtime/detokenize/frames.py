"""Frames of the Detokenize stream to and from the table's messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import unpack_ints, unpack_list
from radixmesh.daemons.runtime.detokenize.messages import EntryFailure, OpenEntry, Pending, TextDelta, TokenBatch
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.hello import check_peer_names
from radixmesh.detokenizer.v1 import detokenizer_pb2

# Of one frame; a router's are at most 4 MiB, or one output's tokens.
MAX_ROWS = 1 << 16
MAX_IDS = 1 << 21


def read_opens(messages: Sequence[detokenizer_pb2.Open]) -> list[OpenEntry]:
    """The opens of one frame.

    Raises MALFORMED_MESSAGE for an array of broken length, PROTOCOL_VIOLATION where shares_with names no earlier open.
    """
    entries: list[OpenEntry] = []
    earlier: dict[int, OpenEntry] = {}
    for message in messages:
        if message.HasField("shares_with"):
            entries.append(_sibling_of(message, earlier.get(message.shares_with)))
        else:
            entry = earlier[message.handle] = read_open(message)
            entries.append(entry)
    return entries


def _sibling_of(message: detokenizer_pb2.Open, other: OpenEntry | None) -> OpenEntry:
    """Another output of the request of `other`; what they share is kept once."""
    if other is None:
        text = f"shares_with names {message.shares_with}, which is no earlier open of this frame"
        raise MeshError(ErrorReason.ERROR_REASON_PROTOCOL_VIOLATION, text, {"field": "opens.shares_with"})
    return replace(
        other,
        handle=message.handle,
        output_ids=unpack_list(message.output_ids, "opens.output_ids"),
        emitted_text_bytes=message.emitted_text_bytes,
    )


def read_open(message: detokenizer_pb2.Open) -> OpenEntry:
    """One that shares nothing. Raises MeshError MALFORMED_MESSAGE, or INVALID_ARGUMENT for a long name."""
    check_peer_names(request_id=message.request_id, trace_context=message.trace_context)
    stop = message.stop
    return OpenEntry(
        handle=message.handle,
        request_id=message.request_id,
        prompt_tail_ids=unpack_list(message.prompt_tail_ids, "opens.prompt_tail_ids"),
        output_ids=unpack_list(message.output_ids, "opens.output_ids"),
        emitted_text_bytes=message.emitted_text_bytes,
        stops=tuple(stop.stop),
        include_stop=stop.include_stop,
        skip_special_tokens=not stop.HasField("skip_special_tokens") or stop.skip_special_tokens,
        eos_ids=frozenset(unpack_list(message.eos_ids, "opens.eos_ids")),
        trace_context=message.trace_context,
    )


def read_tokens(message: detokenizer_pb2.TokenRows) -> TokenBatch:
    """Raises MeshError MALFORMED_MESSAGE if the arrays do not fit each other, TOO_LARGE beyond MAX_ROWS, MAX_IDS."""
    for field, data, most in (("handles", message.handles, MAX_ROWS), ("ids", message.ids, MAX_IDS)):
        if len(data) > 4 * most:
            text = f"tokens.{field} has {len(data) // 4} values: at most {most} go into a frame"
            raise MeshError(ErrorReason.ERROR_REASON_TOO_LARGE, text, {"field": f"tokens.{field}", "max": str(most)})
    handles = unpack_ints(message.handles, "tokens.handles")
    first_indexes = unpack_ints(message.first_output_indexes, "tokens.first_output_indexes")
    counts = unpack_ints(message.counts, "tokens.counts")
    ids = unpack_ints(message.ids, "tokens.ids")
    num_rows = len(handles)
    if len(first_indexes) != num_rows or len(counts) != num_rows or len(message.finals) not in (0, num_rows):
        raise _malformed(f"{num_rows} handles need as many first_output_indexes and counts, and as many finals or none")
    if num_rows and (int(counts.min()) < 0 or int(first_indexes.min()) < 0):
        raise _malformed("counts and first_output_indexes cannot be negative")
    num_ids = int(counts.sum(dtype="int64"))
    if num_ids != len(ids):
        raise _malformed(f"counts sum to {num_ids}, ids holds {len(ids)}")
    return TokenBatch(
        handles=handles.tolist(),
        first_indexes=first_indexes.tolist(),
        counts=counts.tolist(),
        finals=message.finals or bytes(num_rows),
        ids=ids.tolist(),
        min_id=int(ids.min()) if num_ids else 0,
        max_id=int(ids.max()) if num_ids else 0,
    )


def write_response(pending: Pending) -> detokenizer_pb2.DetokenizeResponse:
    return detokenizer_pb2.DetokenizeResponse(
        rows=[_text_row(delta) for delta in pending.deltas],
        failures=[_failure(failure) for failure in pending.failures],
    )


def _text_row(delta: TextDelta) -> detokenizer_pb2.TextRow:
    row = detokenizer_pb2.TextRow(
        handle=delta.handle,
        text_offset=delta.text_offset,
        text=delta.text,
        num_tokens=delta.num_tokens,
        is_final=delta.is_final,
    )
    if delta.stop is not None:
        row.stop.stop = delta.stop.stop
        row.stop.num_tokens = delta.stop.num_tokens
    return row


def _failure(failure: EntryFailure) -> detokenizer_pb2.EntryFailure:
    return detokenizer_pb2.EntryFailure(handle=failure.handle, is_lost=failure.is_lost, error=failure.error.to_proto())


def _malformed(message: str) -> MeshError:
    return MeshError(ErrorReason.ERROR_REASON_MALFORMED_MESSAGE, f"tokens: {message}", {"field": "tokens"})
