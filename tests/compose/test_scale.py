"""compose/scale.yml in a Docker engine: every container is replaced while sixteen streams run.

Its workers are simulated here: two that compute would leave those who are replaced, and the streams' own client, little
of a small machine. What they say is known to the token all the same.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Iterator

import pytest
from openai import AsyncOpenAI
from support.containers import COMPOSE, Project
from support.engine import Engine
from support.jobs import simulated_jobs

from radixmesh.client import AsyncClient

NUM_STREAMS, NUM_OPENAI = 16, 4
# Steps of 20 ms: an output takes one to two seconds.
SIMULATED = """services:
  worker-a: &worker {environment: {RADIXMESH_BACKEND: simulated, RADIXMESH_SIMULATED_BASE_US: "20000"}}
  worker-b: *worker
"""

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def project(images: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    overlay = tmp_path_factory.mktemp("scale") / "simulated.yml"
    overlay.write_text(SIMULATED)
    project = Project(engine=images, file=COMPOSE / "scale.yml", overlays=(overlay,))
    try:
        project.up()
        yield project
    finally:
        project.down()


class Load:
    """Streams that ask for one output after the other, until told to stop."""

    def __init__(self, project: Project) -> None:
        self._jobs = simulated_jobs(32, num_tokens=100)
        self._project = project
        self.num_done = {"grpc": 0, "openai": 0}
        self.is_over = False

    async def run(self) -> None:
        async with (
            AsyncOpenAI(base_url=self._project.openai_url, api_key="none") as openai,
            AsyncClient([self._project.router]) as client,
            asyncio.TaskGroup() as group,
        ):
            for number in range(NUM_STREAMS - NUM_OPENAI):
                group.create_task(self._over_grpc(client, number))
            for number in range(NUM_OPENAI):
                group.create_task(self._over_openai(openai, number))

    async def progress(self) -> None:
        """Waits until every kind of stream has ended one more output."""
        goal = {kind: done + 1 for kind, done in self.num_done.items()}
        while any(self.num_done[kind] < goal[kind] for kind in goal):
            await asyncio.sleep(0.1)

    async def _over_grpc(self, client: AsyncClient, number: int) -> None:
        while not self.is_over:
            job = self._jobs[number % len(self._jobs)]
            assert await job.run(client) == job.answers, job.name
            self.num_done["grpc"] += 1
            number += 1

    async def _over_openai(self, client: AsyncOpenAI, number: int) -> None:
        jobs = [job for job in self._jobs if isinstance(job.prompt, str) and len(job.answers) == 1]
        while not self.is_over:
            job = jobs[number % len(jobs)]
            (answer,) = job.answers
            stream = await client.completions.create(
                model="tiny-llama", prompt=str(job.prompt), temperature=0, max_tokens=len(answer.ids), stream=True
            )
            text = "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])
            assert text == answer.text, job.name
            self.num_done["openai"] += 1
            number += 1


async def test_a_rolling_replacement_fails_no_request(project: Project) -> None:
    load = Load(project)
    running = asyncio.create_task(load.run())
    try:
        await load.progress()
        # Pairs one after the other; what else the routers rely on at the same time; then the routers themselves.
        for services in (("scheduler-a worker-a scheduler-b worker-b",), ("tokenizer", "detokenizer"), ("router",)):
            started = time.monotonic()
            await asyncio.gather(*(asyncio.to_thread(roll, project, *service.split()) for service in services))
            print(f"\n{services}: replaced in {time.monotonic() - started:.1f} s, {load.num_done} outputs so far")
            assert not running.done(), await running
            await load.progress()
    finally:
        load.is_over = True
        await running
    assert min(load.num_done.values()) > NUM_STREAMS, load.num_done


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


def ids_of(project: Project, service: str) -> set[str]:
    return set(project.compose("ps", "--quiet", service).split())


def roll(project: Project, *services: str) -> None:
    """As an operator does it."""
    before = {service: ids_of(project, service) for service in services}
    files = ":".join(str(file) for file in (project.file, *project.overlays))
    done = subprocess.run(
        [str(COMPOSE / "roll.sh"), files, *services],
        env=dict(project.engine.environment),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for service in services:
        after = ids_of(project, service)
        assert len(after) == len(before[service]) and not after & before[service], service
