"""The whole mesh with a worker on a GPU: recitations as on the CPU, and kills that no stream notices."""

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest
from mesh.test_dying_steps import recite_over_deaths
from mesh.test_kills import kill_all
from mesh.test_speculation import NGRAM, drafts_of_scheduler
from support.jobs import recitations
from support.mesh import SERVICES, running_mesh

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

# The longest recitation is of 1,116 tokens.
WORKER = {"backend": "cuda", "dtype": "float32", "num_pages": 60_000, "num_slots": 64, "max_total_len": 2048}


MODELS = ("tiny-llama", "tiny-deepseek")
RECITATIONS = [("tiny-llama", "flashinfer", "2"), *((model, "triton", depth) for model in MODELS for depth in "012")]


@pytest.mark.parametrize(("model", "attention", "depth"), RECITATIONS)
async def test_recitations(model: str, attention: str, depth: str) -> None:
    if attention == "flashinfer":
        pytest.importorskip("flashinfer")
    jobs = recitations(model)
    worker = WORKER | {"attention_backend": attention}
    scheduler = {"pipeline_depth": depth, "chunk_tokens": 7}
    async with running_mesh("cpu", model=model, worker=worker, scheduler=scheduler) as mesh:
        got = await asyncio.gather(*(job.run(mesh.client) for job in jobs))
        wrong = [job.name for job, answers in zip(jobs, got, strict=True) if job.answers and answers != job.answers]
        assert wrong == []
        assert mesh.bugs == []


@pytest.mark.parametrize("model", MODELS)
async def test_no_stream_notices_a_kill(model: str) -> None:
    rounds = int(os.environ.get("RADIXMESH_KILL_ROUNDS", "1"))
    plan = [(service, signal.SIGKILL) for service in SERVICES]
    plan += [("scheduler", signal.SIGKILL)] * rounds
    await kill_all("cpu", plan, model=model, worker=WORKER)


async def test_a_served_worker_drafts_and_changes_no_byte() -> None:
    """Sampled requests with penalties, stop strings and several outputs among them, in deterministic mode."""
    worker = WORKER | {"deterministic": True}
    async with running_mesh("cpu", worker=worker) as plain:
        jobs = [job if job.answers else job.learned(await job.run(plain.client)) for job in recitations()]
    async with running_mesh("cpu", worker=worker | NGRAM) as mesh, httpx.AsyncClient(timeout=60) as http:
        got = await asyncio.gather(*(job.run(mesh.client) for job in jobs))
        assert [job.name for job, answers in zip(jobs, got, strict=True) if answers != job.answers] == []
        drafts = await drafts_of_scheduler(http, mesh)
        assert 0 < drafts["accepted", "4"] < drafts["accepted", "1"] < drafts["drafted", "1"]
        assert mesh.bugs == []


async def test_no_stream_notices_a_step_that_dies(tmp_path: Path) -> None:
    await recite_over_deaths(tmp_path / "dumps", WORKER)
