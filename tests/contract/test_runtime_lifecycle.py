"""A daemon's life as a process: start, health, signals, exit codes, and a peer that goes silent."""

import asyncio
import json
import os
import signal
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from support.runtime_servicers import frame, serving

from radixmesh.daemons.runtime.rpc.channel import check_health, open_channel
from radixmesh.daemons.runtime.rpc.rpc_errors import mesh_error_from_rpc
from radixmesh.detokenizer.v1.detokenizer_pb2_grpc import DetokenizerServiceStub

_ROOT = Path(__file__).resolve().parents[2]
_ENVIRON = {**os.environ, "PYTHONPATH": f"{_ROOT}/src{os.pathsep}{_ROOT}/tests"}
_START_S = 30  # Two busy cores import slowly.


class Child:
    """A running small daemon and the lines that it logged."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.lines: list[dict[str, object]] = []

    async def until(self, event: str) -> dict[str, object]:
        """The next line of that event."""
        assert self._process.stderr is not None
        async with asyncio.timeout(_START_S):
            while text := await self._process.stderr.readline():
                if not self._keep(text):
                    continue
                if self.lines[-1]["event"] == event:
                    return self.lines[-1]
        raise AssertionError(f"no {event} in {self.lines}")

    def _keep(self, text: bytes) -> bool:
        is_ours = text.startswith(b"{")  # grpc's own core writes lines of another form.
        if is_ours:
            self.lines.append(json.loads(text))
        return is_ours

    def signal(self, signum: signal.Signals) -> None:
        self._process.send_signal(signum)

    async def exit_code(self) -> int:
        assert self._process.stderr is not None
        async with asyncio.timeout(60):
            rest = await self._process.stderr.read()
            for text in rest.splitlines():
                self._keep(text)
            return await self._process.wait()

    @property
    def events(self) -> list[object]:
        return [line["event"] for line in self.lines]


@asynccontextmanager
async def _running(name: str, *argv: str) -> AsyncIterator[Child]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "support.small_daemon", name, *argv, stderr=asyncio.subprocess.PIPE, env=_ENVIRON
    )
    try:
        yield Child(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _address(child: Child) -> str:
    addresses = (await child.until("listening"))["addresses"]
    assert isinstance(addresses, list)
    return str(addresses[0])


def _page(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read().decode()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_running_work_finish_and_leaves_with_zero(signum: signal.Signals, tmp_path: Path) -> None:
    addresses = tmp_path / "addresses"
    argv = (
        "--listen",
        f"unix:{tmp_path}/s,127.0.0.1:0",
        "--metrics-listen",
        "127.0.0.1:0",
        "--address-file",
        str(addresses),
    )
    async with _running("well", *argv) as child:
        listening = await child.until("listening")
        assert addresses.read_text().splitlines() == listening["addresses"]
        await child.until("serving")
        address = f"unix:{tmp_path}/s"
        assert await check_health(address) == "SERVING"
        assert "# TYPE radixmesh_errors_total counter" in await asyncio.to_thread(
            _page, f"http://{listening['metrics']}/metrics"
        )
        async with open_channel(address) as channel:
            call = DetokenizerServiceStub(channel).Detokenize()
            await call.write(frame(1))
            await call.read()
            child.signal(signum)
            await child.until("drain_called")
            assert await check_health(address) == "NOT_SERVING"
            await call.write(frame(2))
            assert (await call.read()).rows[0].handle == 2
            await call.done_writing()
            assert await call.code() is grpc.StatusCode.OK
        assert await child.exit_code() == 0
        assert child.events[-3:] == ["drained", "close_called", "left"]
        assert {(line["daemon"], line["instance"]) for line in child.lines} == {("well", listening["instance"])}
        assert os.listdir(tmp_path) == [], "sockets and address files are gone"


async def test_work_that_does_not_finish_is_cut_after_drain_s() -> None:
    async with _running("never_drains", "--drain-s", "0.3") as child:
        await child.until("serving")
        child.signal(signal.SIGTERM)
        assert await child.exit_code() == 4
        assert "drained_late" in child.events and "close_called" in child.events


async def test_a_second_signal_leaves_at_once() -> None:
    async with _running("never_drains") as child:
        await child.until("serving")
        child.signal(signal.SIGTERM)
        await child.until("drain_called")
        child.signal(signal.SIGTERM)
        assert await child.exit_code() == 130
        assert "close_called" not in child.events


async def test_a_daemon_that_loads_says_so_and_can_be_told_to_leave() -> None:
    async with _running("slow_load") as child:
        assert await check_health(await _address(child)) == "NOT_SERVING"
        child.signal(signal.SIGTERM)
        assert await child.exit_code() == 0
        assert "close_called" in child.events and "serving" not in child.events


@pytest.mark.parametrize(
    ("name", "code", "event", "words"),
    [
        ("bad_load", 3, "not_started", "BAD_CHECKPOINT: put the file there"),
        ("bug_in_load", 1, "crashed", "ZeroDivisionError"),
        ("task_fails", 1, "crashed", "the loop broke"),
    ],
)
async def test_a_failure_leaves_with_its_own_code_and_says_why(name: str, code: int, event: str, words: str) -> None:
    async with _running(name) as child:
        said = await child.until(event)
        assert words in json.dumps(said)
        assert await child.exit_code() == code
        assert "close_called" in child.events


async def test_a_taken_port_is_said_and_not_waited_for() -> None:
    async with _running("well") as first:
        address = await _address(first)
        async with _running("well", "--listen", address) as second:
            assert address in str((await second.until("not_started"))["error"])
            assert await second.exit_code() == 3


async def test_a_silent_peer_fails_its_streams_within_seconds() -> None:
    async with _running("well") as child:
        address = await _address(child)
        await child.until("serving")
        async with open_channel(address) as channel:
            call = DetokenizerServiceStub(channel).Detokenize()
            await call.write(frame(1))
            await call.read()
            child.signal(signal.SIGSTOP)
            stopped = time.monotonic()
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await asyncio.wait_for(call.read(), 60)
            assert mesh_error_from_rpc(failure.value).reason_name == "NO_REPLICA"
            # Five seconds and a round trip, on a machine that has time.
            assert time.monotonic() - stopped < 40
            child.signal(signal.SIGCONT)
            async with asyncio.timeout(60):
                # The old connection may take the first try down with it: a peer that is back is found by asking again.
                while not await _is_written(channel):
                    await asyncio.sleep(0.05)


async def _is_written(channel: grpc.aio.Channel) -> bool:
    try:
        await DetokenizerServiceStub(channel).Detokenize(timeout=20, wait_for_ready=True).write(frame(1))
    except grpc.aio.AioRpcError:
        return False
    return True


_SILENT_CLIENT = """
import asyncio, sys
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.detokenizer.v1.detokenizer_pb2_grpc import DetokenizerServiceStub
from support.runtime_servicers import frame

async def main():
    async with open_channel(sys.argv[1]) as channel:
        call = DetokenizerServiceStub(channel).Detokenize()
        await call.write(frame(1))
        await call.read()
        print("ready", flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_a_silent_client_loses_its_streams_within_seconds() -> None:
    async with serving() as bench:
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _SILENT_CLIENT, bench.address, stdout=asyncio.subprocess.PIPE, env=_ENVIRON
        )
        try:
            assert client.stdout is not None
            assert await asyncio.wait_for(client.stdout.readline(), _START_S) == b"ready\n"
            client.send_signal(signal.SIGSTOP)
            await asyncio.wait_for(bench.detokenizer.closed.wait(), 60)
        finally:
            client.kill()
            await client.wait()


async def test_pings_of_an_idle_channel_do_not_close_it() -> None:
    # Three times as often as our channels ping: grpc's default server answers the sixth with GOAWAY too_many_pings.
    options = (("grpc.keepalive_time_ms", 600), ("grpc.http2.max_pings_without_data", 0))
    async with _running("well") as child, grpc.aio.insecure_channel(await _address(child), options) as channel:
        call = DetokenizerServiceStub(channel).Detokenize()
        await call.write(frame(1))
        await call.read()
        await asyncio.sleep(5)
        await call.write(frame(2))
        assert (await call.read()).rows[0].handle == 2
