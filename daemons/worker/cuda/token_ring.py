"""Drawn tokens on their way to the host. Steps that run ahead leave theirs in rows of their own:

    turns      step n   step n + 1   ...          in turn; a draw writes its step's row
    copies       `-> host row -> tokens()         beside the work of step n + 1

A turn comes up again only when its row is on the host, and what nobody has asked for yet is put aside.
"""

from __future__ import annotations

import torch

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.worker.cuda.device import Device, Mark

_TURNS = 16


class FetchedTokens:
    """Tokens of one step. mark: reached when they are on the host."""

    def __init__(self, mark: Mark, row: IntArray) -> None:
        self.mark = mark
        self._row = row
        self._tokens: IntArray | None = None

    def tokens(self) -> IntArray:
        """int32 [rows], the caller's to keep; waits for them."""
        if self._tokens is None:
            self.mark.wait()
            self._tokens = self._row.copy()
        return self._tokens


class TokenRing:
    """rows: int32 [turns, max_rows] on the device."""

    def __init__(self, device: Device, *, max_rows: int, num_turns: int = _TURNS) -> None:
        self._device = device
        self.rows = torch.zeros(num_turns, max_rows, dtype=torch.int32, device=device.torch_device)
        self._on_host = device.host_ints(num_turns, max_rows)
        self._ints: IntArray = self._on_host.numpy()
        self._fetched: list[FetchedTokens | None] = [None] * num_turns
        self._turn = 0

    def take(self) -> int:
        """The turn of the next step's tokens: their row of `rows`."""
        self._turn = (self._turn + 1) % len(self._fetched)
        before, self._fetched[self._turn] = self._fetched[self._turn], None
        if before is not None:
            before.tokens()
        return self._turn

    def fetch(self, count: int, after: Mark) -> FetchedTokens:
        """Brings the first `count` tokens of the turn that was taken last to the host, once `after` is reached."""
        turn = self._turn
        mark = self._device.download(self.rows[turn, :count], self._on_host[turn, :count], after)
        fetched = FetchedTokens(mark, self._ints[turn, :count])
        self._fetched[turn] = fetched
        return fetched
