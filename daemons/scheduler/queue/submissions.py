"""Live sequences by key, handle and request id; and, for a while, the keys of those that have ended."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import NamedTuple

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.scheduler.sequence import Sequence, SequenceKey, Submission

_MAX_ENDED = 65_536
# An abort holds against submits on their way for as long as a router keeps trying: five times --scheduler-wait-s.
_ABORTED_S = 600.0


class AbortOutcome(IntEnum):
    """Values as in `radixmesh.scheduler.v1.AbortOutcome`."""

    FOUND = 1
    FINISHED = 2
    UNKNOWN = 3


class _Ended(NamedTuple):
    attempt: int
    owner: int
    handle: int


class _Aborted(NamedTuple):
    seed: int
    until: float


class Submissions:
    """Live requests by (request id, index) and by (owner, handle); ended keys are remembered, a bounded number.

    Aborted ones are for _ABORTED_S of clock, the same number.
    """

    def __init__(self, max_ended: int = _MAX_ENDED, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._live: dict[SequenceKey, Sequence] = {}
        self._by_handle: dict[tuple[int, int], Sequence] = {}
        self._by_id: dict[str, set[SequenceKey]] = {}
        self._ended: OrderedDict[SequenceKey, _Ended] = OrderedDict()
        # (tenant, None = any; request id) -> outputs in _ended.
        self._ended_ids: dict[tuple[str | None, str], int] = {}
        # Oldest first.
        self._aborted: OrderedDict[SequenceKey, _Aborted] = OrderedDict()
        self.max_ended = max_ended

    def __len__(self) -> int:
        return len(self._live)

    def live(self) -> Iterable[Sequence]:
        """All live requests; a copy, so that they may end meanwhile."""
        return list(self._live.values())

    def get(self, key: SequenceKey) -> Sequence | None:
        return self._live.get(key)

    def by_handle(self, owner: int, handle: int) -> Sequence | None:
        return self._by_handle.get((owner, handle))

    def is_repeat(self, submission: Submission) -> bool:
        """True if this very submit (stream, handle, attempt) was taken already and has ended."""
        ended = self._ended.get(submission.key)
        return ended == _Ended(submission.attempt, submission.owner, submission.handle)

    def check_attempt(self, submission: Submission) -> None:
        """Raises STALE_ATTEMPT if a higher attempt is live. Ended ones do not count: the id is free again."""
        live = self._live.get(submission.key)
        current = live.submission.attempt if live is not None else 0
        if submission.attempt < current:
            raise MeshError(
                ErrorReason.ERROR_REASON_STALE_ATTEMPT,
                f"attempt {submission.attempt} of {submission.key.request_id} is over, {current} took over: drop it",
                {"attempt": str(submission.attempt), "current": str(current)},
            )

    def check_handle(self, submission: Submission) -> None:
        """Raises PROTOCOL_VIOLATION if the handle names another live request of its stream."""
        named = self._by_handle.get((submission.owner, submission.handle))
        if named is not None and named.key != submission.key:
            raise MeshError(
                ErrorReason.ERROR_REASON_PROTOCOL_VIOLATION,
                f"handle {submission.handle} names {named.key.request_id} on this stream: never use one twice",
                {"handle": str(submission.handle)},
            )

    def add(self, sequence: Sequence) -> None:
        """A request goes live; its key has no live request."""
        assert sequence.key not in self._live, sequence.key
        self._aborted.pop(sequence.key, None)
        self._live[sequence.key] = sequence
        self._by_handle[sequence.owner, sequence.handle] = sequence
        self._by_id.setdefault(sequence.key.request_id, set()).add(sequence.key)

    def attach(self, sequence: Sequence, owner: int, handle: int) -> None:
        """Rows of a live request go to another stream or handle from now on."""
        self._by_handle.pop((sequence.owner, sequence.handle), None)
        sequence.owner, sequence.handle = owner, handle
        self._by_handle[owner, handle] = sequence

    def end(self, sequence: Sequence) -> None:
        """A live request has ended."""
        key = sequence.key
        del self._live[key]
        self._by_handle.pop((sequence.owner, sequence.handle), None)
        keys = self._by_id[key.request_id]
        keys.discard(key)
        if not keys:
            del self._by_id[key.request_id]
        self._remember(key, _Ended(sequence.submission.attempt, sequence.owner, sequence.handle))

    def aborted(self, sequence: Sequence) -> None:
        """A live request was ended by an abort of all its attempts."""
        self._aborted[sequence.key] = _Aborted(_seed_of(sequence.submission), self._clock() + _ABORTED_S)
        self._aborted.move_to_end(sequence.key)
        self._forget_aborted()

    def was_aborted(self, submission: Submission) -> bool:
        """True if this is an attempt of a request that was aborted: of a router that has not heard of it.

        Whoever uses the id for another request begins with attempt 0, and chooses another seed.
        """
        self._forget_aborted()
        aborted = self._aborted.get(submission.key)
        return submission.attempt > 0 and aborted is not None and aborted.seed == _seed_of(submission)

    def of_owner(self, owner: int) -> list[Sequence]:
        """Live requests of a stream."""
        return [sequence for sequence in self.live() if sequence.owner == owner]

    def find(
        self,
        request_id: str,
        index: int | None,
        below_attempt: int | None,
        tenant: str | None,
        owner: int | None = None,
    ) -> list[Sequence]:
        """Live requests that an abort names, in order of index. owner: those of that stream, None = of any."""
        keys = [
            key
            for key in self._by_id.get(request_id, ())
            if index in (None, key.index) and tenant in (None, key.tenant)
        ]
        found = [self._live[key] for key in sorted(keys, key=lambda key: (key.tenant, key.index))]
        return [
            sequence
            for sequence in found
            if owner in (None, sequence.owner)
            and (below_attempt is None or sequence.submission.attempt < below_attempt)
        ]

    def has_ended(self, request_id: str, index: int | None, tenant: str | None) -> bool:
        """True if such an output is remembered to have ended. tenant None: of any, where index is None too."""
        if index is None:
            return (tenant, request_id) in self._ended_ids
        return SequenceKey(request_id, index, tenant or "") in self._ended

    def _forget_aborted(self) -> None:
        now = self._clock()
        while self._aborted:
            key, oldest = next(iter(self._aborted.items()))
            if oldest.until > now and len(self._aborted) <= self.max_ended:
                return
            del self._aborted[key]

    def _remember(self, key: SequenceKey, ended: _Ended) -> None:
        if key not in self._ended:
            for name in ((key.tenant, key.request_id), (None, key.request_id)):
                self._ended_ids[name] = self._ended_ids.get(name, 0) + 1
        self._ended[key] = ended
        self._ended.move_to_end(key)
        while len(self._ended) > self.max_ended:
            old, _ = self._ended.popitem(last=False)
            for name in ((old.tenant, old.request_id), (None, old.request_id)):
                self._ended_ids[name] -= 1
                if not self._ended_ids[name]:
                    del self._ended_ids[name]


def _seed_of(submission: Submission) -> int:
    return submission.sampling.seed or 0
