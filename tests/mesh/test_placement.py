"""Requests go where their prefix is cached: three replicas, real daemons, a router that forgets all it sent."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
from support.mesh import COMPOSE

from radixmesh.client import AsyncClient
from radixmesh.daemons.cluster.local_cluster import LocalCluster
from radixmesh.daemons.cluster.processes.process_status import ProcessState

_HEALTH = '{test: [CMD, radixmesh, health, "127.0.0.1:50051"], interval: 1s, timeout: 5s, retries: 10, start_period: 60s, start_interval: 100ms}'  # noqa: E501
_GROUPS = 6
_PREFIX = 256


def _compose(folder: Path) -> Path:
    services = {"detokenizer": ("detokenizer", f"RADIXMESH_MODEL: {COMPOSE / 'models/tiny-llama'}", "")}
    for name in "abc":
        model = f"RADIXMESH_MODEL: {COMPOSE / 'models/tiny-llama'}, RADIXMESH_BACKEND: simulated"
        services[f"worker-{name}"] = ("worker", model, "")
        services[f"scheduler-{name}"] = ("scheduler", f"RADIXMESH_WORKERS: 'worker-{name}:50051'", f"worker-{name}")
    peers = "RADIXMESH_DETOKENIZERS: 'detokenizer:50051', RADIXMESH_SCHEDULERS: " + repr(
        ",".join(f"scheduler-{name}:50051" for name in "abc")
    )
    services["router"] = ("router", peers, "scheduler-c")
    lines = ["name: placement", "services:"]
    for name, (verb, environment, dependency) in services.items():
        lines.append(f"  {name}:")
        lines.append(f"    command: [radixmesh, {verb}]")
        lines.append("    restart: unless-stopped")
        lines.append(f"    environment: {{RADIXMESH_LISTEN: '0.0.0.0:50051', {environment}}}")
        lines.append(f"    healthcheck: {_HEALTH}")
        if dependency:
            lines.append(f"    depends_on: {{{dependency}: {{condition: service_healthy}}}}")
    path = folder / "placement.yml"
    path.write_text("\n".join(lines) + "\n")
    return path


def _prompt(group: int, turn: int) -> list[int]:
    return [1 + (group * 7 + position) % 700 for position in range(_PREFIX)] + [1 + group, 1 + turn, 5, 6]


async def _followed(cluster: LocalCluster, times: int) -> None:
    async with asyncio.timeout(60):
        while sum("cache_followed" in line for line in cluster.recent_lines("router")) < times:
            await asyncio.sleep(0.1)


@pytest.mark.slow
async def test_prefixes_are_found_again_even_by_a_router_that_sent_none_of_them(tmp_path: Path) -> None:
    async with LocalCluster(_compose(tmp_path), publish=False) as cluster:
        await cluster.wait_healthy(120)
        async with AsyncClient([cluster.address("router")]) as client, asyncio.timeout(120):
            await _followed(cluster, 3)

            async def cached(group: int, turn: int) -> int:
                done = await client.complete(_prompt(group, turn), max_tokens=4, temperature=0)
                finish = done.outputs[0].finish
                assert finish is not None
                return finish.usage.cached_tokens

            # All at once: the first requests of the groups are spread over the replicas.
            assert await asyncio.gather(*(cached(group, 0) for group in range(_GROUPS))) == [0] * _GROUPS
            for turn in (1, 2):
                assert min([await cached(group, turn) for group in range(_GROUPS)]) >= _PREFIX
            cluster.kill("router", 1, signal.SIGKILL)
            await cluster.wait_until("router", lambda status: status.restarts == 1)
            await cluster.wait_until("router", lambda status: status.state is ProcessState.HEALTHY)
            await _followed(cluster, 6)
            assert min([await cached(group, 3) for group in range(_GROUPS)]) >= _PREFIX
