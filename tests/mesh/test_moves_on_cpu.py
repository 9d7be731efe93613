"""Moves between two schedulers whose workers compute: guided, sampled and recited outputs are what they are without."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from support.jobs import MODEL, Job, recitations
from support.mixed_jobs import WORDS
from support.router_mesh import RouterMesh, connected, router_mesh
from support.running_daemon import running

from radixmesh.client import AsyncClient
from radixmesh.daemons.scheduler.__main__ import SchedulerDaemon
from radixmesh.daemons.scheduler.config import SchedulerSettings
from radixmesh.daemons.worker.__main__ import WorkerDaemon
from radixmesh.daemons.worker.config import Backend, WorkerSettings

pytest.importorskip("xgrammar")
NAMES = ("sampled.penalties", "ozymandias")


@asynccontextmanager
async def cpu_scheduler() -> AsyncIterator[str]:
    settings = WorkerSettings(backend=Backend.CPU, model=MODEL, num_pages=16384, num_slots=32, cpu_threads=1)
    async with running(WorkerDaemon, settings) as worker:
        own = SchedulerSettings(workers=(worker.address,), check_invariants=True)
        async with running(SchedulerDaemon, own, instance_id=f"scheduler of {worker.address}") as scheduler:
            yield scheduler.address


@asynccontextmanager
async def two_cpu_schedulers() -> AsyncIterator[tuple[RouterMesh, AsyncClient]]:
    async with cpu_scheduler() as first, cpu_scheduler() as second, router_mesh(move_on_overload=False) as mesh:
        pool = mesh.router().schedulers
        await pool.remove(mesh.schedulers[0].address)
        for address in (first, second):
            pool.add(address)
        await connected(mesh.router())
        async with mesh.client() as client:
            yield mesh, client


@pytest.mark.full
@pytest.mark.timeout(300)
async def test_guided_and_other_outputs_are_token_for_token_the_same_where_they_move() -> None:
    rng = random.Random(3)
    jobs = [
        Job(name=f"guided-{seed}", prompt="Words", options={"regex": WORDS, "seed": seed, "n": 1 + seed % 2})
        for seed in range(2)
    ]
    jobs += [job for job in recitations() if job.name in NAMES]
    async with two_cpu_schedulers() as (mesh, client):
        jobs = [job if job.answers else job.learned(await job.run(client)) for job in jobs]
        pool = mesh.router().schedulers
        num_moved = {"guided": 0, "other": 0}
        answers = [asyncio.create_task(job.run(client)) for job in jobs]
        while not all(task.done() for task in answers):
            outputs = [(link, output) for link in pool.links for output in link.outputs() if output.ids]
            if outputs:
                link, output = rng.choice(outputs)
                kind = "guided" if output.request.grammar is not None else "other"
                num_moved[kind] += pool.move(request_id=output.request.request_id, source=link.address)
            await asyncio.sleep(rng.uniform(0.02, 0.06))
        for job, task in zip(jobs, answers, strict=True):
            assert task.result() == job.answers, job.name
            if job.name.startswith("guided"):
                assert all(re.fullmatch(WORDS, answer.text) for answer in task.result())
        assert min(num_moved.values()) > 2, num_moved
        await mesh.settle()
