"""Follows a replica's prefix cache: opens the watch again whenever it ends, from where it was if that is still kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from radixmesh.daemons.router.placement.cache_view import CacheChange, ViewError, ViewTooLargeError
from radixmesh.daemons.router.placement.placement import Placement
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.daemons.runtime.telemetry.logs import get_logger

log = get_logger(__name__)

OpenWatch = Callable[[str, int | None, bool], AsyncIterator[CacheChange]]
"""Opens a watch of the scheduler at an address, after a revision or with a snapshot, with what lies in a store or
without. Raises MeshError as it ends."""

_RETRY_S = 1.0
_MAX_RETRY_S = 30.0
# A cache that cannot be watched now cannot be in a moment either, nor does a view that is too large shrink.
_PAUSE_S = 300.0


class CacheFollower:
    """One replica's watch, in a task of its own. Changes are applied between other work, one message at a time."""

    def __init__(self, row: int, address: str, open_watch: OpenWatch, placement: Placement) -> None:
        self._row = row
        self._address = address
        self._open_watch = open_watch
        self._placement = placement
        self._revision: int | None = None
        self._takes_store = True
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Follows, in the background."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"cache of {self._address}")

    async def close(self) -> None:
        """Ends the watch. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))

    async def _run(self) -> None:
        pause = _RETRY_S
        while True:
            has_heard = False
            try:
                async for change in self._open_watch(self._address, self._revision, self._takes_store):
                    if change.is_reset:
                        await self._clear(keeps_store=True)
                    self._placement.apply(self._row, change)
                    if self._revision is None and not change.is_snapshot:
                        tokens = self._placement.num_cached_tokens(self._row)
                        log.info("cache_followed", address=self._address, tokens=tokens)
                    if not change.is_snapshot:
                        self._revision = change.revision
                    has_heard = True
                    await asyncio.sleep(0)
            except MeshError as error:
                if error.reason == ErrorReason.ERROR_REASON_RESNAPSHOT:
                    self._takes_store = True
                    await self._begin_anew()
                if error.reason == ErrorReason.ERROR_REASON_UNSUPPORTED:
                    log.info("cache_not_watched", address=self._address, error=str(error))
                    await self._begin_anew()
                    await asyncio.sleep(_PAUSE_S)
            except ViewTooLargeError as error:
                is_left_out, self._takes_store = self._takes_store, False
                left_out = "store" if is_left_out else "all"
                log.warning("cache_view_too_large", address=self._address, error=str(error), left_out=left_out)
                await self._begin_anew()
                # The store is the first to be left out: it may have lost what it is said to have.
                await asyncio.sleep(_RETRY_S if is_left_out else _PAUSE_S)
            except ViewError as error:
                log.warning("cache_view_broken", address=self._address, error=str(error))
                await self._begin_anew()
            except Exception:
                # A bug must not end the router; without views it still places, by what it sent.
                log.exception("cache_follower_failed", address=self._address)
                await self._begin_anew()
            if self._revision is None:
                await self._begin_anew()  # A part of a snapshot is none.
            pause = _RETRY_S if has_heard else min(2 * pause, _MAX_RETRY_S)
            await asyncio.sleep(pause)

    async def _begin_anew(self) -> None:
        """A snapshot comes first: what was known is worth nothing, or wrong."""
        self._revision = None
        await self._clear()

    async def _clear(self, *, keeps_store: bool = False) -> None:
        for _ in self._placement.lose_view(self._row, keeps_store=keeps_store):
            await asyncio.sleep(0)
