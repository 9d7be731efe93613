"""Transfers that this worker receives: their regions by id, written to by other workers. Lives on the event loop."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.kv_share import WHOLE_KV, KvShare
from radixmesh.daemons.worker.kv_transfer.device_memory import DevicePiece
from radixmesh.daemons.worker.kv_transfer.host_process import HostProcess
from radixmesh.daemons.worker.kv_transfer.lifecycle import Failure, Reception
from radixmesh.daemons.worker.kv_transfer.staging import (
    CHUNK_TOKENS,
    STAMP_BYTES,
    RegionKey,
    StagingPool,
    region_bytes,
)
from radixmesh.daemons.worker.kv_transfer.transport import ByteArray, RegionMemory

MAX_RECEPTIONS = 4096
"""Transfers that one worker receives at a time."""
MAX_TRANSFER_ID_BYTES = 64


class GatherStart(NamedTuple):
    """When the last chunk of a transfer was computed, and its gather launched, by the receiver's clock."""

    began_s: float
    num_bytes: int


class Region:
    """A staging region with the lifecycle of its transfer. held: None once it is given back."""

    def __init__(
        self,
        key: RegionKey,
        held: RegionMemory,
        reception: Reception,
        first_token: int,
        num_tokens: int,
        part: KvShare = WHOLE_KV,
    ) -> None:
        """part: heads whose KV comes."""
        self.part = part
        self.key = key
        self.held: RegionMemory | None = held
        self.num_bytes = len(held.array)
        self.reception = reception
        self.first_token = first_token
        self.num_tokens = num_tokens
        self.num_written = 0
        self.num_in_order = 0
        """Bytes from the first one on that are all written."""
        self.gather_start: GatherStart | None = None
        """Of what moved behind the prefill, as its writer says."""
        self.is_ending = False
        """Its writer has said that the last chunk is under way."""
        self.opened_s = 0.0
        """When its writer came."""
        self.prepared_s = 0.0
        self._changed: asyncio.Future[None] | None = None

    @property
    def memory(self) -> ByteArray | None:
        """Its bytes; None once they are given back."""
        return None if self.held is None else self.held.array

    def wrote(self, offset: int, num_bytes: int) -> None:
        """Bytes have come."""
        self.num_written += num_bytes
        if offset == self.num_in_order:
            self.num_in_order += num_bytes

    def num_tokens_in_order(self) -> int:
        """Tokens from the first one on whose chunks have come whole."""
        body, num = self.num_bytes - 2 * STAMP_BYTES, self.num_in_order - STAMP_BYTES
        if num >= body:
            return self.num_tokens
        return max(0, num) // (body // self.num_tokens) // CHUNK_TOKENS * CHUNK_TOKENS

    @property
    def written(self) -> ByteArray | DevicePiece | None:
        """The memory that its writer wrote to; None once that is given back."""
        return None if self.held is None else self.held.device_piece or self.held.array

    def change(self) -> asyncio.Future[None]:
        """Done at the next notify() after this call, whenever it is awaited."""
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        # Shielded: several wait for one future.
        return asyncio.shield(self._changed)

    def notify(self) -> None:
        """Wakes all that wait for a change."""
        if self._changed is not None:
            self._changed.set_result(None)
            self._changed = None


class TransferReceiver:
    """new_memory: of a region of so many bytes. clock: monotonic seconds. on_over: told of every transfer that has
    ended."""

    def __init__(
        self,
        instance_id: str,
        pool: StagingPool,
        *,
        new_memory: Callable[[int], RegionMemory] = RegionMemory,
        clock: Callable[[], float],
        on_over: Callable[[Region], None] = lambda region: None,
    ) -> None:
        self._instance_id = instance_id
        self._pool = pool
        self._new_memory = new_memory
        self._clock = clock
        self._on_over = on_over
        self.regions: dict[str, Region] = {}

    def __len__(self) -> int:
        return len(self.regions)

    @property
    def num_quarantined_bytes(self) -> int:
        """Of regions that are over, and that somebody may still write to. Any thread: metrics are read by their own."""
        regions = tuple(self.regions.values())
        return sum(region.num_bytes for region in regions if region.reception.is_quarantined)

    def quarantined(self, most: int) -> list[str]:
        """Transfer ids of such regions."""
        return [name for name, region in self.regions.items() if region.reception.is_quarantined][:most]

    def get(self, transfer_id: str) -> Region:
        """Raises TRANSFER_FAILED for one that is not known, or not any more."""
        region = self.regions.get(transfer_id)
        if region is None:
            raise _failed(
                f"the transfer {transfer_id[:64]!r} is not known here, or is over: prefill again", Failure.NONE
            )
        return region

    def prepare(
        self,
        transfer_id: str,
        epoch: int,
        *,
        first_token: int,
        num_tokens: int,
        token_bytes: int,
        lease_s: float,
        part: KvShare = WHOLE_KV,
    ) -> Region:
        """Reserves a region for tokens of `part`; one that is prepared already gets a longer lease. Raises
        INVALID_ARGUMENT or OVERLOADED."""
        until = self._clock() + lease_s
        region = self.regions.get(transfer_id)
        if region is not None:
            if (region.key.epoch, region.num_tokens, region.part) != (epoch, num_tokens, part):
                message = f"the transfer {transfer_id!r} is another one here: choose another id"
                raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "transfer_id"})
            region.reception.renew(until)
            return region
        if not 0 < len(transfer_id.encode()) <= MAX_TRANSFER_ID_BYTES:
            message = f"transfer_id has {len(transfer_id.encode())} bytes: send 1 to {MAX_TRANSFER_ID_BYTES}"
            raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "transfer_id"})
        if num_tokens < 1:
            message = "num_tokens is 0: reserve for one token at least"
            raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "num_tokens"})
        if len(self.regions) >= MAX_RECEPTIONS:
            message = f"{MAX_RECEPTIONS} transfers come in already: prefill where the request decodes"
            raise MeshError(ErrorReason.ERROR_REASON_OVERLOADED, message, {"retry_after_ms": "1000"})
        num_bytes = region_bytes(num_tokens, token_bytes)
        self._pool.take(num_bytes)
        try:
            held = self._new_memory(num_bytes)
        except (OSError, MemoryError, ValueError) as error:
            self._pool.give_back(num_bytes)
            message = f"no memory for {num_bytes} bytes of KV: prefill where the request decodes"
            raise MeshError(ErrorReason.ERROR_REASON_OVERLOADED, message, {"retry_after_ms": "1000"}) from error
        key = RegionKey(
            transfer_id=transfer_id,
            incarnation=secrets.randbits(64),
            instance_id=self._instance_id,
            epoch=epoch,
        )
        reception = Reception(until, writes_are_seen=held.writes_are_seen, has_one_writer=held.has_one_writer)
        region = self.regions[transfer_id] = Region(key, held, reception, first_token, num_tokens, part)
        region.prepared_s = self._clock()
        return region

    def renew(self, transfer_ids: Iterable[str], epoch: int, lease_s: float) -> int:
        """Renews leases of that epoch; how many there were."""
        until, num = self._clock() + lease_s, 0
        for transfer_id in transfer_ids:
            region = self.regions.get(transfer_id)
            if region is not None and region.key.epoch == epoch and not region.reception.is_over:
                region.reception.renew(until)
                num += 1
        return num

    # From writers.

    def open(self, key: RegionKey, num_bytes: int, writer: str, process: HostProcess | None = None) -> Region:
        """A writer begins; process: it writes to the memory by itself. Raises TRANSFER_FAILED unless the region is
        there, just that one, and nobody's yet."""
        region = self.regions.get(key.transfer_id)
        if region is None or region.key != key or region.num_bytes != num_bytes:
            raise _failed("the region is not here any more: its transfer is over", Failure.NONE)
        if not writer or not region.reception.begin_write(writer):
            raise _failed("the region takes no writer: it has one, or its transfer is over", region.reception.failure)
        if process is not None and region.held is not None:
            region.held.let_in(process)
        region.notify()
        return region

    def write(self, region: Region, writer: str, offset: int, data: bytes) -> None:
        """Bytes arrive. Raises TRANSFER_FAILED where they must not be written."""
        reception = region.reception
        # Each byte once: a writer that repeats itself would look like progress for ever.
        most = min(region.num_bytes - offset, region.num_bytes - region.num_written)
        if reception.may_write(writer) and not (offset >= 0 and len(data) <= most):
            reception.bad_write(writer)
            self._settle(region)
        if not reception.may_write(writer):
            raise _failed("the transfer is over: write no more", reception.failure)
        assert region.memory is not None
        region.memory[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        region.wrote(offset, len(data))
        region.notify()

    def wrote(self, region: Region, writer: str, num_bytes: int, offset: int = 0) -> None:
        """Bytes were written by another way than this process's copies. Raises as write()."""
        reception = region.reception
        most = min(region.num_bytes - offset, region.num_bytes - region.num_written)
        if reception.may_write(writer) and num_bytes > most:
            reception.bad_write(writer)
            self._settle(region)
        if not reception.may_write(writer):
            raise _failed("the transfer is over: write no more", reception.failure)
        region.wrote(offset, num_bytes)
        region.notify()

    def gather_began(self, region: Region, began_s: float, num_bytes: int) -> None:
        """The writer says so of its last chunk, by this clock. What cannot be is passed over: no more than figures are
        made of it."""
        if region.prepared_s <= began_s <= self._clock() and 0 < num_bytes <= region.num_bytes:
            region.gather_start = GatherStart(began_s, num_bytes)

    def ending(self, region: Region, writer: str) -> None:
        """The last chunk is under way."""
        if region.reception.may_write(writer):
            region.is_ending = True
            region.notify()

    def last_word(self, region: Region, writer: str, *, is_done: bool, is_sound: bool = True) -> None:
        """The writer is over. is_sound: the bytes have its checksum. Raises TRANSFER_FAILED if the transfer has
        failed."""
        reception = region.reception
        if is_done and region.num_written != region.num_bytes:
            # The rest is what was there before: no checksum is made of bytes on a device.
            reception.bad_write(writer)
        if is_done and not is_sound:
            reception.bad_write(writer, Failure.CHECKSUM)
        reception.last_word(writer, is_done=is_done)
        failure = reception.failure
        self._settle(region)
        if is_done and failure is not Failure.NONE:
            raise _failed("the transfer has failed", failure)

    def stream_over(self, region: Region, writer: str) -> None:
        """The writer's connection is closed. Idempotent."""
        region.reception.stream_over(writer)
        self._settle(region)

    # From the scheduler, and time.

    def scattered(self, region: Region, failure: Failure) -> None:
        """The pages are written, or not."""
        region.reception.scattered(failure)
        self._settle(region)

    def abort(self, transfer_id: str, *, is_writer_gone: bool = False) -> None:
        """Ends a transfer. is_writer_gone: somebody answers for that its writer cannot write any more. Unknown ids are
        fine."""
        region = self.regions.get(transfer_id)
        if region is not None:
            region.reception.abort()
            if is_writer_gone:
                region.reception.writer_gone(region.reception.writer)
            self._settle(region)

    def begin_epoch(self, epoch: int) -> None:
        """Transfers of epochs before end: nobody waits for them any more."""
        for region in tuple(self.regions.values()):
            if region.key.epoch != epoch:
                region.reception.abort(Failure.EPOCH_ENDED)
                self._settle(region)

    def tick(self) -> None:
        """Ends what nobody renews, and frees what nobody writes to any more. Call it a few times a second while there
        is something."""
        now = self._clock()
        for region in tuple(self.regions.values()):
            if region.reception.expire(now) or region.reception.is_quarantined:
                self._settle(region)

    def _settle(self, region: Region) -> None:
        """Gives memory back as soon as nobody can write or read there."""
        region.notify()
        reception, held = region.reception, region.held
        if held is not None and reception.is_quarantined and held.is_writer_gone():
            reception.writer_gone(reception.writer)
        if held is not None and reception.is_memory_free:
            region.held = None
            held.close()
            self._pool.give_back(region.num_bytes)
            self.regions.pop(region.key.transfer_id, None)
            self._on_over(region)


def _failed(message: str, failure: Failure) -> MeshError:
    details = {"failure": failure.name.lower()} if failure is not Failure.NONE else {}
    return MeshError(ErrorReason.ERROR_REASON_TRANSFER_FAILED, message, details)
