"""WatchCache: a snapshot as inserts, then what changes, as messages. Small ones: steps go on between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import pack_ints
from radixmesh.daemons.runtime.cache_namespace import split_cache_name
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.scheduler.cache.feed import (
    STORE_TIER,
    CacheEvent,
    CacheFeed,
    Evicted,
    Inserted,
    Reset,
    Split,
    inserted_on,
)
from radixmesh.daemons.scheduler.cache.observer import CacheContent
from radixmesh.daemons.scheduler.scheduler_loop import SchedulerLoop
from radixmesh.scheduler.v1 import scheduler_pb2

# Of one message: encoding it keeps a step waiting for a few tenths of a millisecond at most.
_MAX_EVENTS, _MAX_TOKENS = 128, 1 << 16
# A prompt becomes known with its first token, which its router passes on first: it has one thread for both.
_BEHIND_TOKENS_S = 0.002
# On the wire 0 is the root.
_FIRST_NODE = 1
_TIERS = (scheduler_pb2.CACHE_TIER_UNSPECIFIED, scheduler_pb2.CACHE_TIER_HOST, scheduler_pb2.CACHE_TIER_STORE)


async def watch_cache(
    loop: SchedulerLoop, request: scheduler_pb2.WatchCacheRequest
) -> AsyncIterator[scheduler_pb2.WatchCacheResponse]:
    """Messages for one watcher, for ever. The consumer's pace is its own: between two messages any number of changes
    may happen.

    Raises RESNAPSHOT when changes that the watcher lacks are not kept any more, UNSUPPORTED if the cache cannot be
    watched, NOT_SERVING if there is no worker group, hence no cache.
    """
    feed = loop.planner.cache_feed
    group = loop.planner.group
    state = loop.planner.state
    first = scheduler_pb2.WatchCacheResponse(
        weights_digest=group.weights_digest if group is not None else "",
        store_id=state.group.kv_store_id if state is not None and state.stored else "",
    )
    takes_store = request.takes_store_tier
    if request.HasField("after_revision"):
        revision = request.after_revision
    else:
        contents = feed.open()
        revision = feed.revision
        if contents is None:
            raise _no_content(loop)
        async for message in snapshot_messages(contents, revision, feed.num_ranks, takes_store=takes_store):
            message.MergeFrom(first)
            first.Clear()
            yield message
    while True:
        events = feed.events_after(revision, _MAX_EVENTS, _MAX_TOKENS)
        if events is None:
            raise _resnapshot(revision, feed)
        for message in change_messages(events, revision, None if takes_store else feed.is_of_store):
            message.MergeFrom(first)
            first.Clear()
            yield message
        revision += len(events)
        if not events:
            await loop.until(lambda seen=revision: feed.revision != seen)  # type: ignore[misc]
            await asyncio.sleep(_BEHIND_TOKENS_S)


async def snapshot_messages(
    contents: Sequence[CacheContent], revision: int, num_ranks: int, *, takes_store: bool = True
) -> AsyncIterator[scheduler_pb2.WatchCacheResponse]:
    """The last message is the first without is_snapshot: it says that the snapshot is complete. takes_store: False:
    what lies in a store is left out."""
    for index, content in enumerate(contents if takes_store else contents[: STORE_TIER * num_ranks]):
        await asyncio.to_thread(content.order)
        for batch in _batches(content, index, len(contents), num_ranks):
            yield scheduler_pb2.WatchCacheResponse(revision=revision, is_snapshot=True, inserts=batch)
            await asyncio.sleep(0)
    yield scheduler_pb2.WatchCacheResponse(revision=revision)


def _batches(
    content: CacheContent, index: int, num_caches: int, num_ranks: int
) -> Iterator[list[scheduler_pb2.CacheInsert]]:
    batch: list[scheduler_pb2.CacheInsert] = []
    num_tokens = 0
    for item in content.nodes():
        batch.append(_insert(inserted_on(index, num_caches, *item, num_ranks)))
        num_tokens += len(item.ids)
        if len(batch) >= _MAX_EVENTS or num_tokens >= _MAX_TOKENS:
            yield batch
            batch, num_tokens = [], 0
    if batch:
        yield batch


def change_messages(
    events: Iterable[CacheEvent], revision: int, is_unwanted: Callable[[CacheEvent], bool] | None = None
) -> Iterator[scheduler_pb2.WatchCacheResponse]:
    """Events after `revision` as messages. The fields of one apply in the order reset, splits, inserts, trims,
    evicted_nodes: an event that would come too late there begins the next message. is_unwanted: of events that are left
    out; their revisions count."""
    message, last, evicted = scheduler_pb2.WatchCacheResponse(), -1, list[int]()
    for event in events:
        if is_unwanted is not None and is_unwanted(event):
            revision += 1
            continue
        rank = _rank(event)
        if rank < last or (rank == last == 0):
            message.evicted_nodes = pack_ints(evicted)
            yield message
            message, evicted = scheduler_pb2.WatchCacheResponse(), []
        last = rank
        revision += 1
        message.revision = revision
        match event:
            case Reset():
                message.is_reset = True
            case Split():
                message.splits.add(
                    node=event.node + _FIRST_NODE, upper=event.upper + _FIRST_NODE, num_upper=event.num_upper
                )
            case Inserted():
                message.inserts.append(_insert(event))
            case Evicted(num_left=0):
                evicted.append(event.node + _FIRST_NODE)
            case Evicted():
                message.trims.add(node=event.node + _FIRST_NODE, num_left=event.num_left)
    if last >= 0:
        message.evicted_nodes = pack_ints(evicted)
        yield message


def _rank(event: CacheEvent) -> int:
    match event:
        case Reset():
            return 0
        case Split():
            return 1
        case Inserted():
            return 2
        case Evicted():
            return 4 if not event.num_left else 3


def _insert(event: Inserted) -> scheduler_pb2.CacheInsert:
    adapter, salt = split_cache_name(event.namespace.name)
    return scheduler_pb2.CacheInsert(
        node=event.node + _FIRST_NODE,
        parent=event.parent + _FIRST_NODE,
        ids=pack_ints(event.ids),
        cache_namespace=event.namespace.name,
        adapter=adapter,
        salt=salt,
        weights_version=event.namespace.weights_version,
        dp_rank=event.rank,
        tier=_TIERS[event.tier],
    )


def _no_content(loop: SchedulerLoop) -> MeshError:
    if loop.planner.state is None:
        message = "no worker group is claimed, so nothing is cached: watch again later"
        return MeshError(ErrorReason.ERROR_REASON_NOT_SERVING, message, {"state": "connecting"})
    message = "this scheduler's prefix cache cannot be watched: choose the radix cache"
    return MeshError(ErrorReason.ERROR_REASON_UNSUPPORTED, message, {"feature": "WatchCache"})


def _resnapshot(revision: int, feed: CacheFeed) -> MeshError:
    return MeshError(
        ErrorReason.ERROR_REASON_RESNAPSHOT,
        f"changes after revision {revision} are not kept any more: watch again from a snapshot",
        {"after_revision": str(revision), "revision": str(feed.revision)},
    )
