"""A model divided between two processes behind one scheduler: recitations, and kills that nobody notices.

Each has a GPU of its own where there are two. On one they take turns, a millisecond or more for each sum: right, and
slow.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from support.fault_injection import kill_in_turn
from support.jobs import Job, recitations
from support.mesh import running_mesh

from radixmesh.daemons.runtime.rank_layout import RankLayout

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
    services: Mapping[str, Mapping[str, object]] | None = None,
    overlays: Sequence[Path] = (),
) -> None:
    """flags: of all workers; services: of some of them alone."""
    jobs = texts(model, range(170))
    of_ranks = {"worker": WORKER, **SERVICES, **(services or {})}
    of_ranks = {name: {**WORKER, **of_rank, **flags} for name, of_rank in of_ranks.items()}
    async with running_mesh(
        compose, model=model, services=of_ranks, scheduler=dict(scheduler or {}), overlays=overlays
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


@TWO_GPUS
@pytest.mark.parametrize("collectives", ["peer", "nccl"])
async def test_recitations_of_ranks_of_one_batch_that_share_experts(collectives: str) -> None:
    """Attention by heads, experts whole: each rank computes its own for all rows, and one sum adds everything up."""
    services = {"worker": {"ep_rank": 0}, "worker-rank-1": {**SERVICES["worker-rank-1"], "ep_rank": 1}}
    flags = {"ep_size": 2, "tp_collectives": collectives}
    await recite_and_lose_a_rank("tp2", "tiny-deepseek", flags, services=services)


@TWO_GPUS
async def test_experts_move_between_ranks_of_one_batch() -> None:
    services = {"worker": {"ep_rank": 0}, "worker-rank-1": {**SERVICES["worker-rank-1"], "ep_rank": 1}}
    scheduler = {"expert_balance_threshold": 1.0, "expert_balance_interval_s": 0.5}
    flags = {"ep_size": 2, "ep_redundant_experts": 2}
    await recite_and_lose_a_rank("tp2", "tiny-deepseek", flags, scheduler, times=3, services=services)


_RANK = """
  {name}:
    image: radixmesh/worker:local
    restart: unless-stopped
    command: ["radixmesh", "worker"]
    environment:
      RADIXMESH_LISTEN: 0.0.0.0:50051
      RADIXMESH_METRICS_LISTEN: 0.0.0.0:9100
      RADIXMESH_MODEL: /models/tiny-deepseek
    volumes:
      - {models}/tiny-deepseek:/models/tiny-deepseek:ro
    healthcheck:
      test: ["CMD", "radixmesh", "health", "127.0.0.1:50051", "--timeout", "9"]
      x-local: {{interval: 1s, timeout: 1s, retries: 5, start_period: 60s, start_interval: 200ms}}
"""


@TWO_GPUS
async def test_recitations_of_two_batches_of_two_ranks_that_share_experts(tmp_path: Path) -> None:
    """DP 2 x TP 2, EP 4: each rank brings its part of a batch's rows. With fewer than four GPUs ranks share them, and
    rows travel through the hosts: NCCL has one rank a GPU."""
    names = ["worker", *(f"worker-rank-{rank}" for rank in range(1, 4))]
    overlay = tmp_path / "ranks.yml"
    models = Path(__file__).parents[2] / "compose" / "models"
    overlay.write_text("services:" + "".join(_RANK.format(name=name, models=models) for name in names[2:]))
    services: dict[str, dict[str, object]] = {}
    for rank, name in enumerate(names):
        layout = RankLayout.of_rank(rank, tp_size=2, dp_size=2, ep_size=4)
        services[name] = {"cpu_threads": 1, "cuda_device": rank % max(1, NUM_GPUS), **asdict(layout)}
    flags = {"ep_transport": "nccl" if NUM_GPUS >= 4 else "host"}
    scheduler = {"workers": ",".join(f"{name}:50051" for name in names)}
    await recite_and_lose_a_rank("tp2", "tiny-deepseek", flags, scheduler, services=services, overlays=(overlay,))
