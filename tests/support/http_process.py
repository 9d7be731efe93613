"""A router in a process of its own that serves HTTP and has no peers, for tests of what a connection may do."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from support.containers import free_port
from support.running_daemon import process_of

DEADLINE_S = 60.0
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@dataclass(frozen=True, slots=True)
class HttpProcess:
    port: int
    pid: int

    @asynccontextmanager
    async def connection(
        self, tls: ssl.SSLContext | None = None
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A socket and nothing else; encrypted, or not."""
        name = "localhost" if tls else None
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=tls, server_hostname=name)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def answer(self, request: bytes, tls: ssl.SSLContext | None = None) -> bytes:
        """All that comes back on a connection of its own, which the server ends.

        Of a request beyond what the server discards, the end may be a reset, after the answer.
        """
        answer = b""
        async with asyncio.timeout(DEADLINE_S), self.connection(tls) as (reader, writer):
            writer.write(request)
            with suppress(ConnectionError):
                while block := await reader.read(1 << 16):
                    answer += block
        return answer

    async def health_s(self, tls: ssl.SSLContext | None = None) -> float:
        """Seconds that GET /health takes on a connection of its own."""
        start = time.monotonic()
        async with asyncio.timeout(DEADLINE_S), self.connection(tls) as (reader, writer):
            writer.write(HEALTH)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        return time.monotonic() - start

    def memory_bytes(self) -> int:
        """Resident set size."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) * 1024


@asynccontextmanager
async def http_process(
    folder: Path, *flags: str, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
) -> AsyncIterator[HttpProcess]:
    """Runs `radixmesh router` with the flags. tls: what /health is asked under until it answers."""
    port = free_port()
    argv = ["--http-listen", f"{host}:{port}", *flags]
    async with process_of("radixmesh.daemons.router", argv, folder / "address", pid_file := folder / "pid"):
        process = HttpProcess(port, int(pid_file.read_text()))
        async with asyncio.timeout(DEADLINE_S):
            while True:
                try:
                    await process.health_s(tls)
                    break
                except (OSError, AssertionError):
                    await asyncio.sleep(0.02)
        yield process
