"""What waits to be written to one router: a single pending frame that later steps merge into."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.arrays import pack_floats, pack_ints
from radixmesh.daemons.runtime.step import TokenLogprobs
from radixmesh.daemons.scheduler.outputs import Finished, Outputs, Rejected, TokenRows
from radixmesh.scheduler.v1 import scheduler_pb2


class Outbox:
    """Pending output of one stream. A reader that is slow gets larger frames, never more of them."""

    def __init__(self, owner: int) -> None:
        self.owner = owner
        self._rows: list[TokenRows] = []
        self._frame = scheduler_pb2.ServeResponse()
        self._is_empty = True
        self._ready = asyncio.Event()
        self.wants_load = True

    def add(self, outputs: Outputs) -> None:
        """Takes what of `outputs` is for this stream."""
        owner, frame = self.owner, self._frame
        for rows in outputs.rows:
            mine = rows.of_owner(owner)
            if len(mine):
                self._rows.append(mine)
                self._is_empty = False
        for finished in outputs.finished:
            if finished.owner == owner:
                frame.finished.append(_finished(finished))
                self._is_empty = False
        for rejected in outputs.rejected:
            if rejected.owner == owner:
                frame.rejected.append(rejected_to_proto(rejected))
                self._is_empty = False
        for prompt in outputs.prompt_logprobs:
            if prompt.owner == owner:
                frame.prompt_logprobs.add(
                    handle=prompt.handle,
                    first_position=prompt.first_position,
                    logprobs=_logprobs([prompt.logprobs]),
                )
                self._is_empty = False
        for vector in outputs.vectors:
            if vector.owner == owner:
                frame.vectors.add(handle=vector.handle, values=pack_floats(vector.values))
                self._is_empty = False
        if not self._is_empty:
            self._ready.set()

    def add_frame(self, part: scheduler_pb2.ServeResponse) -> None:
        """Merges answers that are messages already."""
        self._frame.MergeFrom(part)
        self._is_empty = False
        self._ready.set()

    def push_load(self) -> None:
        """The next frame carries a load, and goes out now."""
        self.wants_load = True
        self._ready.set()

    async def wait(self) -> None:
        """Returns when there is something to write."""
        await self._ready.wait()

    def take(self, weights_version: int) -> scheduler_pb2.ServeResponse:
        """The pending frame, tokens merged; empty afterwards. The load is the caller's to add."""
        frame, rows = self._frame, self._rows
        self._frame, self._rows, self._is_empty = scheduler_pb2.ServeResponse(), [], True
        self._ready.clear()
        if rows:
            merged, logprobs = merge_rows(rows)
            frame.tokens.handles = pack_ints(merged.handles)
            frame.tokens.attempts = pack_ints(merged.attempts)
            frame.tokens.first_output_indexes = pack_ints(merged.firsts)
            frame.tokens.counts = pack_ints(merged.counts)
            frame.tokens.ids = pack_ints(merged.ids)
            frame.tokens.weights_version = weights_version
            for row, parts in sorted(logprobs.items()):
                frame.tokens.logprobs.add(row=row, logprobs=_logprobs(parts))
        return frame


def merge_rows(parts: Sequence[TokenRows]) -> tuple[TokenRows, dict[int, list[TokenLogprobs]]]:
    """Rows of several steps as one row per handle, in the order of the steps; logprobs by merged row."""
    if len(parts) == 1:
        return parts[0], {row: [value] for row, value in parts[0].logprobs.items()}
    handles = np.concatenate([part.handles for part in parts])
    counts = np.concatenate([part.counts for part in parts])
    ids = np.concatenate([part.ids for part in parts])
    order = np.argsort(handles, kind="stable")
    is_new = np.diff(handles[order], prepend=handles[order][0] - 1) != 0
    heads = np.flatnonzero(is_new)
    starts = (np.cumsum(counts) - counts)[order]
    lengths = counts[order]
    within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    first_rows = order[heads]

    def column(name: str) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        values: np.ndarray[tuple[int], np.dtype[np.int32]] = np.concatenate([getattr(part, name) for part in parts])
        return values[first_rows]

    merged = TokenRows(
        owners=column("owners"),
        handles=column("handles"),
        attempts=column("attempts"),
        firsts=column("firsts"),
        counts=np.add.reduceat(lengths, heads).astype(np.int32),
        ids=ids[np.repeat(starts, lengths) + within],
    )
    return merged, _merged_logprobs(parts, order, is_new)


def _merged_logprobs(
    parts: Sequence[TokenRows], order: np.ndarray[tuple[int], np.dtype[np.int64]], is_new: np.ndarray
) -> dict[int, list[TokenLogprobs]]:
    if not any(part.logprobs for part in parts):
        return {}
    flat: dict[int, TokenLogprobs] = {}
    offset = 0
    for part in parts:
        flat.update({offset + row: value for row, value in part.logprobs.items()})
        offset += len(part)
    merged_rows = (np.cumsum(is_new) - 1).tolist()
    grouped: dict[int, list[TokenLogprobs]] = {}
    for row, merged_row in zip(order.tolist(), merged_rows, strict=True):
        if row in flat:
            grouped.setdefault(merged_row, []).append(flat[row])
    return grouped


def _logprobs(parts: Sequence[TokenLogprobs]) -> common_pb2.Logprobs:
    """Consecutive logprobs of one request as one message."""
    return common_pb2.Logprobs(
        token_logprobs=b"".join(pack_floats(part.own) for part in parts),
        num_top=parts[0].num_top,
        top_ids=b"".join(pack_ints(part.top_ids) for part in parts),
        top_logprobs=b"".join(pack_floats(part.top) for part in parts),
    )


def _finished(finished: Finished) -> scheduler_pb2.Finished:
    return scheduler_pb2.Finished(
        handle=finished.handle,
        attempt=finished.attempt,
        reason=int(finished.reason),  # type: ignore[arg-type]
        num_output=finished.num_output,
        stop_id=finished.stop_id,
        usage=common_pb2.Usage(
            prompt_tokens=finished.prompt_tokens,
            output_tokens=finished.num_output,
            cached_tokens=finished.cached_tokens,
        ),
        error=finished.error.to_proto() if finished.error is not None else None,
    )


def rejected_to_proto(rejected: Rejected) -> scheduler_pb2.Rejected:
    return scheduler_pb2.Rejected(handle=rejected.handle, attempt=rejected.attempt, error=rejected.error.to_proto())
