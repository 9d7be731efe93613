"""kill -9 and SIGSTOP of ranks that share a model's experts on CPUs, and of their scheduler, under open streams."""

from __future__ import annotations

import signal

import pytest
from support.fault_injection import kill_in_turn
from support.jobs import recitations
from support.mesh import running_mesh

from radixmesh.scheduler.v1 import scheduler_pb2

NUM_STREAMS = 6
SEED = 23
MODEL = "tiny-deepseek"


async def kill_under_load(plan: list[tuple[str, signal.Signals]]) -> None:
    """plan: services of compose/dp-ep.yml and signals, in order."""
    # GPUs differ in the memory that is free.
    services = {"worker": {"num_pages": 4003}, "worker-rank-1": {"num_pages": 4000, "cpu_threads": 1}}
    async with running_mesh("dp-ep", model=MODEL, services=services) as mesh:
        jobs = recitations(MODEL, with_sampled=False)
        # Long enough to be there when a daemon dies; not the longest, which are waited for at the end.
        jobs = sorted(jobs, key=lambda job: len(job.answers[0].ids))[-20:-8]
        await kill_in_turn(mesh, jobs, plan, num_streams=NUM_STREAMS, seed=SEED)
        state: scheduler_pb2.GetStateResponse = await mesh.scheduler_state()
        assert state.num_page_violations == 0
        # 0.5 is that of one rank that computes alone.
        assert 0.5 < state.expert_balancedness <= 1.0, state


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_no_stream_notices_dead_ranks_and_schedulers_nor_one_that_hangs() -> None:
    """With rank 0 the group's store is gone."""
    plan = [(service, signal.SIGKILL) for service in ("worker-rank-1", "scheduler", "worker")]
    await kill_under_load([*plan, ("worker-rank-1", signal.SIGSTOP)])


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("service", ["worker", "worker-rank-1", "scheduler"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["sigkill", "sigstop"])
async def test_ten_of_each(number: signal.Signals, service: str) -> None:
    await kill_under_load([(service, number)] * 10)
