"""kill -9 and SIGSTOP of every daemon with streams open: no request fails, no token is lost, repeated or another."""

import json
import os
import random
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.fault_injection import Kill, kill_once, summary
from support.jobs import Job, recitations, simulated_jobs
from support.mesh import COMPOSE, SERVICES, Mesh, running_mesh
from support.stream_load import StreamLoad

NUM_STREAMS = 16
# On CPUs each stream costs seconds of the tiny model; sixteen are of the full form and of simulated meshes.
FEW_STREAMS = 8
SEED = 20
# 0 to 4 tokens a row and step: lengths are bounds while plans are in flight.
UNEVEN = {"simulated_max_tokens_per_row": 4, "simulated_base_us": 12_000}
# Steps that say they are short, however busy the machine: about four travel as one message.
SHORT = {"simulated_base_us": 400, "simulated_time": "virtual"}
# A daemon counts as hung after 2.5 s instead of 5: the full form has the interval that is shipped.
QUICK_HANGS = {"healthcheck": {"x-local": {"interval": "500ms", "timeout": "1s", "retries": 5}}}
MESHES = [("cpu", "tiny-llama"), ("cpu", "tiny-deepseek"), ("simulated", "tiny-llama")]


def load_jobs(backend: str, model: str) -> list[Job]:
    """Sixteen requests that last some seconds; n = 2 on a quarter of them."""
    if backend == "simulated":
        return simulated_jobs(NUM_STREAMS, num_tokens=200)
    jobs = {job.name: job for job in recitations(model)}
    names = [
        "sampled.tyger",
        "jabberwocky",
        "chat.tyger-for-ada",
        "sampled.lorelei",
        "lorelei",
        "stopped.jabberwocky",
        "gettysburg-address",
        "chanson-d-automne",
        # A thousand tokens: of all sixteen only.
        "twelve-days",
        "genesis-1",
        "sampled.genesis",
        "the-tyger.first-line",
        "sampled.penalties",
        "ozymandias",
        "sonnet-18",
        "chat.tyger-for-alan",
    ]
    return [jobs[name] for name in names]


async def with_answers(mesh: Mesh, jobs: list[Job]) -> list[Job]:
    """Jobs whose answers no manifest holds are answered once by the undisturbed mesh, each alone."""
    return [job if job.answers else job.learned(await job.run(mesh.client)) for job in jobs]


async def kill_all(
    backend: str,
    plan: list[tuple[str, signal.Signals]],
    *,
    model: str = "tiny-llama",
    worker: Mapping[str, object] | None = None,
    router: Mapping[str, object] | None = None,
    overlays: Sequence[Path] = (),
    is_against_itself: bool = False,
    num_streams: int = NUM_STREAMS,
) -> list[Kill]:
    """is_against_itself: answers are those of the undisturbed mesh, not those of the manifest. num_streams: of at most
    sixteen requests."""
    pick = random.Random(SEED)
    # Steps of the tiny model are quick: some simulated milliseconds keep streams open over several kills.
    worker = ({"simulated_base_us": 12_000} if backend == "simulated" else {}) | dict(worker or {})
    async with running_mesh(backend, model=model, worker=worker, router=router, overlays=overlays) as mesh:
        jobs = load_jobs(backend, model)[:num_streams]
        if is_against_itself:
            jobs = [replace(job, answers=()) for job in jobs]
        jobs = await with_answers(mesh, jobs)
        kills = []
        async with StreamLoad(mesh.client, jobs, num_streams=num_streams) as load:
            await load.all_progressed(0.0)
            for service, number in plan:
                kills.append(await kill_once(mesh, load, service, number, pick))
                assert load.failures == [], (kills[-1], load.failures[:3])
        assert load.failures == []
        assert load.num_completed >= num_streams
        state = await mesh.scheduler_state()
        assert state.num_page_violations == 0
        assert mesh.bugs == []
        assert (state.owned_pages, state.load.num_running, state.load.num_waiting) == (0, 0, 0)
        report = {
            "backend": backend,
            "model": model,
            "completed": load.num_completed,
            "resumed": load.num_resumptions,
        }
        report |= summary(kills)
        print(json.dumps(report, indent=1))
        if folder := os.environ.get("RADIXMESH_RESULTS"):
            name = backend if model == "tiny-llama" else f"{backend}-{model}"
            signals = "-".join(sorted({number.name.lower() for _, number in plan}))
            (Path(folder) / f"kills-{name}-{signals}.json").write_text(json.dumps(report, indent=1) + "\n")
        return kills


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_no_stream_notices_a_kill() -> None:
    plan = [(service, signal.SIGKILL) for service in SERVICES]
    kills = await kill_all("cpu", plan, num_streams=FEW_STREAMS)
    assert len(kills) == len(SERVICES)


@pytest.mark.full
@pytest.mark.timeout(400)
async def test_no_stream_over_pages_of_fp8_notices_a_kill() -> None:
    """Pages that a scheduler adopts, and those that the next worker computes anew, give the same tokens."""
    plan = [(service, signal.SIGKILL) for service in ("scheduler", "worker")]
    assert len(await kill_all("cpu", plan, worker={"kv_dtype": "fp8"}, is_against_itself=True)) == len(plan)


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_no_stream_notices_a_hang(tmp_path: Path) -> None:
    overlay = tmp_path / "quick-hangs.yml"
    overlay.write_text(json.dumps({"services": dict.fromkeys(SERVICES, QUICK_HANGS)}))
    plan = [(service, signal.SIGSTOP) for service in SERVICES]
    kills = await kill_all("simulated", plan, overlays=(overlay,))
    assert len(kills) == len(SERVICES)


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_no_stream_notices_a_kill_while_rows_yield_any_number_of_tokens() -> None:
    plan = [("scheduler", signal.SIGKILL), ("worker", signal.SIGKILL)]
    assert len(await kill_all("simulated", plan, worker=UNEVEN)) == len(plan)


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_no_stream_notices_a_kill_while_steps_travel_in_batches() -> None:
    plan = [("scheduler", signal.SIGKILL), ("worker", signal.SIGKILL)]
    assert len(await kill_all("simulated", plan, worker=SHORT)) == len(plan)


@pytest.mark.full
@pytest.mark.timeout(240)
async def test_no_stream_notices_a_kill_while_text_is_made_in_the_router() -> None:
    """Streams are longer than the time after which a router has its vocabulary. Eight of twenty outputs stay there."""
    plan = [(service, signal.SIGKILL) for service in SERVICES]
    router = {"tokenizer_path": COMPOSE / "models" / "tiny-llama", "local_outputs": 8}
    assert len(await kill_all("simulated", plan, router=router)) == len(plan)


@pytest.mark.full
@pytest.mark.timeout(1500)
async def test_ten_kills_of_scheduler_and_worker_while_rows_yield_any_number_of_tokens() -> None:
    plan = [(service, signal.SIGKILL) for service in ("scheduler", "worker") for _ in range(10)]
    random.Random(SEED).shuffle(plan)
    await kill_all("simulated", plan, worker=UNEVEN)


@pytest.mark.full
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["sigkill", "sigstop"])
@pytest.mark.parametrize(("backend", "model"), MESHES)
async def test_ten_kills_of_every_daemon(backend: str, model: str, number: signal.Signals) -> None:
    plan = [(service, number) for service in SERVICES for _ in range(10)]
    random.Random(SEED).shuffle(plan)
    await kill_all(backend, plan, model=model)
