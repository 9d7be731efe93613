"""Requests of every kind that a mesh has to carry over: texts, chats, several outputs, sampled ones, guided ones."""

from __future__ import annotations

import re

from support.jobs import Job, recitations
from support.mesh import Mesh

WORDS = "([a-f]{3} ){20,30}end"


async def mixed_jobs(mesh: Mesh, num: int) -> list[Job]:
    """`num` jobs, a third of them guided, half of those with two outputs; what no manifest knows is asked once."""
    guided = [
        Job(name=f"guided-{seed}", prompt="Words", options={"regex": WORDS, "seed": seed, "n": 1 + seed % 2})
        for seed in range(max(1, num // 3))
    ]
    others = recitations()
    jobs = [*guided, *(others[index % len(others)] for index in range(num - len(guided)))]
    known: dict[str, Job] = {}
    for job in jobs:
        if job.name not in known:
            known[job.name] = job if job.answers else job.learned(await job.run(mesh.client))
    for job in guided:
        assert all(re.fullmatch(WORDS, answer.text) for answer in known[job.name].answers), job.name
    # Every kind among any few of them.
    order = sorted(range(num), key=lambda number: (number * 7919) % num)
    return [known[jobs[number].name] for number in order]
