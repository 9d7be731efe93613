"""So many requests at a time, those of conversations that have begun before those of new ones."""

from __future__ import annotations

import asyncio
import heapq


class Gate:
    """limit: slots; None = no bound. Who waits is let in by the lowest priority, then by the order of coming."""

    def __init__(self, limit: int | None) -> None:
        self._free = limit
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._num_came = 0

    async def enter(self, priority: int) -> None:
        """Waits for a slot."""
        if self._free is None:
            return
        if self._free > 0:
            self._free -= 1
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_came += 1
        heapq.heappush(self._waiting, (priority, self._num_came, future))
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.leave()  # The slot came with the cancellation.
            raise

    def leave(self) -> None:
        """Hands the slot on."""
        if self._free is None:
            return
        while self._waiting:
            _, _, future = heapq.heappop(self._waiting)
            if not future.done():
                future.set_result(None)
                return
        self._free += 1
