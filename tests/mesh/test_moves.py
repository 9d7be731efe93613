"""Moves of running outputs: by an operator, a drain, or for evenness; every answer is what it would have been."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable

import pytest
from support.fake_scheduler import made_up_token
from support.router_mesh import MODEL, RouterMesh, oracle_ids, oracle_text, router_mesh

from radixmesh.cli import move, status
from radixmesh.client import Completion
from radixmesh.daemons.runtime.arrays import pack_ints
from radixmesh.daemons.runtime.sampling import output_seed
from radixmesh.router.v1 import router_pb2

PROMPT = [5, 6, 7, 8]


def endless_ids(prompt: list[int], seed: int, count: int, index: int = 0) -> list[int]:
    """Output with ignore_eos, undisturbed."""
    return [made_up_token(MODEL, pack_ints(prompt), output_seed(seed, index), i) for i in range(count)]


def check(done: Completion, seed: int, max_tokens: int) -> None:
    for output in done.outputs:
        ids = oracle_ids(PROMPT, seed, max_tokens, index=output.index)
        assert (output.ids, output.text) == (ids, oracle_text(ids, PROMPT)[0])
        if output.logprobs is not None:
            assert len(output.logprobs.token_logprobs) == len(ids)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


def addresses(mesh: RouterMesh) -> list[str]:
    return [member.address for member in mesh.schedulers]


async def test_outputs_move_back_and_forth_at_random_and_are_the_same() -> None:
    """n = 2 and logprobs too; one scheduler goes on with attempts that have moved away, whose rows are dropped."""
    rng = random.Random(1)
    async with router_mesh(schedulers=2, move_on_overload=False) as mesh, mesh.client() as client:
        mesh.fakes[0].ignores_aborts = True
        for fake in mesh.fakes:
            fake.step_s = 0.003
        pool, num_moved, is_over = mesh.router().schedulers, 0, False

        async def shuffle() -> None:
            nonlocal num_moved
            while not is_over:
                await asyncio.sleep(rng.uniform(0, 0.01))
                num_moved += pool.move(most=rng.randrange(4))
                num_moved += pool.move(source=rng.choice(addresses(mesh)), most=rng.randrange(8))

        shuffling = asyncio.create_task(shuffle())
        for seed in range(0, 60, 12):
            answers = await asyncio.gather(
                *(
                    client.complete(
                        PROMPT, seed=seed + i, max_tokens=40, n=1 + i % 2, logprobs=1 if i % 3 == 0 else None
                    )
                    for i in range(12)
                )
            )
            for i, done in enumerate(answers):
                check(done, seed + i, 40)
        is_over = True
        await shuffling
        assert num_moved > 20
        resumed = [submit for fake in mesh.fakes for submit in fake.submits if submit.resumed_output_ids]
        assert resumed, "outputs moved with what they had"


async def test_a_request_goes_to_the_scheduler_that_the_operator_names() -> None:
    async with router_mesh(schedulers=2) as mesh, mesh.client() as client, mesh.admin() as admin:
        for fake in mesh.fakes:
            fake.step_s = 0.01
        asked = asyncio.create_task(
            client.complete(PROMPT, seed=2, max_tokens=60, n=3, ignore_eos=True, request_id="r")
        )
        other = asyncio.create_task(client.complete(PROMPT, seed=3, max_tokens=60, ignore_eos=True, request_id="other"))
        await until(lambda: sum(fake.num_tokens for fake in mesh.fakes) > 12 and sum_running(mesh) == 4)
        links = mesh.router().schedulers.links
        source = next(link for link in links if any(o.request.request_id == "r" for o in link.outputs()))
        target = next(link for link in links if link is not source)
        request = router_pb2.MoveOutputsRequest(request_id="r", to_address=target.address)
        assert (await admin.MoveOutputs(request)).num_moved == 3
        assert {o.request.request_id for o in source.outputs()} <= {"other"}
        assert (await admin.MoveOutputs(request)).num_moved == 0, "they are there"
        for seed, task in ((2, asked), (3, other)):
            done = await task
            for output in done.outputs:
                assert list(output.ids) == endless_ids(PROMPT, seed, 60, output.index)
        moved = [submit for submit in mesh.fakes[links.index(target)].submits if submit.request_id == "r"]
        assert {submit.index for submit in moved} == {0, 1, 2}
        await mesh.settle()


def sum_running(mesh: RouterMesh) -> int:
    return sum(fake.num_running for fake in mesh.fakes)


async def test_a_drained_scheduler_is_left_at_once_where_that_is_asked_for() -> None:
    async with router_mesh(schedulers=2) as mesh, mesh.client() as client, mesh.admin() as admin:
        for fake in mesh.fakes:
            fake.step_s = 0.02
        answers = [asyncio.create_task(client.complete(PROMPT, seed=i, max_tokens=40)) for i in range(8)]
        await until(lambda: all(fake.num_running for fake in mesh.fakes) and mesh.fakes[0].num_tokens > 8)
        drain = router_pb2.DrainSchedulerRequest(address=addresses(mesh)[0], move_outputs=True)
        reply = await admin.DrainScheduler(drain)
        assert reply.num_moved > 0 and reply.num_running == 0
        await until(lambda: mesh.fakes[0].num_running == 0)
        for seed, task in enumerate(answers):
            check(await task, seed, 40)
        num_before = len(mesh.fakes[0].submits)
        check(await client.complete(PROMPT, seed=9, max_tokens=5), 9, 5)
        assert len(mesh.fakes[0].submits) == num_before
        await mesh.settle()


async def test_a_drain_lasts_until_its_process_ends() -> None:
    async with router_mesh() as mesh, mesh.client() as client:
        pool, (address,) = mesh.router().schedulers, addresses(mesh)
        pool.drain(address, moves_outputs=True)
        await mesh.schedulers[0].restart()
        await until(lambda: pool.link(address).num_connects == 2)
        assert not pool.link(address).takes_submits, "the stream broke, and the process is the same"
        mesh.fakes[0].instance_id = "another"
        await mesh.schedulers[0].restart()
        check(await client.complete(PROMPT, seed=1, max_tokens=5), 1, 5)
        # One that is to be removed goes nevertheless, even if the other process is there before anybody looks.
        mesh.fakes[0].is_paused = True
        running = asyncio.create_task(client.complete(PROMPT))
        await until(lambda: pool.link(address).num_running == 1)
        mesh.router().members.retire(address, moves_outputs=False)
        pool.link(address).is_draining = False
        await until(lambda: not pool.links)
        running.cancel()


async def test_a_scheduler_that_is_about_to_end_is_left_by_itself() -> None:
    async with router_mesh(schedulers=2, move_on_overload=False) as mesh, mesh.client() as client:
        for fake in mesh.fakes:
            fake.step_s = 0.02
        answers = [asyncio.create_task(client.complete(PROMPT, seed=i, max_tokens=40, n=1 + i % 2)) for i in range(8)]
        await until(lambda: all(fake.num_running for fake in mesh.fakes) and mesh.fakes[0].num_tokens > 8)
        mesh.fakes[0].is_leaving = True
        await until(lambda: mesh.fakes[0].num_running == 0)
        # Streams to two schedulers: what the one is told to end may be told to the other a little later.
        await until(lambda: any(submit.resumed_output_ids for submit in mesh.fakes[1].submits))
        mesh.fakes[1].is_leaving = True
        for seed, task in enumerate(answers):  # Nobody is left to take them: they end where they are.
            check(await task, seed, 40)
        await mesh.settle()


async def test_outputs_that_nobody_else_can_take_leave_once_somebody_can() -> None:
    async with router_mesh(schedulers=2) as mesh, mesh.client() as client, mesh.admin() as admin:
        await mesh.schedulers[1].kill()
        await until(lambda: not mesh.router().schedulers.links[1].is_connected)
        mesh.fakes[0].step_s = mesh.fakes[1].step_s = 0.02
        answer = asyncio.create_task(client.complete(PROMPT, seed=5, max_tokens=400, ignore_eos=True))
        await until(lambda: mesh.fakes[0].num_tokens > 3)
        drain = router_pb2.DrainSchedulerRequest(address=addresses(mesh)[0], move_outputs=True)
        reply = await admin.DrainScheduler(drain)
        assert (reply.num_moved, reply.num_running) == (0, 1)
        await mesh.schedulers[1].start()
        await until(lambda: mesh.fakes[1].num_running == 1 and mesh.fakes[0].num_running == 0)
        mesh.fakes[1].step_s = 0.0
        assert list((await answer).outputs[0].ids) == endless_ids(PROMPT, 5, 400)


@pytest.mark.parametrize("field", ["from_address", "to_address"])
async def test_addresses_that_are_no_scheduler_are_refused(field: str) -> None:
    async with router_mesh() as mesh:
        pool = mesh.router().schedulers
        name = {"from_address": "source", "to_address": "target"}[field]
        with pytest.raises(Exception, match="no scheduler was added"):
            pool.move(**{name: "unix:/nowhere"})  # type: ignore[arg-type]


async def test_a_target_that_takes_nothing_is_refused() -> None:
    async with router_mesh(schedulers=2) as mesh:
        pool = mesh.router().schedulers
        pool.drain(addresses(mesh)[1])
        with pytest.raises(Exception, match="takes no outputs now"):
            pool.move(target=addresses(mesh)[1])


async def test_outputs_go_to_a_scheduler_that_is_added_until_both_have_about_as_many() -> None:
    async with router_mesh(schedulers=2) as mesh, mesh.client() as client:
        pool = mesh.router().schedulers
        await pool.remove(addresses(mesh)[1])
        for fake in mesh.fakes:
            fake.step_s = 0.05
        seeds = range(24)
        answers = [
            asyncio.create_task(client.complete(PROMPT, seed=seed, max_tokens=500, ignore_eos=True)) for seed in seeds
        ]
        await until(lambda: mesh.fakes[0].num_running == 24)
        pool.add(addresses(mesh)[1])
        await until(lambda: mesh.fakes[1].num_running >= 10)
        assert mesh.fakes[0].num_running + mesh.fakes[1].num_running <= 24
        for fake in mesh.fakes:
            fake.step_s = 0.0
        for seed, done in zip(seeds, await asyncio.gather(*answers), strict=True):
            assert list(done.outputs[0].ids) == endless_ids(PROMPT, seed, 500)
        await mesh.settle()


async def test_nothing_moves_where_the_prefill_would_cost_more() -> None:
    """Eight long prompts with a few tokens to go."""
    async with router_mesh(schedulers=2) as mesh, mesh.client() as client:
        pool = mesh.router().schedulers
        await pool.remove(addresses(mesh)[1])
        mesh.fakes[0].step_s = 0.4
        answers = [
            asyncio.create_task(client.complete([7] * 450, seed=seed, max_tokens=6, ignore_eos=True))
            for seed in range(8)
        ]
        await until(lambda: mesh.fakes[0].num_running == 8 and mesh.fakes[0].num_tokens >= 16)
        pool.add(addresses(mesh)[1])
        await asyncio.gather(*answers)
        assert not mesh.fakes[1].submits
        await mesh.settle()


async def test_the_verb_moves_and_drains(capsys: pytest.CaptureFixture[str]) -> None:
    async with router_mesh(schedulers=2, move_on_overload=False) as mesh, mesh.client() as client:
        for fake in mesh.fakes:
            fake.step_s = 0.02
        answers = [asyncio.create_task(client.complete(PROMPT, seed=i, max_tokens=40)) for i in range(6)]
        await until(lambda: sum(link.num_running for link in mesh.router().schedulers.links) == 6)
        first, second = addresses(mesh)
        router = ["--router", mesh.routers[0].address, "--json"]
        assert await asyncio.to_thread(move.run, ["--from", first, "--to", second, *router]) == 0
        assert mesh.router().schedulers.links[0].num_running == 0
        assert await asyncio.to_thread(move.run, ["--from", second, "--drain", *router]) == 0
        told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [row["moved"] > 0 for row in told] == [True, True] and told[1]["still_running"] == 0
        assert await asyncio.to_thread(move.run, ["--from", "unix:/nowhere", *router]) == 1
        assert "no scheduler was added" in "".join(capsys.readouterr())
        for seed, task in enumerate(answers):
            check(await task, seed, 40)


async def test_the_routes_of_a_router_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    async with router_mesh(schedulers=2) as mesh, mesh.client() as client:
        await asyncio.gather(*(client.complete(PROMPT, seed=seed, max_tokens=4) for seed in range(6)))
        mesh.router().schedulers.drain(addresses(mesh)[1])
        router = mesh.routers[0].address
        assert await asyncio.to_thread(status.run, [router, "--routes", "--json", "--timeout", "30"]) == 0
        *told, queue = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert queue["queue"]["outputs"] == queue["queue"]["refused"] == 0
        assert [row["scheduler"] for row in told] == addresses(mesh)
        assert [row["state"] for row in told] == ["serving", "draining"]
        assert sum(row["routed"] for row in told) == 6
        assert all(row["hit_rate"] is None or 0 <= row["hit_rate"] <= 1 for row in told)
        assert await asyncio.to_thread(status.run, [router, "--routes", "--timeout", "30"]) == 0
        shown = capsys.readouterr().out
        assert "ROUTED" in shown and addresses(mesh)[0] in shown and "nothing waits in the router" in shown
        assert await asyncio.to_thread(status.run, ["unix:/nowhere", "--routes", "--timeout", "1"]) == 1
