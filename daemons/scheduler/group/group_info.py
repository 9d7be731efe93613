"""The scheduler's view of its worker group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from radixmesh.daemons.runtime.common_settings import PredecessorEnd
from radixmesh.daemons.runtime.kv_share import KvShare
from radixmesh.daemons.runtime.steps.step import PageRecords, Task
from radixmesh.daemons.scheduler.group.shared_experts import SharedExperts


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupInfo:
    """Sizes and abilities that all ranks share; the comments of worker.v1.Capabilities and ModelIdentity hold."""

    page_size: int
    num_pages: int
    num_slots: int
    num_host_pages: int = 0
    """Pages of host memory of each rank; 0 = there is no such tier."""
    dp_size: int = 1
    """Data-parallel ranks: pages and slots are those of each."""
    ep_size: int = 1
    """Ranks that share the experts of a layer."""
    experts: SharedExperts | None = None
    """Those experts; None: none are shared, or a worker cannot move them."""
    max_tokens_per_step: int
    max_plans_in_flight: int
    max_tokens_per_row: int = 1
    """Most tokens that a decode yields in a step; 1: exactly one, else any number from 0 on."""
    vocab_size: int
    max_total_len: int
    eos_ids: tuple[int, ...] = ()
    weights_version: int = 1
    tasks: frozenset[Task] = frozenset({Task.GENERATE})
    barrier_ops: frozenset[str] = frozenset()
    model_name: str = ""
    group_generation: int = 0
    instance_id: str = ""
    """Of the worker process; of rank 0 if there are several."""
    predecessor_end: PredecessorEnd = PredecessorEnd.UNKNOWN
    other_ranks: tuple[tuple[str, PredecessorEnd], ...] = ()
    """Instance id and predecessor's end of the ranks from 1 on."""
    weights_digest: str = ""
    grammar_format: str = ""
    """Of the grammars that the workers follow; empty = none."""
    kv_dtype: str = ""
    kv_layout: str = ""
    has_kv_store: bool = False
    """All workers fetch pages from a store into host memory."""
    kv_store_id: str = ""
    """Equal for groups that find each other's pages there; empty: nobody else has the store."""
    has_transfers: bool = False
    """The workers send KV to others and take it from them."""
    kv_shares: tuple[KvShare, ...] = ()
    """KV heads of each worker of a data-parallel rank, where there are transfers."""

    def lost_from_outside(self, former: GroupInfo) -> bool:
        """True if a rank is the successor of a process of `former` that somebody killed or asked to leave."""
        ranks, others = self._ranks(), former._ranks()
        if len(ranks) != len(others):
            return False
        return any(
            instance_id != other_id and end is PredecessorEnd.FROM_OUTSIDE
            for (instance_id, end), (other_id, _) in zip(ranks, others, strict=True)
        )

    def has_store_of(self, former: GroupInfo) -> bool:
        """True if pages that `former` has stored are of use here, as far as it tells: a disk has no name."""
        names = ("kv_store_id", "weights_digest", "weights_version", "kv_dtype", "kv_layout", "page_size", "dp_size")
        return all(getattr(self, name) == getattr(former, name) for name in names)

    def _ranks(self) -> tuple[tuple[str, PredecessorEnd], ...]:
        return ((self.instance_id, self.predecessor_end), *self.other_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSnapshot:
    """Page records of all pages of a rank; `names` are what namespace_indexes name, `pinned_pages` transfers hold.

    pinned_transfers: of these pages, by transfer id; those that none names stay pinned until the next epoch.
    """

    records: PageRecords
    names: tuple[str, ...]
    pinned_pages: tuple[int, ...] = ()
    pinned_transfers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    host: CacheSnapshot | None = None
    """Of host pages; None: there are none."""
