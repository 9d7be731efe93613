"""A socket in the run folder by which verbs ask the supervisor for something: rolls, so far.

One request a connection, one JSON object a line. Request: {"roll": [service, ...], "ready_s": seconds, "try": bool}.
Answers: {"process": name, "what": word, "seconds": number}, ..., and last {"replaced": [name, ...]} or {"error": text}.
A client that leaves ends the roll after the step that it is at. The folder is ours alone, so nobody else can connect.
"""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from radixmesh.daemons.cluster.errors import ClusterError, NotRunningError, RollAbortedError, RollRefusedError
from radixmesh.daemons.cluster.roll.roller import RollEvent
from radixmesh.daemons.cluster.run_folder import opened

_SOCKET = "control.sock"
_MAX_LINE_BYTES = 1 << 20
_ASK_S = 10.0


class Roll(Protocol):
    """A roll under way."""

    def end(self) -> None: ...

    def run(self) -> Awaitable[list[str]]: ...


MakeRoll = Callable[[Sequence[str], float, bool, Callable[[RollEvent], None]], Roll]


class ControlServer:
    """start(), then close(). make_roll(services, ready_s, is_trying, on_event) raises ClusterError."""

    def __init__(self, folder: Path, make_roll: MakeRoll) -> None:
        self._folder = folder
        self._make_roll = make_roll
        self._server: asyncio.Server | None = None
        self._answering: set[asyncio.Task[None]] = set()
        self._is_rolling = False

    async def start(self) -> None:
        with _socket_path(self._folder) as path:
            self._server = await asyncio.start_unix_server(self._answer, path, limit=_MAX_LINE_BYTES)
            os.chmod(path, 0o600)

    async def close(self) -> None:
        """Ends the roll that is under way."""
        if self._server is None:
            return
        self._server.close()
        (self._folder / _SOCKET).unlink(missing_ok=True)
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        try:
            answer = await self._serve(reader, writer)
            writer.write(_line(answer))
            with suppress(OSError):
                await writer.drain()
        finally:
            self._answering.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Mapping[str, object]:
        try:
            async with asyncio.timeout(_ASK_S):
                request = json.loads(await reader.readline())
            services, ready_s, is_trying = request["roll"], float(request["ready_s"]), bool(request["try"])
        except (TimeoutError, ValueError, KeyError, TypeError):
            return {"error": "this is no request that the supervisor knows: it runs another version of radixmesh"}
        if self._is_rolling:
            return {"error": "another roll is under way: wait until it is done"}
        self._is_rolling = True
        try:
            roll = self._make_roll(services, ready_s, is_trying, lambda event: writer.write(_line(event._asdict())))
            watching = asyncio.ensure_future(_end_when_left(reader, roll))
            try:
                return {"replaced": await roll.run()}
            finally:
                watching.cancel()
        except ClusterError as error:
            return {"error": str(error), "refused": not isinstance(error, RollAbortedError)}
        finally:
            self._is_rolling = False


def ask_for_roll(
    folder: Path, services: Sequence[str], *, ready_s: float, is_trying: bool, on_event: Callable[[RollEvent], None]
) -> list[str]:
    """Asks the supervisor that holds `folder`; names of the replaced processes.

    Raises NotRunningError if it does not listen, RollRefusedError if nothing was done, RollAbortedError.
    """
    return asyncio.run(_ask(folder, services, ready_s, is_trying, on_event))


async def _ask(
    folder: Path, services: Sequence[str], ready_s: float, is_trying: bool, on_event: Callable[[RollEvent], None]
) -> list[str]:
    try:
        with _socket_path(folder) as path:
            reader, writer = await asyncio.open_unix_connection(path, limit=_MAX_LINE_BYTES)
    except OSError as error:
        raise NotRunningError(
            f"the supervisor of {folder} cannot be asked ({error.strerror}): one of an older version cannot roll, "
            "stop and start that cluster"
        ) from error
    try:
        writer.write(_line({"roll": list(services), "ready_s": ready_s, "try": is_trying}))
        while line := await reader.readline():
            answer = json.loads(line)
            if "process" in answer:
                on_event(RollEvent(**answer))
            elif "replaced" in answer:
                return [str(name) for name in answer["replaced"]]
            else:
                raise (RollRefusedError if answer.get("refused", True) else RollAbortedError)(answer["error"])
    finally:
        writer.close()
    raise RollAbortedError("the supervisor has ended: 'radixmesh logs' may say why")


async def _end_when_left(reader: asyncio.StreamReader, roll: Roll) -> None:
    await reader.read()
    roll.end()


def _line(content: Mapping[str, object]) -> bytes:
    return json.dumps(content).encode() + b"\n"


@contextmanager
def _socket_path(folder: Path) -> Iterator[str]:
    """A path to the socket that is short enough for one (108 bytes), however deep the folder is."""
    with opened(folder) as handle:
        by_handle = Path(f"/proc/self/fd/{handle}")
        yield str((by_handle if by_handle.exists() else folder) / _SOCKET)
