"""A store of KV behind simulated workers: it has the first pages of whatever is asked for, as many as a test likes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray, as_ints
from radixmesh.daemons.scheduler.planning.epoch_state import EpochState
from radixmesh.daemons.scheduler.planning.planner import Planner
from radixmesh.daemons.scheduler.tiers.kv_fetches import KvFetch
from radixmesh.daemons.worker.plans.executor import StepExecutor
from radixmesh.daemons.worker.simulated.token_source import EMPTY_PREFIX, token_hashes


@dataclass(slots=True)
class _Asked:
    """generations: of the host pages, once they are granted."""

    state: EpochState
    fetch: KvFetch
    after_step: int
    generations: IntArray | None = None


class FakeStore:
    """Answers the fetches of a planner as FetchCalls and StoreTier do, in two steps: pages are granted, then filled.

    executors: of each data-parallel rank, asked for anew whenever they are needed. num_found: pages that the store has
    of as many.
    """

    def __init__(
        self, planner: Planner, executors: Callable[[], Sequence[StepExecutor]], num_found: Callable[[int], int]
    ) -> None:
        self._planner, self._executors, self._num_found = planner, executors, num_found
        self._asked: deque[_Asked] = deque()
        self.num_filled = 0

    def collect(self) -> None:
        """Takes the fetches that the planner wants, behind the plans that it has made."""
        state = self._planner.state
        for fetch in self._planner.fetches.take_wanted():
            assert state is not None
            host = state.ranks[fetch.rank].host
            assert host is not None
            self._asked.append(_Asked(state, fetch, state.last_step_id + host.has_saves))

    def step(self) -> bool:
        """The next step of one fetch; False: there is none that can be made now."""
        for asked in tuple(self._asked):
            if asked.state is not self._planner.state:
                self._asked.remove(asked)  # The worker has another holder.
            elif asked.generations is not None:
                self._asked.remove(asked)
                self._fill(asked)
                return True
            elif self._executors()[asked.fetch.rank].last_step >= asked.after_step:
                self._grant(asked)
                return True
        return False

    def _grant(self, asked: _Asked) -> None:
        fetch, executor = asked.fetch, self._executors()[asked.fetch.rank]
        host = executor.host
        assert host is not None and not np.isin(fetch.pages, host.loading_host_pages()).any()
        host.records.grant(
            fetch.pages,
            np.array([len(fetch.pages)]),
            previous_pages=as_ints([int(fetch.held.pages[-1]) if len(fetch.held.pages) else -1]),
            namespaces=[fetch.cache_name],
            weights_version=executor.weights_version,
        )
        asked.generations = host.records.generations[fetch.pages]

    def _fill(self, asked: _Asked) -> None:
        fetch, executor = asked.fetch, self._executors()[asked.fetch.rank]
        host, size = executor.host, executor.limits.page_size
        assert host is not None and asked.generations is not None
        assert (host.records.generations[fetch.pages] == asked.generations).all(), "a page of a fetch became another's"
        num = self._num_found(len(fetch.pages))
        pages = fetch.pages[:num]
        if num:
            positions = np.arange(len(fetch.ids), dtype=np.int32)
            kv = np.cumsum(token_hashes(fetch.ids, positions), dtype=np.uint64) + EMPTY_PREFIX
            first = len(fetch.held.pages)
            host.pool.write(pages, kv.reshape(-1, size)[first : first + num].view(np.uint8))
            host.records.ids[pages] = fetch.ids.reshape(-1, size)[first : first + num]
            host.records.filled[pages] = size
        self.num_filled += num
        self._planner.fetches.fetched(asked.state, fetch, num)
