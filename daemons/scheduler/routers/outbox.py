"""Rows to be written to one router: a pending frame that later steps merge into, until it is full.

A full frame is closed and the next one begun, in order: the tokens of an output never come after its end.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from radixmesh.common.v1 import common_pb2
from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import pack_floats, pack_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.frames import MAX_FRAME_BYTES, MAX_FRAME_ENTRIES
from radixmesh.daemons.runtime.steps.step import TokenLogprobs
from radixmesh.daemons.scheduler.results.outputs import Finished, Outputs, Rejected, TokenRows
from radixmesh.daemons.scheduler.results.row_merge import compacted, merge_rows
from radixmesh.scheduler.v1 import scheduler_pb2

# Parts of rows that wait are merged when they are so many: a reader that is away costs what its tokens take, no more.
_MOST_PARTS = 64
# Ids, logprobs and such that wait for one reader: 16 MiB.
_MOST_VALUES = 1 << 22
_VALUES_AN_EVENT = 64
# Handle, attempt, first index and count.
_BYTES_A_ROW = 16


class RouterOutbox:
    """Pending output of one stream. A reader that is slow gets larger frames, up to MAX_FRAME_BYTES.

    One that never reads gets nothing any more once too much waits: is_overfull is set then, and stays.
    """

    def __init__(self, owner: int, most_values: int = _MOST_VALUES) -> None:
        self.owner = owner
        self.is_overfull = False
        self._most_values = most_values
        self._num_values = 0
        self._rows: list[TokenRows] = []
        self._frame = scheduler_pb2.ServeResponse()
        self._frame_values = self._frame_bytes = self._frame_entries = 0
        self._full: deque[tuple[scheduler_pb2.ServeResponse, list[TokenRows], int]] = deque()
        """Frames that are full, oldest first: messages, rows and values."""
        self._is_empty = True
        self._ready = asyncio.Event()
        self.wants_load = True

    def add(self, outputs: Outputs) -> None:
        """Takes what of `outputs` is for this stream."""
        owner = self.owner
        if self.is_overfull:
            return
        for rows in outputs.rows:
            mine = rows.of_owner(owner)
            if len(mine):
                self._add_rows(mine)
        for finished in outputs.finished:
            if finished.owner == owner:
                self._frame.finished.append(_finished(finished))
                self._added(_VALUES_AN_EVENT, num_entries=1)
        for rejected in outputs.rejected:
            if rejected.owner == owner:
                self._frame.rejected.append(rejected_to_proto(rejected))
                self._added(_VALUES_AN_EVENT, num_entries=1)
        for prompt in outputs.prompt_logprobs:
            if prompt.owner == owner:
                self._frame.prompt_logprobs.add(
                    handle=prompt.handle, first_position=prompt.first_position, logprobs=_logprobs([prompt.logprobs])
                )
                self._added(_VALUES_AN_EVENT + _num_values(prompt.logprobs), num_entries=1)
        for vector in outputs.vectors:
            if vector.owner == owner:
                self._frame.vectors.add(handle=vector.handle, values=pack_floats(vector.values))
                self._added(_VALUES_AN_EVENT + len(vector.values), num_entries=1)
        if not self._is_empty:
            self._ready.set()

    def add_frame(self, part: scheduler_pb2.ServeResponse) -> None:
        """Merges answers that are messages already."""
        if self.is_overfull:
            return
        self._frame.MergeFrom(part)
        self._added(_VALUES_AN_EVENT + part.ByteSize() // 4, num_entries=1)
        self._ready.set()

    def push_load(self) -> None:
        """The next frame carries a load, and goes out now."""
        self.wants_load = True
        self._ready.set()

    async def wait(self) -> None:
        """Returns when there is something to write."""
        await self._ready.wait()

    def take(self, weights_version: int) -> scheduler_pb2.ServeResponse:
        """The oldest pending frame, tokens merged, and empty if there is none. The load is the caller's to add."""
        if not self._full:
            self._close_frame()
        frame, rows, num_values = self._full.popleft()
        self._num_values -= num_values
        self._is_empty = not self._full and not self._frame_bytes
        if self._is_empty:
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

    def _add_rows(self, rows: TokenRows) -> None:
        self._rows.append(rows)
        if len(self._rows) > _MOST_PARTS:
            self._rows = [compacted(self._rows)]
        num_logprobs = sum(_num_values(logprobs) for logprobs in rows.logprobs.values())
        # Rows are merged: only what they hold is kept for a reader that is away.
        self._added(len(rows.ids) + num_logprobs, num_more_bytes=_BYTES_A_ROW * len(rows))

    def _added(self, num_values: int, *, num_entries: int = 0, num_more_bytes: int = 0) -> None:
        """So much was added; too much in all is dropped, and so is what comes later."""
        self._is_empty = False
        self._num_values += num_values
        self._frame_values += num_values
        self._frame_bytes += 4 * num_values + num_more_bytes
        self._frame_entries += num_entries
        if self._num_values > self._most_values:
            self.is_overfull = True
            self._full.clear()
            self._close_frame()
            self._full.clear()
        elif self._frame_bytes >= MAX_FRAME_BYTES or self._frame_entries >= MAX_FRAME_ENTRIES:
            self._close_frame()

    def _close_frame(self) -> None:
        """Closes the frame: later entries go into another one."""
        self._full.append((self._frame, self._rows, self._frame_values))
        self._frame, self._rows = scheduler_pb2.ServeResponse(), []
        self._frame_values = self._frame_bytes = self._frame_entries = 0


def stalled() -> MeshError:
    """Why a stream ends whose reader is away for too long."""
    message = "this router read nothing for so long that too much waited for it: connect again and submit what is open"
    return MeshError(ErrorReason.ERROR_REASON_CLIENT_STALLED, message)


def _num_values(logprobs: TokenLogprobs) -> int:
    return int(logprobs.own.size + logprobs.top_ids.size + logprobs.top.size)


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
            accepted_prediction_tokens=finished.accepted_tokens,
            rejected_prediction_tokens=finished.drafted_tokens - finished.accepted_tokens,
        ),
        error=finished.error.to_proto() if finished.error is not None else None,
    )


def rejected_to_proto(rejected: Rejected) -> scheduler_pb2.Rejected:
    return scheduler_pb2.Rejected(handle=rejected.handle, attempt=rejected.attempt, error=rejected.error.to_proto())
