"""Page records of all ranks as one: KV counts only where every rank has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import PageRecords
from radixmesh.daemons.scheduler.group.group_info import CacheSnapshot


def common_snapshot(snapshots: Sequence[CacheSnapshot], num_pages: int, num_host_pages: int = 0) -> CacheSnapshot:
    """Records of the first pages (and of those of the host), emptied where ranks differ; pages that any rank pins.
    num_pages: as many as every rank of the group has.

    Raises RANKS_DIVERGED where page generations differ: the ranks of one group apply the
    same plans. Tokens differ where one rank ended a step that died on another.
    """
    first = snapshots[0]
    ours = _first_pages(first.records, num_pages)
    is_same = np.ones(num_pages, np.bool_)
    for other in snapshots[1:]:
        theirs = _first_pages(other.records, num_pages)
        if not np.array_equal(ours.generations, theirs.generations):
            message = "the ranks' pages were granted differently: the group is formed anew"
            raise MeshError(ErrorReason.ERROR_REASON_RANKS_DIVERGED, message)
        for name in ("filled", "previous_pages", "previous_generations", "weights_versions"):
            is_same &= getattr(ours, name) == getattr(theirs, name)
        is_same &= _names(ours, first.names) == _names(theirs, other.names)
        # Of the pages left, both have equally many tokens.
        pages = np.flatnonzero(is_same)
        page_of_token = np.repeat(pages, ours.filled[pages])
        our_ids = ours.ids[np.repeat(is_same, ours.filled)]
        their_ids = theirs.ids[np.repeat(is_same, theirs.filled)]
        is_same[page_of_token[our_ids != their_ids]] = False
    kept = np.repeat(is_same, ours.filled)
    filled = np.where(is_same, ours.filled, 0).astype(np.int32)
    pinned = sorted({page for snapshot in snapshots for page in snapshot.pinned_pages if page < num_pages})
    transfers: dict[str, set[int]] = {}
    for snapshot in snapshots:
        for name, held in snapshot.pinned_transfers.items():
            transfers.setdefault(name, set()).update(held)
    return CacheSnapshot(
        records=replace(ours, filled=filled, ids=ours.ids[kept]),
        names=first.names,
        pinned_pages=tuple(pinned),
        pinned_transfers={name: tuple(sorted(held)) for name, held in transfers.items()},
        host=_common_host(snapshots, num_host_pages),
    )


def _common_host(snapshots: Sequence[CacheSnapshot], num_pages: int) -> CacheSnapshot | None:
    hosts = [snapshot.host for snapshot in snapshots if snapshot.host is not None]
    return common_snapshot(hosts, num_pages) if len(hosts) == len(snapshots) else None


def _first_pages(records: PageRecords, num_pages: int) -> PageRecords:
    """A page that follows one beyond them has no parent: it is not adopted."""
    if len(records.filled) == num_pages:
        return records
    names = ("generations", "filled", "previous_pages", "previous_generations", "namespace_indexes", "weights_versions")
    columns = {name: getattr(records, name)[:num_pages] for name in names}
    return PageRecords(first_page=0, ids=records.ids[: int(columns["filled"].sum())], **columns)


def _names(records: PageRecords, names: Sequence[str]) -> np.ndarray[tuple[int], np.dtype[np.object_]]:
    """Namespace of each page; of an empty one, none."""
    table = np.array([*names, ""], dtype=object)
    indexes = np.where(records.filled > 0, records.namespace_indexes, len(names))
    return table[indexes]
