"""A model divided between two processes behind one scheduler: recitations, and kills that nobody notices.

Each has a GPU of its own where there are two. On one they take turns, a millisecond or more for each sum: right, and
slow.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping

import pytest
import torch
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
NUM_GPUS = torch.cuda.device_count()
SERVICES = {"worker-rank-1": {"cpu_threads": 1, **WORKER, "cuda_device": min(1, max(0, NUM_GPUS - 1))}}


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


TWO_GPUS = pytest.mark.skipif(NUM_GPUS < 2, reason="NCCL has one rank a GPU: two GPUs are needed")


async def recite_and_lose_a_rank(
    compose: str,
    model: str,
    flags: Mapping[str, object],
    scheduler: Mapping[str, object] | None = None,
    times: int = 1,
) -> None:
    """flags: of both workers."""
    jobs = texts(model, range(170))
    services = {"worker-rank-1": {**SERVICES["worker-rank-1"], **flags}}
    async with running_mesh(
        compose, model=model, worker={**WORKER, **flags}, services=services, scheduler=dict(scheduler or {})
    ) as mesh:
        for _ in range(times):
            got = await asyncio.gather(*(job.run(mesh.client) for job in jobs))
            assert [job.name for job, answers in zip(jobs, got, strict=True) if answers != job.answers] == []
        longer = texts(model, range(150, 310))
        await kill_in_turn(mesh, longer, [("worker-rank-1", signal.SIGKILL)], num_streams=3, seed=18)
        assert mesh.bugs == []


@TWO_GPUS
@pytest.mark.parametrize("transport", ["nccl", "host"])
async def test_recitations_of_ranks_that_share_experts(transport: str) -> None:
    await recite_and_lose_a_rank("dp-ep", "tiny-deepseek", {"ep_transport": transport})


@TWO_GPUS
async def test_recitations_in_halves_while_experts_move() -> None:
    """Captured steps of two halves; experts move at each chance, also when a rank has come back."""
    flags = {"ep_transport": "nccl", "two_batch_min_rows": 2, "ep_redundant_experts": 2}
    scheduler = {"expert_balance_threshold": 1.0, "expert_balance_interval_s": 0.5}
    await recite_and_lose_a_rank("dp-ep", "tiny-deepseek", flags, scheduler, times=3)


@TWO_GPUS
async def test_recitations_with_sums_by_nccl() -> None:
    await recite_and_lose_a_rank("tp2", "tiny-llama", {"tp_collectives": "nccl"})
