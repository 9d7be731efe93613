"""Several daemons die within 50 ms of each other, or one dies while another recovers: still nothing is lost."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable, Sequence

import pytest
from support.jobs import simulated_jobs
from support.mesh import SERVICES, Mesh, running_mesh
from support.stream_load import StreamLoad

from radixmesh.daemons.cluster.processes.process_status import ProcessState, ProcessStatus

NUM_STREAMS = 16
SEED = 7
RECOVERY_S = 90.0
# (service, seconds after the one before at most).
Deaths = Sequence[tuple[str, float]]
TOGETHER = 0.05
MEANWHILE = 1.5
ROUNDS: dict[str, Deaths] = {
    "scheduler and worker": [("scheduler", 0), ("worker", TOGETHER)],
    "router and scheduler": [("router", 0), ("scheduler", TOGETHER)],
    "all three of a token's way": [("scheduler", 0), ("worker", TOGETHER), ("router", TOGETHER)],
    "detokenizer and router": [("detokenizer", 0), ("router", TOGETHER)],
    "everything": [(service, TOGETHER) for service in SERVICES],
    "worker while the scheduler adopts": [("scheduler", 0), ("worker", MEANWHILE)],
    "scheduler twice": [("scheduler", 0), ("scheduler", MEANWHILE)],
    "router while the worker loads": [("worker", 0), ("router", MEANWHILE)],
    "scheduler while the router resumes": [("router", 0), ("scheduler", MEANWHILE)],
}


async def die(mesh: Mesh, deaths: Deaths, pick: random.Random) -> None:
    """Kills as told; what does not run at its turn is dead already."""
    restarts = {service: mesh.cluster.status(service).restarts for service, _ in deaths}
    for service, within_s in deaths:
        await asyncio.sleep(pick.uniform(0, within_s))
        mesh.cluster.kill(service, 1, signal.SIGKILL)

    async with asyncio.timeout(RECOVERY_S):
        for service, before in restarts.items():
            await mesh.cluster.wait_until(service, _is_back_since(before))


def _is_back_since(restarts: int) -> Callable[[ProcessStatus], bool]:
    def is_back(status: ProcessStatus) -> bool:
        return status.restarts > restarts and status.state is ProcessState.HEALTHY

    return is_back


async def run_rounds(names: Sequence[str]) -> None:
    pick = random.Random(SEED)
    async with running_mesh("simulated", worker={"simulated_base_us": 6000}) as mesh:
        jobs = simulated_jobs(NUM_STREAMS, num_tokens=400)  # Their answers are known without a mesh.
        async with StreamLoad(mesh.client, jobs, num_streams=NUM_STREAMS) as load:
            await load.all_progressed(0.0)
            for name in names:
                start = time.monotonic()
                await die(mesh, ROUNDS[name], pick)
                await load.all_progressed(time.monotonic(), RECOVERY_S)
                print(f"{name}: longest stall {load.longest_gap(start):.2f} s")
                assert load.failures == [], (name, load.failures[:3])
                await asyncio.sleep(pick.uniform(0.1, 0.5))
        assert load.failures == []
        assert load.num_completed >= NUM_STREAMS
        state = await mesh.scheduler_state()
        assert state.num_page_violations == 0
        assert (state.owned_pages, state.load.num_running, state.load.num_waiting) == (0, 0, 0)
        assert mesh.bugs == []


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_no_stream_notices_that_two_die_together() -> None:
    await run_rounds(["all three of a token's way", "worker while the scheduler adopts"])


@pytest.mark.full
@pytest.mark.timeout(3000)
async def test_no_stream_notices_any_of_many_deaths_together() -> None:
    names = list(ROUNDS) * 5
    random.Random(SEED).shuffle(names)
    await run_rounds(names)
