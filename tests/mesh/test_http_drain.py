"""HTTP clients of a router that is told to end: what they wait for is answered whole, and they are told to go."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from support.containers import free_port
from support.router_mesh import RouterMesh, oracle_ids, router_mesh

from radixmesh.daemons.router.daemon import RouterDaemon

PROMPT = [5, 6, 7, 8]
DEADLINE_S = 60.0


class Connection:
    """A keep-alive connection, request by request."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def ask(self, seed: int, max_tokens: int, *, stream: bool = False) -> None:
        body = json.dumps(
            {"model": "tiny-llama", "prompt": PROMPT, "seed": seed, "max_tokens": max_tokens, "temperature": 1.0}
            | {"stream": stream, "return_token_ids": True}
        ).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)

    async def head(self) -> tuple[int, dict[str, str]]:
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        fields = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        return int(lines[0].split()[1]), fields

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, head and body of an answer with a length, or in chunks."""
        status, fields = await self.head()
        if "content-length" in fields:
            return status, fields, await self._reader.readexactly(int(fields["content-length"]))
        body = b""
        while size := int(await self._reader.readline(), 16):
            body += (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readline()
        return status, fields, body

    async def is_closed(self) -> bool:
        return await self._reader.read() == b""


@asynccontextmanager
async def http_mesh() -> AsyncIterator[tuple[RouterMesh, list[Connection]]]:
    """A router with HTTP and four connections, each of which has had an answer."""
    port = free_port()
    async with router_mesh(http_listen=f"127.0.0.1:{port}") as mesh:
        connections = []
        for seed in range(4):
            connections.append(Connection(*await asyncio.open_connection("127.0.0.1", port)))
            connections[-1].ask(seed, 3)
            status, fields, _ = await connections[-1].answer()
            assert status == 200 and fields.get("connection") != "close"
        yield mesh, connections
        for connection in connections:
            connection._writer.transport.abort()


async def told_to_end(mesh: RouterMesh) -> asyncio.Task[None]:
    member = mesh.routers[0]
    member.drain()
    assert member.daemon is not None
    draining = asyncio.create_task(member.daemon.drain())
    await asyncio.sleep(0)
    return draining


@pytest.mark.timeout(180)
async def test_clients_get_what_they_wait_for_and_are_told_to_go() -> None:
    async with asyncio.timeout(DEADLINE_S * 2), http_mesh() as (mesh, (streaming, waiting, next_one, idle)):
        mesh.fakes[0].step_s = 0.03
        streaming.ask(11, 100, stream=True)
        assert (await streaming.head())[0] == 200
        waiting.ask(12, 100)
        while mesh.fakes[0].num_running < 2:
            await asyncio.sleep(0.01)
        draining = await told_to_end(mesh)
        next_one.ask(13, 5)
        status, fields, body = await next_one.answer()
        assert (status, fields["connection"]) == (200, "close"), body
        assert len(oracle_ids(PROMPT, 13, 5)) == json.loads(body)["usage"]["completion_tokens"]
        assert await next_one.is_closed()
        status, fields, body = await waiting.answer()
        assert (status, fields["connection"]) == (200, "close")
        assert json.loads(body)["usage"]["completion_tokens"] == len(oracle_ids(PROMPT, 12, 100))
        assert await waiting.is_closed()
        assert b"[DONE]" in await streaming._reader.readuntil(b"\r\n0\r\n\r\n")
        streaming.ask(14, 5)  # Its client could not be told before.
        status, fields, _ = await streaming.answer()
        assert (status, fields["connection"]) == (200, "close")
        assert await idle.is_closed()
        await asyncio.wait_for(draining, DEADLINE_S)


@pytest.mark.timeout(180)
async def test_no_connection_is_taken_in_the_end() -> None:
    async with asyncio.timeout(DEADLINE_S * 2), http_mesh() as (mesh, (first, *_)):
        mesh.fakes[0].step_s = 0.05
        first.ask(11, 200)
        while not mesh.fakes[0].num_running:
            await asyncio.sleep(0.01)
        draining = await told_to_end(mesh)
        port = first._writer.get_extra_info("peername")[1]
        is_open = True
        while is_open:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                await asyncio.sleep(0.05)
            except ConnectionRefusedError:
                is_open = False
        assert not draining.done()
        mesh.fakes[0].step_s = 0.0
        assert (await first.answer())[0] == 200
        await asyncio.wait_for(draining, DEADLINE_S)


@pytest.mark.timeout(180)
async def test_a_proxy_that_has_just_asked_for_health_may_still_send_a_client() -> None:
    """Nobody is connected when the drain begins."""
    async with asyncio.timeout(DEADLINE_S * 2), http_mesh() as (mesh, connections):
        port = connections[0]._writer.get_extra_info("peername")[1]
        for connection in connections:
            connection._writer.close()
        daemon = mesh.routers[0].daemon
        assert isinstance(daemon, RouterDaemon) and daemon.http is not None
        while daemon.http.num_connections:
            await asyncio.sleep(0.01)
        draining = await told_to_end(mesh)
        late = Connection(*await asyncio.open_connection("127.0.0.1", port))
        late.ask(5, 5)
        status, fields, _ = await late.answer()
        assert (status, fields["connection"]) == (200, "close")
        await asyncio.wait_for(draining, DEADLINE_S)
