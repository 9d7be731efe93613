"""compose/scale.yml in a Docker engine, workers simulated: every container is replaced while sixteen streams run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from support.containers import Project
from support.docker_roll_run import roll_containers_under_load, scaled_project
from support.engine import Engine
from support.jobs import simulated_jobs

from radixmesh.client import AsyncClient

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def project(images: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    with scaled_project(images, tmp_path_factory.mktemp("scale")) as project:
        yield project


async def test_a_rolling_replacement_fails_no_request(project: Project) -> None:
    report = await roll_containers_under_load(project, num_streams=12, num_rolls=1)
    print(report["figures"])
    assert report["failures"] == []
    assert int(str(report["figures"]["completed"])) > 48, report


async def test_both_routers_and_both_pairs_take_part(project: Project) -> None:
    """Sixteen fresh connections: the front spreads them, and routers spread requests over schedulers."""
    job = min(simulated_jobs(8, num_tokens=100), key=lambda job: len(job.answers[0].ids))
    clients = [AsyncClient([project.router]) for _ in range(8)]
    for answers in await asyncio.gather(*(job.run(client) for client in clients)):
        assert answers == job.answers
    for client in clients:
        await client.close()
    peers = set()
    for container in project.containers("router"):
        events = project.logs(container)
        peers |= {str(line["address"]).partition(":")[0] for line in events if line["event"] == "peer_connected"}
    assert {"scheduler-a", "scheduler-b", "detokenizer"} <= peers
    front = project.logs(project.container("front"))
    assert not [line for line in front if line["level"] == "error"]
    assert len({line["address"] for line in front if line["event"] == "router_serves"}) >= 4  # Two, gRPC and HTTP.
