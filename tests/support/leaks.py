"""Holdings of an idle mesh's daemons: requests, pages, bytes, tasks, files."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping

import grpc

from radixmesh.daemons.cluster.local_cluster import LocalCluster
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from support.wire import metrics_of

METRICS_PORT = 9100
# Files and tasks are compared with what a fresh mesh had: so many more may be pools and connections that came since.
_MORE_FILES = 8
_MORE_TASKS = 4
_ZERO = {
    "router": ("requests_running", "requests_queued", "journal_bytes"),
    "detokenizer": ("detokenizer_entries",),
    "scheduler": ("requests_running", "requests_queued", "plans_in_flight", "queued_tokens"),
}

Footprint = Mapping[str, float]
"""`router-1.files` and the like -> number."""


async def footprint(cluster: LocalCluster) -> dict[str, float]:
    """Open files and asyncio tasks of every process."""
    found: dict[str, float] = {}
    for status in cluster.processes:
        if status.pid is None:
            continue
        found[f"{status.name}.files"] = len(os.listdir(f"/proc/{status.pid}/fd"))
        if status.service != "front":
            metrics = await metrics_of(cluster.address(status.service, status.replica, METRICS_PORT))
            found[f"{status.name}.tasks"] = metrics["radixmesh_tasks"]
    return found


async def left_behind(cluster: LocalCluster, fresh: Footprint) -> dict[str, float]:
    """Counts that should be zero and are not, and those far above the fresh mesh's."""
    found: dict[str, float] = {}
    for status in cluster.processes:
        kind = status.service.split("-")[0]
        if kind in _ZERO:
            metrics = await metrics_of(cluster.address(status.service, status.replica, METRICS_PORT))
            found |= {f"{status.name}.{name}": metrics[f"radixmesh_{name}"] for name in _ZERO[kind]}
        if kind == "scheduler":
            state = await scheduler_state(cluster, status.service)
            found[f"{status.name}.owned_pages"] = state.owned_pages
            found[f"{status.name}.leased_pages"] = state.leased_pages
            found[f"{status.name}.quarantined_pages"] = state.quarantined_pages
            found[f"{status.name}.page_violations"] = state.num_page_violations
            load = state.load
            found[f"{status.name}.lost_pages"] = load.total_pages - load.free_pages - load.cached_pages
    for name, number in (await footprint(cluster)).items():
        most = fresh.get(name, 0) + (_MORE_FILES if name.endswith("files") else _MORE_TASKS)
        found[name] = number if number > most else 0
    return {name: number for name, number in found.items() if number}


async def all_left(cluster: LocalCluster, fresh: Footprint, timeout_s: float) -> dict[str, float]:
    """Leftovers after that time; empty as soon as there are none."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        try:
            found = await left_behind(cluster, fresh)
        except (OSError, grpc.RpcError) as error:  # A daemon that is only just back.
            found = {repr(error): 1.0}
        if not found or asyncio.get_running_loop().time() > deadline:
            return found
        await asyncio.sleep(0.2)


async def scheduler_state(cluster: LocalCluster, service: str) -> scheduler_pb2.GetStateResponse:
    """State of one scheduler. Raises grpc.RpcError while it is away."""
    async with open_channel(cluster.address(service)) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        return await stub.GetState(scheduler_pb2.GetStateRequest(), timeout=60)
