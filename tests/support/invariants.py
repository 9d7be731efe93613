"""The proof that a mesh was not harmed: the same processes, a right answer, nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from support.jobs import Job, simulated_jobs
from support.mesh import Mesh, running_mesh
from support.wire import metrics_of

METRICS_PORT = 9100
_METRICS = {"metrics_listen": f"0.0.0.0:{METRICS_PORT}"}
_SETTLE_S = 15.0


@asynccontextmanager
async def observed_mesh(
    backend: str = "simulated", *, scale: Mapping[str, int] | None = None, **settings: Mapping[str, object]
) -> AsyncIterator[Mesh]:
    """A mesh whose routers and detokenizer can be looked into; left behind whole and empty, or the test fails."""
    settings = {**settings, "router": {**_METRICS, **settings.get("router", {})}}
    settings["detokenizer"] = {**_METRICS, **settings.get("detokenizer", {})}
    async with running_mesh(backend, scale=scale, **settings) as mesh:  # type: ignore[arg-type]
        pids = mesh.cluster.pids
        yield mesh
        await settled(mesh)
        assert mesh.cluster.pids == pids, "a daemon died"


def known_job(num_tokens: int = 24) -> Job:
    """A text prompt with a known answer of that length at most."""
    job = simulated_jobs(2, num_tokens=num_tokens)[1]
    assert isinstance(job.prompt, str)
    return job


async def serves_on(mesh: Mesh, job: Job) -> None:
    """Text in, the known ids and text out, within seconds."""
    async with asyncio.timeout(20):
        assert await job.run(mesh.client) == job.answers


async def left_behind(mesh: Mesh) -> dict[str, float]:
    """State that the daemons still hold for requests; empty when nothing is left."""
    state = await mesh.scheduler_state()
    found: dict[str, float] = {
        "scheduler.running": state.load.num_running,
        "scheduler.waiting": state.load.num_waiting,
        "scheduler.owned_pages": state.owned_pages,
        "scheduler.leased_pages": state.leased_pages,
        "scheduler.quarantined_pages": state.quarantined_pages,
        "scheduler.page_violations": state.num_page_violations,
        "scheduler.lost_pages": state.load.total_pages - state.load.free_pages - state.load.cached_pages,
    }
    for replica in range(1, len(mesh.routers) + 1):
        router = await metrics_of(mesh.cluster.address("router", replica, METRICS_PORT))
        for name in ("requests_running", "requests_queued", "journal_bytes"):
            found[f"router-{replica}.{name}"] = router[f"radixmesh_{name}"]
    detokenizer = await metrics_of(mesh.cluster.address("detokenizer", 1, METRICS_PORT))
    found["detokenizer.entries"] = detokenizer["radixmesh_detokenizer_entries"]
    return {name: value for name, value in found.items() if value}


async def settled(mesh: Mesh, timeout_s: float = _SETTLE_S) -> None:
    """Returns once nothing is left behind; fails with what still is."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while found := await left_behind(mesh):
        assert asyncio.get_running_loop().time() < deadline, f"left behind after {timeout_s:g} s: {found}"
        await asyncio.sleep(0.05)
