"""All daemons are replaced while streams run: none fails, no token is lost, repeated or another.

The daily form starts with daemons that speak the contract version before, and rolls some to this one and back.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from support.jobs import simulated_jobs
from support.mesh import BUGS, COMPOSE, Mesh
from support.roll_run import kill_replicas, roll_under_load
from support.running_daemon import SOURCES
from support.stream_load import StreamLoad

from radixmesh.client import AsyncClient
from radixmesh.daemons.cluster.local_cluster import LocalCluster
from radixmesh.daemons.runtime.rpc.hello import MAX_CONTRACT_VERSION

OLDER = Path(__file__).parents[1] / "support" / "older_version"
SERVICES = ("tokenizer", "detokenizer", "worker", "scheduler", "router")
NUM_STREAMS = 64


def overlay(older: tuple[str, ...]) -> str:
    """Services that announce the contract version before."""
    lines = [f"  {name}: {{environment: {{PYTHONPATH: '{OLDER}:{SOURCES}'}}}}" for name in older]
    return "\n".join(["services:", *(lines or ["  router: {}"])]) + "\n"


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_versions_are_mixed_while_streams_run(tmp_path: Path) -> None:
    bugs: list[str] = []
    path = tmp_path / "older.yml"
    before: tuple[str, ...] = SERVICES
    path.write_text(overlay(before))
    environment = {
        "worker": {"RADIXMESH_SIMULATED_BASE_US": "6000"},
        "scheduler": {"RADIXMESH_CHECK_INVARIANTS": "true"},
        "router": {"RADIXMESH_DRAIN_S": "2"},
    }

    def on_line(name: str, line: str) -> None:
        if any(bug in line for bug in BUGS):
            bugs.append(f"{name}: {line}")

    cluster = LocalCluster((COMPOSE / "simulated.yml", path), environment=environment, publish=False, on_line=on_line)
    async with cluster:
        await cluster.wait_healthy(150)
        router = cluster.address("router")
        async with AsyncClient([router]) as client:
            mesh = Mesh(cluster=cluster, client=client, routers=[router], bugs=bugs)
            assert await announced(mesh) == MAX_CONTRACT_VERSION - 1
            async with StreamLoad(client, simulated_jobs(12, num_tokens=160), num_streams=6) as load:
                await load.all_progressed(0.0)
                # Each step leaves the others as they are: newer ones beside older ones, and the other way round.
                for older in (
                    ("tokenizer", "detokenizer", "scheduler", "router"),
                    ("tokenizer", "detokenizer", "router"),
                    ("tokenizer", "detokenizer", "router", "worker"),
                    ("tokenizer", "detokenizer", "worker"),
                ):
                    (changed,) = set(before) ^ set(older)
                    path.write_text(overlay(older))
                    assert await cluster.prepare_roll([changed], is_trying=False).run() == [f"{changed}-1"]
                    before = older
                    await load.all_progressed(time.monotonic())
                    assert await announced(mesh) == MAX_CONTRACT_VERSION - ("scheduler" in older)
                    assert load.failures == []
            assert load.failures == [] and load.num_completed >= 6
            assert (await mesh.scheduler_state()).num_page_violations == 0
    assert bugs == []


async def announced(mesh: Mesh) -> int:
    return (await mesh.scheduler_state()).hello.hello.max_contract_version


@pytest.mark.full
@pytest.mark.timeout(3000)
async def test_all_daemons_are_replaced_twice_under_load(tmp_path: Path) -> None:
    """CPU workers, guided outputs and n = 2 among sixty-four streams, and plain HTTP clients through the front."""
    report = await roll_under_load(tmp_path, num_streams=NUM_STREAMS, num_rolls=2)
    print(json.dumps(report, indent=1))
    assert report["failures"] == []


@pytest.mark.full
@pytest.mark.timeout(3000)
async def test_kills_among_replicas_are_not_noticed(tmp_path: Path) -> None:
    """Four pairs, two routers; a plain HTTP client has to ask again at most once when its router dies."""
    report = await kill_replicas(tmp_path, num_streams=NUM_STREAMS, num_each=5)
    print(json.dumps(report, indent=1))
    assert report["failures"] == []
