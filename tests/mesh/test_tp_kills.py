"""kill -9 and SIGSTOP of ranks that hold a model together on CPUs, and of their scheduler, under open streams."""

from __future__ import annotations

import random
import signal

import pytest
from support.fault_injection import kill_in_turn
from support.jobs import recitations
from support.mesh import running_mesh

NUM_STREAMS = 6
SEED = 18


async def kill_under_load(plan: list[tuple[str, signal.Signals]], model: str = "tiny-llama") -> None:
    """plan: services of compose/tp2.yml and signals, in order."""
    async with running_mesh("tp2", model=model, services={"worker-rank-1": {"cpu_threads": 1}}) as mesh:
        jobs = recitations(model, with_sampled=False)
        # Long enough to be there when a daemon dies; not the longest, which are waited for at the end.
        jobs = sorted(jobs, key=lambda job: len(job.answers[0].ids))[-20:-8]
        await kill_in_turn(mesh, jobs, plan, num_streams=NUM_STREAMS, seed=SEED)
        state = await mesh.scheduler_state()
        assert state.num_page_violations == 0


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_no_stream_notices_dead_ranks_and_schedulers_nor_one_that_hangs() -> None:
    """A stop takes as long as three kills: five unanswered checks of its health come first."""
    plan = [(service, signal.SIGKILL) for service in ("worker", "scheduler", "worker-rank-1")]
    await kill_under_load([*plan, ("worker-rank-1", signal.SIGSTOP)])


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-deepseek"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["sigkill", "sigstop"])
async def test_three_kills_of_each(number: signal.Signals, model: str) -> None:
    plan = [(service, number) for service in ("worker", "worker-rank-1", "scheduler") for _ in range(3)]
    random.Random(SEED).shuffle(plan)
    await kill_under_load(plan, model)
