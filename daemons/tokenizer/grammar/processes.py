"""A compiler process as the daemon sees it."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

from radixmesh.common.v1 import common_pb2
from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.guided.source import GrammarSource, invalid_grammar
from radixmesh.daemons.tokenizer.grammar.compiler_process import HEAD

_MODULE = "radixmesh.daemons.tokenizer.grammar.compiler_process"
# It imports torch and transformers, and sorts the vocabulary.
_START_S = 120.0
_MAX_READY_BYTES = 64 << 10


class CompilerProcessEnded(Exception):
    """It is gone, by the compilation that it was given or by somebody's hand."""


class CompilerProcess:
    """One process and the socket to it; one compilation at a time."""

    format = ""

    def __init__(self, process: subprocess.Popen[bytes], link: socket.socket) -> None:
        self._process = process
        self._link = link

    @classmethod
    async def start(cls, folder: Path, backend: str, memory_bytes: int, timeout_s: float) -> CompilerProcess:
        """Raises MeshError: what the process says of its library, or NOT_SERVING."""
        found = cls(*await asyncio.to_thread(_spawn, [str(folder), backend], [str(memory_bytes), str(timeout_s)]))
        try:
            async with asyncio.timeout(_START_S):
                found.format = (await found._answer(_MAX_READY_BYTES)).decode()
        except BaseException as error:
            found.close()
            if isinstance(error, TimeoutError | CompilerProcessEnded):
                raise _not_started("it ended, or took too long") from error
            raise
        return found

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    async def compile(self, source: GrammarSource, max_bytes: int) -> bytes:
        """The artefact, at most so large. Raises MeshError INVALID_GRAMMAR, CompilerProcessEnded."""
        payload = source.to_bytes()
        try:
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(self._link, HEAD.pack(len(payload), b"J"))
            await loop.sock_sendall(self._link, payload)
        except OSError as error:
            raise CompilerProcessEnded from error
        return await self._answer(max_bytes)

    def close(self) -> None:
        """Kills it: what it compiles is lost."""
        self._link.close()
        self._process.kill()
        # A killed process is gone within a moment; nobody else would fetch its end.
        asyncio.get_running_loop().run_in_executor(None, self._process.wait)

    async def _answer(self, max_bytes: int) -> bytes:
        length, letter = HEAD.unpack(await self._receive(HEAD.size))
        if length > max_bytes:
            message = f"the compiled grammar has {length} bytes, {max_bytes} at most: simplify it"
            raise invalid_grammar(message, "artefact_bytes")
        payload = await self._receive(length)
        if letter == b"X":
            raise MeshError.from_proto(common_pb2.Error.FromString(payload))
        return payload

    async def _receive(self, size: int) -> bytes:
        loop = asyncio.get_running_loop()
        data = bytearray(size)
        view, start = memoryview(data), 0
        while start < size:
            try:
                num = await loop.sock_recv_into(self._link, view[start:])
            except OSError as error:
                raise CompilerProcessEnded from error
            if not num:
                raise CompilerProcessEnded
            start += num
        return bytes(data)


def _spawn(before: list[str], after: list[str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """before, after: arguments around the descriptor. Raises NOT_SERVING."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with theirs:
        try:
            process = subprocess.Popen(
                # -P: the daemon's folder is no place to import from.
                [sys.executable, "-P", "-m", _MODULE, *before, str(theirs.fileno()), *after],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # The library prints warnings for every schema.
            )
        except OSError as error:
            ours.close()
            raise _not_started(str(error)) from error
    return process, ours


def _not_started(why: str) -> MeshError:
    message = f"no process that compiles grammars can be started ({why}): retry later, or on another replica"
    return MeshError(ErrorReason.ERROR_REASON_NOT_SERVING, message)
