"""The Execute streams of all ranks of a group as one: what any rank ends, ends for all.

HELLO --complete what ranks miss--> FENCED on all ranks --form, if they are no group--> CLAIMED --any rank's end--> OVER

A step counts as completed when all ranks have answered it. One rank goes the same way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import StepPlan, StepResult
from radixmesh.daemons.runtime.steps.step_codec import encode_plans
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.scheduler.group.broadcast import missing_plans
from radixmesh.daemons.scheduler.group.group_info import CacheSnapshot, GroupInfo
from radixmesh.daemons.scheduler.group.rank_results import CommonLoads, TransferReleases, merged
from radixmesh.daemons.scheduler.group.rank_snapshots import common_snapshot
from radixmesh.daemons.scheduler.group.worker_stream import RefusedPlan, WorkerStream
from radixmesh.worker.v1 import worker_pb2

log = get_logger(__name__)

T = TypeVar("T")

# Ranks refuse a plan for one reason: within the time that a step may differ between them.
_REFUSALS_S = 1.0
# A holder that says nothing for 5 s counts as dead to other schedulers.
ALIVE_S = 1.0


class GroupStream:
    """One epoch on all ranks; `streams` by rank. Every method raises MeshError when any rank's stream is lost."""

    def __init__(self, streams: Sequence[WorkerStream]) -> None:
        self.rank_streams = tuple(streams)
        self._completed_step = 0
        self._releases: list[TransferReleases] = []
        self._loads: list[CommonLoads] = []
        self._tp_size = len(self.rank_streams)
        self._slots_per_rank = 0
        self.must_form = False
        """The ranks' KV may differ, or some wait in collectives: the next epoch begins with a new group."""

    def shaped(self, info: GroupInfo) -> None:
        """The ranks make so many data-parallel ones, with so many slots each."""
        self._tp_size = len(self.rank_streams) // info.dp_size
        self._slots_per_rank = info.num_slots

    @property
    def tp_size(self) -> int:
        """Workers of a data-parallel rank."""
        return self._tp_size

    def workers_of(self, dp_rank: int) -> Sequence[WorkerStream]:
        """Streams of the workers that share the batch of a data-parallel rank."""
        return self.rank_streams[dp_rank * self._tp_size : (dp_rank + 1) * self._tp_size]

    @property
    def epoch(self) -> int:
        return self.rank_streams[0].epoch

    async def hello(self) -> list[worker_pb2.WorkerHello]:
        """Opens the streams; what each rank says of itself."""
        return await together([stream.hello() for stream in self.rank_streams])

    async def fence(self, hellos: Sequence[worker_pb2.WorkerHello], epoch: int) -> bool:
        """Completes the broadcast of the epoch before, then fences all ranks, or raises the first refusal.

        False: plans are lost that some ranks have run and others have not; their KV differs.
        """
        missing = missing_plans(hellos)
        lacking = [stream for stream, plans in zip(self.rank_streams, missing.plans, strict=True) if plans]
        await together([_complete(s, plans) for s, plans in zip(self.rank_streams, missing.plans, strict=True)])
        # A fence is answered after the plans before it were received. Ranks that had all plans keep them until then: if
        # this scheduler dies too, its successor finds them there.
        await together([stream.fence(epoch) for stream in lacking])
        await together([stream.fence(epoch) for stream in self.rank_streams if stream not in lacking])
        return missing.is_whole

    @asynccontextmanager
    async def kept_alive(self) -> AsyncIterator[None]:
        """Says to all fenced ranks, every second, that their holder lives.

        Before the first plan it may wait for another rank, or for a long answer, longer than a standby would.
        """
        task = asyncio.ensure_future(self._stay_alive())
        try:
            yield
        finally:
            await _dropped((task,))

    async def _stay_alive(self) -> None:
        while True:
            await asyncio.sleep(ALIVE_S)
            await asyncio.gather(*(stream.alive() for stream in self.rank_streams))

    async def form(
        self,
        hellos: Sequence[worker_pb2.WorkerHello],
        epoch: int,
        experts: worker_pb2.ExpertPlacement | None = None,
    ) -> int:
        """Makes the ranks, fenced by `epoch`, a new group; its generation. Ranks that hold a model together lose their
        KV, others keep it. experts: their placement, where it is another than that of the loaded weights."""
        # The epoch is above every rank's highest one. What ranks report is not enough: one that has left a group, or
        # whose forming was cut off, reports none and still refuses the generations that it has seen.
        generation = epoch
        # All leave before any forms: a rank that waits for one of the old group would wait for ever.
        await together([stream.leave_group() for stream in self.rank_streams])
        rendezvous = hellos[0].capabilities.rendezvous
        members = [hello.hello.instance_id for hello in hellos]
        await together(
            [
                stream.form_group(generation, hello.capabilities.layout, rendezvous, members, experts)
                for stream, hello in zip(self.rank_streams, hellos, strict=True)
            ]
        )
        log.info("group_formed", generation=generation, num_ranks=len(self.rank_streams))
        return generation

    async def claim(self, epoch: int, group_generation: int) -> None:
        """Begins the epoch on all ranks, once their steps have ended. Raises the first refusal, or RANKS_DIVERGED where
        some have made a change of placement that others have not."""
        await together([stream.claim(epoch, group_generation) for stream in self.rank_streams])
        if any(stream.placement != self.placement for stream in self.rank_streams):
            message = "the ranks have different placements of experts: the group is formed anew"
            raise MeshError(ErrorReason.ERROR_REASON_RANKS_DIVERGED, message, {"step": "0"})

    @property
    def placement(self) -> worker_pb2.ExpertPlacement | None:
        """Of experts that the ranks share, as they claimed; None: they share none."""
        return self.rank_streams[0].placement

    async def snapshots(self, num_pages: Sequence[tuple[int, int]]) -> list[CacheSnapshot]:
        """The page records of each data-parallel rank that all its workers have alike, of as many pages as all ranks
        have: GPUs differ in the memory that is free. num_pages: by worker, of device and host."""
        streams = zip(self.rank_streams, num_pages, strict=True)
        snapshots = await together([stream.snapshot(*nums) for stream, nums in streams])
        parts = self._by_dp_rank(snapshots)
        self._releases = [TransferReleases([snapshot.pinned_transfers for snapshot in part]) for part in parts]
        self._loads = [CommonLoads() for _ in parts]
        least, least_host = (min(nums) for nums in zip(*num_pages, strict=True))
        return [common_snapshot(part, least, least_host) for part in parts]

    async def put_blob(self, blob_hash: str, data: bytes) -> None:
        """Gives all ranks a blob; the first refusal."""
        await together([stream.put_blob(blob_hash, data) for stream in self.rank_streams])

    async def send(self, *plans: StepPlan) -> None:
        """Sends plans that follow each other to all ranks at once: the same bytes, encoded once.

        They are one message, and are answered together, where all ranks take that.
        """
        num = len(self.rank_streams)
        completed = self._completed_step if num > 1 else 0
        takes_batches = all(stream.takes_plan_batches for stream in self.rank_streams)
        for batch in [plans] if takes_batches else [(plan,) for plan in plans]:
            data = encode_plans(batch, completed, num // self._tp_size, self._slots_per_rank)
            await together([stream.send(data) for stream in self.rank_streams])

    async def results(self) -> AsyncIterator[Sequence[StepResult]]:
        """Merged results in step order, one of each data-parallel rank.

        Raises RefusedPlan, or MeshError when a rank ends the epoch or ranks differ.
        """
        each = [stream.results() for stream in self.rank_streams]
        while True:
            results = await self._next(each)
            try:
                parts = self._by_dp_rank(results)
                each_rank = [
                    loads.take(part, releases.take(part, merged(part)))
                    for part, releases, loads in zip(parts, self._releases, self._loads, strict=True)
                ]
            except MeshError as error:
                self.must_form = error.reason == ErrorReason.ERROR_REASON_RANKS_DIVERGED
                raise
            self._completed_step = each_rank[0].step_id
            yield each_rank

    def _by_dp_rank(self, values: Sequence[T]) -> list[Sequence[T]]:
        return [values[start : start + self._tp_size] for start in range(0, len(values), self._tp_size)]

    async def _next(self, each: Sequence[AsyncIterator[StepResult]]) -> list[StepResult]:
        """The next result of every rank."""
        if len(each) == 1:
            return [await anext(each[0])]
        tasks = [asyncio.ensure_future(_next_of(rank)) for rank in each]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            refusals = _refusals(tasks)
            if refusals:
                # All ranks refuse what is wrong with the plan. One that refuses alone leaves the others in collectives.
                await asyncio.wait(tasks, timeout=_REFUSALS_S)
                self.must_form = len(_refusals(tasks)) < len(tasks)
                raise refusals[0]
            # A rank that was lost, before the ranks that wait for it in a collective.
            for task in tasks:
                if task.done() and (error := task.exception()) is not None:
                    raise error
            return [task.result() for task in tasks]
        finally:
            await _dropped(tasks)

    def close(self) -> None:
        """Drops the streams: the workers finish what they have received."""
        for stream in self.rank_streams:
            stream.close()


async def together(calls: Sequence[Awaitable[T]]) -> list[T]:
    """All results, in order; the first error, with the other calls cancelled and over."""
    if len(calls) == 1:
        return [await calls[0]]
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _dropped(tasks)


async def _dropped(tasks: Sequence[asyncio.Future[T]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _next_of(results: AsyncIterator[StepResult]) -> StepResult:
    return await anext(results)


def _refusals(tasks: Sequence[asyncio.Future[StepResult]]) -> list[RefusedPlan]:
    errors = [task.exception() for task in tasks if task.done() and not task.cancelled()]
    return [error for error in errors if isinstance(error, RefusedPlan)]


async def _complete(stream: WorkerStream, plans: Sequence[bytes]) -> None:
    for plan in plans:
        await stream.complete(plan)
