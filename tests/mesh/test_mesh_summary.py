"""/mesh: bounded, cheap for many readers, and silent about names."""

from __future__ import annotations

import asyncio
import json

from support.router_mesh import PROMPT_OF_TESTS, router_mesh

from radixmesh.daemons.router.http.answers.mesh_summary import MAX_REQUESTS
from radixmesh.daemons.router.http.context import HttpContext
from radixmesh.daemons.router.http.endpoints.mesh import MeshEndpoint
from radixmesh.daemons.runtime.rpc.health.progress import Progress
from radixmesh.daemons.runtime.telemetry.metrics import Metrics

SECRET = "a-name-that-nobody-is-told"


async def test_many_readers_cost_one_answer_and_learn_no_names() -> None:
    async with router_mesh() as mesh, mesh.client() as client:
        router, now = mesh.router(), [100.0]
        nothing: object = None
        context = HttpContext(
            router=router, tables=nothing, chats=nothing, body=nothing, metrics=Metrics(), progress=Progress()
        )  # type: ignore[arg-type]
        endpoint = MeshEndpoint(context, lambda: now[0])
        mesh.fakes[0].is_paused = True

        async def read(i: int) -> None:
            async for _ in client.generate(list(PROMPT_OF_TESTS), request_id=f"{SECRET}-{i}", max_tokens=400):
                pass

        running = [asyncio.create_task(read(i)) for i in range(MAX_REQUESTS + 20)]
        try:
            async with asyncio.timeout(60):
                while len(router.journal) < len(running):
                    await asyncio.sleep(0.01)
            first = endpoint.body_for(None)
            now[0] += 0.4
            assert all(endpoint.body_for(None) is first for _ in range(1000)), "made once"
            now[0] += 0.2
            assert endpoint.body_for(None) is not first
            whole = json.loads(first)
            assert whole["router"]["num_requests"] == len(running)
            assert len(whole["requests"]) == MAX_REQUESTS
            assert len(json.loads(endpoint.body_for("alice"))["requests"]) == 0, "another tenant's"
            assert len(json.loads(endpoint.body_for(""))["requests"]) == MAX_REQUESTS
            assert SECRET.encode() not in first
            assert not any(member.address.encode() in first for member in mesh.members)
            for i in range(1000):
                endpoint.body_for(f"tenant {i}")
            assert len(endpoint.kept) <= 32
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        await mesh.settle()
