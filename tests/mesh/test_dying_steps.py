"""Steps that die of the device: the plan is kept, the worker ends and comes back, and no stream notices but by time."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.jobs import recitations
from support.mesh import running_mesh

from radixmesh.worker.v1 import worker_pb2

pytestmark = pytest.mark.timeout(240)
# Of every life of the worker. Chunks make prefills some steps long.
FATAL_STEP = 60


async def recite_over_deaths(folder: Path, worker: Mapping[str, object]) -> None:
    """Recitations that take more steps than a worker lives for."""
    jobs = [job for job in recitations(with_sampled=False) if 60 < len(job.answers[0].ids) < 170]
    settings = {**worker, "faults": f"die@{FATAL_STEP}", "dump_folder": folder}
    async with running_mesh("cpu", worker=settings) as mesh:
        got = await asyncio.gather(*(job.run(mesh.client) for job in jobs))
        assert [job.name for job, answers in zip(jobs, got, strict=True) if answers != job.answers] == []
        assert mesh.cluster.status("worker").restarts >= 1
        plans = [worker_pb2.StepPlan.FromString(path.read_bytes()) for path in folder.glob("plan-*.bin")]
        assert plans and {plan.header.step_id for plan in plans} == {FATAL_STEP}
        assert all("died on demand" in path.read_text() for path in folder.glob("plan-*.txt"))
        # Each worker says once that a step died, and once that it ends.
        others = [line for line in mesh.bugs if not line.startswith("worker") or "died on demand" not in line]
        assert mesh.bugs and others == []
        state = await mesh.scheduler_state()
        assert (state.num_page_violations, state.owned_pages, state.load.num_running, state.load.num_waiting) == (
            0,
            0,
            0,
            0,
        )


async def test_no_stream_notices_a_step_that_dies(tmp_path: Path) -> None:
    await recite_over_deaths(tmp_path / "dumps", {})
