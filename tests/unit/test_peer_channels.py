"""Channels to peers: one for all transfers to a worker, another after one that failed, none that nobody uses."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from radixmesh.daemons.runtime.rpc import peer_channels


class Channel:
    def __init__(self, address: str, tls: object) -> None:
        self.address, self.num_closed = address, 0

    async def close(self) -> None:
        self.num_closed += 1


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Channel]:
    found: list[Channel] = []

    def open_channel(address: str, tls: object) -> Channel:
        found.append(Channel(address, tls))
        return found[-1]

    monkeypatch.setattr(peer_channels, "open_channel", open_channel)
    return found


def failed() -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing)


async def test_transfers_share_a_channel_until_one_fails(opened: list[Channel]) -> None:
    channels = peer_channels.PeerChannels()
    async with channels.channel("a") as first, channels.channel("a") as second:
        assert first is second is opened[0]
        with pytest.raises(grpc.aio.AioRpcError):
            async with channels.channel("a"):
                raise failed()
        async with channels.channel("a") as third:
            assert third is opened[1] and len(opened) == 2
        await asyncio.sleep(0)
        assert not opened[0].num_closed, "two use it"
    await asyncio.sleep(0.01)
    assert (opened[0].num_closed, opened[1].num_closed) == (1, 0)
    channels.close()
    await asyncio.sleep(0.01)
    assert opened[1].num_closed == 1 and not len(channels)


async def test_channels_that_nobody_uses_are_closed(opened: list[Channel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_channels, "_IDLE_S", 0.1)
    monkeypatch.setattr(peer_channels, "_MOST", 3)
    channels = peer_channels.PeerChannels()
    for name in "abcd":
        async with channels.channel(name):
            assert len(channels) <= 4
    await asyncio.sleep(0.01)
    assert [channel.num_closed for channel in opened] == [1, 0, 0, 0], "no more than so many"
    async with channels.channel("b"):
        await asyncio.sleep(0.3)
        assert [channel.num_closed for channel in opened] == [1, 0, 1, 1], "one is in use"
    await asyncio.sleep(0.3)
    assert all(channel.num_closed == 1 for channel in opened) and not len(channels)
