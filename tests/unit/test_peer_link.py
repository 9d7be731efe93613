"""A link to a peer outlives what happens on it, a bug of its own included."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from radixmesh.daemons.router.peers.frame_stream import Dial, FrameStream
from radixmesh.daemons.router.peers.grpc_peers import GrpcFrameStream
from radixmesh.daemons.router.peers.peer_link import PeerLink
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.daemons.runtime.rpc.channel import open_channel


class Echo(FrameStream[str, str]):
    """A peer that says hello, and repeats what it is told."""

    def __init__(self) -> None:
        self._frames: asyncio.Queue[str] = asyncio.Queue()

    async def send(self, frame: str) -> None:
        self._frames.put_nowait(frame)

    async def receive(self) -> str | None:
        return await self._frames.get()

    async def close(self) -> None:
        return


class Link(PeerLink[str, str]):
    """Says what is put into `news`; raises what is an exception."""

    def __init__(self, dial: Dial[str, str] = lambda address: Echo()) -> None:
        super().__init__("peer", dial, 5.0)
        self.news: list[str | Exception] = []
        self.heard: list[str] = []
        self.num_lost = 0

    def _hello_frame(self) -> str:
        return "hello"

    def _welcome(self, frame: str) -> str:
        assert frame == "hello"
        return "it"

    def next_frame(self) -> str | None:
        if not self.news:
            return None
        first = self.news.pop(0)
        if self.news:
            self.wake()
        if isinstance(first, Exception):
            raise first
        return first

    def _on_frame(self, frame: str) -> None:
        self.heard.append(frame)

    def _on_connected(self) -> None:
        self.wake()

    def _on_lost(self) -> None:
        self.num_lost += 1

    def _is_answer_owed(self) -> bool:
        return False


async def test_a_frame_that_cannot_be_made_costs_one_connection_and_not_the_link() -> None:
    link = Link()
    link.start()
    link.news = ["a", ValueError("a request that no message holds"), "b"]
    async with asyncio.timeout(60):
        while "b" not in link.heard:
            await asyncio.sleep(0.01)
    assert link.heard[-1] == "b"
    assert (link.num_connects, link.num_lost) == (2, 1)
    assert link.is_connected
    await link.close()


class DyingCall:
    """A call of grpc.aio to a peer that says nothing, and dies in the moment in which its task is cancelled."""

    def __init__(self) -> None:
        self.num_reads = 0

    async def write(self, frame: str) -> None:
        return

    async def read(self) -> str:
        self.num_reads += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            empty = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, empty, empty, "Socket closed") from None
        raise AssertionError

    def cancel(self) -> bool:
        return False


async def test_a_peer_that_loads_is_asked_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not there less often. The link counts its pauses and takes none."""
    pauses: dict[str, list[float]] = {}
    sleep = asyncio.sleep
    for state in ("loading", "standby"):
        taken = pauses[state] = []

        async def pause(seconds: float, taken: list[float] = taken) -> None:
            taken.append(seconds)
            await sleep(0.0)

        def refuse(address: str, state: str = state) -> FrameStream[str, str]:
            raise MeshError(ErrorReason.ERROR_REASON_NOT_SERVING, f"this daemon is {state}", {"state": state})

        monkeypatch.setattr(asyncio, "sleep", pause)
        link = Link(refuse)
        link.start()
        async with asyncio.timeout(30.0):
            while len(taken) < 12:
                await sleep(0.0)
        monkeypatch.setattr(asyncio, "sleep", sleep)
        await link.close()
    assert max(pauses["loading"]) <= 0.25 < 0.75 <= pauses["standby"][-1]


async def test_a_link_ends_when_it_is_closed_in_the_moment_in_which_its_peer_dies() -> None:
    call: Any = DyingCall()
    link = Link(lambda address: GrpcFrameStream(open_channel("unix:/nowhere"), call, address, str))
    link.start()
    async with asyncio.timeout(20):
        while not call.num_reads:
            await asyncio.sleep(0.01)
        await link.close()
    assert call.num_reads == 1
