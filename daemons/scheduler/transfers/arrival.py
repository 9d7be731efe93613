"""One transfer of KV that comes from elsewhere, and the room that its receiver has for such KV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

from radixmesh.daemons.runtime.arrays import IntArray, empty_ints
from radixmesh.daemons.runtime.kv_share import KvShare
from radixmesh.daemons.scheduler.cache.prefix_cache import Match, Namespace
from radixmesh.daemons.scheduler.group.group_info import GroupInfo
from radixmesh.daemons.scheduler.planning.admission.decode_reserve import DecodeReserve
from radixmesh.daemons.scheduler.planning.epoch_state import EpochState
from radixmesh.daemons.scheduler.sequence import Sequence
from radixmesh.daemons.scheduler.transfers.kv_parts import RankPart

if TYPE_CHECKING:
    from radixmesh.daemons.scheduler.planning.admission.prefill import PrefillLimits


class ArrivalState(Enum):
    QUEUED = "queued"
    RESERVING = "reserving"
    RESERVED = "reserved"
    COMMITTING = "committing"
    ARRIVED = "arrived"
    FAILED = "failed"


class ArrivalFailure(StrEnum):
    """Why KV did not come, in metrics. A worker's own reasons are told as worker_<reason>."""

    CACHED = "cached"
    """None was needed: the cache had got it by then."""
    QUEUE = "queue"
    """There was no room for it in time; nothing had begun."""
    PAGES = "pages"
    """It was written, and there were no pages for it in time."""
    STALLED = "stalled"
    """Nothing was heard of it for long."""
    LEASE = "lease"
    """Its router was not heard of for long."""
    LEFT = "left"
    """The requests that it was for are over."""
    CANCELLED = "cancelled"
    """Its router gave it up."""
    FLUSH = "flush"
    EPOCH = "epoch"
    REFUSED = "refused"
    """The workers cannot take it."""
    TIMEOUT = "timeout"
    """The workers did not answer."""
    COMMIT = "commit"
    """The workers did not scatter it."""


_OVER = (ArrivalState.ARRIVED, ArrivalState.FAILED)


@dataclass(slots=True, eq=False, kw_only=True)
class Arrival:
    """One transfer. ids: tokens up to the last one that comes, int32; [0, first_token) are cached here, and locked, on
    the data-parallel rank `rank`, to which the rest comes.

    number: its place among those that wait for room. since: when it was reserved. heard_at: when it last made
    progress. pages: what the KV is being scattered into.
    """

    transfer_id: str
    number: int
    ids: IntArray
    rank: int = 0
    first_token: int = 0
    cache_name: str
    namespace: Namespace
    since: float
    lease_until: float
    heard_at: float
    held: Match | None = None
    """None: it waits for room, and holds nothing."""
    writers: tuple[KvShare, ...] = ()
    """KV heads of the sending group's ranks; none: as ours."""
    parts: tuple[RankPart, ...] = ()
    """By which the workers know it, once it is being prepared."""
    state: ArrivalState = ArrivalState.QUEUED
    failure: str = ""
    is_awaited: bool = False
    """Committed ahead of the writer's last word: it may still be given up, and the worker says then that it was."""
    first_token_until: float | None = None
    """It has arrived, and the prompt's first token is on its way by the router, as a later attempt: until then the one
    that waits without it would compute it anew."""
    waits_for_pages_since: float | None = None
    """It is written, and there are no pages for it."""
    pages: IntArray = field(default_factory=empty_ints)
    sequences: list[Sequence] = field(default_factory=list)
    """Requests that wait for it: outputs of one request share its KV."""
    expected: list[Sequence] = field(default_factory=list)
    """Requests that named it, whether they have come to wait or not. A later attempt takes an earlier one's place."""

    @property
    def num_tokens(self) -> int:
        return len(self.ids) - self.first_token

    @property
    def is_over(self) -> bool:
        return self.state in _OVER


class ArrivalRoom:
    """Pages and slots of a rank that KV which comes may count on, as admission would: running requests are expected to
    ask for more. limits: of admission."""

    def __init__(self, reserve: DecodeReserve, limits: Callable[[GroupInfo], PrefillLimits]) -> None:
        self._reserve = reserve
        self._limits = limits

    def num_pages(self, state: EpochState, rank: int) -> int:
        """Pages that nobody is expected to need; where nothing runs, all that could be had."""
        available = state.ranks[rank].num_available
        if not state.table.running_on(rank):
            return available
        return available - self._reserve.reserved_pages(state.table, state.group.page_size, rank)

    def num_requests(self, state: EpochState, rank: int) -> int:
        """Requests that may be on their way to a slot: as many as are free, and some that are there when one gets
        free."""
        limits = self._limits(state.group)
        most = min(limits.max_running, limits.max_running_of_rank)
        return most - state.table.running_on(rank) + max(_LEAST_AHEAD, most // _AHEAD_SHARE)


_LEAST_AHEAD = 4
_AHEAD_SHARE = 8
