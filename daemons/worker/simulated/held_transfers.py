"""KV transfers that wait on demand where a fault says so: tests lose daemons, and time, in each phase of a transfer."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.kv_share import KvShare
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.core import WorkerCore
from radixmesh.daemons.worker.kv_transfer.device_memory import Copied, DevicePiece, TokenNumbers
from radixmesh.daemons.worker.kv_transfer.transport import ByteArray
from radixmesh.daemons.worker.runner import ModelRunner
from radixmesh.daemons.worker.service import WorkerService
from radixmesh.daemons.worker.simulated.faults import FaultInjector, FaultKind
from radixmesh.daemons.worker.step_handle import DeviceEvent
from radixmesh.daemons.worker.stream.result_stream import ResultStream, Send
from radixmesh.worker.v1 import worker_pb2

log = get_logger(__name__)


class TransferHolds:
    """Decides whether a transfer waits, by how many have come to that phase in this process, from 1 on.

    WRITING: all data is sent, the last word is not.
    """

    def __init__(self, faults: FaultInjector) -> None:
        self._faults = faults
        self._counts: Counter[FaultKind] = Counter()

    async def wait(self, phase: FaultKind) -> None:
        """Returns when a transfer in this phase may go on."""
        if seconds := self._seconds(phase):
            await asyncio.sleep(seconds)
            log.info("transfer_released", phase=phase.value)

    def block(self, phase: FaultKind) -> None:
        """As wait(), on the step thread: nothing else runs there."""
        if seconds := self._seconds(phase):
            time.sleep(seconds)
            log.info("transfer_released", phase=phase.value)

    def _seconds(self, phase: FaultKind) -> float:
        self._counts[phase] += 1
        fault = self._faults.holds(phase, self._counts[phase])
        if fault is None:
            return 0.0
        log.info("transfer_held", phase=phase.value, number=self._counts[phase], ms=fault.ms)
        return fault.ms / 1000.0


class HeldService(WorkerService):
    """RESERVED: the region is there, its scheduler is not told yet. PIECE: behind one that was scattered ahead of the
    last word. WRITTEN: before the rest is scattered. VALIDATED: before the commit's answer."""

    def __init__(self, core: WorkerCore, open_stream: Callable[[Send], ResultStream], holds: TransferHolds) -> None:
        super().__init__(core, open_stream)
        self._holds = holds
        core.transfers.commits.between_pieces = partial(holds.wait, FaultKind.PIECE)
        core.transfers.commits.before_scatter = partial(holds.wait, FaultKind.WRITTEN)

    async def PrepareTransfer(
        self, request: worker_pb2.PrepareTransferRequest, context: object
    ) -> worker_pb2.PrepareTransferResponse:
        answer = await super().PrepareTransfer(request, context)
        await self._holds.wait(FaultKind.RESERVED)
        return answer

    async def CommitTransfer(
        self, request: worker_pb2.CommitTransferRequest, context: object
    ) -> worker_pb2.CommitTransferResponse:
        answer = await super().CommitTransfer(request, context)
        await self._holds.wait(FaultKind.VALIDATED)
        return answer


def hold_scatters(runner: ModelRunner, holds: TransferHolds) -> None:
    """SCATTERING: KV is in the pages, the stamps are not looked at yet."""
    write_kv = runner.write_kv

    def write_and_wait(indexes: IntArray, data: ByteArray, part: KvShare | None = None) -> None:
        write_kv(indexes, data, part)
        holds.block(FaultKind.SCATTERING)

    runner.write_kv = write_and_wait  # type: ignore[method-assign]
    if (device := runner.kv_device) is not None:
        scatter = device.scatter

        def scatter_and_wait(
            tokens: TokenNumbers, source: DevicePiece, part: KvShare | None, after: DeviceEvent | None = None
        ) -> Copied:
            copied = scatter(tokens, source, part, after)
            holds.block(FaultKind.SCATTERING)
            return copied

        device.scatter = scatter_and_wait  # type: ignore[method-assign]
