"""Daemons as processes of their own, for a while."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from radixmesh.daemons.runtime.rpc.channel import check_health

ROOT = Path(__file__).parents[2]
_DIE_WITH_PARENT = ROOT / "daemons" / "cluster" / "processes" / "die_with_parent.py"
_START_S = 60.0
_STOP_S = 10.0


class Processes:
    """An async context manager that kills what it started.

    transport: "unix" or "tcp", what the daemons listen on. start_s: how long a daemon
    may take to serve. folder: for sockets and logs. addresses: by name. cores_each: every process gets so many cores
    that are no other daemon's, while there are some; None: all have all.
    """

    def __init__(
        self, folder: Path, transport: str, *, start_s: float = _START_S, cores_each: int | None = None
    ) -> None:
        self._folder = folder
        self._cores = sorted(os.sched_getaffinity(0))
        self._cores_each = cores_each
        self._transport = transport
        self._start_s = start_s
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.addresses: dict[str, list[str]] = {}

    async def __aenter__(self) -> Processes:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in reversed(self._running.values()):
            process.terminate()
        for process in self._running.values():
            try:
                await asyncio.to_thread(process.wait, _STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    async def stop(self, name: str) -> None:
        """Tells one daemon to leave and waits for it."""
        process = self._running.pop(name)
        process.terminate()
        await asyncio.to_thread(process.wait, _STOP_S)

    def pid(self, name: str) -> int:
        return self._running[name].pid

    def address(self, name: str) -> str:
        return self.addresses[name][0]

    async def start(
        self,
        name: str,
        daemon: str,
        flags: Mapping[str, object],
        *,
        has_both: bool = False,
        through: Sequence[str] = ("-m",),
    ) -> None:
        """Returns once it serves. has_both: it listens on a unix socket (first) and on TCP. through: the interpreter's
        arguments ahead of the daemon's module, such as a script that records it.

        Raises RuntimeError with the end of its log if it does not.
        """
        listen = {"unix": f"unix:{self._folder}/{name}", "tcp": "127.0.0.1:0"}
        chosen = ",".join(listen.values()) if has_both else listen[self._transport]
        address_file, log_file = self._folder / f"{name}.address", self._folder / f"{name}.log"
        values = {"listen": chosen, "address-file": address_file, "log-level": "error", **flags}
        command = [sys.executable, *through, f"radixmesh.daemons.{daemon}"]
        for flag, value in values.items():
            name_of = flag.replace("_", "-")
            if isinstance(value, bool):
                command.append(f"--{name_of}" if value else f"--no-{name_of}")
            else:
                command += [f"--{name_of}", str(value)]
        self._running[name] = _start(command, log_file)
        if self._cores_each is not None and len(self._cores) >= self._cores_each:
            # It has one thread yet, of which all others inherit this.
            cores, self._cores = self._cores[: self._cores_each], self._cores[self._cores_each :]
            os.sched_setaffinity(self._running[name].pid, cores)
        deadline = time.monotonic() + self._start_s
        while not address_file.exists() or await check_health(address_file.read_text().split()[0]) != "SERVING":
            if self._running[name].poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{name} does not serve:\n{log_file.read_text()[-4000:]}")
            await asyncio.sleep(0.05)
        self.addresses[name] = address_file.read_text().split()


def cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process so far; in steps of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _start(command: Sequence[str], log_file: Path) -> subprocess.Popen[bytes]:
    with log_file.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-IS", str(_DIE_WITH_PARENT), str(os.getpid()), *command],
            env={**os.environ, "PYTHONPATH": _python_path(), "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _python_path() -> str:
    """This tree first, then what this process's own says."""
    return os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH", ""))))
