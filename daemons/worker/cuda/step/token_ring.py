"""Drawn tokens on their way to the host. Steps that run ahead leave theirs in rows of their own, which lie there:

    turns      step n   step n + 1   ...          in turn; a draw of the device writes its step's row

A turn comes up again only when its step is over, and what nobody has asked for yet is put aside.
"""

from __future__ import annotations

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.worker.cuda.device import Device, Mark

_TURNS = 16


class FetchedTokens:
    """Tokens of one step, which are on the host when it is over."""

    def __init__(self, over: Mark, row: IntArray) -> None:
        self._over = over
        self._row = row
        self._tokens: IntArray | None = None

    def tokens(self) -> IntArray:
        """int32 [rows], the caller's to keep; waits for them."""
        if self._tokens is None:
            self._over.wait()
            self._tokens = self._row.copy()
        return self._tokens


class TokenRing:
    """rows: int32 [turns, max_rows], of the host, for the device to write."""

    def __init__(self, device: Device, *, max_rows: int, num_turns: int = _TURNS) -> None:
        self.rows = device.host_ints(num_turns, max_rows)
        self._ints: IntArray = self.rows.numpy()
        self._fetched: list[FetchedTokens | None] = [None] * num_turns
        self._turn = 0

    def take(self) -> int:
        """The turn of the next step's tokens: their row of `rows`."""
        self._turn = (self._turn + 1) % len(self._fetched)
        before, self._fetched[self._turn] = self._fetched[self._turn], None
        if before is not None:
            before.tokens()
        return self._turn

    def fetch(self, count: int, over: Mark) -> FetchedTokens:
        """The first `count` tokens of the turn that was taken last, when their step is over."""
        fetched = FetchedTokens(over, self._ints[self._turn, :count])
        self._fetched[self._turn] = fetched
        return fetched
