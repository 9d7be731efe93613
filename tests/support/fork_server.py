"""Daemons of a mesh, forked from a process that has imported what they import.

The imports of a daemon take a second of CPU time, those of a worker with torch three: much of what the daily suite
would compute on two cores. `tests/run_tests.py daily` asks for it (TESTS_FORK_DAEMONS); all other runs start their
daemons as users do, and so do the tests of the CLI, of compose files and of daemons as modules in the daily suite.

    tests    --- arguments of `radixmesh`, folder, environment, descriptors of output and reply --->    server
             <--- on the reply's socket: pid, then the wait status ---

A forked daemon has a session and a group of its own, dies with the server, which dies with the tests, and gets signals
by its pid: what a supervisor sees of a process that it started itself.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from radixmesh.daemons.cluster.plan import ProcessSpec

_TESTS = Path(__file__).parents[1]
_CLI = ["-m", "radixmesh.cli"]
_DAEMONS = ("worker", "scheduler", "router", "tokenizer", "detokenizer")
_MAX_REQUEST_BYTES = 1 << 17
_PR_SET_PDEATHSIG = 1
# Beside the daemons' own modules: what they import while they load, and first calls would import.
_WITH_TORCH = (
    "torch",
    "radixmesh.daemons.worker.cpu.load",
    "radixmesh.daemons.worker.cpu.attention.paged_torch",
    "radixmesh.daemons.worker.models.deepseek.family",
    "radixmesh.daemons.worker.models.llama",
    "radixmesh.daemons.runtime.guided.xgrammar_backend",
)
_WITHOUT_TORCH = ("tokenizers", "radixmesh.daemons.runtime.detokenize.byte_level")


class ForkedProcess:
    """As asyncio's Process, of a daemon that the server forked."""

    def __init__(self, pid: int, reply: socket.socket) -> None:
        self.pid, self._reply = pid, reply
        self.returncode: int | None = None
        self._ended = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> int:
        # Nothing comes where the server is gone, which took the daemon with it.
        status = await asyncio.get_running_loop().sock_recv(self._reply, 64)
        self.returncode = os.waitstatus_to_exitcode(int(status)) if status else -signal.SIGKILL
        self._reply.close()
        return self.returncode

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)


class ForkServer:
    """One process of this module, begun when the first daemon is asked for."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = modules
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None

    async def start(
        self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], output: int
    ) -> ForkedProcess:
        """A daemon of `radixmesh` with these arguments, its stdout and stderr the descriptor `output`."""
        requests = self._requests or self._begin()
        # Messages, not a stream: the end of a daemon that fails at once may lie behind its pid before that is read.
        reply, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        request = {"arguments": list(arguments), "folder": str(folder), "environment": dict(environment)}
        with theirs:
            socket.send_fds(requests, [json.dumps(request).encode()], [output, theirs.fileno()])
        reply.setblocking(False)
        pid = await asyncio.get_running_loop().sock_recv(reply, 64)
        assert pid, "the fork server is gone"
        return ForkedProcess(int(pid), reply)

    def _begin(self) -> socket.socket:
        self._requests, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        self._requests.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _MAX_REQUEST_BYTES)
        command = [sys.executable, "-m", "support.fork_server", str(theirs.fileno()), str(os.getpid()), *self._modules]
        search_path = [str(_TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search_path)}
        with theirs:
            self._process = subprocess.Popen(
                command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        return self._requests


_SERVERS = {
    name: ForkServer(
        (*_WITH_TORCH, "radixmesh.daemons.worker.__main__")
        if name == "worker"
        else (*_WITHOUT_TORCH, *(f"radixmesh.daemons.{other}.__main__" for other in _DAEMONS if other != "worker"))
    )
    for name in ("worker", "other")
}


def server_of(argv: Sequence[str], added: Mapping[str, str]) -> ForkServer | None:
    """The server that forks what a command starts; None: it is started as ever. added: its own variables; others than
    those of settings may be read by imports."""
    is_daemon = list(argv[:3]) == [sys.executable, *_CLI] and len(argv) > 3 and argv[3] in _DAEMONS
    if not is_daemon or any(not name.startswith("RADIXMESH_") for name in added):
        return None
    return _SERVERS["worker" if argv[3] == "worker" else "other"]


def fork_daemons() -> None:
    """From now on meshes of this process have forked daemons."""
    from radixmesh.daemons.cluster.processes import child_process

    start = child_process.start

    async def fork(spec: ProcessSpec, folder: Path, environment: Mapping[str, str], output: int) -> Any:
        server = server_of(spec.argv, spec.environment)
        if server is None:
            return await start(spec, folder, environment, output)
        return await server.start(spec.argv[3:], folder, environment, output)

    child_process.start = fork


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _serve(requests: socket.socket) -> None:
    """Returns in a daemon that was forked, which has become what was asked for."""
    server, replies = os.getpid(), dict[int, socket.socket]()
    woken, wakes = socket.socketpair()
    woken.setblocking(False)
    wakes.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if woken in ready:
                woken.recv(4096)
                while replies and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    with replies.pop(ended[0]) as reply:
                        _send(reply, ended[1])
            if requests not in ready:
                continue
            message, descriptors, _, _ = socket.recv_fds(requests, _MAX_REQUEST_BYTES, 2)
            if not message:
                # Nobody is left to ask: the daemons die with this process.
                os._exit(0)
            output, reply = descriptors[0], socket.socket(fileno=descriptors[1])
            if pid := os.fork():
                os.close(output)
                replies[pid] = reply
                _send(reply, pid)
                continue
            _die_with(server)
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for held in (requests, woken, wakes, reply, *replies.values()):
                held.close()
            _become(json.loads(message), output)
            return


def _send(reply: socket.socket, number: int) -> None:
    # The test that asked may have ended.
    with suppress(OSError):
        reply.send(str(number).encode())


def _become(request: Mapping[str, object], output: int) -> None:
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.chdir(str(request["folder"]))
    environment, arguments = request["environment"], request["arguments"]
    assert isinstance(environment, dict) and isinstance(arguments, list)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["radixmesh", *arguments]


def _main() -> int:
    descriptor, parent, modules = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    _die_with(parent)
    # Ctrl-C is for the tests, which end this process by ending.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in modules:
        importlib.import_module(module)
    cli = importlib.import_module("radixmesh.cli.__main__")
    gc.collect()
    gc.freeze()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=True)  # type: ignore[union-attr]
    _serve(socket.socket(fileno=descriptor))
    return int(cli.main())


if __name__ == "__main__":
    sys.exit(_main())
