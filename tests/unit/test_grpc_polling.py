"""gRPC's threads in a daemon: messages wake the one that waits for them, and no event engine's."""

import os
import subprocess
import sys

import pytest

DAEMONS = ("detokenizer", "front", "router", "scheduler", "tokenizer", "worker")
_CALLS = 100

# A server and a client in one process, calls with pauses between them as at low load; prints how often threads of the
# event engine were woken by the calls: more than in as long a time without calls, in which only timers wake them.
_PROGRAM = f"""
import asyncio, importlib, sys, time
from pathlib import Path
importlib.import_module("radixmesh.daemons." + sys.argv[1])
assert "grpc" not in sys.modules, "its environment is read by then"
import grpc

def woken():
    total = 0
    for task in Path("/proc/self/task").iterdir():
        lines = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
        if lines["Name"].strip().startswith("event_engine"):
            total += int(lines["voluntary_ctxt_switches"])
    return total

async def main():
    async def answer(message, context):
        return message
    handler = grpc.unary_unary_rpc_method_handler(answer)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Test", {{"Echo": handler}}),))
    address = "unix:" + sys.argv[2]
    server.add_insecure_port(address)
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        echo = channel.unary_unary("/Test/Echo")
        await echo(b"x")
        before, began = woken(), time.monotonic()
        for _ in range({_CALLS}):
            await asyncio.sleep(0.002)
            await echo(b"x")
        by_calls, took = woken() - before, time.monotonic() - began
        before = woken()
        await asyncio.sleep(took)
        print(by_calls - (woken() - before))
    await server.stop(0)

asyncio.run(main())
"""


def _woken(daemon: str, folder: os.PathLike[str], **environment: str) -> int:
    kept = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    command = [sys.executable, "-c", _PROGRAM, daemon, os.path.join(folder, "socket")]
    done = subprocess.run(command, env=kept | environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout)


@pytest.mark.parametrize("daemon", DAEMONS)
def test_calls_wake_no_threads_of_an_event_engine(daemon: str, tmp_path: os.PathLike[str]) -> None:
    assert _woken(daemon, tmp_path) < _CALLS // 2


def test_an_environment_that_says_otherwise_is_followed(tmp_path: os.PathLike[str]) -> None:
    assert _woken("router", tmp_path, GRPC_EXPERIMENTS="event_engine_client") > _CALLS
