"""The topologies beside local.yml, as local processes. What needs an engine is in tests/compose."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.jobs import recitations
from support.mesh import COMPOSE

from radixmesh.client import AsyncClient
from radixmesh.daemons.cluster.compose.compose import ComposeFile
from radixmesh.daemons.cluster.compose.reader import read_compose
from radixmesh.daemons.cluster.local_cluster import LocalCluster
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

TOPOLOGIES = ("local", "gpu", "scale", "simulated", "tp2", "dp-ep", "pd", "pd-gpu")


def topology(name: str) -> ComposeFile:
    return read_compose(COMPOSE / f"{name}.yml", {})


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_each_daemon_is_checked_and_restarted_and_hangs_are_found_in_five_seconds(name: str) -> None:
    for service in topology(name).services.values():
        assert service.healthcheck is not None and service.healthcheck.hang_window_s == 5.0, service.name
        assert service.restart.restarts(1) and service.stop_grace_s > 30


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_published_ports_are_this_machine_s_alone_unless_asked_otherwise(name: str) -> None:
    text = (COMPOSE / f"{name}.yml").read_text()
    published = [line.strip() for line in text.splitlines() if line.strip().startswith('- "') and ":50050" in line]
    assert published and all(line.startswith('- "${RADIXMESH_PUBLISH:-127.0.0.1}:') for line in published)


async def test_the_gpu_topology_speaks_over_sockets_on_a_shared_volume(tmp_path: Path) -> None:
    """On a CPU: what is looked at is who reaches whom."""
    worker = {"RADIXMESH_BACKEND": "cpu", "RADIXMESH_CPU_THREADS": "1"}
    job = min(recitations(with_sampled=False), key=lambda job: len(job.answers[0].ids))
    async with LocalCluster(COMPOSE / "gpu.yml", publish=False, environment={"worker": worker}) as cluster:
        await cluster.wait_healthy(90)
        async with AsyncClient([cluster.address("router")]) as client, asyncio.timeout(60):
            assert await job.run(client) == job.answers
        connected = [line for line in cluster.recent_lines("router") if "peer_connected" in line]
        assert any("volumes/sockets/scheduler.sock" in line for line in connected), connected


@pytest.mark.full
async def test_the_gpu_pair_recites() -> None:
    """On CPUs: what is looked at is who reaches whom, and that KV goes from one to the other."""
    on_cpu = {"RADIXMESH_BACKEND": "cpu", "RADIXMESH_CPU_THREADS": "1", "RADIXMESH_TRANSFER_STAGING_BYTES": "67108864"}
    changes = {"worker": on_cpu, "worker-prefill": on_cpu, "router": {"RADIXMESH_PREFILL_MIN_TOKENS": "8"}}
    jobs = sorted(recitations(with_sampled=False), key=lambda job: len(job.answers[0].ids))[:6]
    async with LocalCluster(COMPOSE / "pd-gpu.yml", publish=False, environment=changes) as cluster:
        await cluster.wait_healthy(90)
        async with AsyncClient([cluster.address("router")]) as client, asyncio.timeout(60):
            assert [await job.run(client) for job in jobs] == [job.answers for job in jobs]
        async with open_channel(cluster.address("scheduler")) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            assert (await stub.GetState(scheduler_pb2.GetStateRequest(), timeout=60)).num_kv_arrived
