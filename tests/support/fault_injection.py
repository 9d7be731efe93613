"""Kills daemons of a mesh under a load of streams, and measures what clients saw of it."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import grpc

from radixmesh.daemons.cluster.processes.process_status import ProcessState, ProcessStatus
from radixmesh.scheduler.v1 import scheduler_pb2
from support.jobs import Job
from support.mesh import Mesh
from support.stream_load import StreamLoad

_RECOVERY_S = 120.0  # On a machine that does much else besides; how long it took is in the Kill.


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One kill. stall_s: longest time without a chunk of any of the streams, pause_s: of these, within one request;
    back_s: until the daemon was healthy again.

    Of a scheduler: tokens whose KV it took over from the worker, and tokens computed again until all streams went on.
    """

    service: str
    signal: str
    stall_s: float
    back_s: float
    pause_s: float = 0.0
    adopted_tokens: int = 0
    prefilled_tokens: int = 0
    cached_tokens: int = 0


async def kill_once(
    mesh: Mesh,
    load: StreamLoad,
    service: str,
    number: signal.Signals,
    pick: random.Random,
    recovery_s: float = _RECOVERY_S,
) -> Kill:
    """Sends a signal at a random moment and waits until the daemon is back and every stream has gone on. Raises
    TimeoutError if that takes longer than recovery_s."""
    await asyncio.sleep(pick.uniform(0.1, 0.9))
    replicas = [status for status in mesh.cluster.processes if status.service == service]
    replica = pick.choice(replicas).replica
    restarts = mesh.cluster.status(service, replica).restarts
    killed = time.monotonic()
    assert mesh.cluster.kill(service, replica, number), f"{service} does not run"

    def is_back(status: ProcessStatus) -> bool:
        return status.restarts > restarts and status.state is ProcessState.HEALTHY

    async with asyncio.timeout(recovery_s):
        await mesh.cluster.wait_until(service, is_back, replica=replica)
    back = time.monotonic()
    await load.all_progressed(back, recovery_s)
    stall_s, pause_s = load.longest_gap(killed), load.longest_pause(killed)
    state = await _scheduler_state(mesh) if service == "scheduler" else None
    return Kill(
        service=service,
        signal=number.name,
        stall_s=round(stall_s, 3),
        back_s=round(back - killed, 3),
        pause_s=round(pause_s, 3),
        adopted_tokens=state.adopted_tokens if state is not None else 0,
        prefilled_tokens=state.prefilled_tokens if state is not None else 0,
        cached_tokens=state.prompt_cached_tokens if state is not None else 0,
    )


async def kill_in_turn(
    mesh: Mesh, jobs: Sequence[Job], plan: Sequence[tuple[str, signal.Signals]], *, num_streams: int, seed: int
) -> None:
    """Kills services one after the other, each once, under a load: no stream fails, and every token is the expected."""
    pick = random.Random(seed)
    async with StreamLoad(mesh.client, jobs, num_streams=num_streams) as load:
        await load.all_progressed(0.0)
        for service, number in plan:
            kill = await kill_once(mesh, load, service, number, pick)
            assert load.failures == [], (kill, load.failures[:3])
            print(kill)
    assert load.failures == [] and load.num_completed >= num_streams
    assert mesh.bugs == []


def summary(kills: list[Kill]) -> dict[str, dict[str, float]]:
    """Per daemon and signal: how many kills, the longest stall, and sums over the kills."""
    rows: dict[str, dict[str, float]] = {}
    for kill in kills:
        row = rows.setdefault(
            f"{kill.service} {kill.signal}", {"kills": 0, "longest_stall_s": 0.0, "longest_back_s": 0.0}
        )
        row["kills"] += 1
        row["longest_stall_s"] = max(row["longest_stall_s"], kill.stall_s)
        row["longest_back_s"] = max(row["longest_back_s"], kill.back_s)
        if kill.service == "scheduler":
            for name in ("adopted_tokens", "prefilled_tokens", "cached_tokens"):
                row[name] = row.get(name, 0) + asdict(kill)[name]
    return rows


async def _scheduler_state(mesh: Mesh) -> scheduler_pb2.GetStateResponse | None:
    try:
        return await mesh.scheduler_state()
    except grpc.RpcError:
        return None
