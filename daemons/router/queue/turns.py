"""Turns of the outputs that wait: whenever a scheduler has room, the queue says whose it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from radixmesh.daemons.router.queue.fair_queue import Turn
from radixmesh.daemons.router.queue.waiting_outputs import WaitingOutputs
from radixmesh.daemons.router.requests.journal import Output, Request

if TYPE_CHECKING:
    from radixmesh.daemons.router.peers.schedulers.scheduler_link import SchedulerLink
    from radixmesh.daemons.router.peers.schedulers.scheduler_pool import SchedulerPool


class QueueTurns:
    """Places the outputs of `waiting` on the schedulers of `pool`, in turn."""

    def __init__(
        self, pool: SchedulerPool, waiting: WaitingOutputs, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pool = pool
        self._waiting = waiting
        self._clock = clock
        self._roomy: dict[SchedulerLink, None] = {}
        self._is_any_roomy = False
        self._handle: asyncio.Handle | None = None
        self._num_turns = 0

    def close(self) -> None:
        """No more turns."""
        if self._handle is not None:
            self._handle.cancel()

    def line_of(self, output: Output) -> str:
        """Outputs of one line can run at the same schedulers: those of one size hold up no others."""
        request = output.request
        return f"{request.resolved.model}/{len(self._pool.table.fitting(request))}"

    def has_to_wait(self, output: Output) -> bool:
        """True if a newcomer has its turn behind others, or its tenant has as many at schedulers as it may."""
        if any(sibling.scheduler is not None for sibling in output.request.outputs):
            return False  # Outputs of one request share their prompt's KV, and go together.
        if self._waiting.running.is_at_limit(output.request.resolved.tenant):
            return True
        return bool(len(self._waiting)) and self._waiting.is_contended(self.line_of(output))

    def _would_wait(self, output: Output) -> bool:
        """True if the output cannot be placed now."""
        if self.has_to_wait(output):
            return True
        return not self._pool.placement.has_room_for(output, self._pool.table.able(output))

    def waits_for_room(self, output: Output) -> bool:
        """True if schedulers could take the output that are only too full, or its tenant has enough there."""
        rows = self._pool.table.able(output)
        if len(rows) and self._waiting.running.is_at_limit(output.request.resolved.tenant):
            return True
        return bool(len(rows)) and not self._pool.placement.has_room_for(output, rows)

    def left(self, link: SchedulerLink, output: Output) -> None:
        """An output is not at that scheduler any more."""
        tenant = output.request.resolved.tenant
        self._waiting.running.left(tenant)
        for line in self._waiting.lines:
            self._waiting.retry(line, tenant)
        self.has_room(link)

    def has_room(self, link: SchedulerLink) -> None:
        """The scheduler may have room now. Turns come later: its link is in the middle of something."""
        if not len(self._waiting):
            return
        self._roomy[link] = None
        self._call_soon()

    def soon(self) -> None:
        """Somebody waits for whom there may be room: those before it may need another scheduler."""
        self._is_any_roomy = True
        self._call_soon()

    def require_room(self, request: Request) -> None:
        """Raises OVERLOADED with retry_after_ms for a request that would have to wait, where the queue has no room."""
        # Only where the queue has no room is it worth looking whether there is a scheduler for it now.
        if not self._waiting.lacks_room(request):
            return
        waits = [output for output in request.outputs if output.is_open and not output.ending]
        if waits and self._would_wait(waits[0]):
            self._waiting.require_room(request)

    def require_any_room(self) -> None:
        """Raises OVERLOADED where nobody could even wait: before anything is done for a request."""
        if self._waiting.is_overfull and not self._pool.placement.has_room():
            raise self._waiting.refused()

    def serve_all(self, num_rounds: int = 1 << 20) -> None:
        """Turns for all that wait, at any scheduler, while there is room."""
        for line in self._waiting.lines:
            self._waiting.retry(line)
        while num_rounds and self._pool.placement.has_room() and self._serve_lines():
            num_rounds -= 1

    def _call_soon(self) -> None:
        if self._handle is None:
            self._handle = asyncio.get_running_loop().call_soon(self._serve_roomy)

    def _serve_roomy(self) -> None:
        self._handle = None
        links = [link for link in self._roomy if self._takes_more(link)]
        self._roomy = {}
        if links:
            # All tenants, not only the one whose output has left: it would keep the room for ever.
            self._waiting.retry_lacking_room()
        if self._is_any_roomy:
            self._is_any_roomy = False
            while self._pool.placement.has_room() and self._serve_lines():
                pass
        for link in links:
            while self._takes_more(link) and self._serve_lines():
                pass

    def _takes_more(self, link: SchedulerLink) -> bool:
        return self._pool.has(link) and link.takes_submits and not self._pool.placement.is_full(link)

    def _serve_lines(self) -> bool:
        """One turn in each line: none waits for another to be empty. True if anybody was served."""
        lines = self._waiting.lines
        self._num_turns += 1
        first = self._num_turns % len(lines) if lines else 0
        served = [self._waiting.take(line, self._place) for line in (*lines[first:], *lines[:first])]
        return any(served)

    def _place(self, output: Output) -> Turn:
        """Places it and its siblings that wait, wherever there is room."""
        if self._waiting.running.is_at_limit(output.request.resolved.tenant):
            return Turn.PASSED
        self._pool.place(output)
        if output in self._waiting:
            return Turn.FULL if self._lacks_only_room(output) else Turn.PASSED
        for sibling in output.request.outputs:
            if sibling in self._waiting:
                self._pool.place(sibling)
        return Turn.SERVED

    def _lacks_only_room(self, output: Output) -> bool:
        """True if schedulers could take it that are all full, and none was left out because it had refused it."""
        now = self._clock()
        return not any(until > now for until in output.backoff_until.values()) and self.waits_for_room(output)
