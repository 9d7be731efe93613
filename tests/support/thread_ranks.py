"""Ranks of a group as threads of this process, each in its batch (tensor parallel) and among those of its experts."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from radixmesh.daemons.runtime.rank_layout import RankLayout
from radixmesh.daemons.worker.collectives.rank_group import RankGroup
from support.thread_group import ThreadGroup

T = TypeVar("T")


class ThreadRanks:
    """layouts, batches, experts: by rank."""

    def __init__(self, *, tp_size: int, dp_size: int, ep_size: int) -> None:
        sizes = {"tp_size": tp_size, "dp_size": dp_size, "ep_size": ep_size}
        self.layouts = [RankLayout.of_rank(rank, **sizes) for rank in range(tp_size * dp_size)]
        self._groups = [ThreadGroup(tp_size) for _ in range(dp_size)]
        self._of_experts = [ThreadGroup(ep_size) for _ in range(len(self.layouts) // ep_size)]
        self.batches: list[RankGroup] = [self._groups[of.dp_rank].groups[of.tp_rank] for of in self.layouts]
        self.experts: list[RankGroup] = [self._of_experts[of.rank // ep_size].groups[of.ep_rank] for of in self.layouts]
        self._threads = ThreadPoolExecutor(len(self.layouts))

    def run(self, call: Callable[[int], T]) -> list[T]:
        """The results of call(rank) on all ranks at once; an error of one ends all."""

        def one(rank: int) -> T:
            try:
                return call(rank)
            except BaseException:
                for group in (*self.batches, *self.experts):
                    assert group.communicator is not None
                    group.communicator.close()
                raise

        return ThreadGroup.results([self._threads.submit(one, rank) for rank in range(len(self.layouts))])

    def close(self) -> None:
        self._threads.shutdown()
        for group in (*self._groups, *self._of_experts):
            group.close()
