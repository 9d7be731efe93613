"""The mesh of compose/gpu.yml as local processes, to be killed, asked and read."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from types import TracebackType

from hop_ladder.processes import ROOT

from radixmesh.daemons.cluster.local_cluster import LocalCluster
from radixmesh.daemons.cluster.processes.process_status import ProcessState, ProcessStatus
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

SERVICES = ("tokenizer", "detokenizer", "worker", "scheduler", "router")
_METRICS_PORT = 9100
_START_S = 240.0
_BACK_S = 120.0
_MAX_LINES = 40
# Events that say what a lost peer looks like from its neighbours.
_OF_A_KILL = {"peer_lost", "peer_not_reached", "epoch_lost", "group_not_claimed", "holder_fenced", "plan_refused"}
_KILL_IS_OVER_S = 30.0


@dataclass(slots=True, kw_only=True)
class LogBook:
    """Log lines above info. Errors, uncaught exceptions and what is no log line at all are kept; warnings
    are counted, those apart that come within 30 s of a kill and say that a peer is lost."""

    errors: list[str] = field(default_factory=list)
    explained: Counter[str] = field(default_factory=Counter)
    warnings: Counter[str] = field(default_factory=Counter)
    other_lines: list[str] = field(default_factory=list)
    started: dict[str, object] = field(default_factory=dict)
    killed_at: float = float("-inf")

    def take(self, name: str, line: str) -> None:
        try:
            entry = json.loads(line)
            level, event = entry["level"], entry["event"]
        except (ValueError, TypeError, KeyError):
            if line.strip() and len(self.other_lines) < _MAX_LINES:
                self.other_lines.append(f"{name}: {line[:300]}")
            return
        if level in ("error", "critical"):
            if len(self.errors) < _MAX_LINES:
                self.errors.append(f"{name}: {line[:2000]}")
        elif level == "warning":
            is_explained = event in _OF_A_KILL and time.monotonic() - self.killed_at < _KILL_IS_OVER_S
            (self.explained if is_explained else self.warnings)[f"{name} {event}"] += 1
        elif event in ("memory_sized", "graphs_captured"):
            self.started[event] = {key: value for key, value in entry.items() if isinstance(value, int | float)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """at: on the monotonic clock. back_s: until the daemon was healthy again. adopted_tokens: that the next scheduler
    took over from the worker; same_worker: which lived on."""

    service: str
    at: float
    back_s: float
    adopted_tokens: int = 0
    same_worker: bool = False


class EnduranceMesh:
    """An async context manager. model: folder with config.json and tokenizer. settings: service -> its flags."""

    def __init__(self, model: Path, settings: Mapping[str, Mapping[str, str]]) -> None:
        # The compose file is read with these.
        os.environ["RADIXMESH_MODEL_FOLDER"] = str(model.absolute())
        os.environ["RADIXMESH_MODEL_NAME"] = model.name
        self.logs = LogBook()
        self.kills: list[Kill] = []
        self._num_killed: Counter[str] = Counter()
        environment = {service: {"RADIXMESH_LOG_LEVEL": "warning"} for service in SERVICES}
        environment["worker"]["RADIXMESH_LOG_LEVEL"] = "info"
        for service, flags in settings.items():
            environment[service] |= {f"RADIXMESH_{name.upper().replace('-', '_')}": v for name, v in flags.items()}
        self._cluster = LocalCluster(
            ROOT / "compose" / "gpu.yml", environment=environment, publish=False, on_line=self.logs.take
        )

    async def __aenter__(self) -> EnduranceMesh:
        await self._cluster.start()
        try:
            await self._cluster.wait_healthy(_START_S)
        except BaseException:
            await self._cluster.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            for service in SERVICES:
                lines = "\n".join(self._cluster.recent_lines(service)[-10:])
                print(f"--- {service}\n{lines}", file=sys.stderr, flush=True)
        await self._cluster.stop()

    @property
    def router(self) -> str:
        return self._cluster.address("router")

    @property
    def pids(self) -> dict[str, int]:
        """Service -> process id, of those that run now."""
        return {status.service: status.pid for status in self._cluster.processes if status.pid is not None}

    @property
    def unasked_restarts(self) -> dict[str, int]:
        """Service -> how often it was started again without having been killed here."""
        restarts = {
            status.service: status.restarts - self._num_killed[status.service] for status in self._cluster.processes
        }
        return {service: num for service, num in restarts.items() if num}

    async def kill(self, service: str) -> Kill:
        """kill -9, and waits until the supervisor has brought it back. Raises TimeoutError if it does not come."""
        worker, restarts = self.pids.get("worker"), self._cluster.status(service).restarts
        self.logs.killed_at = at = time.monotonic()
        if not self._cluster.kill(service, number=signal.SIGKILL):
            raise RuntimeError(f"{service} did not run when it was to be killed")
        self._num_killed[service] += 1

        def is_back(status: ProcessStatus) -> bool:
            return status.restarts > restarts and status.state is ProcessState.HEALTHY

        async with asyncio.timeout(_BACK_S):
            await self._cluster.wait_until(service, is_back)
        back_s = round(time.monotonic() - at, 3)
        adopted = (await self.state()).adopted_tokens if service == "scheduler" else 0
        same_worker = self.pids.get("worker") == worker
        kill = Kill(service=service, at=at, back_s=back_s, adopted_tokens=adopted, same_worker=same_worker)
        self.kills.append(kill)
        return kill

    async def state(self) -> scheduler_pb2.GetStateResponse:
        """Of the scheduler. Raises grpc.RpcError while it is away."""
        async with open_channel(self._cluster.address("scheduler")) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            return await stub.GetState(scheduler_pb2.GetStateRequest(), timeout=30)

    async def flush_cache(self) -> int:
        """Empties the prefix cache; pages that it held."""
        async with open_channel(self._cluster.address("scheduler")) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            answer = await stub.FlushCache(scheduler_pb2.FlushCacheRequest(), timeout=60)
            return int(answer.flushed_pages)

    async def metrics(self, service: str) -> dict[str, float]:
        """Every sample that it serves, by name and labels; empty while it is away."""
        return await asyncio.to_thread(self.read_metrics, service)

    def read_metrics(self, service: str) -> dict[str, float]:
        address = self._cluster.address(service, container_port=_METRICS_PORT)
        try:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=5.0) as answer:
                lines = answer.read().decode().splitlines()
        except (OSError, HTTPException):
            return {}
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}
