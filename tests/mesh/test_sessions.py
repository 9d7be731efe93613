"""Sessions: their requests go to one scheduler while it takes them, whatever their prompts are."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from support.router_mesh import RouterMesh, router_mesh

from radixmesh.client import AsyncClient
from radixmesh.client.errors import DeadlineExceededError, InvalidRequestError
from radixmesh.daemons.router.daemon import RouterDaemon
from radixmesh.daemons.router.http.server.server import HttpServer


async def placed_at(mesh: RouterMesh, client: AsyncClient, session: str, prompt: int) -> int:
    """Number of the scheduler that got a request of the session."""
    before = [len(fake.submits) for fake in mesh.fakes]
    await client.complete([prompt] * 40, session=session, max_tokens=2, seed=1)
    (found,) = [i for i, fake in enumerate(mesh.fakes) if len(fake.submits) > before[i]]
    return found


async def test_a_session_stays_at_a_scheduler_and_moves_on_when_that_is_gone() -> None:
    async with router_mesh(schedulers=3, policy="session") as mesh, mesh.client() as client:
        homes = {name: await placed_at(mesh, client, name, 5) for name in ("ada", "bob", "eve")}
        for prompt in range(6, 12):
            for name, home in homes.items():
                assert await placed_at(mesh, client, name, prompt) == home
        home = homes["ada"]
        await mesh.schedulers[home].kill()
        second = await placed_at(mesh, client, "ada", 13)
        assert second != home
        await mesh.schedulers[home].start()
        links = mesh.router().schedulers.links
        async with asyncio.timeout(60):
            while not links[home].is_connected:
                await asyncio.sleep(0.01)
        assert await placed_at(mesh, client, "ada", 14) == second, "what it has cached is there by now"
        await mesh.settle()


async def test_the_sessions_of_two_tenants_are_two() -> None:
    async with router_mesh(schedulers=2, policy="session") as mesh, mesh.client() as client:
        pool = mesh.router().schedulers
        for tenant in ("a", "b"):
            await client.complete([5] * 40, session="main", tenant=tenant, max_tokens=1)
        policy = pool.placement.placement.policy
        assert len(policy) == 2  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="session"):
            await client.complete([5], session="x" * 257)


@pytest.mark.parametrize("named", ["x-session-id", "x-smg-routing-key", "prompt_cache_key", "a long header"])
async def test_an_http_client_names_its_session_in_a_header_or_the_body(named: str) -> None:
    async with router_mesh(schedulers=2, policy="session", http_listen="127.0.0.1:0") as mesh:
        daemon = mesh.routers[0].daemon
        assert isinstance(daemon, RouterDaemon) and isinstance(daemon.http, HttpServer)
        port = daemon.http.port
        for number in range(3):
            key = {"a long header": "k" * 3000}.get(named, "key")
            header = {"a long header": "x-session-id"}.get(named, named)
            body: dict[str, object] = {"prompt": [5 + number] * 40, "max_tokens": 1}
            headers = {}
            if named == "prompt_cache_key":
                body[named] = key
            else:
                headers[header] = key
            async with httpx.AsyncClient() as http:
                answer = await http.post(f"http://127.0.0.1:{port}/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200 and "x-radixmesh-ignored-fields" not in answer.headers
        assert sorted(len(fake.submits) for fake in mesh.fakes) == [0, 3]


async def test_an_output_without_a_token_ends_at_the_ttft_deadline_and_one_with_a_token_goes_on() -> None:
    async with router_mesh() as mesh, mesh.client() as client:
        fake = mesh.fakes[0]
        fake.is_paused = True
        with pytest.raises(DeadlineExceededError, match="ttft_deadline_ms"):
            async with asyncio.timeout(60):
                await client.complete([5, 6], max_tokens=5, ttft_deadline_s=0.3)
        fake.is_paused = False
        fake.step_s = 0.1
        done = await client.complete([5, 6], max_tokens=30, ignore_eos=True, ttft_deadline_s=2.0)
        assert len(done.outputs[0].ids) == 30, "it took longer than the deadline of its first token"
        await mesh.settle()
