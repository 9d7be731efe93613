"""compose/pd.yml: prompts computed by one group, outputs decoded by another, and any daemon of either killed."""

from __future__ import annotations

import asyncio
import random
import signal

import pytest
from support.fault_injection import kill_in_turn
from support.jobs import Job, recitations, sampled_recitations
from support.mesh import Mesh, running_mesh
from support.wire import metrics_of

from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

SEED = 22
NUM_STREAMS = 6
DAEMONS = ("worker", "scheduler", "worker-prefill", "scheduler-prefill", "router")
CHECKED = {
    "router": {"metrics_listen": "0.0.0.0:9100"},
    "scheduler-prefill": {"check_invariants": "true"},
    "worker-prefill": {"cpu_threads": 1},
}
FIRST_TOKENS = "radixmesh_remote_first_tokens_total"


async def state_of(mesh: Mesh, service: str) -> scheduler_pb2.GetStateResponse:
    async with open_channel(mesh.cluster.address(service)) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        return await stub.GetState(scheduler_pb2.GetStateRequest(), timeout=60)


async def check_nothing_is_left(mesh: Mesh) -> None:
    """No page is lent, owned or lost on either side once nothing runs."""
    async with asyncio.timeout(60):
        for service in ("scheduler", "scheduler-prefill"):
            while True:
                state = await state_of(mesh, service)
                assert not state.num_page_violations and not state.quarantined_pages
                load = state.load
                is_idle = not (load.num_running or load.num_waiting or state.num_kv_arriving)
                if is_idle and load.free_pages + load.cached_pages == load.total_pages:
                    break
                await asyncio.sleep(0.05)


async def check_recited(mesh: Mesh, jobs: list[Job], least: int) -> None:
    """Every answer is the known one, and prompts were computed elsewhere: right answers alone would not show that."""
    answers = await asyncio.gather(*(job.run(mesh.client) for job in jobs))
    assert list(answers) == [job.answers for job in jobs]
    await check_nothing_is_left(mesh)
    decoding, prefilling = await state_of(mesh, "scheduler"), await state_of(mesh, "scheduler-prefill")
    assert decoding.num_kv_arrived >= least and prefilling.num_kv_handed_over >= decoding.num_kv_arrived
    assert prefilling.prefilled_tokens > decoding.prefilled_tokens
    # The first token is the prefill side's: it is not sampled once more.
    async with asyncio.timeout(30):
        while (await metrics_of(mesh.cluster.address("router", 1, 9100)))[FIRST_TOKENS] < decoding.num_kv_arrived:
            await asyncio.sleep(0.1)
    assert mesh.bugs == []


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_it_recites_and_no_stream_notices_a_dead_prefill_worker() -> None:
    jobs = sorted(recitations(with_sampled=False), key=lambda job: len(job.answers[0].ids))
    async with running_mesh("pd", services=CHECKED) as mesh:
        await check_recited(mesh, jobs[:8], 3)
        # Two streams of short answers: what costs here is the processes' start.
        await kill_in_turn(mesh, jobs[8:20], [("worker-prefill", signal.SIGKILL)], num_streams=2, seed=SEED)
        await check_nothing_is_left(mesh)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page_sizes", [(1, 1), (16, 1), (1, 4)])
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-deepseek"])
async def test_the_tiny_models_recite_with_pages_of_other_sizes(model: str, page_sizes: tuple[int, int]) -> None:
    jobs, sampled = recitations(model, with_sampled=False), sampled_recitations()
    async with running_mesh("cpu", model=model) as mesh:
        answers = await asyncio.gather(*(job.run(mesh.client) for job in sampled))
        jobs += [job.learned(answer) for job, answer in zip(sampled, answers, strict=True)]
    prefill, decode = page_sizes
    services = {**CHECKED, "worker-prefill": {"cpu_threads": 1, "page_size": prefill}}
    async with running_mesh("pd", model=model, worker={"page_size": decode}, services=services) as mesh:
        await check_recited(mesh, jobs, 5)


async def kill_under_load(plan: list[tuple[str, signal.Signals]]) -> None:
    async with running_mesh("pd", services=CHECKED) as mesh:
        await kill_in_turn(
            mesh, recitations("tiny-llama", with_sampled=False), plan, num_streams=NUM_STREAMS, seed=SEED
        )
        await check_nothing_is_left(mesh)


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["sigkill", "sigstop"])
async def test_two_kills_of_each(number: signal.Signals) -> None:
    plan = [(service, number) for service in DAEMONS if service != "router" for _ in range(2)]
    random.Random(SEED).shuffle(plan)
    await kill_under_load(plan)
