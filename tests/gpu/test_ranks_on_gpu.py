"""A model divided between two processes on one GPU, behind one scheduler: recitations, and kills that nobody notices.

Two processes take turns on a GPU, a millisecond or more for each sum: right, and slow.
"""

from __future__ import annotations

import asyncio
import signal

import pytest
from support.fault_injection import kill_in_turn
from support.jobs import Job, recitations
from support.mesh import running_mesh

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

MODELS = ("tiny-llama", "tiny-deepseek")
WORKER = {
    "backend": "cuda",
    "dtype": "float32",
    "num_pages": 8_000,
    "num_slots": 16,
    "max_total_len": 1024,
    "max_tokens_per_step": 256,
}
SERVICES = {"worker-rank-1": {"cpu_threads": 1, **WORKER}}


def texts(model: str, lengths: range) -> list[Job]:
    return [job for job in recitations(model, with_sampled=False) if len(job.answers[0].ids) in lengths]


@pytest.mark.parametrize("model", MODELS)
async def test_recitations(model: str) -> None:
    jobs = texts(model, range(170))
    scheduler = {"pipeline_depth": 2, "chunk_tokens": 7}
    async with running_mesh("tp2", model=model, worker=WORKER, scheduler=scheduler, services=SERVICES) as mesh:
        got = await asyncio.gather(*(job.run(mesh.client) for job in jobs))
        wrong = [job.name for job, answers in zip(jobs, got, strict=True) if answers != job.answers]
        assert wrong == []
        assert mesh.bugs == []


@pytest.mark.parametrize("model", MODELS)
async def test_no_stream_notices_a_dead_rank(model: str) -> None:
    """The survivor leaves its kernels, keeps its weights and forms a new group with the rank that comes back."""
    plan = [("worker-rank-1", signal.SIGKILL), ("worker", signal.SIGKILL), ("scheduler", signal.SIGKILL)]
    async with running_mesh("tp2", model=model, worker=WORKER, services=SERVICES) as mesh:
        await kill_in_turn(mesh, texts(model, range(150, 310)), plan, num_streams=3, seed=18)
        state = await mesh.scheduler_state()
        assert state.num_page_violations == 0
