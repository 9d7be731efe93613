"""The writing end of an Execute stream with injected faults, for tests and the simulated backend."""

from __future__ import annotations

import asyncio

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.simulated.faults import Fault, FaultInjector, FaultKind
from radixmesh.daemons.worker.stream.result_stream import ResultStream, Send
from radixmesh.worker.v1 import worker_pb2


class FaultyStream(ResultStream):
    """Injects the faults of simulated.faults into plans and results."""

    may_merge = False  # A fault strikes one result.

    def __init__(self, send: Send, faults: FaultInjector) -> None:
        super().__init__(send)
        self._faults = faults
        self._lock = asyncio.Lock()
        self._held: worker_pb2.ExecuteResponse | None = None
        self._release: asyncio.Task[None] | None = None

    def fault_of(self, plan: worker_pb2.StepPlan) -> Exception | None:
        fault = self._faults.strikes(plan.header.step_id)
        if fault is FaultKind.REFUSE:
            return MeshError(ErrorReason.ERROR_REASON_INTERNAL, "refused on demand: a fault was asked for by flag")
        return RuntimeError("died on demand: a fault was asked for by flag") if fault is FaultKind.DIE else None

    async def write(self, response: worker_pb2.ExecuteResponse) -> None:
        """Sends a message, or does to it what its fault says. Raises NO_REPLICA where the stream vanishes."""
        fault = self._faults.hit(response.result.step_id) if response.HasField("result") else None
        if fault is None:
            async with self._lock:
                await self._send(response)
            await self.flush()
        else:
            await self._spoil(response, fault)

    async def flush(self) -> None:
        """Sends what was held back."""
        async with self._lock:
            held, self._held = self._held, None
            if held is not None:
                await self._send(held)

    def close(self) -> None:
        """The stream is over: what is held back is lost."""
        if self._release is not None:
            self._release.cancel()

    async def _spoil(self, response: worker_pb2.ExecuteResponse, fault: Fault) -> None:
        match fault.kind:
            case FaultKind.DELAY:
                await asyncio.sleep(fault.ms / 1000.0)
                await self._send(response)
            case FaultKind.DUPLICATE:
                await self._send(response)
                await self._send(response)
            case FaultKind.REORDER:
                await self.flush()
                self._held = response
                self._release = asyncio.ensure_future(self._flush_after(fault.ms / 1000.0))
            case FaultKind.VANISH:
                raise MeshError(ErrorReason.ERROR_REASON_NO_REPLICA, "vanished on demand", {"daemon": "worker"})
            case FaultKind.HANG:
                await asyncio.Event().wait()
            case _:
                raise AssertionError(f"{fault.kind} is no fault of a result")

    async def _flush_after(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self.flush()
