"""A semaphore with a bounded number of waiters; a free permit goes to the peer that holds fewest."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError


class FairSemaphore:
    """num_permits: held at once. max_per_peer: of them by one peer. max_waiting: calls that wait, of all peers.

    Where too many wait, the peer that has most of them gives way.
    """

    def __init__(self, num_permits: int, *, max_per_peer: int, max_waiting: int) -> None:
        self._num_free = num_permits
        self._max_per_peer = max_per_peer
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._held: Counter[str] = Counter()
        # Peers in the order in which they are served next.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def permit(self, peer: str) -> AsyncIterator[None]:
        """Within it the caller holds a permit. Raises MeshError OVERLOADED where too many wait already."""
        await self.take(peer)
        try:
            yield
        finally:
            self.give_back(peer)

    async def take(self, peer: str) -> None:
        """A permit that the caller gives back itself, once. Raises MeshError OVERLOADED as permit() does."""
        if self._num_free and self._held[peer] < self._max_per_peer:
            self._take(peer)
        else:
            await self._wait(peer)

    def take_now(self, peer: str) -> None:
        """As take(), of one that cannot wait. Raises MeshError OVERLOADED where no permit is free for the peer."""
        if not self._num_free or self._held[peer] >= self._max_per_peer:
            raise self._overloaded()
        self._take(peer)

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
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(peer, deque()).append(waiter)
        self._num_waiting += 1
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():  # In the same moment it got the permit, or was refused.
                if waiter.exception() is None:
                    self.give_back(peer)
            elif peer in self._waiting and waiter in self._waiting[peer]:
                self._forget(peer, waiter)
            raise

    def _make_room(self, peer: str) -> None:
        """Refuses the last one that waits of the peer with most; raises OVERLOADED where that is the caller itself."""
        error = self._overloaded()
        fullest = max(self._waiting, key=lambda name: len(self._waiting[name]), default=peer)
        if len(self._waiting.get(fullest, ())) <= len(self._waiting.get(peer, ())) + 1:
            raise error
        waiter = self._waiting[fullest][-1]
        self._forget(fullest, waiter)
        if not waiter.done():
            waiter.set_exception(error)

    def _overloaded(self) -> MeshError:
        message = (
            f"all calls that run at once are taken and {self._num_waiting} wait already: retry, or on another replica"
        )
        return MeshError(ErrorReason.ERROR_REASON_OVERLOADED, message, {"retry_after_ms": "100"})

    def _take(self, peer: str) -> None:
        self._num_free -= 1
        self._held[peer] += 1

    def _wake(self) -> None:
        while self._num_free:
            able = [peer for peer in self._waiting if self._held[peer] < self._max_per_peer]
            if not able:
                return
            peer = min(able, key=self._held.__getitem__)
            waiter = self._waiting[peer][0]
            self._forget(peer, waiter)
            if peer in self._waiting:
                self._waiting.move_to_end(peer)
            if not waiter.done():
                self._take(peer)
                waiter.set_result(None)

    def _forget(self, peer: str, waiter: asyncio.Future[None]) -> None:
        self._num_waiting -= 1
        self._waiting[peer].remove(waiter)
        if not self._waiting[peer]:
            del self._waiting[peer]
