"""Dense faults over a mesh of real processes: kills, stops, drains, several at a time, while it serves."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import grpc

from radixmesh.daemons.cluster.local_cluster import LocalCluster
from radixmesh.daemons.cluster.processes.process_status import ProcessState, ProcessStatus
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

_BACK_S = 120.0
# Some stops are over before anybody takes the process for dead, some are not.
_STOP_S = (0.2, 9.0)
_FAULTS = {"kill": 5, "stop": 3, "terminate": 2, "drain": 3}


class Chaos:
    """Until told to end, one fault after the other begins; each ends when its process is healthy again.

    A process has one fault at a time, and may have the next as soon as it is back. counts: faults by service and kind.
    every_s: mean time between two of them. failures: processes that did not come back.
    """

    def __init__(self, cluster: LocalCluster, rng: random.Random, *, every_s: float) -> None:
        self._cluster = cluster
        self._rng = rng
        self._every_s = every_s
        self._busy: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_faults: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []

    async def run(self, seconds: float) -> None:
        """Returns when every process that had a fault is healthy again."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if target := self._target():
                task = asyncio.create_task(self._fault(target))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            await asyncio.sleep(self._rng.expovariate(1 / self._every_s))
        await asyncio.gather(*self._tasks)

    def _target(self) -> ProcessStatus | None:
        choices = [
            status
            for status in self._cluster.processes
            if status.state is ProcessState.HEALTHY and status.name not in self._busy
        ]
        if not choices:
            return None
        # Whoever had few is likelier: a short run reaches all of them.
        weights = [(1 + self._num_faults[status.name]) ** -3 for status in choices]
        (chosen,) = self._rng.choices(choices, weights)
        return chosen

    async def _fault(self, status: ProcessStatus) -> None:
        kinds = [kind for kind in _FAULTS if kind != "drain" or status.service.startswith("scheduler")]
        (kind,) = self._rng.choices(kinds, [_FAULTS[kind] for kind in kinds])
        self._busy.add(status.name)
        self._num_faults[status.name] += 1
        self.counts[f"{status.service} {kind}"] += 1
        try:
            if kind == "stop":
                await self._stop(status)
            else:
                if kind == "drain":
                    await self._drain(status)
                number = signal.SIGKILL if kind == "kill" else signal.SIGTERM
                self._cluster.kill(status.service, status.replica, number)
                await self._wait_for(status, lambda now: now.restarts > status.restarts)
        except TimeoutError:
            now = self._cluster.status(status.service, status.replica)
            self.failures.append(f"{status.name} is not healthy {_BACK_S:g} s after {kind}: {now}")
        finally:
            self._busy.discard(status.name)

    async def _stop(self, status: ProcessStatus) -> None:
        """Nothing of it runs for a while; it goes on where it was, unless its supervisor has replaced it."""
        if not self._cluster.kill(status.service, status.replica, signal.SIGSTOP):
            return
        await asyncio.sleep(self._rng.uniform(*_STOP_S))
        # To whatever process is there now: one that was not stopped does not mind.
        self._cluster.kill(status.service, status.replica, signal.SIGCONT)
        await self._wait_for(status, lambda now: True)

    async def _drain(self, status: ProcessStatus) -> None:
        with suppress(grpc.RpcError):
            async with open_channel(self._cluster.address(status.service, status.replica)) as channel:
                stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
                await stub.Drain(scheduler_pb2.DrainRequest(timeout_ms=500), timeout=10)

    async def _wait_for(self, status: ProcessStatus, condition: Callable[[ProcessStatus], bool]) -> None:
        async with asyncio.timeout(_BACK_S):
            await self._cluster.wait_until(
                status.service,
                lambda now: condition(now) and now.state is ProcessState.HEALTHY,
                replica=status.replica,
            )
