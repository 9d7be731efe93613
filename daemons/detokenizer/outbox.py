"""Output of a stream that is not sent yet: at most one response, merged into until its reader takes it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from radixmesh.daemons.runtime.detokenize.messages import EntryFailure, Pending, TextDelta
from radixmesh.daemons.runtime.rpc.frames import MAX_FRAME_BYTES, MAX_FRAME_ENTRIES, FrameBudget

# Bytes that a row or failure costs beside its text.
_ROW_BYTES = 64
# Of a row that ends with a stop string: it says which.
_STOP_BYTES = 1024


class Outbox:
    """Merges deltas per entry. One producer and one consumer on one event loop.

    max_bytes: past it `has_room` is false, and the producer reads no further until the consumer has taken what there
    is. So a reader that never reads costs this much and no more.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._deltas: dict[int, TextDelta] = {}
        self._failures: dict[int, EntryFailure] = {}
        self._num_bytes = 0
        self._is_due = False
        self._is_closed = False
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()

    @property
    def has_room(self) -> bool:
        return self._num_bytes < self._max_bytes

    def put(self, deltas: Iterable[TextDelta], failures: Iterable[EntryFailure]) -> None:
        """Adds to the next response, and makes one due even if there is nothing in it (each request is answered)."""
        pending = self._deltas
        num_bytes = self._num_bytes
        for delta in deltas:
            before = pending.get(delta.handle)
            num_bytes += _cost_of(delta)
            pending[delta.handle] = delta if before is None else _merged(before, delta)
        for failure in failures:
            num_bytes += _failure_cost(failure)
            self._failures[failure.handle] = failure
        self._num_bytes = num_bytes
        self._is_due = True
        self._changed.set()

    def forget(self, handles: Iterable[int]) -> None:
        """The router wants nothing more of these entries (closed, or opened anew)."""
        for handle in handles:
            self._deltas.pop(handle, None)
            self._failures.pop(handle, None)

    def close(self) -> None:
        """Nothing more will be put. What is there can still be taken."""
        self._is_closed = True
        self._changed.set()

    async def take(self) -> Pending | None:
        """All there is, once there is something; None once the outbox is closed and empty."""
        while not self._is_due:
            if self._is_closed:
                return None
            self._changed.clear()
            await self._changed.wait()
        if self._num_bytes > MAX_FRAME_BYTES or len(self._deltas) + len(self._failures) > MAX_FRAME_ENTRIES:
            return self._take_some()
        pending = Pending(list(self._deltas.values()), list(self._failures.values()))
        self._deltas, self._failures = {}, {}
        self._num_bytes = 0
        self._is_due = False
        self._taken.set()
        return pending

    def _take_some(self) -> Pending:
        """As much as a message may hold: replays of many long outputs can be more than that."""
        deltas: list[TextDelta] = []
        failures: list[EntryFailure] = []
        budget = FrameBudget()
        num_bytes = 0
        while self._deltas:
            delta = next(iter(self._deltas.values()))
            size = _cost_of(delta)
            if size > MAX_FRAME_BYTES and not deltas:
                delta, rest = _cut(delta)
                size = _cost_of(delta)
                self._deltas = {**self._deltas, delta.handle: rest}
            elif budget.take(size):
                del self._deltas[delta.handle]
            else:
                break
            deltas.append(delta)
            num_bytes += size
            if delta.handle in self._deltas:
                break
        while self._failures and not self._deltas:
            failure = next(iter(self._failures.values()))
            size = _failure_cost(failure)
            if not budget.take(size):
                break
            del self._failures[failure.handle]
            failures.append(failure)
            num_bytes += size
        self._num_bytes = max(0, self._num_bytes - num_bytes)
        self._is_due = bool(self._deltas or self._failures)
        if not self._is_due:
            self._num_bytes = 0
        self._taken.set()
        return Pending(deltas, failures)

    async def wait_for_room(self) -> None:
        while not self.has_room:
            self._taken.clear()
            await self._taken.wait()


def _cost_of(delta: TextDelta) -> int:
    text = delta.text
    size = len(text) if text.isascii() else len(text.encode())
    return _ROW_BYTES + size + (0 if delta.stop is None else _STOP_BYTES)


def _failure_cost(failure: EntryFailure) -> int:
    error = failure.error
    return _ROW_BYTES + len(error.message) + sum(len(key) + len(value) for key, value in error.metadata.items())


def _cut(delta: TextDelta) -> tuple[TextDelta, TextDelta]:
    """A delta whose text no response holds, as a part of it and the rest. The part says nothing of tokens or ends."""
    text = delta.text[: (MAX_FRAME_BYTES - _ROW_BYTES) // 4]  # No character has more bytes.
    rest = delta._replace(text=delta.text[len(text) :], text_offset=delta.text_offset + len(text.encode()))
    return TextDelta(delta.handle, delta.text_offset, text, 0, None, False), rest


def _merged(old: TextDelta, new: TextDelta) -> TextDelta:
    return new._replace(text_offset=old.text_offset, text=old.text + new.text)
