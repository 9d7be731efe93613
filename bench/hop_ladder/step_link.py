"""Links from a planner to its steps: on a thread of this process, or in a worker process behind Execute."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from radixmesh.daemons.runtime.steps.step import StepPlan, StepResult
from radixmesh.daemons.scheduler.group.group_client import ClaimedGroup, GroupClient
from radixmesh.daemons.scheduler.group.group_info import CacheSnapshot, GroupInfo
from radixmesh.daemons.scheduler.group_service import grpc_connect
from radixmesh.daemons.scheduler.messages import snapshot_of
from radixmesh.daemons.worker.plans.executor import StepExecutor
from radixmesh.daemons.worker.step_handle import StepHandle
from radixmesh.daemons.worker.stream.step_queue import StepQueue

# The default that worker and scheduler agree on over gRPC.
_PLANS_IN_FLIGHT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A worker that is ours for one epoch."""

    epoch: int
    info: GroupInfo
    snapshot: CacheSnapshot


class StepLink(ABC):
    """One epoch on one worker. Belongs to the event loop in which it was opened."""

    @abstractmethod
    async def open(self, on_result: Callable[[StepResult | Exception], None]) -> Held:
        """Takes hold of the worker. on_result: gets results in step order, or once the error that ended the epoch."""

    @abstractmethod
    async def send(self, plan: StepPlan) -> None:
        """Queues a plan behind those sent before."""

    @abstractmethod
    async def close(self) -> None:
        """Gives the worker back."""


class ThreadLink(StepLink):
    """The executor on the worker's own step thread: no message is packed, nothing leaves the process."""

    def __init__(self, executor: StepExecutor, eos_ids: tuple[int, ...] = ()) -> None:
        self._executor = executor
        self._eos_ids = eos_ids
        self._queue = StepQueue()
        self._on_result: Callable[[StepResult | Exception], None] = lambda _: None

    async def open(self, on_result: Callable[[StepResult | Exception], None]) -> Held:
        self._on_result = on_result
        executor, limits = self._executor, self._executor.limits
        await self._queue.run(lambda: executor.begin_epoch(1))
        parts, names = await self._queue.run(executor.snapshot)
        info = GroupInfo(
            page_size=limits.page_size,
            num_pages=limits.num_pages,
            num_slots=limits.num_slots,
            max_tokens_per_step=limits.max_tokens_per_step,
            max_plans_in_flight=_PLANS_IN_FLIGHT,
            vocab_size=limits.vocab_size,
            max_total_len=limits.max_total_len,
            eos_ids=self._eos_ids,
            model_name="in-process",
        )
        snapshot = snapshot_of(list(parts), tuple(names), ((), {}), limits.num_pages)
        return Held(epoch=1, info=info, snapshot=snapshot)

    async def send(self, plan: StepPlan) -> None:
        ready_ns = self._executor.runner.now_ns()
        self._queue.submit(lambda: self._run(plan, ready_ns), self._on_result, is_urgent=bool(plan.chunks))

    async def close(self) -> None:
        self._queue.close()

    def _run(self, plan: StepPlan, ready_ns: int) -> StepHandle[StepResult | Exception]:
        try:
            return StepHandle.of(self._executor.run(plan, ready_ns=ready_ns))
        except Exception as error:  # A job of the queue must not raise; the planner's side says what becomes of it.
            return StepHandle.of(error)


class ExecuteLink(StepLink):
    """The scheduler's own client of a worker process."""

    def __init__(self, address: str, instance_id: str) -> None:
        self._client = GroupClient((address,), instance_id, lambda _: None, grpc_connect())
        self._claimed: ClaimedGroup | None = None
        self._reading: asyncio.Task[None] | None = None

    async def open(self, on_result: Callable[[StepResult | Exception], None]) -> Held:
        claimed = self._claimed = await self._client.claim()
        self._reading = asyncio.create_task(_read(claimed, on_result))
        return Held(epoch=claimed.stream.epoch, info=claimed.info, snapshot=claimed.snapshots[0])

    async def send(self, plan: StepPlan) -> None:
        assert self._claimed is not None, "open the link first"
        await self._claimed.stream.send(plan)

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            with suppress(asyncio.CancelledError):
                await self._reading
        if self._claimed is not None:
            await self._claimed.close()


async def _read(claimed: ClaimedGroup, on_result: Callable[[StepResult | Exception], None]) -> None:
    try:
        async for (result,) in claimed.stream.results():
            on_result(result)
    except Exception as error:  # Whatever ended the stream ends the epoch.
        on_result(error)
