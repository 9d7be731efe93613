"""Loads of all replicas, as columns: a decision among a thousand takes as long as a few array operations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

IntColumn = npt.NDArray[np.int64]
FloatColumn = npt.NDArray[np.float64]
NO_BOUND = 1 << 40
# Speeds are learned, a few percent off: below this ratio replicas count as equal. Beyond the other one a replica is
# hardly of use, and one that measured nonsense still gets some work. Models of one router may be far apart.
_EVEN_SPEEDS, _SLOWEST = 1.25, 32.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """A scheduler's own figures. submit_sequence: the last of this router's submits that they include. Tokens of KV.
    host_load_cost, store_load_cost: time of a token that comes from host memory or from the store below, as a share of
    a computed one's.
    token_us: by which a token more makes a step longer; 0 = not known."""

    submit_sequence: int
    num_running: int
    num_waiting: int
    waiting_tokens: int
    free_tokens: int
    cached_tokens: int
    host_load_cost: float = 0.0
    store_load_cost: float = 0.0
    token_us: float = 0.0


@dataclass(slots=True)
class _Sent:
    """An own output that is there. uncached: of its num_tokens, as far as is known; both 0 once it has begun."""

    num_tokens: int
    uncached: int


@dataclass(slots=True)
class _Others:
    """Other routers' outputs there, by the latest load."""

    outputs: int = 0
    tokens: int = 0


@dataclass(slots=True)
class _Replica:
    """last_included: the last submit that a load has included."""

    sent: dict[int, _Sent] = field(default_factory=dict)
    last_included: int = 0
    others: _Others = field(default_factory=_Others)


class Replicas:
    """Rows by number. A row that was removed is used again by the next one added.

    A load comes twice a second. What this router knows better, since it sent the output and sees its tokens, counts at
    once; of a load only what others have there is believed.
    """

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self._free: list[int] = []
        self._replicas: list[_Replica] = []
        self.num_outputs: IntColumn = np.zeros(0, dtype=np.int64)
        """Outputs running or waiting there."""
        self.num_own: IntColumn = np.zeros(0, dtype=np.int64)
        """Of these, those that this router sent."""
        self.queued_tokens: IntColumn = np.zeros(0, dtype=np.int64)
        """Tokens still to be prefilled there."""
        self.free_tokens: IntColumn = np.zeros(0, dtype=np.int64)
        self.cached_tokens: IntColumn = np.zeros(0, dtype=np.int64)
        self.host_load_costs: FloatColumn = np.zeros(0)
        self.store_load_costs: FloatColumn = np.zeros(0)
        self._stores: dict[int, str] = {}
        self.shared_by: IntColumn | None = None
        """By row, one row for all that share its store; itself where nobody does. None: nobody shares any."""
        self.max_outputs: IntColumn = np.zeros(0, dtype=np.int64)
        """With so many outputs the replica is full; NO_BOUND = never."""
        self._token_us: FloatColumn = np.zeros(0)
        self._slowness: FloatColumn | None = None

    def __len__(self) -> int:
        return len(self.addresses)

    def add(self, address: str) -> int:
        """The number of a new row, all zero."""
        if self._free:
            row = self._free.pop()
            self.addresses[row], self._replicas[row] = address, _Replica()
            for column in self._columns():
                column[row] = 0
            self.host_load_costs[row] = self.store_load_costs[row] = 0.0
            self.max_outputs[row] = NO_BOUND
            return row
        self.addresses.append(address)
        self._replicas.append(_Replica())
        if len(self.addresses) > len(self.num_outputs):
            self._grow()
        self.max_outputs[len(self.addresses) - 1] = NO_BOUND
        self._find_shared()
        return len(self.addresses) - 1

    def remove(self, row: int) -> None:
        """The row may be used again."""
        self.addresses[row] = ""
        self._token_us[row] = 0.0
        self._free.append(row)
        self.shares_store(row, "")

    def shares_store(self, row: int, store_id: str) -> None:
        """The replica has the store of that name below its host memory; empty: nobody else has it."""
        if self._stores.get(row, "") == store_id:
            return
        if store_id:
            self._stores[row] = store_id
        else:
            del self._stores[row]
        self._find_shared()

    def _find_shared(self) -> None:
        if len(set(self._stores.values())) == len(self._stores):
            self.shared_by = None
            return
        self.shared_by = np.arange(len(self.addresses), dtype=np.int64)
        first: dict[str, int] = {}
        for row, store_id in self._stores.items():
            self.shared_by[row] = first.setdefault(store_id, row)

    def restart(self, row: int) -> None:
        """A new stream: sequences begin anew, and nothing sent before is still there."""
        self._replicas[row] = _Replica()
        self._update(row)

    def take_load(self, row: int, load: ReplicaLoad) -> None:
        """The scheduler's figures. Its waiting_tokens are of whole prompts, cached or not."""
        replica = self._replicas[row]
        replica.last_included = load.submit_sequence
        included = [sent for sequence, sent in replica.sent.items() if sequence <= load.submit_sequence]
        own_tokens = sum(sent.num_tokens for sent in included)
        replica.others.outputs = max(0, load.num_running + load.num_waiting - len(included))
        replica.others.tokens = max(0, load.waiting_tokens - own_tokens)
        self.free_tokens[row] = load.free_tokens
        self.cached_tokens[row] = load.cached_tokens
        self.host_load_costs[row] = load.host_load_cost
        self.store_load_costs[row] = load.store_load_cost
        self._token_us[row] = load.token_us
        self._update(row)

    def take_sent(self, row: int, sequence: int, num_tokens: int, uncached: int) -> None:
        """An output was sent there as that submit; `uncached` of its num_tokens are to be prefilled."""
        self._replicas[row].sent[sequence] = _Sent(num_tokens, uncached)
        self.num_outputs[row] += 1
        self.num_own[row] += 1
        self.queued_tokens[row] += uncached

    def take_first_token(self, row: int, sequence: int) -> None:
        """The prefill of that submit is done."""
        sent = self._replicas[row].sent.get(sequence)
        if sent is not None:
            self.queued_tokens[row] -= sent.uncached
            sent.num_tokens = sent.uncached = 0

    def take_left(self, row: int, sequence: int) -> None:
        """The output of that submit has ended, or gone elsewhere."""
        sent = self._replicas[row].sent.pop(sequence, None)
        if sent is not None:
            self.num_outputs[row] -= 1
            self.num_own[row] -= 1
            self.queued_tokens[row] -= sent.uncached

    def num_credits(self, row: int) -> int:
        """Own outputs there that no load has included yet."""
        replica = self._replicas[row]
        return sum(sequence > replica.last_included for sequence in replica.sent)

    def compare_speeds(self) -> None:
        """Call every second or so: what slowness() says follows the loads since the last call.

        A replica whose speed is not known counts as one in the middle of those known.
        """
        self._slowness = None
        known = self._token_us[self._token_us > 0]
        if len(known) < 2 or known.max() < _EVEN_SPEEDS * known.min():
            return
        slowness = np.where(self._token_us > 0, self._token_us, np.median(known)) / known.min()
        slowness[slowness < _EVEN_SPEEDS] = 1.0
        self._slowness = np.minimum(slowness, _SLOWEST)

    def slowness(self, rows: IntColumn) -> FloatColumn | None:
        """By row: time for the same work, as a multiple of the fastest one's; None where all take about as long."""
        return None if self._slowness is None else self._slowness[rows]

    def _update(self, row: int) -> None:
        replica = self._replicas[row]
        self.num_own[row] = len(replica.sent)
        self.num_outputs[row] = replica.others.outputs + len(replica.sent)
        self.queued_tokens[row] = replica.others.tokens + sum(sent.uncached for sent in replica.sent.values())

    def _columns(self) -> Iterator[IntColumn]:
        yield from (self.num_outputs, self.num_own, self.queued_tokens)
        yield from (self.free_tokens, self.cached_tokens, self.max_outputs)

    def _grow(self) -> None:
        size = max(16, 2 * len(self.num_outputs))
        self._token_us = np.concatenate([self._token_us, np.zeros(size - len(self._token_us))])
        self._slowness = None  # Until they are compared anew: the new rows have none.
        (
            self.num_outputs,
            self.num_own,
            self.queued_tokens,
            self.free_tokens,
            self.cached_tokens,
            self.max_outputs,
        ) = (np.concatenate([column, np.zeros(size - len(column), dtype=np.int64)]) for column in self._columns())
        more = np.zeros(size - len(self.host_load_costs))
        self.host_load_costs = np.concatenate([self.host_load_costs, more])
        self.store_load_costs = np.concatenate([self.store_load_costs, more])
