"""Facts of all scheduler links as columns: finding those that can take an output costs a few array operations, among a
thousand of them too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from radixmesh.daemons.router.peers.schedulers.link_health import SLOW_START_S, shares
from radixmesh.daemons.router.peers.schedulers.scheduler_link import SchedulerLink
from radixmesh.daemons.router.placement.replicas import IntColumn, Replicas
from radixmesh.daemons.router.requests.journal import Output, Request
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.scheduler.v1 import scheduler_pb2

_BoolColumn = npt.NDArray[np.bool_]
# Requests name a model and its identity, resumed ones as their clients tell them: so many pairs are remembered.
_MAX_MODELS = 64


class LinkTable:
    """A row for each link, the number that placement gave it. Links tell of their changes by update().

    replicas: own outputs by row. clock: monotonic seconds.
    """

    def __init__(self, replicas: Replicas, clock: Callable[[], float] = time.monotonic) -> None:
        self.version = 0
        """Another number whenever a link was added or removed, or serves another model or other lengths."""
        self._replicas = replicas
        self._clock = clock
        self._rows: dict[SchedulerLink, int] = {}
        self._links: dict[int, SchedulerLink] = {}
        self._facts: dict[int, tuple[object, ...]] = {}
        self._takes_submits: _BoolColumn = np.zeros(0, dtype=np.bool_)
        self._is_serving: _BoolColumn = np.zeros(0, dtype=np.bool_)
        self._is_prefill: _BoolColumn = np.zeros(0, dtype=np.bool_)
        self._max_request_len: IntColumn = np.zeros(0, dtype=np.int64)
        self._max_total_len: IntColumn = np.zeros(0, dtype=np.int64)
        # See LinkHealth; -inf for one that was always sound.
        self._passed_until: npt.NDArray[np.float64] = np.zeros(0)
        self._slow_since: npt.NDArray[np.float64] = np.zeros(0)
        self._all_sound_at = float("-inf")
        self.serving: dict[tuple[str, tuple[str, str, int, int]], _BoolColumn] = {}

    def add(self, row: int, link: SchedulerLink) -> None:
        """A new link; from now on it tells of its changes here."""
        if row >= len(self._takes_submits):
            self._grow(row + 1)
        self._rows[link], self._links[row] = row, link
        self.update(link)

    def remove(self, link: SchedulerLink) -> None:
        """The link gets nothing any more. Idempotent."""
        row = self._rows.pop(link, None)
        if row is None:
            return
        del self._links[row], self._facts[row]
        self._takes_submits[row] = self._is_serving[row] = False
        self._max_request_len[row] = self._max_total_len[row] = 0
        self._note_change()

    def update(self, link: SchedulerLink) -> None:
        """The link's facts have changed. Nothing for one that was removed."""
        row = self._rows.get(link)
        if row is None:
            return
        self._takes_submits[row], self._is_serving[row] = link.takes_submits, link.is_group_serving
        self._is_prefill[row] = link.role == scheduler_pb2.SCHEDULER_ROLE_PREFILL
        self._max_request_len[row], self._max_total_len[row] = link.max_request_len, link.max_total_len
        self._passed_until[row], self._slow_since[row] = link.health.passed_until, link.health.slow_since
        self._all_sound_at = max(self._all_sound_at, link.health.passed_until, link.health.slow_since + SLOW_START_S)
        facts = (link.is_connected, link.max_request_len, link.identity, link.adapters)
        if self._facts.get(row) != facts:
            self._facts[row] = facts
            self._note_change()

    def link(self, row: int) -> SchedulerLink:
        return self._links[row]

    def links(self, rows: Iterable[int]) -> list[SchedulerLink]:
        return [self._links[row] for row in rows]

    def rows(self, links: Sequence[SchedulerLink]) -> IntColumn:
        return np.array([self._rows[link] for link in links], dtype=np.int64)

    def fitting(self, request: Request) -> IntColumn:
        """Those that hold prompt and whole output, those included that are away at the moment."""
        return np.flatnonzero(self._fitting(request))

    def candidates(self, request: Request) -> IntColumn:
        """As fitting(); where no KV memory is large enough all with the context: their refusal says how much there is.

        A shorter context is never a choice: it would end the output too early, as if that had been asked for.
        """
        return np.flatnonzero(self._candidates(request))

    def able(self, output: Output) -> IntColumn:
        """Candidates that take submits now; those whose group serves, if there are any; none that just refused it.

        Those in trouble, or in a slow start with their share already, are passed over while there are others.
        """
        is_open = self._candidates(output.request) & self._takes_submits
        rows = np.flatnonzero(is_open & self._is_serving)
        if not len(rows):
            rows = np.flatnonzero(is_open)
        if output.backoff_until:
            now, until = self._clock(), output.backoff_until
            rows = rows[[until.get(link.address, 0.0) <= now for link in self.links(rows.tolist())]]
        # Groups that prefill for others decode only where there are no others.
        if self._is_prefill[rows].any() and not self._is_prefill[rows].all():
            rows = rows[~self._is_prefill[rows]]
        return self._trusted(rows)

    def prefilling(self, output: Output) -> list[SchedulerLink]:
        """Those that could compute the output's prompt for another now."""
        rows = self._candidates(output.request) & self._takes_submits & self._is_serving & self._is_prefill
        return self.links(np.flatnonzero(rows).tolist())

    def decode_room(self, request: Request) -> int:
        """Most tokens of one request that groups hold which decode for others; 0: there are none."""
        rows = self._same_model(request) & self._is_serving & ~self._is_prefill
        return int(self._max_request_len[rows].max(initial=0))

    def nobody(self, output: Output, wait_s: float) -> MeshError:
        """The error of an output that has waited for wait_s."""
        request = output.request
        wanted = f"model {request.resolved.model!r}"
        if not len(self.candidates(request)):
            wanted += f" and {request.max_total_len} tokens"
        message = f"no scheduler could take {wanted} for {wait_s:g} s: retry, with resume to continue"
        return MeshError(ErrorReason.ERROR_REASON_NO_REPLICA, message, {"daemon": "scheduler"})

    def _fitting(self, request: Request) -> _BoolColumn:
        return self._same_model(request) & (self._max_request_len >= request.max_total_len)

    def _candidates(self, request: Request) -> _BoolColumn:
        fitting = self._fitting(request)
        if fitting.any():
            return fitting
        return self._same_model(request) & (self._max_total_len >= request.max_total_len)

    def _same_model(self, request: Request) -> _BoolColumn:
        model, identity = request.resolved.model, request.resolved.model_identity
        key = (model, identity.compared)
        found = self.serving.get(key)
        if found is None:
            if len(self.serving) >= _MAX_MODELS:
                self.serving.clear()
            found = np.zeros(len(self._takes_submits), dtype=np.bool_)
            found[[row for row, link in self._links.items() if link.serves(model, identity)]] = True
            self.serving[key] = found
        return found

    def _trusted(self, rows: IntColumn) -> IntColumn:
        now = self._clock()
        if len(rows) < 2 or now >= self._all_sound_at:
            return rows
        sound = rows[self._passed_until[rows] <= now]
        share = shares(now, self._slow_since[sound])
        if (share < 1.0).any():
            own = self._replicas.num_own[sound]
            sound = sound[(share >= 1.0) | (own < 1 + share * own.mean())]
        return sound if len(sound) else rows

    def _note_change(self) -> None:
        self.version += 1
        self.serving.clear()

    def _grow(self, least: int) -> None:
        more = max(16, 2 * least) - len(self._takes_submits)
        for name in ("_takes_submits", "_is_serving", "_is_prefill", "_max_request_len", "_max_total_len"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros(more, dtype=column.dtype)]))
        for name in ("_passed_until", "_slow_since"):
            setattr(self, name, np.concatenate([getattr(self, name), np.full(more, -np.inf)]))
        self._note_change()
