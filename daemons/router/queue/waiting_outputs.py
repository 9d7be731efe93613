"""Outputs that wait for a scheduler: those that all replicas are too full for, or that none can take now."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.router.queue.fair_queue import FairQueue, Ticket, Turn
from radixmesh.daemons.router.queue.tenants import RunningOutputs, TenantShares
from radixmesh.daemons.router.requests.journal import Output, Request, journal_size
from radixmesh.daemons.runtime.errors import MeshError

# The share of a tenant that sends without max_tokens counts as if its outputs had so many at most.
_MOST_EXPECTED = 1_024
# A step of prefill computes many tokens, one of decode one for each output: an output token takes so much more.
_OUTPUT_COST = 4
# Room beyond the bounds for outputs that had begun at another router: their clients hold a part of them.
_RESUMED_SHARE = 8
# Rates are of about the last so many seconds in which anything waited.
_MEMORY_S = 10.0
_LEAST_MS, _MOST_MS, _FIRST_MS = 100, 60_000, 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueBounds:
    """Of the whole queue, and of one tenant's part of it; 0 = none. Resumed requests find an eighth more room."""

    max_outputs: int = 0
    max_bytes: int = 0
    tenant_max_outputs: int = 0
    shares: TenantShares = field(default_factory=TenantShares)


class WaitingOutputs:
    """The queue of one router. on_served: told the seconds that an output has waited; on_refused: told why."""

    def __init__(
        self,
        bounds: QueueBounds,
        *,
        on_served: Callable[[float], None] = lambda seconds: None,
        on_refused: Callable[[str], None] = lambda reason: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.bounds = bounds
        self.running = RunningOutputs(bounds.shares)
        self.num_refused = 0
        self._queue: FairQueue[Output] = FairQueue(bounds.shares.weight_of)
        self._on_served = on_served
        self._on_refused = on_refused
        self._clock = clock
        self._rate = _Rate()

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, output: object) -> bool:
        return output in self._queue

    def __iter__(self) -> Iterator[Output]:
        return iter(self._queue)

    @property
    def num_bytes(self) -> int:
        return self._queue.num_bytes

    @property
    def num_tenants(self) -> int:
        return self._queue.num_tenants

    @property
    def lines(self) -> tuple[str, ...]:
        """Lines in which somebody waits."""
        return tuple(line for line in self._queue.lines if self._queue.is_contended(line))

    def longest_wait_s(self) -> float:
        """Seconds that the output which came first has waited."""
        oldest = self._queue.oldest
        return 0.0 if oldest is None else max(0.0, self._clock() - oldest.since)

    def retry_after_ms(self) -> int:
        """Time that the queue of now takes to get through, at the rate of late."""
        return self._rate.ms_for(len(self._queue))

    @property
    def is_overfull(self) -> bool:
        """True if not even resumed outputs may wait any more."""
        spare = 1.0 + 1.0 / _RESUMED_SHARE
        bounds = self.bounds
        return _is_beyond(1 + len(self._queue), bounds.max_outputs * spare) or _is_beyond(
            1 + self.num_bytes, bounds.max_bytes * spare
        )

    def refused(self) -> MeshError:
        """The error for a request that is not even looked at."""
        return self._refused("full", f"{len(self._queue)} outputs wait for a scheduler")

    def require_room(self, request: Request) -> None:
        """Raises OVERLOADED with retry_after_ms if the request's outputs may not wait here."""
        bound = self.lacks_room(request)
        if bound == "full":
            raise self._refused(bound, f"{len(self._queue)} outputs wait for a scheduler")
        if bound == "bytes":
            raise self._refused(bound, f"{self.num_bytes} bytes of requests wait for a scheduler")
        if bound == "tenant":
            num = self._queue.num_of(request.resolved.tenant)
            raise self._refused(bound, f"{num} outputs of this tenant wait for a scheduler")

    def lacks_room(self, request: Request) -> str:
        """The bound that keeps the request's outputs from waiting here, empty if they may."""
        bounds, num = self.bounds, len(request.outputs)
        spare = 1.0 + 1.0 / _RESUMED_SHARE if request.resumption else 1.0
        if _is_beyond(len(self._queue) + num, bounds.max_outputs * spare):
            return "full"
        if _is_beyond(self.num_bytes + _num_bytes(request), bounds.max_bytes * spare):
            return "bytes"
        if _is_beyond(self._queue.num_of(request.resolved.tenant) + num, bounds.tenant_max_outputs * spare):
            return "tenant"
        return ""

    def add(self, output: Output, line: str) -> None:
        """The output waits, from now on or as before. line: name of what it competes for."""
        if output in self._queue:
            return
        request = output.request
        resolved, n = request.resolved, len(request.outputs)
        expected = min(max(1, request.max_tokens - len(output.ids)), _MOST_EXPECTED)
        ticket = Ticket(
            line=line,
            tenant=resolved.tenant,
            priority=resolved.priority,
            # Outputs of one request share the prefill of their prompt.
            cost=request.num_prompt / n + _OUTPUT_COST * expected,
            is_begun=bool(output.ids) or output.attempt_no >= 0,
            num_bytes=_num_bytes(request) // n,
            since=self._clock(),
        )
        self._rate.tick(self._clock(), len(self._queue))
        self._queue.add(output, ticket)

    def served(self, output: Output) -> None:
        """A scheduler takes the output. Idempotent."""
        ticket = self._queue.served(output)
        if ticket is not None:
            now = self._clock()
            self._on_served(now - ticket.since)
            self._rate.tick(now, 1 + len(self._queue), num_served=1)

    def remove(self, output: Output) -> None:
        """The output is over, or waits no more. Idempotent."""
        self._queue.remove(output)

    def clear(self) -> None:
        self._queue.clear()

    def is_contended(self, line: str) -> bool:
        """True if somebody waits in that line: a newcomer has its turn behind."""
        return self._queue.is_contended(line)

    def take(self, line: str, serve: Callable[[Output], Turn]) -> bool:
        """Serves the output whose turn it is: see FairQueue.take()."""
        return self._queue.take(line, serve)

    def retry(self, line: str, tenant: str | None = None) -> None:
        """Those that nobody could take have turns again."""
        self._queue.retry(line, tenant)

    def retry_lacking_room(self) -> None:
        """Those that found all schedulers full have turns again."""
        self._queue.retry_lacking_room()

    def _refused(self, reason: str, found: str) -> MeshError:
        self.num_refused += 1
        self._on_refused(reason)
        retry_after_ms = self.retry_after_ms()
        return MeshError(
            ErrorReason.ERROR_REASON_OVERLOADED,
            f"{found}: retry in {retry_after_ms} ms, or elsewhere",
            {"retry_after_ms": str(retry_after_ms), "num_waiting": str(len(self._queue))},
        )


class _Rate:
    """Rate at which the queue moves, while anything waits in it."""

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._seconds = 0.0
        self._num_served = 0.0

    def tick(self, now: float, num_waiting: int, num_served: int = 0) -> None:
        """So many waited until now, and so many of them have been served now."""
        passed = max(0.0, now - self._last_s) if self._last_s is not None else 0.0
        self._last_s = now
        if not num_waiting:
            return  # Nobody waited: that says nothing of how fast the queue could move.
        kept = math.exp(-passed / _MEMORY_S)
        self._seconds = self._seconds * kept + passed
        self._num_served = self._num_served * kept + num_served

    def ms_for(self, num_waiting: int) -> int:
        if self._num_served < 1.0 or self._seconds <= 0.0:
            return _FIRST_MS
        return int(min(max(1000.0 * num_waiting * self._seconds / self._num_served, _LEAST_MS), _MOST_MS))


def _is_beyond(value: int, bound: float) -> bool:
    return bool(bound) and value > bound


def _num_bytes(request: Request) -> int:
    return journal_size(len(request.resolved.prompt_ids), len(request.outputs))
