"""The scheduler daemon: `radixmesh scheduler --workers host:port`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import suppress

from radixmesh.daemons.runtime.lifecycle import Daemon, Runtime, run_daemon
from radixmesh.daemons.runtime.rpc.frames import MAX_SERVE_FRAME_BYTES
from radixmesh.daemons.runtime.rpc.gates.stream_gate import StreamLimits
from radixmesh.daemons.runtime.settings import load_settings
from radixmesh.daemons.scheduler.config import SchedulerSettings
from radixmesh.daemons.scheduler.group.group_client import GroupClient, GroupState
from radixmesh.daemons.scheduler.group_service import grpc_connect
from radixmesh.daemons.scheduler.scheduler_loop import SchedulerLoop
from radixmesh.daemons.scheduler.service import SchedulerServicer
from radixmesh.scheduler.v1 import scheduler_pb2_grpc


class SchedulerDaemon(Daemon):
    """Healthy once its group was claimed for the first time, or is another scheduler's (standby is a healthy state, but
    Serve answers NOT_SERVING). A group that is lost later is no illness of the scheduler: Load says so."""

    def __init__(self, runtime: Runtime, settings: SchedulerSettings) -> None:
        group = GroupClient(settings.workers, runtime.instance_id, self._on_state, grpc_connect(settings.tls))
        self.loop = SchedulerLoop(settings, group, runtime.progress, runtime.metrics, runtime.tracer)
        self.servicer = SchedulerServicer(
            self.loop,
            runtime.progress,
            instance_id=runtime.instance_id,
            drain_s=settings.drain_s,
        )
        runtime.server.add(scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server, self.servicer)
        self._runtime = runtime
        self._running: asyncio.Task[None] | None = None

    async def load(self) -> None:
        self._running = self._runtime.spawn(self.loop.run(), "engine")
        await self.loop.until(lambda: self.loop.group_state in (GroupState.SERVING, GroupState.STANDBY))

    async def drain(self) -> None:
        """Routers move what runs here to other schedulers; what none of them can take goes on while drain_s lasts."""
        self.loop.is_draining = self.loop.is_leaving = True
        self.loop.streams.push_loads()
        await self.servicer.drained()

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            with suppress(asyncio.CancelledError):
                await self._running

    def _on_state(self, state: GroupState) -> None:
        self.loop.on_state(state)


async def build(runtime: Runtime, settings: SchedulerSettings) -> Daemon:
    return SchedulerDaemon(runtime, settings)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a scheduler until it is told to leave; returns the exit code."""
    settings = load_settings(SchedulerSettings, argv, "radixmesh-scheduler")

    async def build_daemon(runtime: Runtime) -> Daemon:
        return await build(runtime, settings)

    limits = StreamLimits(max_message_bytes=MAX_SERVE_FRAME_BYTES)
    return run_daemon("scheduler", settings, build_daemon, stream_limits=limits)


if __name__ == "__main__":
    sys.exit(main())
