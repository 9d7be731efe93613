"""compose/tp2.yml and compose/dp-ep.yml in a Docker engine: ranks of one model recite, and one of them may die."""

from __future__ import annotations

import asyncio

import pytest
from support.containers import COMPOSE, Project
from support.engine import Engine
from support.jobs import recitations

from radixmesh.client import AsyncClient

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(("file", "model"), [("tp2", "tiny-llama"), ("dp-ep", "tiny-deepseek")])
def test_ranks_in_containers_recite_and_outlive_one_of_them(images: Engine, file: str, model: str) -> None:
    """The ranks meet at the addresses that the network gave their containers, which say nothing about it."""
    project = Project(engine=images, file=COMPOSE / f"{file}.yml", variables={"RADIXMESH_MODEL_NAME": model})
    jobs = sorted(recitations(model, with_sampled=False), key=lambda job: len(job.answers[0].ids))[:6]

    async def recite() -> None:
        async with AsyncClient([project.router], resume_timeout_s=240) as client, asyncio.timeout(300):
            answers = await asyncio.gather(*(job.run(client) for job in jobs))
        for job, answer in zip(jobs, answers, strict=True):
            assert answer == job.answers, job.name

    try:
        project.up()
        asyncio.run(recite())
        project.kill_process(project.container("worker-rank-1"))
        asyncio.run(recite())
        formed = [line for line in project.logs(project.container("worker")) if line["event"] == "group_formed"]
        assert len(formed) > 1, "the ranks have met again"
    finally:
        project.down()
