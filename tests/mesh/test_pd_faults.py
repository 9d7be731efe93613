"""Every daemon of compose/pd.yml killed and stopped in every phase of a KV transfer: no output fails or changes.

Transfers wait in each phase (`--faults`): it is there when the log of a worker, or the state of a scheduler, says
so. Workers are simulated: their tokens depend on the KV that is read, and the answers are those of one group.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

import pytest
from support.jobs import Job, simulated_jobs
from support.kv_writers import needs_nixl
from support.mesh import Mesh, running_mesh
from support.stream_load import StreamLoad
from support.wire import metrics_of

from radixmesh.daemons.cluster.processes.process_status import ProcessState, ProcessStatus
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

SEED = 22
TIMEOUT_S = 90.0
NUM_STREAMS = 3
HOLD_MS = 700
SCHEDULERS, WORKERS = ("scheduler", "scheduler-prefill"), ("worker", "worker-prefill")
DAEMONS = (*WORKERS, *SCHEDULERS, "router")
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
# The worker whose log says that a transfer waits.
HELD = {
    "reserved": "worker",
    "writing": "worker-prefill",
    "piece": "worker",
    "written": "worker",
    "scattering": "worker",
    "validated": "worker",
}
QUEUED = "radixmesh_kv_reservations_queued"
PHASES = ("reserved", "prefilling", "writing", "written", "scattering", "validated", "decoding")


class Cell(NamedTuple):
    service: str
    number: signal.Signals
    phase: str


@asynccontextmanager
async def held_mesh(
    transport: str, *, has_devices: bool = False, has_pieces: bool = False, **of_worker: object
) -> AsyncIterator[Mesh]:
    """Prompts of 100 tokens and more take 0.4 s and more, transfers wait in all phases. of_worker: settings of the
    decode side's. has_devices: steps and copies of KV run beside the host, and plans name pages that are scattered to.
    has_pieces: what is there ahead of the last word is scattered then; for prompts of 512 tokens and more.
    """
    common = {"backend": "simulated", "metrics_listen": "0.0.0.0:9100", "transfer_transport": transport}
    if has_devices:
        common |= {"simulated_device": "true", "simulated_copied_token_us": 100.0}
    holds = {name: [f"{phase}%1:{HOLD_MS}" for phase, at in HELD.items() if at == name] for name in WORKERS}
    slow = {"simulated_base_us": 100_000.0, "max_tokens_per_step": 32}
    prefill = {"check_invariants": "true"}
    if has_pieces:
        common |= {"transfer_piece_bytes": 1, "simulated_copied_token_us": 20.0}
        slow["max_tokens_per_step"], prefill["transfer_chunk_tokens"] = 128, "256"
    services = {
        "worker-prefill": {**common, **slow, "faults": ",".join(holds["worker-prefill"])},
        "scheduler-prefill": prefill,
    }
    worker = {**common, "simulated_base_us": 8_000.0, "faults": ",".join(holds["worker"]), **of_worker}
    async with running_mesh("pd", worker=worker, services=services) as mesh:
        yield mesh


def jobs_of(seed: int, *, are_long: bool = False) -> list[Job]:
    """Prompts that no cache has. are_long: three chunks of staging and more."""
    if are_long:
        return simulated_jobs(3 * NUM_STREAMS, num_tokens=100, seed=seed, prompt_lens=(560, 760))
    jobs = [job for job in simulated_jobs(40, num_tokens=200, seed=seed) if len(job.prompt or "") >= 100]
    return [job for job in jobs if not isinstance(job.prompt, str)][: 3 * NUM_STREAMS]


async def state_of(mesh: Mesh, service: str) -> scheduler_pb2.GetStateResponse:
    async with open_channel(mesh.cluster.address(service)) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        return await stub.GetState(scheduler_pb2.GetStateRequest(), timeout=60)


async def reach(mesh: Mesh, load: StreamLoad, phase: str, before: frozenset[str], began: float) -> None:
    """Returns when a transfer is in that phase. before: lines of the worker's log that are older."""
    async with asyncio.timeout(TIMEOUT_S):
        if phase == "decoding":
            await load.all_progressed(began, TIMEOUT_S)
            return
        mark = f'"phase":"{phase}"'
        while True:
            if phase == "queued":
                is_there = (await metrics_of(mesh.cluster.address("scheduler", 1, 9100)))[QUEUED] > 0
            elif phase == "prefilling":
                load_of_prefill = (await state_of(mesh, "scheduler-prefill")).load
                is_there = load_of_prefill.num_running > 0
            else:
                lines = set(mesh.cluster.recent_lines(HELD[phase])) - before
                is_there = any("transfer_held" in line and mark in line.replace(" ", "") for line in lines)
            if is_there:
                return
            await asyncio.sleep(0.01)


async def nothing_is_left(mesh: Mesh) -> None:
    """No page is lent, lost or in doubt, and no staging is used or quarantined."""
    async with asyncio.timeout(TIMEOUT_S):
        for service in SCHEDULERS:
            while True:
                state = await state_of(mesh, service)
                assert not state.num_page_violations and not state.quarantined_pages
                load = state.load
                is_idle = not (load.num_running or load.num_waiting or state.num_kv_arriving)
                if is_idle and load.free_pages + load.cached_pages == load.total_pages:
                    break
                await asyncio.sleep(0.05)
        for service in WORKERS:
            address = mesh.cluster.address(service, 1, 9100)
            while (await metrics_of(address))["radixmesh_kv_staging_bytes"]:
                await asyncio.sleep(0.05)


async def run_cell(mesh: Mesh, cell: Cell, seed: int, *, are_long: bool = False) -> float:
    """Longest stall of a stream in seconds."""
    before = frozenset(mesh.cluster.recent_lines(HELD.get(cell.phase, "worker")))
    restarts = mesh.cluster.status(cell.service).restarts

    def is_back(status: ProcessStatus) -> bool:
        return status.restarts > restarts and status.state is ProcessState.HEALTHY

    began = time.monotonic()
    async with StreamLoad(mesh.client, jobs_of(seed, are_long=are_long), num_streams=NUM_STREAMS) as load:
        await reach(mesh, load, cell.phase, before, began)
        killed = time.monotonic()
        assert mesh.cluster.kill(cell.service, 1, cell.number), f"{cell.service} does not run"
        async with asyncio.timeout(TIMEOUT_S):
            await mesh.cluster.wait_until(cell.service, is_back)
        await load.all_progressed(time.monotonic(), TIMEOUT_S)
        stall = load.longest_gap(killed)
    assert load.failures == [], (cell, load.failures[:3])
    assert load.num_completed >= NUM_STREAMS, cell
    await nothing_is_left(mesh)
    assert mesh.bugs == [], cell
    return stall


async def run_cells(
    cells: Sequence[Cell],
    transport: str = "device",
    *,
    has_devices: bool = False,
    has_pieces: bool = False,
    **of_worker: object,
) -> None:
    async with held_mesh(transport, has_devices=has_devices, has_pieces=has_pieces, **of_worker) as mesh:
        for index, cell in enumerate(cells):
            stall = await run_cell(mesh, cell, SEED + index, are_long=has_pieces)
            print(f"{cell.service} {cell.number.name} {cell.phase}: longest stall {stall:.2f} s", flush=True)
            # A writer that cannot reach a region by its own transport sends over gRPC.
            lines = mesh.cluster.recent_lines("worker-prefill")
            assert not any("nixl_does_not_lead_there" in line for line in lines), cell
        # KV did come over: the answers alone would not show it.
        await serve_one(mesh, are_long=has_pieces)


async def serve_one(mesh: Mesh, *, are_long: bool = False) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        for seed in itertools.count(1_000):
            before = (await state_of(mesh, "scheduler")).num_kv_arrived
            (job, *_) = jobs_of(seed, are_long=are_long)
            assert await job.run(mesh.client) == job.answers
            if (await state_of(mesh, "scheduler")).num_kv_arrived > before:
                return


@pytest.mark.timeout(240)
async def test_daemons_that_die_in_the_middle_of_a_transfer() -> None:
    await run_cells(
        [
            Cell("worker-prefill", KILL, "writing"),
            Cell("worker", KILL, "scattering"),
            Cell("scheduler", KILL, "written"),
        ]
    )


@pytest.mark.timeout(240)
async def test_daemons_that_die_between_two_pieces_of_a_transfer() -> None:
    """A part of its KV is in pages of the decode side by then, which nobody has been told of."""
    cells = [Cell(service, KILL, "piece") for service in ("worker-prefill", "scheduler")]
    await run_cells(cells, has_devices=True, has_pieces=True)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [KILL, STOP], ids=["sigkill", "sigstop"])
async def test_every_daemon_between_two_pieces(number: signal.Signals) -> None:
    cells = [Cell(service, number, phase) for service in DAEMONS for phase in ("piece", "written")]
    random.Random(SEED).shuffle(cells)
    await run_cells(cells, has_devices=True, has_pieces=True)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", [KILL, STOP], ids=["sigkill", "sigstop"])
@pytest.mark.parametrize("services", [WORKERS, SCHEDULERS, ("router",)], ids=["workers", "schedulers", "router"])
@pytest.mark.parametrize("has_devices", [False, True], ids=["host", "devices"])
async def test_every_daemon_in_every_phase(
    number: signal.Signals, services: tuple[str, ...], has_devices: bool
) -> None:
    cells = [Cell(service, number, phase) for service in services for phase in PHASES]
    random.Random(SEED).shuffle(cells)
    await run_cells(cells, has_devices=has_devices)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [KILL, STOP], ids=["sigkill", "sigstop"])
async def test_daemons_that_die_while_prompts_wait_for_room(number: signal.Signals) -> None:
    """There is staging for one or two of three."""
    cells = [Cell(service, number, "queued") for service in DAEMONS]
    random.Random(SEED).shuffle(cells)
    await run_cells(cells, transfer_staging_bytes=2000)


@pytest.mark.full
@needs_nixl
@pytest.mark.timeout(900)
async def test_ten_cells_with_nixl() -> None:
    """Both workers in the phases in which KV moves; a writer that dies or hangs is known by other means here."""
    cells = [Cell("worker-prefill", number, phase) for number in (KILL, STOP) for phase in ("writing", "written")]
    cells += [Cell("worker", number, phase) for number in (KILL, STOP) for phase in ("writing", "scattering")]
    cells += [Cell("scheduler", KILL, "writing"), Cell("scheduler-prefill", KILL, "writing")]
    random.Random(SEED).shuffle(cells)
    await run_cells(cells, "nixl")
