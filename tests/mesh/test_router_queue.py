"""When all schedulers are full outputs wait in the router: in fair turns, within bounds, and none is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import httpx
import pytest
from support.fake_scheduler import made_up_token
from support.router_mesh import MODEL, RouterMesh, router_mesh

from radixmesh.client import AsyncClient, Completion
from radixmesh.client.errors import DeadlineExceededError, OverloadedError, UnavailableError
from radixmesh.daemons.router.daemon import RouterDaemon
from radixmesh.daemons.router.http.server.server import HttpServer
from radixmesh.daemons.router.peers.schedulers import scheduler_pool
from radixmesh.daemons.runtime.arrays import pack_ints
from radixmesh.daemons.runtime.sampling import output_seed
from radixmesh.router.v1 import router_pb2

PROMPT = [5, 6, 7, 8]


def ids_of(seed: int, count: int, index: int = 0) -> list[int]:
    """Output with ignore_eos, undisturbed."""
    return [made_up_token(MODEL, pack_ints(PROMPT), output_seed(seed, index), i) for i in range(count)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


class Load:
    """Requests that run at once, and the order in which they end."""

    def __init__(self, mesh: RouterMesh, client: AsyncClient) -> None:
        self.mesh = mesh
        self._client = client
        self.ended: list[str] = []
        self.tasks: list[asyncio.Task[Completion]] = []

    def ask(self, name: str, count: int = 1, *, max_tokens: int = 3, **options: Any) -> None:
        for _ in range(count):
            self.tasks.append(asyncio.create_task(self._ask(name, len(self.tasks), max_tokens, options)))

    async def all(self) -> None:
        async with asyncio.timeout(60):
            await asyncio.gather(*self.tasks)

    async def _ask(self, name: str, seed: int, max_tokens: int, options: dict[str, Any]) -> Completion:
        done = await self._client.complete(PROMPT, seed=seed, max_tokens=max_tokens, ignore_eos=True, **options)
        for output in done.outputs:
            assert list(output.ids) == ids_of(seed, max_tokens, output.index)
        self.ended.append(name)
        return done

    @property
    def num_waiting(self) -> int:
        return self.mesh.router().schedulers.num_waiting


async def test_no_scheduler_gets_more_than_fit_and_all_are_served() -> None:
    async with (
        router_mesh(schedulers=2, scheduler_max_outputs=4, move_on_overload=False) as mesh,
        mesh.client() as client,
    ):
        most = [0, 0]
        for i, fake in enumerate(mesh.fakes):
            fake.step_s, fake.is_paused = 0.002, True

            def watch(num_tokens: int, i: int = i) -> None:
                most[i] = max(most[i], mesh.fakes[i].num_running)

            fake.on_step = watch
        load = Load(mesh, client)
        load.ask("x", 60)
        await until(lambda: load.num_waiting == 52)
        assert mesh.router().schedulers.waiting.num_bytes > 0
        for fake in mesh.fakes:
            fake.is_paused = False
        await load.all()
        assert max(most) <= 4 and min(most) == 4
        assert mesh.router().schedulers.waiting.num_bytes == 0
        await mesh.settle()


async def test_a_tenant_with_many_holds_up_no_other_and_shares_go_by_weight() -> None:
    async with router_mesh(scheduler_max_outputs=2, tenant_weights=("big=4",)) as mesh, mesh.client() as client:
        mesh.fakes[0].is_paused = True
        load = Load(mesh, client)
        load.ask("first", 2, tenant="crowd")
        await until(lambda: mesh.fakes[0].num_running == 2)
        load.ask("crowd", 40, tenant="crowd")
        await until(lambda: load.num_waiting == 40)
        load.ask("one", 3, tenant="one")
        load.ask("big", 12, tenant="big")
        await until(lambda: load.num_waiting == 55)
        mesh.fakes[0].is_paused = False
        await load.all()
        order = [name for name in load.ended if name != "first"]
        assert order.index("one") < 10, order
        last_big = max(i for i, name in enumerate(order) if name == "big")
        # Of what was served while all three waited, big had four of six.
        assert last_big < 26 and order[:last_big].count("crowd") <= 8, order
        await mesh.settle()


async def test_a_tenant_without_outputs_at_schedulers_gets_its_share_of_the_room() -> None:
    # Full for a normal priority and not for a higher one: every newcomer has those that wait tried, and none fits.
    async with router_mesh(scheduler_max_outputs=8, tenant_weights=("big=4",)) as mesh, mesh.client() as client:
        mesh.fakes[0].is_paused, mesh.fakes[0].step_s = True, 0.005
        load = Load(mesh, client)
        load.ask("first", 8, tenant="crowd")
        await until(lambda: mesh.fakes[0].num_running == 8)
        load.ask("crowd", 80, tenant="crowd")
        await until(lambda: load.num_waiting == 80)
        load.ask("one", 3, tenant="one")
        load.ask("big", 12, tenant="big")
        await until(lambda: load.num_waiting == 95)
        mesh.fakes[0].is_paused = False
        await load.all()
        order = [name for name in load.ended if name != "first"]
        assert order.index("one") < 20, order
        last_big = max(i for i, name in enumerate(order) if name == "big")
        assert last_big < 40 and order[:last_big].count("crowd") <= 16, order
        await mesh.settle()


async def test_outputs_of_the_only_scheduler_end_in_time_when_it_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_pool, "_LATE_A_TICK", 2)
    async with router_mesh(scheduler_wait_s=0.5) as mesh, mesh.client() as client:
        mesh.fakes[0].step_s = 0.02
        running = [asyncio.create_task(client.complete(PROMPT, max_tokens=400, ignore_eos=True)) for _ in range(7)]
        await until(lambda: mesh.fakes[0].num_running == 7 and mesh.fakes[0].num_tokens > 50)
        await mesh.router().schedulers.remove(mesh.schedulers[0].address)
        async with asyncio.timeout(60):
            for answer in running:
                with pytest.raises(UnavailableError, match="no scheduler could take"):
                    await answer


async def test_within_a_tenant_the_higher_priority_goes_first() -> None:
    async with router_mesh(scheduler_max_outputs=1) as mesh, mesh.client() as client:
        mesh.fakes[0].is_paused = True
        load = Load(mesh, client)
        load.ask("first")
        await until(lambda: mesh.fakes[0].num_running == 1)
        for number, (name, priority) in enumerate((("low", -1), ("normal", 0), ("high", 3))):
            load.ask(name, 2, priority=priority)
            await until(lambda number=number: load.num_waiting == 2 * number + 2)  # type: ignore[misc]
        mesh.fakes[0].is_paused = False
        await load.all()
        assert load.ended == ["first", "high", "high", "normal", "normal", "low", "low"]


async def test_beyond_the_bound_a_request_is_refused_and_told_when_to_retry() -> None:
    settings = {"scheduler_max_outputs": 2, "max_queue": 8, "http_listen": "127.0.0.1:0"}
    async with router_mesh(**settings) as mesh, mesh.client() as client, mesh.stub() as stub:
        mesh.fakes[0].is_paused = True
        load = Load(mesh, client)
        load.ask("a", 2, tenant="a")
        await until(lambda: mesh.fakes[0].num_running == 2)
        load.ask("a", 6, tenant="a")
        await until(lambda: load.num_waiting == 6)
        with pytest.raises(OverloadedError, match="this tenant") as refused:
            await client.complete(PROMPT, tenant="a")
        assert (refused.value.retry_after_s or 0) > 0
        load.ask("b", 2, tenant="b")
        await until(lambda: load.num_waiting == 8)
        request = router_pb2.GenerateRequest(prompt_ids=pack_ints(PROMPT), tenant="c")
        with pytest.raises(grpc.aio.AioRpcError) as status:
            await anext(aiter(stub.Generate(request)))
        assert status.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        async with httpx.AsyncClient() as http:
            body = {"prompt": PROMPT, "max_tokens": 1}
            answer = await http.post(f"http://127.0.0.1:{_port(mesh)}/v1/completions", json=body)
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "OVERLOADED"
        mesh.fakes[0].is_paused = False
        await load.all()
        assert len((await client.complete(PROMPT, max_tokens=2)).outputs[0].ids) == 2
        assert mesh.router().schedulers.waiting.num_refused == 3
        await mesh.settle()


async def test_the_bytes_of_those_that_wait_are_bounded_too() -> None:
    async with router_mesh(scheduler_max_outputs=1, queue_bytes=100_000) as mesh, mesh.client() as client:
        mesh.fakes[0].is_paused = True
        load = Load(mesh, client)
        load.ask("x", 3)
        await until(lambda: load.num_waiting == 2)
        with pytest.raises(OverloadedError, match="bytes"):
            await client.complete(PROMPT)
        mesh.fakes[0].is_paused = False
        await load.all()


async def test_a_request_that_is_cancelled_or_late_leaves_the_queue_at_once() -> None:
    async with router_mesh(scheduler_max_outputs=1, scheduler_wait_s=0.5) as mesh, mesh.client() as client:
        mesh.fakes[0].is_paused = True
        load = Load(mesh, client)
        load.ask("first")
        await until(lambda: mesh.fakes[0].num_running == 1)
        leaving = [asyncio.create_task(client.complete(PROMPT, n=4)) for _ in range(5)]
        await until(lambda: load.num_waiting == 20)
        for task in leaving:
            task.cancel()
        await until(lambda: load.num_waiting == 0)
        with pytest.raises(DeadlineExceededError, match="ttft_deadline_ms"):
            await client.complete(PROMPT, ttft_deadline_s=0.3)
        assert load.num_waiting == 0 and len(mesh.fakes[0].submits) == 1, "the scheduler never heard of it"
        # For room a request waits as long as it takes, however long a scheduler is waited for.
        load.ask("patient")
        await until(lambda: load.num_waiting == 1)
        await asyncio.sleep(1.5)
        assert load.num_waiting == 1
        mesh.fakes[0].is_paused = False
        await load.all()
        await mesh.settle()


async def test_a_tenant_has_no_more_outputs_at_schedulers_than_it_may() -> None:
    settings = {"tenant_max_outputs": ("2", "free=0")}
    async with router_mesh(schedulers=2, **settings) as mesh, mesh.client() as client:
        for fake in mesh.fakes:
            fake.is_paused = True
        load = Load(mesh, client)
        load.ask("a", 6, tenant="a")
        load.ask("free", 5, tenant="free")
        await until(lambda: load.num_waiting == 4 and sum(fake.num_running for fake in mesh.fakes) == 7)
        running = mesh.router().schedulers.waiting.running
        assert (running.num_of("a"), running.num_of("free")) == (2, 5)
        for fake in mesh.fakes:
            fake.is_paused = False
        await load.all()
        await mesh.settle()
        assert running.num_of("a") == running.num_of("free") == 0


async def test_outputs_of_a_scheduler_that_dies_go_before_those_that_have_not_begun() -> None:
    async with (
        router_mesh(schedulers=2, scheduler_max_outputs=3, move_on_overload=False) as mesh,
        mesh.client() as client,
    ):
        for fake in mesh.fakes:
            fake.step_s = 0.02
        load = Load(mesh, client)
        load.ask("begun", 6, max_tokens=60)
        await until(lambda: all(fake.num_running == 3 and fake.num_tokens > 9 for fake in mesh.fakes))
        load.ask("new", 6, max_tokens=60)
        await until(lambda: load.num_waiting == 6)
        await mesh.schedulers[0].kill()
        await until(lambda: load.num_waiting == 9)
        await load.all()
        assert set(load.ended[:6]) == {"begun"}, load.ended
        await mesh.schedulers[0].start()
        await mesh.settle()


async def test_outputs_of_one_request_wait_and_go_together() -> None:
    async with (
        router_mesh(schedulers=2, scheduler_max_outputs=2, move_on_overload=False) as mesh,
        mesh.client() as client,
    ):
        for fake in mesh.fakes:
            fake.is_paused = True
        load = Load(mesh, client)
        load.ask("first", 4)
        await until(lambda: sum(fake.num_running for fake in mesh.fakes) == 4)
        load.ask("many", 2, n=5)
        await until(lambda: load.num_waiting == 10)
        mesh.fakes[1].is_paused = False
        await until(lambda: len(load.ended) >= 2)
        mesh.fakes[0].is_paused = False
        await load.all()
        ids_of = [{submit.request_id for submit in fake.submits if submit.index == 4} for fake in mesh.fakes]
        for fake in mesh.fakes:
            for submit in fake.submits:
                if submit.index:
                    assert submit.request_id in ids_of[mesh.fakes.index(fake)]
        await mesh.settle()


async def test_load_cancellations_and_deaths_at_random_leave_nothing_behind() -> None:
    """Counts of running and waiting outputs and of bytes are zero in the end, whatever came between."""
    settings = {"scheduler_max_outputs": 3, "tenant_max_outputs": ("4",), "max_queue": 30}
    async with router_mesh(schedulers=3, **settings) as mesh, mesh.client() as client:
        for fake in mesh.fakes:
            fake.step_s = 0.002
        ended = {"done": 0, "refused": 0, "cancelled": 0}

        async def one(number: int) -> None:
            try:
                async with asyncio.timeout(0.05 if number % 7 == 0 else 60):
                    done = await client.complete(
                        PROMPT, seed=number, n=1 + number % 3, max_tokens=8, ignore_eos=True, tenant=f"t{number % 4}"
                    )
                for output in done.outputs:
                    assert list(output.ids) == ids_of(number, 8, output.index)
                ended["done"] += 1
            except OverloadedError:
                ended["refused"] += 1
            except TimeoutError:
                ended["cancelled"] += 1

        async def kills() -> None:
            for number in (0, 1, 2, 0):
                await asyncio.sleep(0.2)
                await mesh.schedulers[number].restart()

        await asyncio.gather(_paced(one, 240), kills())
        assert sum(ended.values()) == 240 and ended["done"] > 20, ended
        await mesh.settle()
        pool = mesh.router().schedulers
        assert not pool.waiting.running.num_tenants and pool.waiting.num_bytes == 0 and pool.waiting.num_tenants == 0
        assert pool.placement.placement.replicas.num_outputs[:3].max() == 0
        assert pool.placement.placement.replicas.queued_tokens[:3].max() == 0


async def _paced(one: Callable[[int], Coroutine[Any, Any, None]], count: int) -> None:
    tasks = []
    for number in range(count):
        tasks.append(asyncio.create_task(one(number)))
        if number % 8 == 7:
            await asyncio.sleep(0.02)
    await asyncio.gather(*tasks)


def _port(mesh: RouterMesh) -> int:
    daemon = mesh.routers[0].daemon
    assert isinstance(daemon, RouterDaemon) and isinstance(daemon.http, HttpServer)
    return daemon.http.port
