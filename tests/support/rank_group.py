"""A group of simulated ranks in this process whose steps meet in collectives, as those of tensor parallelism do."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from radixmesh.daemons.runtime.rank_layout import RankLayout
from radixmesh.daemons.worker.__main__ import WorkerDaemon
from radixmesh.daemons.worker.config import Backend, WorkerSettings
from radixmesh.daemons.worker.ranks.group_member import CollectiveAborted
from radixmesh.daemons.worker.runner import ModelRunner, StepOutput
from support.running_daemon import Running, running

VOCAB_SIZE = 1000
_STUCK_S = 60.0


class Wire:
    """Carries the collectives of all ranks: values by (generation, how many came before, rank)."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.changed = threading.Condition()
        self.values: dict[tuple[int, int], dict[int, object]] = {}


class LockStepMember:
    """One rank's end of the wire. all_gather() blocks until every rank has come, or abort() is called here."""

    group = None
    experts = None

    def __init__(self, wire: Wire, rank: int) -> None:
        self.layout = RankLayout(tp_size=wire.num_ranks, tp_rank=rank)
        self.rendezvous = f"rank-{rank}"
        self.generations: list[int] = []
        self._wire = wire
        self._num_calls = 0
        self._is_aborted = True

    @property
    def is_whole(self) -> bool:
        return not self._is_aborted

    def form(self, generation: int, rendezvous: str, member_instance_ids: Sequence[str]) -> None:
        assert len(member_instance_ids) == self._wire.num_ranks
        self.generations.append(generation)
        self._num_calls, self._is_aborted = 0, False
        assert self.all_gather(rendezvous) == ["rank-0"] * self._wire.num_ranks

    def abort(self) -> None:
        with self._wire.changed:
            self._is_aborted = True
            self._wire.changed.notify_all()

    def all_gather(self, value: object) -> list[object]:
        """The ranks' values, by rank."""
        wire, deadline = self._wire, time.monotonic() + _STUCK_S
        with wire.changed:
            if self._is_aborted:
                raise CollectiveAborted
            there = wire.values.setdefault((self.generations[-1], self._num_calls), {})
            self._num_calls += 1
            there[self.layout.rank] = value
            wire.changed.notify_all()
            while len(there) < wire.num_ranks:
                if self._is_aborted:
                    raise CollectiveAborted
                if time.monotonic() > deadline:
                    raise RuntimeError(f"rank {self.layout.rank} waited {_STUCK_S} s in a collective")
                wire.changed.wait(1.0)
        return [there[rank] for rank in range(wire.num_ranks)]


Spoil = Callable[[int, StepOutput], StepOutput]


class RankDaemon(WorkerDaemon):
    """A simulated worker whose forwards begin in a collective, in which the ranks compare what they compute."""

    spoil: Spoil | None = None
    """Called with the number of the forward and its output."""

    async def load(self) -> None:
        await super().load()
        assert self.core.executor is not None
        in_lock_step(self.core.executor.runner, self)


def in_lock_step(runner: ModelRunner, daemon: RankDaemon) -> None:
    inner, num = runner.step, 0
    member = daemon.core.member
    assert isinstance(member, LockStepMember)

    def step(rows, segments, ready_ns):  # type: ignore[no-untyped-def]
        nonlocal num
        # No token values: ranks that diverged go on with different ones until the scheduler has compared them.
        batch = (rows.slots.tolist(), rows.positions.tolist(), [(s.slot, s.start, len(s.ids)) for s in segments])
        batches = member.all_gather(batch)
        assert all(other == batch for other in batches), "the ranks compute different batches"
        output = inner(rows, segments, ready_ns)
        num += 1
        return output if daemon.spoil is None else daemon.spoil(num, output)

    runner.step = step  # type: ignore[method-assign]


class RankGroup:
    """N ranks over real gRPC; any of them can be restarted at its address."""

    def __init__(self, num_ranks: int, changes: dict[int, dict[str, object]]) -> None:
        self._wire = Wire(num_ranks)
        self._changes = changes
        self._stacks: dict[int, AsyncExitStack] = {}
        self._num_starts = 0
        self.ranks: dict[int, Running[RankDaemon]] = {}

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(self.ranks[rank].address for rank in range(self._wire.num_ranks))

    def member(self, rank: int) -> LockStepMember:
        member = self.ranks[rank].daemon.core.member
        assert isinstance(member, LockStepMember)
        return member

    def runner(self, rank: int) -> ModelRunner:
        executor = self.ranks[rank].daemon.core.executor
        assert executor is not None
        return executor.runner

    async def start(self, rank: int, address: str = "127.0.0.1:0") -> None:
        self._num_starts += 1
        values: dict[str, object] = {
            "backend": Backend.SIMULATED,
            "simulated_vocab_size": VOCAB_SIZE,
            "num_pages": 1024 + rank,  # The group has the least.
            "num_slots": 16,
            "max_total_len": 512,
            "simulated_base_us": 500.0,
            **self._changes.pop(rank, {}),
        }
        settings = WorkerSettings(**values)  # type: ignore[arg-type]
        stack = self._stacks[rank] = AsyncExitStack()
        member = LockStepMember(self._wire, rank)
        self.ranks[rank] = await stack.enter_async_context(
            running(
                lambda runtime, settings: RankDaemon(runtime, settings, member),
                settings,
                instance_id=f"rank-{rank}-{self._num_starts}",
                address=address,
            )
        )

    async def stop(self, rank: int) -> None:
        """As if the process died: nothing of it is left."""
        self.member(rank).abort()
        await self._stacks.pop(rank).aclose()

    async def restart(self, rank: int) -> None:
        address = self.ranks[rank].address
        await self.stop(rank)
        await self.start(rank, address)

    async def close(self) -> None:
        for rank in list(self._stacks):
            self.member(rank).abort()
        await asyncio.gather(*(self._stacks.pop(rank).aclose() for rank in list(self._stacks)))


@asynccontextmanager
async def rank_group(num_ranks: int, **changes: dict[str, object]) -> AsyncIterator[RankGroup]:
    """changes: settings of single ranks' first start, e.g. rank_1={"faults": (...,)}."""
    group = RankGroup(num_ranks, {int(name.removeprefix("rank_")): values for name, values in changes.items()})
    try:
        await asyncio.gather(*(group.start(rank) for rank in range(num_ranks)))
        yield group
    finally:
        await group.close()


def with_other_tokens(output: StepOutput) -> StepOutput:
    """The output of a rank that has diverged."""
    segments = [replace(s, token=s.token ^ 1) if s.token is not None else s for s in output.segments]
    return replace(output, tokens=output.tokens ^ 1, segments=segments)
