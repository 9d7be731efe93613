"""radixmesh-worker: flags -> settings -> serve."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from functools import partial

from radixmesh.daemons.runtime.lifecycle import Daemon, Runtime, run_daemon
from radixmesh.daemons.runtime.rpc.frames import MAX_PLAN_BYTES
from radixmesh.daemons.runtime.rpc.gates.stream_gate import StreamLimits
from radixmesh.daemons.runtime.rpc.gates.unary_gate import UnaryLimits
from radixmesh.daemons.runtime.settings import load_settings
from radixmesh.daemons.worker.backends import check_backend, create_member, load_model
from radixmesh.daemons.worker.config import WorkerSettings
from radixmesh.daemons.worker.core import WorkerCore
from radixmesh.daemons.worker.core_config import CoreConfig
from radixmesh.daemons.worker.host_memory.tiers import add_host_memory, add_store, page_format_of
from radixmesh.daemons.worker.kv_transfer.transport import KvTransport
from radixmesh.daemons.worker.kv_transfer.transports.choice import make_transport
from radixmesh.daemons.worker.plans.executor import StepExecutor
from radixmesh.daemons.worker.ranks.group_member import GroupMember
from radixmesh.daemons.worker.service import WorkerService
from radixmesh.daemons.worker.simulated.faults import FaultInjector, FaultKind
from radixmesh.daemons.worker.simulated.faulty_stream import FaultyStream
from radixmesh.daemons.worker.simulated.held_transfers import HeldService, TransferHolds, hold_scatters
from radixmesh.worker.v1 import worker_pb2_grpc

# Of a nameserver. torch's store asks for the name of each address that it connects with, "::ffff:10.0.0.1", while the
# other ranks wait: 10 s by glibc's own limits where nobody answers.
_NAME_LIMITS = "timeout:1 attempts:3"


class WorkerDaemon(Daemon):
    """The worker's life: the model loads while capabilities and health answer already."""

    def __init__(self, runtime: Runtime, settings: WorkerSettings, member: GroupMember | None = None) -> None:
        self._settings = settings
        self._metrics = runtime.metrics
        self._faults = FaultInjector(settings.parsed_faults, settings.fault_seed) if settings.faults else None
        self._holds = TransferHolds(self._faults) if self._faults is not None else None
        self.core = WorkerCore(
            runtime.instance_id,
            CoreConfig(
                backend=settings.backend.value,
                max_plans_in_flight=settings.max_plans_in_flight,
                max_blob_bytes=settings.max_blob_bytes,
                blob_store_bytes=settings.blob_store_bytes,
                dump_folder=settings.dump_folder,
                record_plans=settings.record_plans,
                predecessor_end=settings.predecessor_end,
                transfer_staging_bytes=settings.transfer_staging_bytes,
                transfer_piece_bytes=settings.transfer_piece_bytes,
            ),
            runtime.progress,
            runtime.metrics,
            runtime.fail,
            runtime.tracer,
            member or create_member(settings),
            transport := self._transport(),
        )
        self._kv_transport = transport
        service = self._service()
        runtime.server.add(worker_pb2_grpc.add_WorkerServiceServicer_to_server, service)

    async def load(self) -> None:
        member = self.core.member
        model = await asyncio.to_thread(load_model, self._settings, member.group, member.experts)
        page_format = None
        if self._settings.kv_store or self._settings.host_kv_segment is not None:
            fingerprint = model.identity.model_fingerprint
            page_format = await asyncio.to_thread(page_format_of, self._settings, model.runner, fingerprint)
        if self._settings.host_kv_bytes:
            await asyncio.to_thread(add_host_memory, self._settings, model.runner, page_format)
        if self._holds is not None:
            hold_scatters(model.runner, self._holds)
        if self._kv_transport is not None and model.runner.kv_device is not None:
            await asyncio.to_thread(self._kv_transport.use_device, model.runner.kv_device)
        executor = StepExecutor(
            model.runner,
            num_slots=self._settings.num_slots,
            max_tokens_per_step=self._settings.max_tokens_per_step,
            blobs=self.core.blobs,
            grammars=model.grammars,
            guides=model.guides,
        )
        if executor.host is not None:
            executor.host.metrics = self._metrics
        if self._settings.kv_store and page_format is not None:
            await asyncio.to_thread(add_store, self._settings, executor, page_format, self._metrics)
        self.core.attach(executor, model.identity, model.grammars)

    async def drain(self) -> None:
        await self.core.drain()

    async def close(self) -> None:
        self.core.close()
        executor = self.core.executor
        if executor is not None:
            await asyncio.to_thread(executor.close)
        if executor is not None and executor.host is not None:
            await asyncio.to_thread(executor.host.close)

    def _transport(self) -> KvTransport | None:
        if not self._settings.transfer_staging_bytes:
            return None
        hold = None if self._holds is None else partial(self._holds.wait, FaultKind.WRITING)
        return make_transport(
            self._settings.transfer_transport,
            self._settings.tls,
            staging_bytes=self._settings.transfer_staging_bytes,
            before_last_word=hold,
            on_fallback=self._metrics.kv_transfer_fallbacks.inc,
        )

    def _service(self) -> WorkerService:
        faults, holds = self._faults, self._holds
        if faults is None or holds is None:
            return WorkerService(self.core)
        return HeldService(self.core, lambda send: FaultyStream(send, faults), holds)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a worker until it is told to leave; the exit code."""
    settings = load_settings(WorkerSettings, argv, "radixmesh-worker")
    if settings.rank_layout.world_size > 1:
        # Read once, when the process asks for its first name.
        os.environ.setdefault("RES_OPTIONS", _NAME_LIMITS)

    async def build(runtime: Runtime) -> Daemon:
        check_backend(settings)
        return WorkerDaemon(runtime, settings)

    # Blobs, of half that size at most, are what its unary calls carry.
    unary_limits = UnaryLimits(max_message_bytes=MAX_PLAN_BYTES, max_bytes=4 * MAX_PLAN_BYTES)
    code = run_daemon("worker", settings, build, unary_limits, StreamLimits(max_message_bytes=MAX_PLAN_BYTES))
    if settings.rank_layout.world_size > 1:
        # A thread that still meets other ranks is in gloo, which aborts a process that ends around it (status 134).
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
