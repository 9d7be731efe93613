"""A roll of all daemons of compose/scale.yml under load, and kills in it: the runs behind tests and bench/roll.py."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import TypedDict

from radixmesh.daemons.cluster.roll.roller import RollEvent
from support.fault_injection import kill_once
from support.http_load import HttpLoad
from support.mixed_jobs import mixed_jobs
from support.scaled_mesh import scaled_mesh
from support.stream_load import StreamLoad

_HTTP_PORT = 8000
_PATIENCE_S = 300.0


class Report(TypedDict):
    """Figures by name, and failures in words."""

    failures: list[str]
    figures: dict[str, object]


async def roll_under_load(folder: Path, *, num_streams: int, num_rolls: int, num_http: int = 4) -> Report:
    """Every daemon is replaced `num_rolls` times; the front, which cuts plain HTTP, when no such client is left.

    CPU workers, two pairs. Times in the figures are seconds and milliseconds, as their names say.
    """
    failures: list[str] = []
    async with scaled_mesh(folder) as mesh:
        jobs = await mixed_jobs(mesh, num_streams)
        front = mesh.cluster.address("front", 1, _HTTP_PORT)
        services = [name for name in dict.fromkeys(s.service for s in mesh.cluster.processes) if name != "front"]
        rolls: list[dict[str, object]] = []
        async with StreamLoad(mesh.client, jobs, num_streams=num_streams, finish_s=_PATIENCE_S) as load:
            await load.all_progressed(time.monotonic(), _PATIENCE_S)
            began = time.monotonic()
            async with HttpLoad(front, jobs, num_streams=num_http, patience_s=_PATIENCE_S) as http:
                await http.progressed(2 * num_http)
            quiet = load.gap_figures(began)
            for _ in range(num_rolls):
                times: dict[str, float] = {}

                def on_event(event: RollEvent, times: dict[str, float] = times) -> None:
                    if event.what == "ready":
                        times[event.process] = round(event.seconds, 2)

                began = time.monotonic()
                async with HttpLoad(front, jobs, num_streams=num_http, patience_s=_PATIENCE_S) as http:
                    await mesh.cluster.prepare_roll(services, on_event=on_event).run()
                    await http.progressed(num_http)
                failures += [*http.failures, *(text for _, text in http.retryable)]
                took_s = time.monotonic() - began
                gaps = load.gap_figures(began)
                await mesh.cluster.prepare_roll(["front"], on_event=on_event).run()
                await load.all_progressed(time.monotonic(), _PATIENCE_S)
                rolls.append(
                    {
                        "seconds": round(took_s, 1),
                        "leaving_to_ready_s": times,
                        "gaps": gaps,
                        "http_answers": http.num_completed,
                    }
                )
            await load.finish()
        failures += [*load.failures, *mesh.bugs]
    figures = {"completed": load.num_completed, "resumed": load.num_resumptions, "quiet": quiet, "rolls": rolls}
    return {"failures": failures, "figures": figures}


async def kill_replicas(folder: Path, *, num_streams: int, num_each: int, pairs: int = 4, num_http: int = 8) -> Report:
    """SIGKILL of schedulers, workers and routers at random, one at a time, `num_each` of each."""
    pick = random.Random(19)
    failures: list[str] = []
    rows: dict[str, list[dict[str, float]]] = {"scheduler": [], "worker": [], "router": []}
    async with scaled_mesh(folder, pairs=pairs) as mesh:
        jobs = await mixed_jobs(mesh, num_streams)
        front = mesh.cluster.address("front", 1, _HTTP_PORT)
        plan = [kind for kind in rows for _ in range(num_each)]
        pick.shuffle(plan)
        async with (
            StreamLoad(mesh.client, jobs, num_streams=num_streams, finish_s=_PATIENCE_S) as load,
            HttpLoad(front, jobs, num_streams=num_http, patience_s=_PATIENCE_S) as http,
        ):
            await load.all_progressed(time.monotonic(), _PATIENCE_S)
            for kind in plan:
                before = len(http.retryable)
                service = kind if kind == "router" else f"{kind}-{pick.choice('abcd'[:pairs])}"
                kill = await kill_once(mesh, load, service, signal.SIGKILL, pick)
                await http.progressed(1)
                errors = http.retryable[before:]
                failures += _too_many_errors(kind, errors)
                times = {"stall_s": kill.stall_s, "pause_s": kill.pause_s, "back_s": kill.back_s}
                rows[kind].append({**times, "http_errors": len(errors)})
            await load.finish()
        failures += [*load.failures, *http.failures, *mesh.bugs]
    figures: dict[str, object] = {
        "completed": load.num_completed,
        "resumed": load.num_resumptions,
        "http_answers": http.num_completed,
        "kills": {kind: _summary(kills) for kind, kills in rows.items()},
    }
    return {"failures": failures, "figures": figures}


def _too_many_errors(kind: str, errors: list[tuple[int, str]]) -> list[str]:
    """A plain HTTP client may have to ask again once when its router dies, and never for anything else."""
    clients = [number for number, _ in errors]
    if kind == "router" and len(set(clients)) == len(clients):
        return []
    return [f"{kind} killed, HTTP client {number}: {text}" for number, text in errors]


def _summary(kills: list[dict[str, float]]) -> dict[str, float]:
    return {"kills": len(kills)} | {
        f"longest_{name}" if name.endswith("_s") else name: max(kill[name] for kill in kills)
        for name in ("stall_s", "pause_s", "back_s", "http_errors")
        if kills
    }
