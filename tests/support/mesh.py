"""A whole mesh of real processes, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from radixmesh.client import AsyncClient
from radixmesh.daemons.cluster.local_cluster import LocalCluster
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.daemons.runtime.security.tls_files import TlsFiles
from radixmesh.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

COMPOSE = Path(__file__).parents[2] / "compose"
FILES = {
    "cpu": COMPOSE / "local.yml",
    **{name: COMPOSE / f"{name}.yml" for name in ("simulated", "tp2", "dp-ep", "pd")},
}
# Log events of a daemon whose own code has failed: it went on, or gave up because of that.
BUGS = (
    "background_task_failed",
    "crashed",
    "handler_failed",
    "link_failed",
    "local_detokenizer_failed",
    "page_invariant_violation",
    "planner_failed",
    "step_died",
    "submit_failed",
    "tick_failed",
)
SERVICES = ("tokenizer", "detokenizer", "scheduler", "worker", "router")


@dataclass(slots=True, kw_only=True)
class Mesh:
    """A healthy mesh and a client of its routers. bugs: log lines that no daemon writes unless it is wrong itself."""

    cluster: LocalCluster
    client: AsyncClient
    routers: list[str]
    bugs: list[str]

    async def scheduler_state(self) -> scheduler_pb2.GetStateResponse:
        """State of the first scheduler. Raises grpc.RpcError while it is away."""
        async with open_channel(self.cluster.address("scheduler")) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            return await stub.GetState(scheduler_pb2.GetStateRequest(), timeout=60)


@asynccontextmanager
async def running_mesh(
    backend: str,
    *,
    model: str = "tiny-llama",
    folder: Path | None = None,
    scale: Mapping[str, int] | None = None,
    worker: Mapping[str, object] | None = None,
    scheduler: Mapping[str, object] | None = None,
    router: Mapping[str, object] | None = None,
    tokenizer: Mapping[str, object] | None = None,
    detokenizer: Mapping[str, object] | None = None,
    api_key: str = "",
    tls: TlsFiles | None = None,
    timeout_s: float = 150.0,
    overlays: Sequence[Path] = (),
    services: Mapping[str, Mapping[str, object]] | None = None,
) -> AsyncIterator[Mesh]:
    """Starts the compose file of `backend` ("cpu" or another key of FILES) with settings added per daemon.

    `model`: a folder of compose/models/, or with `folder` what clients call that one; simulated meshes have the
    vocabulary of the tiny Llama only.
    overlays: compose files after the backend's own. services: settings of other services than the five.
    api_key, tls: how the mesh's client gets in, where daemons are told to ask.
    The scheduler checks the page invariant after every step; a violation ends its epoch, and is among the mesh's bugs.
    """
    environment = {
        "worker": _variables({"cpu_threads": 1, **(worker or {})}),
        "scheduler": _variables({"check_invariants": "true", **(scheduler or {})}),
        "router": _variables(router or {}),
        "tokenizer": _variables(tokenizer or {}),
        "detokenizer": _variables(detokenizer or {}),
    }
    for name, values in (services or {}).items():
        environment[name] = {**environment.get(name, {}), **_variables(values)}
    bugs: list[str] = []

    def on_line(name: str, line: str) -> None:
        if any(bug in line for bug in BUGS):
            bugs.append(f"{name}: {line}")

    with pytest.MonkeyPatch.context() as shell:
        shell.setenv("RADIXMESH_MODEL_NAME", model)
        if folder is not None:
            shell.setenv("RADIXMESH_MODEL_FOLDER", str(folder))
        cluster = LocalCluster(
            (FILES[backend], *overlays), scale=scale, environment=environment, publish=False, on_line=on_line
        )
    async with cluster:
        await cluster.wait_healthy(timeout_s)
        routers = [cluster.address("router", replica + 1) for replica in range((scale or {}).get("router", 1))]
        async with AsyncClient(routers, api_key=api_key, tls=tls) as client:
            # On a loaded machine a router that has served may just have lost its scheduler's stream: it comes back.
            async with asyncio.timeout(timeout_s):
                while [served.name for served in await client.models()] != [model]:
                    await asyncio.sleep(0.1)
            yield Mesh(cluster=cluster, client=client, routers=routers, bugs=bugs)


def _variables(settings: Mapping[str, object]) -> dict[str, str]:
    return {f"RADIXMESH_{name.upper()}": str(value) for name, value in settings.items()}
