"""Fence, formation and completed broadcasts of one worker, spoken as a scheduler speaks them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest
from support.plans import first_plan
from support.running_daemon import running
from support.worker_client import WorkerClient

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rank_layout import RankLayout
from radixmesh.daemons.runtime.steps.step import StepPlan
from radixmesh.daemons.runtime.steps.step_codec import encode_plan
from radixmesh.daemons.worker.__main__ import WorkerDaemon
from radixmesh.daemons.worker.config import Backend, WorkerSettings
from radixmesh.daemons.worker.plans.retained_plans import RetainedPlans
from radixmesh.daemons.worker.ranks.group_member import CollectiveAborted, UnconnectedMember
from radixmesh.daemons.worker.simulated.clock import ClockKind
from radixmesh.worker.v1 import worker_pb2


def _worker(**changes: object):
    values = {"backend": Backend.SIMULATED, "simulated_time": ClockKind.VIRTUAL, "num_pages": 64, **changes}
    return running(WorkerDaemon, WorkerSettings(**values))  # type: ignore[arg-type]


async def _fence(client: WorkerClient, epoch: int) -> worker_pb2.ExecuteResponse:
    await client.send(worker_pb2.ExecuteRequest(fence=worker_pb2.Fence(epoch=epoch)))
    response = await client.read()
    assert response is not None
    return response


async def test_a_fence_shuts_the_holder_out_while_a_step_runs_and_its_claim_waits_for_it() -> None:
    slow = {"simulated_time": ClockKind.REAL, "simulated_base_us": 1_500_000.0}
    async with (
        _worker(**slow) as worker,
        WorkerClient(worker.address, "a") as a,
        WorkerClient(worker.address, "b") as b,
    ):
        core = worker.daemon.core
        await a.hold(1)
        await a.plan(first_plan())
        while core.ledger.last_received_step < 1:
            await asyncio.sleep(0.005)
        await b.greet()
        assert (await _fence(b, 2)).fenced.epoch == 2
        assert core.num_in_flight == 1, "the step runs on"
        assert (await a.ended()).reason_name == "EPOCH_FENCED"
        assert (await b.claim(2)).claimed.epoch == 2
        assert core.num_in_flight == 0


async def test_a_completed_plan_waits_for_no_step_and_neither_does_the_fence_behind_it() -> None:
    slow = {"simulated_time": ClockKind.REAL, "simulated_base_us": 1_500_000.0, "max_plans_in_flight": 1}
    async with _worker(**slow) as worker, WorkerClient(worker.address, "b") as b:
        core = worker.daemon.core
        async with WorkerClient(worker.address, "a") as a:
            await a.hold(1)
            await a.plan(first_plan())
            while core.ledger.last_received_step < 1:
                await asyncio.sleep(0.005)
        while core.ledger.is_holder_connected:
            await asyncio.sleep(0.005)
        await b.greet()
        for step in (2, 3):
            complete = encode_plan(StepPlan(epoch=1, step_id=step, has_forward=False))
            await b.send(worker_pb2.ExecuteRequest(complete=complete))
        assert (await _fence(b, 2)).fenced.epoch == 2
        assert core.num_in_flight == 3, "step 1 runs on, and the others behind it"
        assert (await b.claim(2)).claimed.epoch == 2
        async with WorkerClient(worker.address, "c") as c:
            await b.plan(first_plan(epoch=2))
            b.cut()
            while core.ledger.is_holder_connected:
                await asyncio.sleep(0.005)
            await c.greet()
            for step in (2, 3, 4):
                complete = encode_plan(StepPlan(epoch=2, step_id=step, has_forward=False))
                await c.send(worker_pb2.ExecuteRequest(complete=complete))
            assert (await c.ended()).reason_name == "PROTOCOL_VIOLATION", "no more than a few are kept"


async def test_of_two_fences_the_higher_wins_and_a_claim_needs_its_own() -> None:
    async with _worker() as worker, WorkerClient(worker.address, "a") as a, WorkerClient(worker.address, "b") as b:
        await a.greet()
        await b.greet()
        assert (await _fence(a, 1)).fenced.epoch == 1
        assert (await _fence(b, 1)).fenced.epoch == 1, "(1, b) is higher than (1, a)"
        assert (await a.ended()).reason_name == "EPOCH_FENCED"
        assert (await b.claim(1)).claimed.epoch == 1
        async with WorkerClient(worker.address, "b") as other:
            await other.greet()
            refusal = (await other.claim(1)).refusal
            assert MeshError.from_proto(refusal.error).reason_name == "EPOCH_FENCED", "a claim wins once"


async def test_a_stranger_cannot_inject_the_next_step_of_a_live_holder() -> None:
    async with _worker() as worker, WorkerClient(worker.address, "a") as a, WorkerClient(worker.address, "b") as b:
        await a.hold(1)
        await a.plan(first_plan())
        await a.result()
        await b.greet()
        injected = encode_plan(StepPlan(epoch=1, step_id=2, has_forward=False))
        await b.send(worker_pb2.ExecuteRequest(complete=injected))
        assert (await b.ended()).reason_name == "EPOCH_FENCED"
        await a.plan(StepPlan(epoch=1, step_id=2, has_forward=False))
        assert (await a.result()).step_id == 2
        worker.daemon.core.ledger.holder_timeout_s = 0.2
        await asyncio.sleep(0.5)  # The holder is silent.
        async with WorkerClient(worker.address, "c") as c:
            await c.greet()
            await c.send(
                worker_pb2.ExecuteRequest(complete=encode_plan(StepPlan(epoch=1, step_id=3, has_forward=False)))
            )
            assert (await _fence(c, 2)).fenced.epoch == 2
            while worker.daemon.core.num_in_flight:
                await asyncio.sleep(0.005)


def _group_worker(kind: type[UnconnectedMember] = UnconnectedMember, **changes: object):
    """Rank 0 of two."""

    def make(runtime, settings):
        return WorkerDaemon(runtime, settings, kind(RankLayout(tp_size=2, tp_rank=0)))

    values = {"backend": Backend.SIMULATED, "simulated_time": ClockKind.VIRTUAL, "num_pages": 64, **changes}
    return running(make, WorkerSettings(**values))  # type: ignore[arg-type]


async def test_completed_plans_are_kept_and_do_not_hide_a_silent_holder() -> None:
    async with _group_worker() as worker, WorkerClient(worker.address, "a") as a:
        core = worker.daemon.core
        core.ledger.formed(1)
        await a.greet()
        await a.send(worker_pb2.ExecuteRequest(claim=worker_pb2.Claim(epoch=1, group_generation=1)))
        assert (await a.read()).claimed.epoch == 1
        sent = [encode_plan(StepPlan(epoch=1, step_id=i + 1, group_generation=1, has_forward=False)) for i in range(3)]
        for data in sent:
            await a.send(data)
            await a.result()
        async with WorkerClient(worker.address, "b") as b:
            await asyncio.sleep(0.05)
            hello = await b.greet()
            assert list(hello.retained_plans) == sent, "byte for byte"
            assert (hello.last_completed_step, hello.is_holder_connected) == (3, True)
            assert hello.holder_silent_ms >= 50, "nothing is unfinished: the holder is silent"
        covering = StepPlan(epoch=1, step_id=4, group_generation=1, has_forward=False)
        await a.send(encode_plan(covering, group_completed_step=2))
        await a.result()
        async with WorkerClient(worker.address, "b") as b:
            assert list((await b.greet()).retained_plans) == [sent[2], encode_plan(covering, group_completed_step=2)]


class _LonelyMember(UnconnectedMember):
    """The other rank never comes."""

    def __init__(self, layout: RankLayout) -> None:
        super().__init__(layout)
        self.is_aborted, self.waits = threading.Event(), threading.Event()

    def form(self, generation: int, rendezvous: str, member_instance_ids: Sequence[str]) -> None:
        self.is_aborted.clear()
        self.waits.set()
        assert self.is_aborted.wait(30)
        raise CollectiveAborted("left")

    def abort(self) -> None:
        self.is_aborted.set()


async def test_a_worker_that_leaves_waits_for_no_other_rank() -> None:
    """Its thread would hold up the end of the process."""
    async with _group_worker(_LonelyMember) as worker, WorkerClient(worker.address, "a") as a:
        await a.greet()
        await _fence(a, 1)
        core = worker.daemon.core
        layout = core.member.layout.to_proto()
        request = worker_pb2.FormGroupRequest(epoch=1, instance_id="a", generation=1, layout=layout)
        forming = asyncio.ensure_future(core.formation.form(request))
        assert await asyncio.to_thread(core.member.waits.wait, 30)
        await worker.daemon.close()
        with pytest.raises(MeshError, match="the group was left while it formed"):
            await forming


async def test_only_the_fence_forms_a_group_of_the_layout_and_never_an_old_generation() -> None:
    layout = RankLayout(tp_size=2, tp_rank=0).to_proto()
    async with _group_worker() as worker, WorkerClient(worker.address, "a") as a:
        await a.greet()
        assert (await _fence(a, 4)).fenced.epoch == 4

        async def form(**changes: object) -> str:
            values = {"epoch": 4, "instance_id": "a", "generation": 3, "layout": layout, **changes}
            try:
                await worker.daemon.core.formation.form(worker_pb2.FormGroupRequest(**values))
            except MeshError as error:
                return error.reason_name
            return ""

        assert await form(instance_id="b") == "EPOCH_FENCED"
        assert await form(layout=RankLayout(tp_size=2, tp_rank=1).to_proto()) == "GROUP_GENERATION"
        assert worker.daemon.core.ledger.group_generation == 0
        assert await form() == ""
        assert worker.daemon.core.ledger.group_generation == 3
        assert await form() == "GROUP_GENERATION"
        await worker.daemon.core.formation.leave(4, "a")
        assert worker.daemon.core.ledger.group_generation == 0
        assert await form(generation=3) == "GROUP_GENERATION"
        assert await form(generation=5) == ""


def _plan(step_id: int, completed: int = 0, size: int = 0) -> worker_pb2.StepPlan:
    plan = worker_pb2.StepPlan(header=worker_pb2.PlanHeader(step_id=step_id, group_completed_step=completed))
    plan.ranks.add(release_slots=b"x" * size)
    return plan


def _steps(retained: RetainedPlans) -> list[int]:
    return [worker_pb2.ExecuteRequest.FromString(data).plan.header.step_id for data in retained.encoded()]


def test_retained_plans_are_bounded_and_never_lose_an_unfinished_one() -> None:
    retained = RetainedPlans(max_plans=4, keeps_completed=True, max_bytes=1000)
    for step in range(1, 9):
        retained.received(_plan(step))
        retained.completed(step)
        assert not retained.has_unfinished
    assert _steps(retained) == [5, 6, 7, 8]
    for step in range(9, 15):
        retained.received(_plan(step, completed=8))
    assert _steps(retained) == [9, 10, 11, 12, 13, 14] and retained.has_unfinished
    retained.completed(9)
    assert _steps(retained) == [10, 11, 12, 13, 14], "over max_plans: the completed one goes"
    retained.received(_plan(15, size=900))
    retained.received(_plan(16, size=900))
    assert _steps(retained) == [16], "a hello has room for so many bytes"
    retained.received(_plan(17, size=1100))
    assert _steps(retained) == []
    retained.begin_epoch()
    assert not retained.encoded() and not retained.has_unfinished


@pytest.mark.parametrize("completed", [0, 3, 99])
def test_a_lying_cover_drops_no_unfinished_plan(completed: int) -> None:
    retained = RetainedPlans(max_plans=8, keeps_completed=True)
    retained.received(_plan(1))
    retained.received(_plan(2, completed=completed))
    assert _steps(retained) == [1, 2]


async def test_a_holder_that_says_it_lives_is_not_silent_and_nobody_else_can_say_so_for_it() -> None:
    alive = worker_pb2.ExecuteRequest(alive=worker_pb2.Alive(epoch=1))
    async with _worker() as worker, WorkerClient(worker.address, "a") as a, WorkerClient(worker.address, "b") as b:
        ledger = worker.daemon.core.ledger
        await a.greet()
        await _fence(a, 1)
        for claimed in (False, True):
            if claimed:
                await a.claim(1)
            ledger.heard_at -= 60.0
            assert ledger.holder_silent_ms >= 60_000
            await a.send(alive)
            async with asyncio.timeout(30):
                while ledger.holder_silent_ms >= 60_000:
                    await asyncio.sleep(0.01)
        await b.greet()
        ledger.heard_at -= 60.0
        await b.send(alive)
        assert (await b.ended()).reason_name == "PROTOCOL_VIOLATION"
        assert ledger.holder_silent_ms >= 60_000
