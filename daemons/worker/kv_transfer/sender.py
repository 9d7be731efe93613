"""Transfers that this worker sends: chunks gathered from pages, in order, written to a region elsewhere as they come.

One writer a transfer. It ends with its last chunk, by an abort, with the epoch, or when no chunk comes for long.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import numpy as np

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.kv_transfer.device_memory import DevicePiece
from radixmesh.daemons.worker.kv_transfer.lifecycle import Emission
from radixmesh.daemons.worker.kv_transfer.staging import CHUNK_TOKENS, STAMP_BYTES, StagingPool
from radixmesh.daemons.worker.kv_transfer.transport import (
    ByteArray,
    KvTransport,
    KvWriter,
    SendBuffer,
    checksum_of,
    until_done,
)
from radixmesh.worker.v1 import worker_pb2

log = get_logger(__name__)

MAX_SENDERS = 256
"""Transfers that one worker sends at a time."""
_MAX_WAITING = 64
_NEXT_CHUNK_S = 120.0
# Each is a launch on either side, and a word.
_MOST_PIECES = 16


class Chunk:
    """Gathered tokens that wait for their turn. offset: in the region. buffer: None where they lie there already."""

    def __init__(self, offset: int, num_bytes: int, buffer: SendBuffer | None, *, is_last: bool) -> None:
        self.offset = offset
        self.num_bytes = num_bytes
        self.buffer = buffer
        self.is_last = is_last
        self.emission = Emission()


Gather = Callable[[range, ByteArray | DevicePiece, bytes], Awaitable[object]]
"""Gathers some tokens of a chunk to memory, and bytes behind them to memory of a device."""


class KvSender:
    """Of one transfer. writer: instance id of this process. piece_bytes: of the last chunk in one copy, so that its
    receiver may scatter one piece while the next is gathered; 0: all at once. on_over: told once whether all was sent,
    the bytes, and the seconds since the first chunk; nothing is written any more."""

    def __init__(
        self,
        region: worker_pb2.TransferRegion,
        address: str,
        stamp: bytes,
        epoch: int,
        writer: str,
        pool: StagingPool,
        transport: KvTransport,
        on_over: Callable[[KvSender, bool, int, float], None],
        *,
        piece_bytes: int = 0,
    ) -> None:
        self.region = region
        self.address = address
        self.epoch = epoch
        self.next_token = region.first_token
        self._stamp = np.frombuffer(stamp, np.uint8)
        self._writer = writer
        self._pool = pool
        self._transport = transport
        self._on_over = on_over
        self._piece_bytes = piece_bytes
        self.gather_start: Callable[[], worker_pb2.GatherStart | None] = lambda: None
        """When the gather of the last chunk began, once it has."""
        self._chunks: asyncio.Queue[Chunk | None] = asyncio.Queue()
        """Chunks to be written; None: the last one is being gathered."""
        self._task: asyncio.Task[None] | None = None
        self._target: KvWriter | None = None
        """While copies may be begun to where it says."""
        self._is_open = asyncio.Event()
        """There is a target, or will be none."""
        self._placing: set[asyncio.Future[object]] = set()
        self._began = time.monotonic()
        self._num_bytes = 0
        self._is_sent = False
        self._is_ended = False

    async def add(self, first_token: int, num_tokens: int, token_bytes: int, *, is_last: bool, gather: Gather) -> None:
        """Gathers the next tokens; returns when their pages are the caller's again.

        Raises INVALID_ARGUMENT for tokens that are not the next ones, OVERLOADED, TRANSFER_FAILED for a transfer that
        is over, and what gather() raises.
        """
        end = first_token + num_tokens
        region_end = self.region.first_token + self.region.num_tokens
        is_whole = num_tokens % CHUNK_TOKENS == 0 or end == region_end
        is_next = first_token == self.next_token and num_tokens > 0 and end <= region_end and is_whole
        if not is_next or is_last != (end == region_end):
            message = (
                f"tokens {first_token} to {end} are not the next ones: send from {self.next_token} on, by multiples of "
                f"{CHUNK_TOKENS}, up to {region_end}"
            )
            raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "num_tokens"})
        if self.is_over():
            raise _over()
        if self._chunks.qsize() >= _MAX_WAITING:
            message = f"{_MAX_WAITING} chunks wait to be written: send larger ones"
            raise MeshError(ErrorReason.ERROR_REASON_OVERLOADED, message, {"retry_after_ms": "100"})
        size = num_tokens * token_bytes
        offset = STAMP_BYTES + (first_token - self.region.first_token) * token_bytes
        self.next_token = end
        if self._task is None and self._transport.may_place(self.region):
            self._start()
        if is_last and self._task is not None:
            self._chunks.put_nowait(None)
        try:
            target, place = await self._place(offset, size + STAMP_BYTES * is_last)
            if target is None or place is None:
                self._take(await self._buffered(offset, range(num_tokens), size, gather, is_last=is_last))
            else:
                pieces = pieces_of(num_tokens, token_bytes, self._piece_bytes if is_last else 0)
                await self._placed_in(place, offset, token_bytes, pieces, gather, is_last=is_last)
        except BaseException:
            self.cancel()
            raise
        if self._task is None:
            self._start()

    def is_over(self) -> bool:
        """True if nothing more is sent."""
        return self._is_ended

    def cancel(self) -> None:
        """Ends it, also before it begins. Idempotent."""
        if self._task is None:
            if not self._is_ended:
                self._is_ended = True
                self._on_over(self, False, 0, 0.0)
        elif not self._task.cancelling():
            self._task.cancel()

    def _take(self, chunk: Chunk) -> None:
        """The next one to be written. Raises TRANSFER_FAILED for a transfer that is over."""
        chunk.emission.gathered()
        if self.is_over():
            self._let_go(chunk, is_sent=False)
            raise _over()
        self._chunks.put_nowait(chunk)

    async def _place(self, offset: int, size: int) -> tuple[KvWriter | None, DevicePiece | None]:
        """Memory of the region, where the target has some for this process's device. Raises TRANSFER_FAILED."""
        if self._task is None or not self._transport.may_place(self.region):
            return None, None
        await self._is_open.wait()
        target = self._target
        if target is None:
            raise _over()
        return target, target.place(offset, size)

    async def _placed_in(
        self,
        place: DevicePiece,
        offset: int,
        token_bytes: int,
        pieces: list[range],
        gather: Gather,
        *,
        is_last: bool,
    ) -> None:
        """Gathers a chunk to the region, piece by piece; each is told as it is there. Behind the last one is the
        stamp."""
        running = []
        for piece in pieces:
            start, num_bytes = piece.start * token_bytes, len(piece) * token_bytes
            tail = self._stamp.tobytes() if is_last and piece is pieces[-1] else b""
            memory = place.part(start, num_bytes + len(tail))
            # The target is not left before it has run, whatever becomes of this call.
            placing: asyncio.Future[object] = asyncio.ensure_future(gather(piece, memory, tail))
            self._placing.add(placing)
            placing.add_done_callback(self._placed)
            running.append((placing, Chunk(offset + start, num_bytes, None, is_last=False)))
        running[-1][1].is_last = is_last
        for placing, chunk in running:
            await asyncio.shield(placing)
            self._take(chunk)

    async def _buffered(self, offset: int, tokens: range, size: int, gather: Gather, *, is_last: bool) -> Chunk:
        """Gathers a chunk to memory of this process."""
        chunk = Chunk(offset, size, buffer := self._new_buffer(size), is_last=is_last)
        try:
            await gather(tokens, buffer.memory, b"")
        except BaseException:
            chunk.emission.abort()
            buffer.close()
            self._pool.give_back(size)
            raise
        return chunk

    def _placed(self, placing: asyncio.Future[object]) -> None:
        if not placing.cancelled():
            placing.exception()  # The first piece that fails is told, and ends the call.
            self._placing.discard(placing)

    def _start(self) -> None:
        """Begins to write."""
        self._began = time.monotonic()
        self._task = asyncio.ensure_future(self._run())
        # A task that is cancelled before it runs has no last line.
        self._task.add_done_callback(self._over)

    def _new_buffer(self, size: int) -> SendBuffer:
        """Raises OVERLOADED or NEVER_FITS."""
        self._pool.take(size)
        try:
            return self._transport.new_buffer(size)
        except MemoryError as error:
            self._pool.give_back(size)
            message = f"no memory for {size} bytes of KV: prefill where the request decodes"
            raise MeshError(ErrorReason.ERROR_REASON_OVERLOADED, message, {"retry_after_ms": "100"}) from error

    async def _run(self) -> None:
        try:
            async with self._transport.open(self.address, self.region, self._writer) as target:
                self._target = target
                self._is_open.set()
                try:
                    await self._write(target)
                finally:
                    self._target = None
                    await until_done(self._placing)
                    if any(placing.cancelled() for placing in self._placing):
                        target.left_running()
            self._is_sent = True
        except (MeshError, TimeoutError) as error:
            message = str(error) or "no chunk came"
            log.info("kv_not_sent", transfer=self.region.transfer_id, peer=self.address, error=message)

    async def _write(self, target: KvWriter) -> None:
        """All chunks, as they come, and the last word."""
        await target.write(0, self._stamp)
        checksum = checksum_of(self._stamp)
        is_last = has_end = False
        while not is_last:
            async with asyncio.timeout(_NEXT_CHUNK_S):
                chunk = await self._chunks.get()
            if chunk is None:
                await target.ending()
                continue
            try:
                if chunk.buffer is None:
                    has_end = chunk.is_last
                    num_bytes = chunk.num_bytes + (STAMP_BYTES if has_end else 0)
                    await target.placed(chunk.offset, num_bytes, is_last=has_end)
                else:
                    memory = chunk.buffer.memory
                    await target.write(chunk.offset, memory)
                    if not isinstance(memory, DevicePiece):
                        checksum = await asyncio.to_thread(checksum_of, memory, checksum)
            except BaseException:
                self._let_go(chunk, is_sent=False)
                raise
            self._let_go(chunk, is_sent=True)
            is_last = chunk.is_last
        if not has_end:
            await target.write(self.region.num_bytes - STAMP_BYTES, self._stamp)
        await target.done(checksum_of(self._stamp, checksum), self.gather_start())

    def _over(self, task: asyncio.Task[None]) -> None:
        self._is_ended = True
        self._is_open.set()
        while not self._chunks.empty():
            if (chunk := self._chunks.get_nowait()) is not None:
                self._let_go(chunk, is_sent=False)
        self._on_over(self, self._is_sent, self._num_bytes, time.monotonic() - self._began)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("kv_sender_failed", transfer=self.region.transfer_id, error=repr(error))

    def _let_go(self, chunk: Chunk, *, is_sent: bool) -> None:
        """The transport reads the chunk no more."""
        chunk.emission.handle_over(is_sent=is_sent)
        if is_sent:
            self._num_bytes += chunk.num_bytes
        assert chunk.emission.is_buffer_free
        if chunk.buffer is not None:
            chunk.buffer.close()
            self._pool.give_back(chunk.num_bytes)


def pieces_of(num_tokens: int, token_bytes: int, piece_bytes: int) -> list[range]:
    """Tokens of a chunk by pieces of at least piece_bytes and of whole CHUNK_TOKENS; the last one has the rest."""
    if not piece_bytes:
        return [range(num_tokens)]
    least = max(piece_bytes, num_tokens * token_bytes // _MOST_PIECES)
    step = -(-least // (token_bytes * CHUNK_TOKENS)) * CHUNK_TOKENS
    return [range(start, min(start + step, num_tokens)) for start in range(0, num_tokens, step)]


def _over() -> MeshError:
    return MeshError(ErrorReason.ERROR_REASON_TRANSFER_FAILED, "the transfer is over: prefill again")
