"""compose/pd.yml: prompts computed by one group, outputs decoded by another, and any daemon of either killed."""

from __future__ import annotations

import asyncio
import copy
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.fault_injection import kill_in_turn
from support.jobs import MODELS, Job, recitations, sampled_recitations
from support.kv_writers import needs_nixl
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


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("transport", ["grpc", pytest.param("nixl", marks=needs_nixl)])
async def test_it_recites_over_other_transports_and_no_stream_notices_a_dead_writer(transport: str) -> None:
    jobs = sorted(recitations(with_sampled=False), key=lambda job: len(job.answers[0].ids))
    flags = {"transfer_transport": transport}
    services = {**CHECKED, "worker-prefill": {**CHECKED["worker-prefill"], **flags}}
    async with running_mesh("pd", worker=flags, services=services) as mesh:
        await check_recited(mesh, jobs[:8], 3)
        await kill_in_turn(mesh, jobs[8:20], [("worker-prefill", signal.SIGKILL)], num_streams=2, seed=SEED)
        await check_nothing_is_left(mesh)


def more_of(num_prefill: int, num_decode: int, folder: Path) -> Path:
    """An overlay with further pairs of either role, made as compose/pd.yml says: copies under names of their own."""
    services = yaml.safe_load((MODELS.parent / "pd.yml").read_text(encoding="utf-8"))["services"]
    added: dict[str, Any] = {}
    schedulers = ["scheduler:50051", "scheduler-prefill:50051"]
    for suffix, num in (("-prefill", num_prefill), ("", num_decode)):
        for number in range(2, num + 1):
            worker, scheduler = f"worker{suffix}-{number}", f"scheduler{suffix}-{number}"
            added[worker] = copy.deepcopy(services[f"worker{suffix}"])
            added[scheduler] = copy.deepcopy(services[f"scheduler{suffix}"])
            added[scheduler]["environment"]["RADIXMESH_WORKERS"] = f"{worker}:50051"
            added[scheduler]["depends_on"] = {worker: {"condition": "service_healthy"}}
            schedulers.append(f"{scheduler}:50051")
            for name in (worker, scheduler):
                added[name].pop("build", None)
                added[name].pop("networks", None)
    added["router"] = {"environment": {"RADIXMESH_SCHEDULERS": ",".join(schedulers)}}
    path = folder / "more.yml"
    path.write_text(yaml.safe_dump({"services": added}), encoding="utf-8")
    return path


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-deepseek"])
@pytest.mark.parametrize(("num_prefill", "num_decode"), [(2, 1), (2, 2)])
async def test_more_of_either_side_recite_and_all_take_part(
    num_prefill: int, num_decode: int, model: str, tmp_path: Path
) -> None:
    """Page sizes differ within each side too."""
    jobs = recitations(model, with_sampled=False)
    prefills = ["scheduler-prefill", *(f"scheduler-prefill-{n}" for n in range(2, num_prefill + 1))]
    decodes = ["scheduler", *(f"scheduler-{n}" for n in range(2, num_decode + 1))]
    services: dict[str, dict[str, object]] = {
        **CHECKED,
        "worker-prefill": {"cpu_threads": 1, "page_size": 16},
        "worker-prefill-2": {"cpu_threads": 1},
        **{name: {"check_invariants": "true"} for name in (*prefills[1:], *decodes[1:])},
    }
    if num_decode > 1:
        services["worker-2"] = {"cpu_threads": 1, "page_size": 4}
    overlay = more_of(num_prefill, num_decode, tmp_path)
    async with running_mesh("pd", model=model, services=services, overlays=[overlay]) as mesh:
        answers = await asyncio.gather(*(job.run(mesh.client) for job in jobs))
        assert list(answers) == [job.answers for job in jobs]
        states = {name: await state_of(mesh, name) for name in (*prefills, *decodes)}
        assert all(states[name].num_kv_handed_over for name in prefills), states
        assert all(states[name].num_kv_arrived for name in decodes), states
        assert all(not state.num_page_violations for state in states.values())
        assert mesh.bugs == []


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_roles_change_while_outputs_run() -> None:
    jobs = sorted(recitations(with_sampled=False), key=lambda job: len(job.answers[0].ids))[:18]
    roles = {"scheduler": "prefill", "scheduler-prefill": "decode"}
    async with running_mesh("pd", services=CHECKED) as mesh:
        await check_recited(mesh, jobs[:6], 3)
        running = [asyncio.ensure_future(job.run(mesh.client)) for job in jobs[6:12]]
        for service, role in roles.items():
            command = [sys.executable, "-m", "radixmesh.cli", "role", mesh.cluster.address(service), role]
            done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0 and f"-> {role}, " in done.stdout, done.stderr
        assert [await task for task in running] == [job.answers for job in jobs[6:12]]
        before = await state_of(mesh, "scheduler-prefill")
        assert not before.num_kv_arrived
        answers = await asyncio.gather(*(job.run(mesh.client) for job in jobs[12:]))
        assert list(answers) == [job.answers for job in jobs[12:]]
        await check_nothing_is_left(mesh)
        assert (await state_of(mesh, "scheduler-prefill")).num_kv_arrived >= 2
        assert (await state_of(mesh, "scheduler")).num_kv_handed_over >= 2
        assert mesh.bugs == []


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
