"""A roll of all containers of compose/scale.yml under load, by compose/roll.sh: behind a test and bench/roll.py."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from radixmesh.client import AsyncClient
from support.containers import COMPOSE, Project
from support.engine import Engine
from support.http_load import HttpLoad
from support.jobs import simulated_jobs
from support.roll_run import Report
from support.stream_load import StreamLoad

# Workers that compute would leave those who are replaced, and the streams' own client, little of a small machine: what
# simulated ones say is known to the token all the same. Steps of 20 ms: an output takes one to two seconds.
_SIMULATED = """services:
  worker-a: &worker {environment: {RADIXMESH_BACKEND: simulated, RADIXMESH_SIMULATED_BASE_US: "20000"}}
  worker-b: *worker
"""
# Pairs one after the other; then what else the routers rely on, at the same time; then the routers themselves. Each is
# one call of roll.sh.
_GROUPS = (("scheduler-a worker-a scheduler-b worker-b",), ("tokenizer", "detokenizer"), ("router",))
_PATIENCE_S = 300.0
_QUIET_S = 10.0


@contextmanager
def scaled_project(engine: Engine, folder: Path) -> Iterator[Project]:
    """compose/scale.yml with simulated workers, healthy. folder: of a file that is written for it."""
    overlay = folder / "simulated.yml"
    overlay.write_text(_SIMULATED)
    project = Project(engine=engine, file=COMPOSE / "scale.yml", overlays=(overlay,))
    try:
        project.up()
        yield project
    finally:
        project.down()


async def roll_containers_under_load(
    project: Project, *, num_streams: int, num_rolls: int, num_http: int = 4
) -> Report:
    """Every container is replaced `num_rolls` times; the front, which cuts plain HTTP, when no such client is left.

    Times in the figures are seconds and milliseconds, as their names say. Raises AssertionError where roll.sh fails,
    and TimeoutError where a stream stands still.
    """
    jobs = simulated_jobs(32, num_tokens=100)
    front = f"127.0.0.1:{project.http_port}"
    failures: list[str] = []
    rolls: list[dict[str, object]] = []
    async with (
        AsyncClient([project.router]) as client,
        StreamLoad(client, jobs, num_streams=num_streams, finish_s=_PATIENCE_S) as load,
    ):
        await load.all_progressed(time.monotonic(), _PATIENCE_S)
        began = time.monotonic()
        await asyncio.sleep(_QUIET_S)
        quiet = load.gap_figures(began)
        for _ in range(num_rolls):
            began, answers_before = time.monotonic(), load.num_completed
            seconds: dict[str, float] = {}
            async with HttpLoad(front, jobs, num_streams=num_http, patience_s=_PATIENCE_S) as http:
                await http.progressed(num_http)
                for calls in _GROUPS:
                    seconds[", ".join(calls)] = await _roll(project, calls)
                    await load.all_progressed(time.monotonic(), _PATIENCE_S)
                    await http.progressed(num_http)
            failures += [*http.failures, *(text for _, text in http.retryable)]
            gaps, front_began = load.gap_figures(began), time.monotonic()
            seconds["front"] = await _roll(project, ("front",))
            await load.all_progressed(time.monotonic(), _PATIENCE_S)
            rolls.append(
                {
                    "seconds": seconds,
                    "gaps": gaps,
                    "gaps_of_the_front": load.gap_figures(front_began),
                    "answers": load.num_completed - answers_before,
                    "http_answers": http.num_completed,
                }
            )
        await load.finish()
    failures += load.failures
    figures: dict[str, object] = {
        "completed": load.num_completed,
        "failed": len(failures),
        "tokens": load.num_tokens,
        "tokens_lost": load.num_lost,
        "tokens_repeated": load.num_repeated,
        "resumed": load.num_resumptions,
        "quiet": quiet,
        "rolls": rolls,
    }
    return {"failures": failures, "figures": figures}


async def _roll(project: Project, calls: Sequence[str]) -> float:
    """Calls of roll.sh at the same time, each with its services; the seconds until all are through."""
    started = time.monotonic()
    await asyncio.gather(*(asyncio.to_thread(_replace, project, *services.split()) for services in calls))
    return round(time.monotonic() - started, 1)


def _replace(project: Project, *services: str) -> None:
    """As an operator does it."""
    before = {service: _ids_of(project, service) for service in services}
    files = ":".join(str(file) for file in (project.file, *project.overlays))
    done = subprocess.run(
        [str(COMPOSE / "roll.sh"), files, *services],
        env=dict(project.engine.environment),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for service in services:
        after = _ids_of(project, service)
        assert len(after) == len(before[service]) and not after & before[service], service


def _ids_of(project: Project, service: str) -> set[str]:
    return set(project.compose("ps", "--quiet", service).split())
