"""Dense chaos over routers that share schedulers: kills, stops, drains, hostile clients and slow readers, all at once.
Every request has exactly its answer, no daemon fails of its own, and an idle mesh holds nothing of it all.

RADIXMESH_CHAOS_S: length of the long form in seconds (900). RADIXMESH_CHAOS_SEED: of the faults.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from support.chaos import Chaos
from support.hostile_clients import HostileClients
from support.jobs import simulated_jobs
from support.leaks import all_left, footprint
from support.mesh import BUGS, COMPOSE
from support.stream_load import StreamLoad

from radixmesh.client import AsyncClient
from radixmesh.daemons.cluster.local_cluster import LocalCluster

_LONG_S = float(os.environ.get("RADIXMESH_CHAOS_S", "900"))
_SEED = int(os.environ.get("RADIXMESH_CHAOS_SEED", "1"))
_SIMULATED = {"RADIXMESH_BACKEND": "simulated", "RADIXMESH_SIMULATED_BASE_US": "6000"}
_CHECKED = {"RADIXMESH_CHECK_INVARIANTS": "true"}
# A drained daemon gives its streams that long; the clients resume them elsewhere.
_SHORT_DRAIN = {"RADIXMESH_DRAIN_S": "2"}
_IDLE_S = 60.0
_NUM_TOKENS = 240


class _Form(NamedTuple):
    """every_s: mean time between two faults. pause_s: of slow readers, after each chunk."""

    file: str
    scale: dict[str, int]
    seconds: float
    every_s: float
    num_streams: int
    num_hostile: int
    pause_s: float


_DAILY = _Form("simulated.yml", {"router": 2}, 4.0, 0.6, 6, 2, 0.03)
_FULL = _Form("scale.yml", {"router": 2, "tokenizer": 2, "detokenizer": 2}, _LONG_S, 1.5, 16, 4, 0.2)


def _mesh(form: _Form, bugs: list[str]) -> LocalCluster:
    environment = {name: dict(_SHORT_DRAIN) for name in ("tokenizer", "detokenizer", "router")}
    if form.file == "scale.yml":
        environment |= {"front": dict(_SHORT_DRAIN)}
    for pair in ("-a", "-b") if form.file == "scale.yml" else ("",):
        environment |= {f"worker{pair}": {**_SHORT_DRAIN, **_SIMULATED}}
        environment |= {f"scheduler{pair}": {**_SHORT_DRAIN, **_CHECKED}}

    def on_line(name: str, line: str) -> None:
        if any(bug in line for bug in BUGS):
            bugs.append(f"{name}: {line}")

    return LocalCluster(COMPOSE / form.file, scale=form.scale, environment=environment, publish=False, on_line=on_line)


async def _run_chaos(form: _Form) -> None:
    bugs: list[str] = []
    jobs = simulated_jobs(32, num_tokens=_NUM_TOKENS)
    async with _mesh(form, bugs) as cluster:
        await cluster.wait_healthy(150)
        routers = [cluster.address("router", replica) for replica in (1, 2)]
        async with AsyncClient(routers) as client:
            # Each connection is there once, before anything is counted.
            await asyncio.gather(*(job.run(client) for job in jobs[:8]))
            fresh = await footprint(cluster)
            chaos = Chaos(cluster, random.Random(_SEED), every_s=form.every_s)
            hostile = HostileClients(cluster, random.Random(-_SEED))
            until = time.monotonic() + form.seconds
            # A slow reader may have begun two outputs just now, and pauses after each token of both.
            last_s = 120 + 2 * _NUM_TOKENS * form.pause_s
            num_slow = max(2, form.num_streams // 4)
            async with (
                StreamLoad(client, jobs, num_streams=form.num_streams, finish_s=last_s) as quick,
                StreamLoad(client, jobs, num_streams=num_slow, pause_s=form.pause_s, finish_s=last_s) as slow,
            ):
                await asyncio.gather(chaos.run(form.seconds), *(hostile.run(until) for _ in range(form.num_hostile)))
                await cluster.wait_healthy(120)
                await asyncio.gather(quick.finish(), slow.finish())
        left = await all_left(cluster, fresh, _IDLE_S)
        report = {
            "seconds": form.seconds,
            "seed": _SEED,
            "completed": quick.num_completed,
            "completed_slowly": slow.num_completed,
            "resumed": quick.num_resumptions + slow.num_resumptions,
            "faults": dict(sorted(chaos.counts.items())),
            "hostile_visits": dict(sorted(hostile.counts.items())),
            "failures": [*quick.failures, *slow.failures, *chaos.failures],
            "left_behind": left,
            "bugs": bugs[:20],
            "footprint": {"fresh": fresh, "idle": await footprint(cluster)},
        }
    print(json.dumps(report, indent=1))
    if folder := os.environ.get("RADIXMESH_RESULTS"):
        (Path(folder) / "chaos.json").write_text(json.dumps(report, indent=1) + "\n")
    assert report["failures"] == []
    assert bugs == []
    assert left == {}, f"an idle mesh holds something after {_IDLE_S:g} s"
    assert sum(chaos.counts.values()) >= form.seconds / form.every_s / 4
    assert quick.num_completed >= form.num_streams and slow.num_completed >= 1


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_few_seconds_of_chaos_lose_nothing() -> None:
    """One scheduler of two routers."""
    await _run_chaos(_DAILY)


@pytest.mark.full
@pytest.mark.timeout(max(1200, 2 * _LONG_S))
async def test_dense_chaos_loses_nothing() -> None:
    """Two pairs of scheduler and worker, two routers in front of both, two of each tokenizer and detokenizer."""
    await _run_chaos(_FULL)
