"""The router as a process keeps it alive."""

from __future__ import annotations

import asyncio

from radixmesh.daemons.router.admin_service import RouterAdminService
from radixmesh.daemons.router.config import RouterSettings
from radixmesh.daemons.router.detokenizer_link import DetokenizerLink
from radixmesh.daemons.router.detokenizer_pool import DetokenizerPool
from radixmesh.daemons.router.grpc_peers import GrpcTokenizer, dial_detokenizer, dial_scheduler
from radixmesh.daemons.router.journal import Journal
from radixmesh.daemons.router.output_flow import OutputFlow
from radixmesh.daemons.router.policy import make_policy
from radixmesh.daemons.router.router import Router
from radixmesh.daemons.router.scheduler_link import SchedulerLink
from radixmesh.daemons.router.scheduler_pool import SchedulerPool
from radixmesh.daemons.router.service import RouterService
from radixmesh.daemons.router.tokenizer_pool import TokenizerPool
from radixmesh.daemons.runtime.hello import make_hello
from radixmesh.daemons.runtime.lifecycle import Daemon, Runtime
from radixmesh.daemons.runtime.metrics import Metrics
from radixmesh.daemons.runtime.progress import Progress
from radixmesh.router.v1 import router_pb2_grpc

_DRAIN_POLL_S = 0.05


class RouterDaemon(Daemon):
    """Serves clients from the start: what needs a peer waits for it."""

    def __init__(self, runtime: Runtime, settings: RouterSettings) -> None:
        self._router = make_router(settings, runtime.instance_id, runtime.progress, runtime.metrics)
        self._clock: asyncio.Task[None] | None = None
        self._runtime = runtime
        runtime.server.add(router_pb2_grpc.add_RouterServiceServicer_to_server, RouterService(self._router))
        runtime.server.add(
            router_pb2_grpc.add_RouterAdminServiceServicer_to_server, RouterAdminService(self._router.schedulers)
        )

    @property
    def router(self) -> Router:
        return self._router

    async def load(self) -> None:
        self._router.connect()
        self._clock = self._runtime.spawn(self._router.keep_time(), "clock")

    async def drain(self) -> None:
        while self._router.num_streams:  # noqa: ASYNC110 - streams end in domain code, which knows no waiting.
            await asyncio.sleep(_DRAIN_POLL_S)

    async def close(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
        await self._router.close()


def make_router(settings: RouterSettings, instance_id: str, progress: Progress, metrics: Metrics) -> Router:
    """A router whose peers are reached over gRPC. Raises MeshError for a policy or address that is none."""
    hello = make_hello("router", instance_id)
    journal = Journal(settings.journal_bytes)
    flow = OutputFlow(journal, metrics)
    schedulers = SchedulerPool(
        lambda address: SchedulerLink(address, dial_scheduler, settings.silence_s, hello, flow),
        make_policy(settings.policy),
        wait_s=settings.scheduler_wait_s,
        migrate_after_s=settings.migrate_after_s,
        fail=flow.fail,
    )
    detokenizers = DetokenizerPool(
        [
            DetokenizerLink(address, dial_detokenizer, settings.silence_s, hello, flow)
            for address in settings.detokenizers
        ],
        settings.detokenizer_wait_s,
        fail=flow.fail_text,
    )
    flow.bind(schedulers, detokenizers)
    tokenizers = TokenizerPool(
        [GrpcTokenizer(address) for address in settings.tokenizers],
        wait_s=settings.tokenizer_wait_s,
        hedge_s=settings.tokenizer_hedge_s,
    )
    return Router(settings, journal=journal, flow=flow, tokenizers=tokenizers, progress=progress, metrics=metrics)
