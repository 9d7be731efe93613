"""Channels to peers that were called lately: to open one takes as long as a hand-over of KV may."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.daemons.runtime.security.tls_files import TlsFiles

_MOST = 64
# Certificates are read anew with the next one.
_IDLE_S = 60.0


class _Peer:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.num_users = 0
        self.is_kept = True
        self.idle: asyncio.TimerHandle | None = None


class PeerChannels:
    """By address. tls: None = plain."""

    def __init__(self, tls: TlsFiles | None = None) -> None:
        self._tls = tls
        self._peers: OrderedDict[str, _Peer] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._peers)

    @asynccontextmanager
    async def channel(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        """A channel that others may use too. After a call that failed it is opened anew. Raises INVALID_ARGUMENT."""
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = _Peer(open_channel(address, self._tls))
        self._peers.move_to_end(address)
        peer.num_users += 1
        if peer.idle is not None:
            peer.idle.cancel()
        try:
            yield peer.channel
        except (grpc.aio.AioRpcError, TimeoutError):
            self._drop(address, peer)
            raise
        finally:
            peer.num_users -= 1
            if not peer.is_kept:
                self._close(peer)
            elif not peer.num_users:
                peer.idle = asyncio.get_running_loop().call_later(_IDLE_S, self._drop, address, peer)
            for other, least in tuple(self._peers.items())[: max(0, len(self._peers) - _MOST)]:
                self._drop(other, least)

    def close(self) -> None:
        """None is opened any more."""
        for address, peer in tuple(self._peers.items()):
            self._drop(address, peer)

    def _drop(self, address: str, peer: _Peer) -> None:
        """The next one is another."""
        if self._peers.get(address) is peer:
            del self._peers[address]
        peer.is_kept = False
        self._close(peer)

    def _close(self, peer: _Peer) -> None:
        if peer.num_users:
            return
        if peer.idle is not None:
            peer.idle.cancel()
        closing = asyncio.ensure_future(peer.channel.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
