"""One address for several routers: connections follow who serves, and a router that drains loses nobody."""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest
import uvloop
from support.jobs import simulated_jobs
from support.mesh import COMPOSE
from support.stream_load import StreamLoad

from radixmesh.client import AsyncClient
from radixmesh.daemons.cluster.local_cluster import LocalCluster
from radixmesh.daemons.cluster.processes.process_status import ProcessState, ProcessStatus
from radixmesh.daemons.front.backend_pool import BackendPool
from radixmesh.daemons.front.connection_end import ConnectionEnd
from radixmesh.daemons.front.listener import Listener
from radixmesh.daemons.front.room import Room, connections_within_files

pytestmark = pytest.mark.timeout(240)


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.02)


class EchoServer:
    """Answers every line with its own name before it; a client's end of file ends the answer."""

    def __init__(self, name: str) -> None:
        self.name = name.encode()
        self.is_serving = True
        self.address = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(self.name + b" " + line)
            await writer.drain()
        writer.write(b"bye\n")
        writer.close()

    def stop(self) -> None:
        self._server.close()


@asynccontextmanager
async def front(
    *names: str, wait_s: float = 5.0, room: Room | None = None
) -> AsyncIterator[tuple[Listener, BackendPool, list[EchoServer], int]]:
    servers = [EchoServer(name) for name in names]
    for server in servers:
        await server.start()

    async def probe(address: str) -> bool:
        return next(server for server in servers if server.address == address).is_serving

    pool = BackendPool(probe, 0.02)
    for server in servers:
        pool.add(server.address)
    listener = Listener(pool, wait_s, room)
    port = int((await listener.open("127.0.0.1:0")).rpartition(":")[2])
    try:
        yield listener, pool, servers, port
    finally:
        listener.close()
        pool.close()
        for server in servers:
            server.stop()


async def ask(port: int, line: bytes = b"hello\n") -> tuple[bytes, asyncio.StreamWriter, asyncio.StreamReader]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(line)
    return await reader.readline(), writer, reader


async def test_connections_are_spread_and_follow_who_serves() -> None:
    async with front("a", "b") as (_listener, pool, servers, port):
        await until(lambda: all(backend.is_serving for backend in pool.backends))
        answers = [await ask(port) for _ in range(6)]
        assert sorted(answer for answer, _, _ in answers) == [b"a hello\n"] * 3 + [b"b hello\n"] * 3
        servers[0].is_serving = False
        await until(lambda: not pool.backends[0].is_serving)
        assert [(await ask(port))[0] for _ in range(3)] == [b"b hello\n"] * 3
        _, writer, reader = next(answer for answer in answers if answer[0].startswith(b"a"))
        writer.write(b"still here\n")
        assert await reader.readline() == b"a still here\n", "what is open stays open"
        for _, writer, _ in answers:
            writer.close()
        await until(lambda: pool.backends[0].num_connections == 0)


async def test_a_router_that_refuses_is_passed_over_and_one_that_is_awaited_gets_the_connection() -> None:
    async with front("a", "b") as (_, pool, servers, port):
        await until(lambda: all(backend.is_serving for backend in pool.backends))
        servers[0].stop()  # Its probe still says that it serves.
        assert [(await ask(port))[0] for _ in range(4)] == [b"b hello\n"] * 4
    async with front("a") as (_listener, pool, servers, port):
        servers[0].is_serving = False
        await until(lambda: not pool.backends[0].is_serving)
        asking = asyncio.create_task(ask(port))
        await asyncio.sleep(0.2)
        assert not asking.done()
        servers[0].is_serving = True
        assert (await asking)[0] == b"a hello\n"


def test_a_server_that_speaks_first_is_heard_whole() -> None:
    """gRPC's do, as soon as the connection stands: before the front has tied it to a client. In the daemons' loop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(converse_with_greeters())


async def converse_with_greeters() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"settings\n")
        await writer.drain()
        writer.write(await reader.readline())
        writer.close()

    async def serves(address: str) -> bool:
        return True

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    pool = BackendPool(serves, 0.02)
    pool.add(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    listener = Listener(pool, 5.0)
    port = int((await listener.open("127.0.0.1:0")).rpartition(":")[2])

    async def converse() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"hello\n")
        return await reader.read()

    async with asyncio.timeout(20):
        assert await asyncio.gather(*(converse() for _ in range(100))) == [b"settings\nhello\n"] * 100
    listener.close()
    pool.close()
    server.close()


async def test_a_connection_that_is_given_up_as_it_comes_is_counted_down_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop closes the transport of a connection that comes as the time is over, and says so after the error."""
    loop, lost = asyncio.get_running_loop(), asyncio.Event()

    async def create_connection(make: Callable[[], ConnectionEnd], host: str, port: int) -> None:
        loop.call_soon(make().connection_lost, None)
        loop.call_soon(lost.set)
        raise TimeoutError

    async with front("a") as (_, pool, _servers, port):
        await until(lambda: pool.backends[0].is_serving)
        monkeypatch.setattr(loop, "create_connection", create_connection)
        client = socket.create_connection(("127.0.0.1", port))
        async with asyncio.timeout(10):
            await lost.wait()
        monkeypatch.undo()
        assert pool.backends[0].num_connections in (0, 1), "1: it is tried again"
        client.close()
        await until(lambda: pool.backends[0].num_connections == 0)


async def test_without_any_router_the_connection_ends_in_time() -> None:
    async with front("a", wait_s=0.2) as (listener, pool, servers, port):
        servers[0].is_serving = False
        await until(lambda: not pool.backends[0].is_serving)
        async with asyncio.timeout(5):
            assert (await ask(port))[0] == b""
        await until(lambda: listener.num_connections == 0)


async def test_big_answers_and_ends_of_file_go_through() -> None:
    async with front("a") as (listener, pool, _servers, port):
        await until(lambda: pool.backends[0].is_serving)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        line = b"x" * 60_000 + b"\n"

        async def write() -> None:
            for _ in range(100):
                writer.write(line)
                await writer.drain()
            writer.write_eof()

        writing = asyncio.create_task(write())
        await asyncio.sleep(0.2)  # A slow reader: it stops the writer's side, and nothing is lost.
        received = await reader.read()
        await writing
        assert received == (b"a " + line) * 100 + b"bye\n"
        await until(lambda: listener.num_connections == 0)


async def test_routers_behind_a_front_are_replaced_under_streams() -> None:
    """SIGTERM to each router in turn: what runs on it ends there, what is new goes to the other."""
    simulated = {"RADIXMESH_BACKEND": "simulated", "RADIXMESH_SIMULATED_BASE_US": "20000"}
    environment = {"worker-a": simulated, "worker-b": simulated}
    async with LocalCluster(COMPOSE / "scale.yml", environment=environment, publish=False) as cluster:
        await cluster.wait_healthy(150)
        address = cluster.address("front", container_port=50050)
        async with (
            AsyncClient([address]) as client,
            StreamLoad(client, simulated_jobs(8, num_tokens=120), num_streams=8) as load,
        ):
            await load.all_progressed(0.0)
            for replica in (1, 2):
                restarts = cluster.status("router", replica).restarts
                assert cluster.kill("router", replica, signal.SIGTERM)
                async with asyncio.timeout(60):
                    await cluster.wait_until("router", partial(is_back, restarts), replica=replica)
                await load.all_progressed(time.monotonic())
        assert load.failures == []
        assert load.num_completed >= 2 * 8, "of each stream the one that ran at first, and one that came after"


def is_back(restarts: int, status: ProcessStatus) -> bool:
    return status.restarts > restarts and status.state is ProcessState.HEALTHY


async def test_connections_beyond_the_bound_are_closed_and_counted() -> None:
    refused: list[int] = []
    room = Room(2, lambda: refused.append(1))
    async with front("a", room=room) as (listener, pool, _servers, port):
        await until(lambda: all(backend.is_serving for backend in pool.backends))
        held = [await ask(port) for _ in range(2)]
        assert [answer for answer, _, _ in held] == [b"a hello\n"] * 2
        for _ in range(3):
            reader, _ = await asyncio.open_connection("127.0.0.1", port)
            async with asyncio.timeout(60):
                assert await reader.read() == b"", "closed at once, before a byte"
        assert len(refused) == room.num_refused == 3 and listener.num_connections == 2
        held[0][1].close()
        await until(lambda: listener.num_connections == 1, 60)
        assert (await ask(port))[0] == b"a hello\n"


def test_connections_follow_the_limit_of_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        assert 1 <= connections_within_files(1 << 40) <= (1 << 40)
        now, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert now >= soft, "raised, never lowered"
        assert connections_within_files(10) == 10
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
