"""Calls to the workers for pages of their store, of one epoch: plans go on while they run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from radixmesh.daemons.runtime.arrays import pack_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.scheduler.group.group_stream import GroupStream, together
from radixmesh.daemons.scheduler.planning.epoch_state import EpochState
from radixmesh.daemons.scheduler.planning.planner import Planner
from radixmesh.daemons.scheduler.tiers.kv_fetches import KvFetch
from radixmesh.worker.v1 import worker_pb2

log = get_logger(__name__)

# Host pages of a fetch without an answer stay taken: a worker that does not answer is lost for other reasons before.
_TIMEOUT_S = 60.0


class FetchCalls:
    """changed: called when requests were unparked."""

    def __init__(self, planner: Planner, stream: GroupStream, changed: Callable[[], None]) -> None:
        self._planner, self._stream, self._changed = planner, stream, changed
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begins what the planner wants. Call when its plans have been sent."""
        state = self._planner.state
        if state is None:
            return
        for fetch in self._planner.fetches.take_wanted():
            # A page that was evicted for it may be saved to by a plan that the worker does not have yet.
            host = state.ranks[fetch.rank].host
            after_step = state.last_step_id + (host is not None and host.has_saves)
            task = asyncio.ensure_future(self._fetch(state, fetch, after_step))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        """The epoch is over."""
        for task in tuple(self._tasks):
            task.cancel()

    async def _fetch(self, state: EpochState, fetch: KvFetch, after_step: int) -> None:
        num, is_answer, held = 0, False, fetch.held.pages
        ids, pages = pack_ints(fetch.ids), pack_ints(fetch.pages)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                answers = await together(
                    [
                        rank.transport.fetch_pages(
                            worker_pb2.FetchPagesRequest(
                                epoch=rank.epoch,
                                instance_id=rank.instance_id,
                                after_step=after_step,
                                ids=ids,
                                host_pages=pages,
                                previous_page=int(held[-1]) if len(held) else -1,
                                cache_namespace=fetch.cache_name,
                            )
                        )
                        for rank in self._stream.workers_of(fetch.rank)
                    ]
                )
            # Workers of a rank have stores of their own; one may have evicted what another has.
            num, is_answer = min(len(fetch.pages), *(answer.num_pages for answer in answers)), True
        except (MeshError, TimeoutError) as error:
            log.info("kv_not_fetched", error=str(error) or "timeout")
        self._planner.fetches.fetched(state, fetch, num, is_answer=is_answer)
        self._changed()
