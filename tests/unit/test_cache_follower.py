"""A replica's cache is followed over broken watches, gaps and reports that make no sense."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.router.placement import cache_follower
from radixmesh.daemons.router.placement.cache_follower import CacheFollower
from radixmesh.daemons.router.placement.cache_view import CacheChange, Insert, Tier
from radixmesh.daemons.router.placement.placement import PlacedRequest, Placement
from radixmesh.daemons.router.placement.policies import make_policy
from radixmesh.daemons.runtime.errors import MeshError

IDS = bytes(4 * 320)
GAP = MeshError(ErrorReason.ERROR_REASON_RESNAPSHOT, "a gap")
GONE = MeshError(ErrorReason.ERROR_REASON_NO_REPLICA, "gone")
UNSUPPORTED = MeshError(ErrorReason.ERROR_REASON_UNSUPPORTED, "told to nobody")


def insert(node: int, *, parent: int = 0, tier: Tier = Tier.DEVICE) -> Insert:
    return Insert(node=node, parent=parent, ids=IDS[: 4 * 64], namespace="", weights_version=0, tier=tier)


class Source:
    """Watches that report what they are given, in order, and end with an error; the last one goes on for ever."""

    def __init__(self, *watches: tuple[list[CacheChange], Exception]) -> None:
        self.watches = list(watches)
        self.opened_after: list[int | None] = []
        self.took_store: list[bool] = []
        self.is_done = asyncio.Event()

    async def __call__(self, address: str, after_revision: int | None, takes_store: bool) -> AsyncIterator[CacheChange]:
        self.opened_after.append(after_revision)
        self.took_store.append(takes_store)
        if not self.watches:
            self.is_done.set()
            await asyncio.Event().wait()
        changes, error = self.watches.pop(0)
        for change in changes:
            yield change
        raise error


async def follow(source: Source, monkeypatch: pytest.MonkeyPatch, view_bytes: int = 1 << 20) -> tuple[Placement, int]:
    for name in ("_RETRY_S", "_MAX_RETRY_S", "_PAUSE_S"):
        monkeypatch.setattr(cache_follower, name, 0.0)
    placement = Placement(make_policy("cache_aware"), view_bytes=view_bytes)
    row = placement.add("replica")
    follower = CacheFollower(row, "replica", source, placement)
    follower.start()
    async with asyncio.timeout(30):
        await source.is_done.wait()
    await follower.close()
    return placement, row


def matched(placement: Placement, row: int) -> int:
    return placement.choose(PlacedRequest(prompt_ids=IDS), [row]).matched_tokens


async def test_a_watch_goes_on_from_the_last_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(
        ([CacheChange(revision=5, is_snapshot=True, inserts=[insert(1)]), CacheChange(revision=5)], GONE),
        ([CacheChange(revision=6, inserts=[insert(2, parent=1)])], GONE),
    )
    placement, row = await follow(source, monkeypatch)
    assert source.opened_after == [None, 5, 6]
    assert matched(placement, row) == 128


async def test_half_a_snapshot_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(([CacheChange(revision=5, is_snapshot=True, inserts=[insert(1)])], GONE))
    placement, row = await follow(source, monkeypatch)
    assert source.opened_after == [None, None]
    assert matched(placement, row) == 0 and placement.num_cached_tokens(row) is None


@pytest.mark.parametrize(
    "ending", [GAP, UNSUPPORTED, RuntimeError("a bug")], ids=["gap", "not supported", "bug in between"]
)
async def test_what_was_known_is_worth_nothing_after(ending: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(([CacheChange(revision=5, inserts=[insert(1)])], ending))
    placement, row = await follow(source, monkeypatch)
    assert source.opened_after == [None, None]
    assert matched(placement, row) == 0 and placement.view_bytes == 0


async def test_reports_that_do_not_fit_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = CacheChange(revision=6, inserts=[insert(3, parent=9)])
    source = Source(([CacheChange(revision=5, inserts=[insert(1)]), broken], GONE))
    placement, row = await follow(source, monkeypatch)
    assert source.opened_after == [None, None] and matched(placement, row) == 0


async def test_a_view_that_is_too_large_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = [CacheChange(revision=n, inserts=[insert(n)]) for n in range(1, 99)]
    source = Source((changes, GONE), (changes, GONE))
    placement, row = await follow(source, monkeypatch, 4000)
    assert source.opened_after == [None, None, None] and placement.view_bytes == 0
    # Changes sent there are remembered instead.
    decision = placement.choose(PlacedRequest(prompt_ids=IDS), [row])
    placement.take_sent(decision, 1)
    assert matched(placement, row) == 319


async def test_what_lies_in_a_store_is_left_out_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has half of the bytes of all views, and a view without it is better than none; a gap begins with all."""
    near = CacheChange(revision=1, inserts=[insert(1)])
    stored = [CacheChange(revision=n, inserts=[insert(n, tier=Tier.STORE)]) for n in range(2, 9)]
    source = Source(([near, *stored], GONE), ([near], GONE), ([], GAP))
    placement, row = await follow(source, monkeypatch, 8000)
    assert source.took_store == [True, False, False, True] and source.opened_after == [None, None, 1, None]
    source = Source(([near, *stored[:4]], GONE))
    placement, row = await follow(source, monkeypatch, 8000)
    assert source.took_store == [True, True] and matched(placement, row) == 64
    assert placement.view_bytes > 4000


async def test_a_flush_leaves_the_store_its_name_and_a_gap_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first report of a watch says it."""
    changes = [
        CacheChange(revision=1, inserts=[insert(1, tier=Tier.HOST)], store_id="s"),
        CacheChange(revision=2, is_reset=True),
        CacheChange(revision=3, inserts=[insert(1, tier=Tier.HOST)]),
    ]
    for ending, is_shared in ((GONE, True), (GAP, False)):
        source = Source((changes, ending))
        placement, _ = await follow(source, monkeypatch)
        placement.replicas.shares_store(beside := placement.add("beside"), "s")
        assert (placement.replicas.shared_by is not None) == is_shared
        assert matched(placement, beside) == (64 if is_shared else 0)
