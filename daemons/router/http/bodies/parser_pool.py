"""Processes that parse large bodies for the router: a parser holds the interpreter's lock, in whatever thread it runs.

Started when they are first needed, by exec of a new interpreter: a fork would copy gRPC's threads half.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.daemons.runtime.telemetry.logs import get_logger

log = get_logger(__name__)

_MODULE = "radixmesh.daemons.router.http.bodies.parser_process"
# As in parser_process.py, which is too much to import here.
_HEAD = struct.Struct("<Ic")
_WRITE_BYTES = 256 << 10
_M = TypeVar("_M")


class ParserPool:
    """max_body_bytes: of the largest body. num_processes: at most so many run. timeout_s: for one body, from its turn
    on; then its process is killed. idle_s: after so long without work a process ends."""

    def __init__(
        self, *, max_body_bytes: int, num_processes: int = 2, timeout_s: float = 30.0, idle_s: float = 60.0
    ) -> None:
        self._max_body_bytes = max_body_bytes
        self.timeout_s = timeout_s
        self._idle_s = idle_s
        self._turn = asyncio.Semaphore(num_processes)
        self.idle: list[_ParserProcess] = []
        self._reaper: asyncio.TimerHandle | None = None

    async def parse(
        self, parts: list[bytes], size: int, kind: str, contexts: Mapping[str, int], make: Callable[[bytearray], _M]
    ) -> tuple[dict[str, object], list[_M]]:
        """The body's fields, and what `make` makes of its messages. Takes the parts: the list is empty then.

        Raises MeshError: what is wrong with the body, or NOT_SERVING when its process died of it or of something
        else, or took too long.
        """
        job = {"kind": kind, "size": size, "contexts": dict(contexts)}
        async with self._turn:
            process = self._take_process(job)
            is_whole = False
            try:
                async with asyncio.timeout(self.timeout_s):
                    await process.send(msgspec.msgpack.encode(job), parts)
                    answer = await _read_answer(process, make)
                is_whole = True
            except TimeoutError as error:
                raise self._lost(f"took more than {self.timeout_s:g} s", job) from error
            except OSError as error:
                raise self._lost("ended", job) from error
            finally:
                # After anything else its socket holds half an answer.
                if is_whole:
                    self._keep(process)
                else:
                    process.close()
        if isinstance(answer, MeshError):
            raise answer
        return answer

    def _take_process(self, job: Mapping[str, object]) -> _ParserProcess:
        """One that waits, or a new one. Raises NOT_SERVING where none can be started."""
        while self.idle:
            process = self.idle.pop()
            if process.is_alive:
                return process
            process.close()  # Killed while it waited, for want of memory for one.
        try:
            return _ParserProcess(self._max_body_bytes)
        except OSError as error:
            raise self._lost(f"cannot be started ({error})", job) from error

    def close(self) -> None:
        """Ends the processes that have nothing to do; the others end with their body."""
        for process in self.idle:
            process.close()
        self.idle = []
        if self._reaper is not None:
            self._reaper.cancel()

    def _lost(self, why: str, header: Mapping[str, object]) -> MeshError:
        log.warning("body_parser_lost", why=why, kind=header["kind"], size=header["size"])
        message = f"the process that parses this body {why}: retry later, or send less at once"
        return MeshError(ErrorReason.ERROR_REASON_NOT_SERVING, message)

    def _keep(self, process: _ParserProcess) -> None:
        process.idle_since = time.monotonic()
        self.idle.append(process)
        if self._reaper is None:
            self._reaper = asyncio.get_running_loop().call_later(self._idle_s, self._reap)

    def _reap(self) -> None:
        self._reaper = None
        now = time.monotonic()
        kept = [process for process in self.idle if now - process.idle_since < self._idle_s]
        for process in self.idle:
            if process not in kept:
                process.close()
        self.idle = kept
        if kept:
            self._reaper = asyncio.get_running_loop().call_later(self._idle_s, self._reap)


class _ParserProcess:
    """A process and the socket to it. idle_since: on the monotonic clock."""

    def __init__(self, max_body_bytes: int) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            try:
                # -P: the router's folder is no place to import from.
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", _MODULE, str(theirs.fileno()), str(max_body_bytes)],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
            except OSError:
                self._socket.close()
                raise
        self._socket.setblocking(False)
        self.idle_since = 0.0

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    async def send(self, header: bytes, parts: list[bytes]) -> None:
        """Empties parts as they go."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._socket, _HEAD.pack(len(header), b"J") + header)
        parts.reverse()
        while parts:
            part = memoryview(parts.pop())
            for start in range(0, len(part), _WRITE_BYTES):
                await loop.sock_sendall(self._socket, part[start : start + _WRITE_BYTES])

    async def frame(self) -> tuple[bytes, bytearray]:
        """Letter and payload. Raises ConnectionError once the process is gone."""
        head = await self._receive(_HEAD.size)
        length, letter = _HEAD.unpack(head)
        return letter, await self._receive(length)

    def close(self) -> None:
        """Kills it: a process that waits has nothing to lose."""
        self._socket.close()
        self._process.kill()
        # A killed process is gone within a moment; nobody else would fetch its end.
        asyncio.get_running_loop().run_in_executor(None, self._process.wait)

    async def _receive(self, size: int) -> bytearray:
        loop = asyncio.get_running_loop()
        data = bytearray(size)
        view, start = memoryview(data), 0
        while start < size:
            num = await loop.sock_recv_into(self._socket, view[start:])
            if not num:
                raise ConnectionResetError("the parser's process is gone")
            start += num
        return data


async def _read_answer(
    process: _ParserProcess, make: Callable[[bytearray], _M]
) -> tuple[dict[str, object], list[_M]] | MeshError:
    fields: dict[str, object] = {}
    messages: list[_M] = []
    while True:
        letter, payload = await process.frame()
        if letter == b"E":
            return fields, messages
        if letter == b"X":
            return MeshError.from_proto(common_pb2.Error.FromString(bytes(payload)))
        if letter == b"B":
            fields = msgspec.msgpack.decode(payload, type=dict[str, object])
        else:
            messages.append(make(payload))
            # A thousand messages that are there already are no reason to keep the loop.
            await asyncio.sleep(0)
