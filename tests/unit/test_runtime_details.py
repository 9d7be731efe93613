"""Small promises of the runtime's and the worker's parts, each of which a changed line broke unnoticed
(tests/mutation.py)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1 import health_pb2
from support.plans import admit
from support.runtime_servicers import serving
from support.wire import raw_channel, refusal_from

from radixmesh.common.v1 import common_pb2
from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import as_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.gates.fair_semaphore import FairSemaphore
from radixmesh.daemons.runtime.rpc.gates.unary_gate import UnaryLimits
from radixmesh.daemons.runtime.rpc.health.progress import Progress
from radixmesh.daemons.runtime.rpc.health.service import HealthService
from radixmesh.daemons.runtime.sampling import MAX_STOP_BYTES, check_stops
from radixmesh.daemons.runtime.steps.step import Grant, Grants, StepPlan
from radixmesh.daemons.runtime.steps.step_codec import admit_bytes, plan_to_proto
from radixmesh.daemons.worker.ranks.group_formation import GroupFormation
from radixmesh.daemons.worker.stream.epochs import EpochLedger
from radixmesh.daemons.worker.stream.session import ExecuteSession
from radixmesh.worker.v1 import worker_pb2


async def test_a_slot_that_came_with_the_cancellation_is_given_back() -> None:
    semaphore = FairSemaphore(1, max_per_peer=1, max_waiting=4)
    await semaphore.take("a")
    waiting = asyncio.ensure_future(semaphore.take("b"))
    await asyncio.sleep(0)
    semaphore.give_back("a")  # The permit is b's from now on, and b does not know it yet.
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    async with asyncio.timeout(30):
        await semaphore.take("c")


async def test_a_caller_that_is_refused_and_leaves_at_once_gives_nothing_back() -> None:
    semaphore = FairSemaphore(1, max_per_peer=1, max_waiting=2)
    await semaphore.take("a")
    waiting = [asyncio.ensure_future(semaphore.take("b")) for _ in range(2)]
    await asyncio.sleep(0)
    other = asyncio.ensure_future(semaphore.take("c"))
    await asyncio.sleep(0)  # The last of b's gives way to c, and has not heard of it yet.
    waiting[1].cancel()
    for caller in (*waiting, other):
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
    with pytest.raises(MeshError):
        semaphore.take_now("d")
    semaphore.give_back("a")
    semaphore.take_now("b")
    with pytest.raises(MeshError):
        semaphore.take_now("b")


async def test_a_caller_that_gives_up_leaves_the_queue() -> None:
    semaphore = FairSemaphore(1, max_per_peer=1, max_waiting=1)
    await semaphore.take("a")
    for _ in range(3):
        waiting = asyncio.ensure_future(semaphore.take("b"))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    semaphore.give_back("a")
    async with asyncio.timeout(30):
        await semaphore.take("c")


async def test_a_unary_call_without_a_message_is_told_so() -> None:
    async def no_message():  # type: ignore[no-untyped-def]
        for message in ():
            yield message

    limits = UnaryLimits(max_message_bytes=1 << 20, max_bytes=1 << 20, patience_s=30.0)
    async with serving(unary_limits=limits) as bench, raw_channel(bench.address) as channel:
        call = channel.stream_unary("/radixmesh.tokenizer.v1.TokenizerService/Decode")
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await call(no_message(), timeout=60)
    assert refusal_from(ended.value).reason == "MALFORMED_MESSAGE"


def test_listeners_hear_that_loading_is_over() -> None:
    progress, heard = Progress(), []
    progress.subscribe(lambda: heard.append(progress.state))
    progress.loaded()
    assert heard == [progress.state]


async def test_a_health_check_of_an_unknown_service_ends_the_call() -> None:
    class Ended(Exception):
        pass

    async def abort(code: grpc.StatusCode, details: str) -> None:
        assert code is grpc.StatusCode.NOT_FOUND and "'nobody" in details and len(details) < 200
        raise Ended

    context = SimpleNamespace(abort=abort, set_trailing_metadata=lambda metadata: None)
    with pytest.raises(Ended):
        await HealthService(Progress()).Check(health_pb2.HealthCheckRequest(service="nobody" * 100), context)  # type: ignore[arg-type]


def test_errors_of_peers_keep_sixteen_details() -> None:
    error = common_pb2.Error(reason=ErrorReason.ERROR_REASON_OVERLOADED, message="m" * 5000)
    for number in range(100):
        error.metadata[f"k{number}"] = "v" * 5000
    taken = MeshError.from_proto(error)
    assert len(taken.metadata) == 16 and {len(value) for value in taken.metadata.values()} == {1000}
    assert len(taken.message) == 1000


@pytest.mark.parametrize("name", ["request_id", "cache_namespace", "adapter", "trace_context"])
def test_an_admit_takes_no_more_bytes_than_were_counted(name: str) -> None:
    for length in (0, 1, 1000, 100_000):
        part = replace(admit(0, list(range(100))), **{name: "\U0001f600" * length})  # type: ignore[arg-type]
        plan = plan_to_proto(StepPlan(epoch=1, step_id=1, has_forward=False, admits=(part,)))
        assert plan.ranks[0].admits[0].ByteSize() <= admit_bytes(part), length


def test_a_stop_string_of_the_largest_size_is_taken_and_one_byte_more_is_not() -> None:
    check_stops(["é" * (MAX_STOP_BYTES // 2)])
    with pytest.raises(MeshError) as refused:
        check_stops(["é" * (MAX_STOP_BYTES // 2) + "x"])
    assert refused.value.reason == ErrorReason.ERROR_REASON_TOO_MANY_STOPS


def test_grants_in_columns_stay_as_they_are() -> None:
    grants = Grants.of([Grant(slot=3, pages=as_ints([7, 8])), Grant(slot=5, pages=as_ints([9]))])
    assert grants.slots.tolist() == [3, 5] and grants.pages.tolist() == [7, 8, 9]
    assert Grants.of(grants) is grants


def test_a_session_that_closes_has_left_the_core() -> None:
    left: list[object] = []
    session = ExecuteSession(SimpleNamespace(left=left.append))  # type: ignore[arg-type]
    session.close()
    assert left == [session]


async def test_a_group_that_was_fenced_while_it_formed_is_not_formed() -> None:
    ledger = EpochLedger(holder_timeout_s=60.0)
    ledger.fence(1, "a")
    layout = worker_pb2.RankLayout(tp_size=1)

    def form(*_: object) -> None:
        ledger.fence(2, "b")

    async def reset(*_: object) -> None:
        return

    member = SimpleNamespace(layout=SimpleNamespace(to_proto=lambda: layout, rank=0), form=form, abort=lambda: None)
    request = worker_pb2.FormGroupRequest(epoch=1, instance_id="a", generation=1, layout=layout)
    with pytest.raises(MeshError) as fenced:
        await GroupFormation(ledger, member, reset, reset).form(request)  # type: ignore[arg-type]
    assert fenced.value.reason == ErrorReason.ERROR_REASON_EPOCH_FENCED
    assert ledger.group_generation == 0
