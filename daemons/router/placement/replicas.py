"""What is known of every replica, as columns: a decision among a thousand takes as long as a few array operations."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntColumn = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """A scheduler's own figures. submit_sequence: the last of this router's submits that they include. Tokens of KV."""

    submit_sequence: int
    num_running: int
    num_waiting: int
    waiting_tokens: int
    free_tokens: int
    cached_tokens: int


class _Credit(NamedTuple):
    sequence: int
    tokens: int


class Replicas:
    """Rows by number. A row that was removed is used again by the next one added."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self._free: list[int] = []
        self._credits: list[deque[_Credit]] = []
        self.num_outputs: IntColumn = np.zeros(0, dtype=np.int64)
        """Outputs running or waiting there, those sent since its last load included."""
        self.queued_tokens: IntColumn = np.zeros(0, dtype=np.int64)
        """Tokens still to be prefilled there, those sent since its last load included."""
        self.free_tokens: IntColumn = np.zeros(0, dtype=np.int64)
        self.cached_tokens: IntColumn = np.zeros(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.addresses)

    def add(self, address: str) -> int:
        """The number of a new row, all zero."""
        if self._free:
            row = self._free.pop()
            self.addresses[row] = address
            self._credits[row].clear()
            for column in self._columns():
                column[row] = 0
            return row
        self.addresses.append(address)
        self._credits.append(deque())
        if len(self.addresses) > len(self.num_outputs):
            self._grow()
        return len(self.addresses) - 1

    def remove(self, row: int) -> None:
        """The row may be used again."""
        self.addresses[row] = ""
        self._free.append(row)

    def restart(self, row: int) -> None:
        """A new stream: sequences begin anew, and nothing sent before is still there."""
        self._credits[row].clear()
        self.num_outputs[row] = self.queued_tokens[row] = 0

    def take_load(self, row: int, load: ReplicaLoad) -> None:
        """The scheduler's figures; what was sent since is added."""
        credits = self._credits[row]
        while credits and credits[0].sequence <= load.submit_sequence:
            credits.popleft()
        self.num_outputs[row] = load.num_running + load.num_waiting + len(credits)
        self.queued_tokens[row] = load.waiting_tokens + sum(credit.tokens for credit in credits)
        self.free_tokens[row] = load.free_tokens
        self.cached_tokens[row] = load.cached_tokens

    def take_sent(self, row: int, sequence: int, uncached_tokens: int) -> None:
        """An output was sent there as that submit; it counts until a load includes it."""
        self._credits[row].append(_Credit(sequence, uncached_tokens))
        self.num_outputs[row] += 1
        self.queued_tokens[row] += uncached_tokens

    def num_credits(self, row: int) -> int:
        """Submits that no load has included yet."""
        return len(self._credits[row])

    def _columns(self) -> tuple[IntColumn, ...]:
        return (self.num_outputs, self.queued_tokens, self.free_tokens, self.cached_tokens)

    def _grow(self) -> None:
        size = max(16, 2 * len(self.num_outputs))
        self.num_outputs, self.queued_tokens, self.free_tokens, self.cached_tokens = (
            np.concatenate([column, np.zeros(size - len(column), dtype=np.int64)]) for column in self._columns()
        )
