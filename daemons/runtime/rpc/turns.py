"""A few places that callers take in turn, the caller that holds fewest first."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError


class Turns:
    """num_places: held at once. max_per_peer: of them by one peer. max_waiting: calls that wait, of all peers.

    Where too many wait, the peer that has most of them gives way.
    """

    def __init__(self, num_places: int, *, max_per_peer: int, max_waiting: int) -> None:
        self._num_free = num_places
        self._max_per_peer = max_per_peer
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._held: Counter[str] = Counter()
        # Peers in the order in which they are served next.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def place(self, peer: str) -> AsyncIterator[None]:
        """Within it the caller holds a place. Raises MeshError OVERLOADED where too many wait already."""
        await self.take(peer)
        try:
            yield
        finally:
            self.give_back(peer)

    async def take(self, peer: str) -> None:
        """A place that the caller gives back itself, once. Raises MeshError OVERLOADED as place() does."""
        if self._num_free and self._held[peer] < self._max_per_peer:
            self._take(peer)
        else:
            await self._wait(peer)

    def give_back(self, peer: str) -> None:
        """Ends what take() began."""
        self._num_free += 1
        self._held[peer] -= 1
        if not self._held[peer]:
            del self._held[peer]
        self._wake()

    async def _wait(self, peer: str) -> None:
        if self._num_waiting >= self._max_waiting:
            self._make_room(peer)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(peer, deque()).append(turn)
        self._num_waiting += 1
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # It got the place in the same moment.
                self.give_back(peer)
            elif peer in self._waiting and turn in self._waiting[peer]:
                self._forget(peer, turn)
            raise

    def _make_room(self, peer: str) -> None:
        """Refuses the last one that waits of the peer with most; raises OVERLOADED where that is the caller itself."""
        message = f"no place is free and {self._num_waiting} calls wait already: retry later, or on another replica"
        error = MeshError(ErrorReason.ERROR_REASON_OVERLOADED, message, {"retry_after_ms": "100"})
        fullest = max(self._waiting, key=lambda name: len(self._waiting[name]), default=peer)
        if len(self._waiting.get(fullest, ())) <= len(self._waiting.get(peer, ())) + 1:
            raise error
        turn = self._waiting[fullest][-1]
        self._forget(fullest, turn)
        if not turn.done():
            turn.set_exception(error)

    def _take(self, peer: str) -> None:
        self._num_free -= 1
        self._held[peer] += 1

    def _wake(self) -> None:
        while self._num_free:
            able = [peer for peer in self._waiting if self._held[peer] < self._max_per_peer]
            if not able:
                return
            peer = min(able, key=self._held.__getitem__)
            turn = self._waiting[peer][0]
            self._forget(peer, turn)
            if peer in self._waiting:
                self._waiting.move_to_end(peer)
            if not turn.done():
                self._take(peer)
                turn.set_result(None)

    def _forget(self, peer: str, turn: asyncio.Future[None]) -> None:
        self._num_waiting -= 1
        self._waiting[peer].remove(turn)
        if not self._waiting[peer]:
            del self._waiting[peer]
