"""One running process of the cluster: started in a process group of its own, its output read line by line."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from radixmesh.daemons.cluster.errors import SpawnError
from radixmesh.daemons.cluster.plan import ProcessSpec
from radixmesh.daemons.cluster.processes import die_with_parent

_MAX_LINE_BYTES = 64 * 1024
_LAST_OUTPUT_S = 0.5


class ChildProcess:
    """Made by `spawn`. The group dies with the process, so that its own children never outlive a restart."""

    def __init__(self, process: asyncio.subprocess.Process, output: "asyncio.Task[None]") -> None:
        self._process = process
        self._output = output

    @classmethod
    async def spawn(cls, spec: ProcessSpec, folder: Path, on_line: Callable[[str], None]) -> "ChildProcess":
        """Starts `spec` in `folder`; every line of its stdout and stderr goes to `on_line`. Raises SpawnError."""
        # A pipe of our own: with asyncio's, some versions do not report the end of a process while a child of it still
        # holds the other end.
        read_end, write_end = os.pipe()
        output = asyncio.create_task(_forward_lines(read_end, on_line))
        try:
            process = await start(spec, folder, _environment(os.environ, spec.environment), write_end)
        except (OSError, ValueError) as error:
            raise SpawnError(f"{spec.name}: {error}") from error
        finally:
            # Without a process this ends the reader as well.
            os.close(write_end)
        return cls(process, output)

    @property
    def pid(self) -> int:
        """The process id, which is the id of its group too."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that killed it."""
        return self._process.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Signals the process alone; nothing happens if it has ended."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def wait(self) -> int:
        """Waits for the end, clears up what is left of the group and of the output, and returns the exit code."""
        exit_code = await self._process.wait()
        _kill_group(self.pid)
        # Someone outside the group may still hold the pipe open; what it writes is not ours.
        await asyncio.wait([self._output], timeout=_LAST_OUTPUT_S)
        self._output.cancel()
        return exit_code

    async def kill(self) -> int:
        """Kills process and group, and waits. Safe at any time; a stopped process dies as well."""
        _kill_group(self.pid)
        return await self.wait()

    async def stop(self, grace_s: float, hurry_s: float | None = None) -> int:
        """Asks it to finish (SIGTERM), and kills it after `grace_s` seconds.

        hurry_s: seconds after which it is asked once more; our daemons then leave at once.
        """
        self.send_signal(signal.SIGTERM)
        # One that was stopped would never see the request.
        self.send_signal(signal.SIGCONT)
        if hurry_s is not None:
            with suppress(TimeoutError):
                return await asyncio.wait_for(self.wait(), hurry_s)
            self.send_signal(signal.SIGTERM)
        try:
            return await asyncio.wait_for(self.wait(), grace_s)
        except TimeoutError:
            return await self.kill()


async def start(
    spec: ProcessSpec, folder: Path, environment: Mapping[str, str], output: int
) -> asyncio.subprocess.Process:
    """A process in a session of its own, so that Ctrl-C at the terminal reaches the supervisor alone, which stops the
    daemons in order. Raises OSError or ValueError."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid())),
        *spec.argv,
        cwd=folder,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )


def _environment(inherited: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    # A container would not see the settings of the shell that started it; only the file's own count.
    environment = {name: value for name, value in inherited.items() if not name.startswith("RADIXMESH_")}
    import_root = Path(__file__).absolute().parents[4]
    search_path = [
        str(Path(entry).absolute()) for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry
    ]
    if import_root.name != "site-packages" and str(import_root) not in search_path:
        search_path.insert(0, str(import_root))
    if search_path:
        environment["PYTHONPATH"] = os.pathsep.join(search_path)
    environment["PYTHONUNBUFFERED"] = "1"
    return environment | dict(added)


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


async def _forward_lines(read_end: int, on_line: Callable[[str], None]) -> None:
    stream = asyncio.StreamReader()
    pipe = os.fdopen(read_end, "rb", buffering=0)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), pipe
    )
    try:
        pending = b""
        while chunk := await stream.read(_MAX_LINE_BYTES):
            *lines, pending = (pending + chunk).split(b"\n")
            if len(pending) > _MAX_LINE_BYTES:
                lines, pending = [*lines, pending], b""
            for line in lines:
                on_line(line.decode(errors="replace").rstrip("\r"))
        if pending:
            on_line(pending.decode(errors="replace"))
    finally:
        transport.close()
