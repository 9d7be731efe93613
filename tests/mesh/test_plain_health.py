"""`radixmesh health` without gRPC: what it reads is what gRPC would, and it is told apart from everything else."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from radixmesh.cli.plain_health import ask_plain
from radixmesh.daemons.runtime.rpc.health.progress import Progress
from radixmesh.daemons.runtime.rpc.health.service import HealthService
from radixmesh.daemons.runtime.rpc.server import MeshServer


async def test_every_state_is_told_over_tcp_and_sockets(tmp_path: Path) -> None:
    progress = Progress()
    server = MeshServer(HealthService(progress))
    addresses = await server.start(["127.0.0.1:0", f"unix:{tmp_path}/daemon.sock"])

    async def answers() -> set[str | None]:
        return {await asyncio.to_thread(ask_plain, address, 5.0) for address in addresses}

    assert await answers() == {"NOT_SERVING"}
    progress.loaded()
    assert await answers() == {"SERVING"}
    progress.drain()
    assert await answers() == {"NOT_SERVING"}
    await server.stop(0)
    assert await answers() == {None}


async def test_the_command_answers_without_importing_grpc(tmp_path: Path) -> None:
    progress = Progress()
    progress.loaded()
    server = MeshServer(HealthService(progress))
    (address,) = await server.start(["127.0.0.1:0"])
    program = (
        "import sys; from radixmesh.cli import health\n"
        f"code = health.run([{address!r}]); assert 'grpc' not in sys.modules; sys.exit(code)"
    )
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "SERVING\n"), done.stderr
    await server.stop(0)


@pytest.mark.parametrize(
    "said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", bytes(9), b"\x00\x00\x00\x01\x01\x00\x00\x00\x01"]
)
async def test_who_speaks_something_else_or_nothing_is_no_answer(said: bytes) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        await writer.drain()
        await reader.read(1)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    assert await asyncio.to_thread(ask_plain, f"127.0.0.1:{port}", 0.5) is None
    server.close()


def test_silence_ends_in_time() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert ask_plain(f"127.0.0.1:{listener.getsockname()[1]}", 0.3) is None
    assert ask_plain("no address", 0.3) is None
