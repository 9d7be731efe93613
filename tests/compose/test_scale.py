"""compose/scale.yml in a Docker engine: every stateless container is replaced while sixteen streams run."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI
from support.containers import COMPOSE, Project
from support.engine import Engine
from support.jobs import Job, recitations

from radixmesh.client import AsyncClient

NUM_STREAMS, NUM_OPENAI = 16, 4
REPLACED = ("tokenizer", "detokenizer", "router")

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def project(images: Engine) -> Iterator[Project]:
    project = Project(engine=images, file=COMPOSE / "scale.yml")
    try:
        project.up()
        yield project
    finally:
        project.down()


class Load:
    """Streams that recite, one recitation after the other, until told to stop."""

    def __init__(self, project: Project) -> None:
        jobs = recitations(with_sampled=False)
        self._jobs = [job for job in jobs if isinstance(job.prompt, str) and len(job.answers[0].ids) < 500]
        self._project = project
        self.num_done = {"grpc": 0, "openai": 0}
        self.is_over = False

    async def run(self) -> None:
        openai = AsyncOpenAI(base_url=self._project.openai_url, api_key="none")
        async with AsyncClient([self._project.router]) as client, asyncio.TaskGroup() as group:
            for number in range(NUM_STREAMS - NUM_OPENAI):
                group.create_task(self._over_grpc(client, number))
            for number in range(NUM_OPENAI):
                group.create_task(self._over_openai(openai, number))

    async def progress(self, rounds: int = 1) -> None:
        """Waits until every kind of stream has ended so many more recitations."""
        goal = {kind: done + rounds for kind, done in self.num_done.items()}
        while any(self.num_done[kind] < goal[kind] for kind in goal):
            await asyncio.sleep(0.1)

    async def _over_grpc(self, client: AsyncClient, number: int) -> None:
        while not self.is_over:
            job = self._next(number)
            assert await job.run(client) == job.answers, job.name
            self.num_done["grpc"] += 1
            number += 1

    async def _over_openai(self, client: AsyncOpenAI, number: int) -> None:
        while not self.is_over:
            job = self._next(number)
            stream = await client.completions.create(
                model="tiny-llama", prompt=str(job.prompt), temperature=0, max_tokens=1024, stream=True
            )
            text = "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])
            assert text == job.answers[0].text, job.name
            self.num_done["openai"] += 1
            number += 1

    def _next(self, number: int) -> Job:
        return self._jobs[number % len(self._jobs)]


async def test_a_rolling_replacement_fails_no_request(project: Project) -> None:
    load = Load(project)
    running = asyncio.create_task(load.run())
    try:
        await load.progress()
        for service in REPLACED:
            before = ids_of(project, service)
            started = time.monotonic()
            await asyncio.to_thread(roll, project, service)
            after = ids_of(project, service)
            assert len(after) == len(before) == 2 and not after & before
            print(f"\n{service}: replaced in {time.monotonic() - started:.1f} s, {load.num_done} recitations so far")
            assert not running.done(), await running
            await load.progress()
    finally:
        load.is_over = True
        await running
    assert min(load.num_done.values()) > NUM_STREAMS, load.num_done


async def test_both_routers_and_both_pairs_take_part(project: Project) -> None:
    """Sixteen fresh connections: the front spreads them, and routers spread requests over schedulers."""
    job = min(recitations(with_sampled=False), key=lambda job: len(job.answers[0].ids))
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


def roll(project: Project, service: str) -> None:
    """As an operator does it."""
    script = Path(COMPOSE / "roll.sh")
    done = subprocess.run(
        [str(script), str(project.file), service],
        env=dict(project.engine.environment),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
