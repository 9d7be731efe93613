"""The end of a worker of a group as a process: its status, its last results and its last log lines."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import torch.distributed as dist
from support.cpu_ranks import MODELS
from support.plans import first_plan
from support.running_daemon import SOURCES
from support.worker_client import WorkerClient

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rank_layout import RankLayout
from radixmesh.worker.v1 import worker_pb2

START_S = 60.0
# Half of what gloo takes to give a meeting up.
END_S = 30.0
# Threads that meet others, and seconds between the cuts of their connections: some come while the interpreter ends.
NUM_MEETINGS, CUT_S = 12, 0.02


class GroupWorker:
    """One rank of two, which is told to leave."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.events: list[str] = []
        self.address = ""

    async def until(self, event: str) -> dict[str, object]:
        """The next line of that event."""
        async with asyncio.timeout(START_S):
            while (line := await self._line()) and line["event"] != event:
                pass
        assert line, (event, self.events)
        return line

    def leave(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    async def status(self) -> int:
        """Of its exit, with all that it logged before."""
        async with asyncio.timeout(END_S):
            while await self._line():
                pass
            return await self._process.wait()

    async def _line(self) -> dict[str, object]:
        """Empty: the worker has closed its log."""
        assert self._process.stderr is not None
        while text := await self._process.stderr.readline():
            if text.startswith(b"{"):
                line: dict[str, object] = json.loads(text)
                self.events.append(str(line["event"]))
                return line
        return {}


@asynccontextmanager
async def group_worker(*argv: str) -> AsyncIterator[GroupWorker]:
    command = [sys.executable, "-m", "radixmesh.daemons.worker", "--listen", "127.0.0.1:0", "--num-pages", "64", *argv]
    environ = {**os.environ, "PYTHONPATH": str(SOURCES)}
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, env=environ)
    try:
        worker = GroupWorker(process)
        worker.address = str((await worker.until("serving"))["addresses"][0])  # type: ignore[index]
        yield worker
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def fence(client: WorkerClient) -> None:
    await client.greet()
    await client.send(worker_pb2.ExecuteRequest(fence=worker_pb2.Fence(epoch=1)))
    response = await client.read()
    assert response is not None and response.fenced.epoch == 1


def form_request(layout: RankLayout, rendezvous: str = "", generation: int = 1) -> worker_pb2.FormGroupRequest:
    return worker_pb2.FormGroupRequest(
        epoch=1,
        instance_id="s",
        generation=generation,
        layout=layout.to_proto(),
        rendezvous=rendezvous,
        member_instance_ids=["a", "b"],
    )


class StoreProxy:
    """A group's store behind connections that are cut when the test says so."""

    def __init__(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        self._pumps: list[asyncio.Task[None]] = []
        self.connections: list[asyncio.StreamWriter] = []

    async def open(self) -> str:
        """Its address."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        store_reader, store_writer = await asyncio.open_connection("127.0.0.1", self._store.port)
        self.connections.append(writer)
        self._pumps += [asyncio.create_task(_pump(*ends)) for ends in ((reader, store_writer), (store_reader, writer))]


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
    finally:
        writer.close()


async def test_a_step_that_runs_is_answered_before_the_process_ends() -> None:
    simulated = ("--backend", "simulated", "--simulated-base-us", "3000000", "--dp-size", "2")
    async with group_worker(*simulated) as worker, WorkerClient(worker.address, "s") as client:
        await fence(client)
        await client.stub.FormGroup(form_request(RankLayout(dp_size=2)), timeout=START_S)
        await client.send(worker_pb2.ExecuteRequest(claim=worker_pb2.Claim(epoch=1, group_generation=1)))
        response = await client.read()
        assert response is not None and response.claimed.epoch == 1
        await client.plan(replace(first_plan(), group_generation=1))
        # Nothing says that a step has begun; a plan that comes behind the signal is refused.
        await asyncio.sleep(1.0)
        worker.leave()
        assert (await client.result()).step_id == 1
        with pytest.raises(MeshError, match="the worker leaves"):
            await client.read()
        assert await worker.status() == 0
    assert worker.events[-2:] == ["drained", "left"]


async def test_a_rank_whose_threads_still_meet_others_leaves_with_zero() -> None:
    """gloo aborts a process that ends around its threads, where the store goes at that moment: a crash to whoever
    restarts it."""
    layout = RankLayout(dp_size=2, dp_rank=1, ep_size=2, ep_rank=1)
    argv = ("--backend", "cpu", "--model", str(MODELS / "tiny-deepseek"), "--cpu-threads", "1", *layout.flags.split())
    store = StoreProxy()
    rendezvous = await store.open()
    async with group_worker(*argv) as worker, WorkerClient(worker.address, "s") as client:
        await fence(client)
        formings = []
        for generation in range(1, NUM_MEETINGS + 1):
            request = form_request(layout, rendezvous, generation)
            formings.append(asyncio.ensure_future(client.stub.FormGroup(request, timeout=START_S)))
            async with asyncio.timeout(START_S):
                while len(store.connections) < 2 * generation:
                    await asyncio.sleep(0.01)
        worker.leave()
        await worker.until("left")
        for connection in store.connections:
            connection.close()
            await asyncio.sleep(CUT_S)
        assert await worker.status() == 0
        await asyncio.gather(*formings, return_exceptions=True)
    assert worker.events[-2:] == ["drained", "left"]
    await store.close()
