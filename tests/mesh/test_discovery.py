"""Schedulers that come and go by a file or an operator, while requests run: nothing is lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.fake_scheduler import made_up_token
from support.router_mesh import MODEL, RouterMesh, router_mesh

from radixmesh.cli import replica, status
from radixmesh.client import AsyncClient
from radixmesh.daemons.runtime.arrays import pack_ints
from radixmesh.daemons.runtime.sampling import output_seed

PROMPT = [5, 6, 7, 8]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def answer(client: AsyncClient, seed: int, max_tokens: int = 60) -> None:
    done = await client.complete(PROMPT, seed=seed, max_tokens=max_tokens, ignore_eos=True)
    expected = [made_up_token(MODEL, pack_ints(PROMPT), output_seed(seed, 0), i) for i in range(max_tokens)]
    assert list(done.outputs[0].ids) == expected


def links_of(mesh: RouterMesh) -> dict[str, bool]:
    """Connected or not, by address."""
    return {link.address: link.is_connected for link in mesh.router().schedulers.links}


async def test_the_schedulers_of_a_file_are_used_and_left_as_it_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "schedulers"
    path.write_text("# nobody yet\n")
    async with router_mesh(schedulers=3, discover=(f"file:{path}",)) as mesh, mesh.client() as client:
        first, second, third = (member.address for member in mesh.schedulers)
        for address in (second, third):
            await mesh.router().schedulers.remove(address)  # Only the first was configured.
        for fake in mesh.fakes:
            fake.step_s = 0.02
        path.write_text(f"{second}\n{third}\n")
        await until(lambda: links_of(mesh) == dict.fromkeys((first, second, third), True))
        running = [asyncio.create_task(answer(client, seed)) for seed in range(12)]
        await until(lambda: all(fake.num_running for fake in mesh.fakes) and mesh.fakes[2].num_tokens > 5)
        path.write_text(f"{second}\n")
        await until(lambda: set(links_of(mesh)) == {first, second})
        await asyncio.gather(*running)
        await until(lambda: mesh.fakes[2].num_running == 0)
        # A file that is gone, or empty, changes nothing but what status says.
        path.unlink()
        router = mesh.router()
        await until(lambda: bool(router.discovery.states[f"file:{path}"].error))
        assert set(links_of(mesh)) == {first, second}
        assert await asyncio.to_thread(status.run, [mesh.routers[0].address, "--routes", "--timeout", "30"]) == 0
        assert "No such file" in capsys.readouterr().out
        path.write_text(f"{third}\n")
        await until(lambda: set(links_of(mesh)) == {first, third})
        await answer(client, 3, 5)
        await mesh.settle()


async def test_an_operator_adds_and_removes_schedulers(capsys: pytest.CaptureFixture[str]) -> None:
    async with router_mesh(schedulers=2) as mesh, mesh.client() as client:
        first, second = (member.address for member in mesh.schedulers)
        router = ["--router", mesh.routers[0].address, "--json"]

        async def tell(*arguments: str) -> int:
            assert await asyncio.to_thread(replica.run, [*arguments, *router]) == 0
            return int(json.loads(capsys.readouterr().out)["still_running"])

        assert await tell("remove", second) == 0
        assert set(links_of(mesh)) == {first}
        assert await tell("add", second) == 0
        await until(lambda: links_of(mesh) == {first: True, second: True})
        mesh.fakes[0].is_paused, mesh.fakes[1].step_s = True, 0.02
        running = [asyncio.create_task(answer(client, seed)) for seed in range(4)]
        await until(lambda: mesh.fakes[1].num_running > 0)
        num_there = await tell("remove", second, "--finish")
        assert num_there > 0 and set(links_of(mesh)) == {first, second}, "what runs there ends there"
        num_before = len(mesh.fakes[1].submits)
        await until(lambda: set(links_of(mesh)) == {first})
        assert len(mesh.fakes[1].submits) == num_before
        mesh.fakes[0].is_paused = False
        await asyncio.gather(*running)
        # One that was to go and is added again stays.
        await tell("add", second)
        await until(lambda: links_of(mesh) == {first: True, second: True})
        mesh.fakes[1].is_paused = True
        running = [asyncio.create_task(answer(client, seed)) for seed in range(4)]
        await until(lambda: mesh.fakes[1].num_running > 0)
        await tell("remove", second, "--finish")
        await tell("add", second)
        mesh.fakes[1].is_paused = False
        await asyncio.gather(*running)
        await asyncio.sleep(0.5)
        assert links_of(mesh) == {first: True, second: True}
        assert not mesh.router().schedulers.link(second).is_draining
        assert await asyncio.to_thread(replica.run, ["remove", "unix:/nowhere", *router]) == 1
        assert "no scheduler was added" in "".join(capsys.readouterr())
        await mesh.settle()
