"""Watch of the health service: pushed on change, bounded in number and size, nothing polled and nothing left behind."""

import asyncio
import time
from contextlib import AsyncExitStack

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.runtime_servicers import Bench, serving

from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.daemons.runtime.rpc.health import watches as health_watches
from radixmesh.daemons.runtime.rpc.health.progress import Progress, State
from radixmesh.daemons.runtime.rpc.health.watches import HealthWatches

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

_Call = grpc.aio.UnaryStreamCall[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]


async def _open(channel: grpc.aio.Channel, service: str = "") -> _Call:
    call: _Call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service))
    return call


async def _first(call: _Call) -> int:
    async with asyncio.timeout(60):
        answer = await call.read()
    assert isinstance(answer, health_pb2.HealthCheckResponse), await call.code()
    return answer.status


async def _until_closed(bench: Bench, num: int) -> None:
    async with asyncio.timeout(60):
        while len(bench.health.watches) != num:
            await asyncio.sleep(0.01)


async def test_watches_of_an_idle_daemon_ask_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    num_looks = 0
    state = Progress.state.fget
    assert state is not None

    def counted(progress: Progress) -> State:
        nonlocal num_looks
        num_looks += 1
        return state(progress)

    async with serving(stall_s=1000) as bench, open_channel(bench.address) as channel:
        calls = [await _open(channel) for _ in range(20)]
        assert [await _first(call) for call in calls] == [_SERVING] * 20
        monkeypatch.setattr(Progress, "state", property(counted))
        await asyncio.sleep(1.2)  # Twenty watches that poll four times a second would have looked 80 times.
        assert num_looks == 0
        assert bench.health.watches.num_timer_runs == 0
        bench.progress.drain()
        assert [await _first(call) for call in calls] == [_NOT_SERVING] * 20
        assert num_looks < 60


async def test_a_stall_is_found_by_one_timer_for_all() -> None:
    async with serving(stall_s=1.0) as bench, open_channel(bench.address) as channel:
        calls = [await _open(channel) for _ in range(20)]
        assert [await _first(call) for call in calls] == [_SERVING] * 20
        bench.progress.work_pending(1)
        started = time.monotonic()
        assert [await _first(call) for call in calls] == [_NOT_SERVING] * 20
        assert time.monotonic() - started > 0.9
        assert bench.health.watches.num_timer_runs <= 2 + (time.monotonic() - started) / 0.9
        bench.progress.completed()
        assert [await _first(call) for call in calls] == [_SERVING] * 20


async def test_the_number_of_watches_is_bounded_by_connection_and_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_watches, "MAX_WATCHES", 6)
    monkeypatch.setattr(health_watches, "MAX_WATCHES_OF_A_CONNECTION", 4)
    async with serving() as bench, AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(open_channel(bench.address)) for _ in range(3)]
        calls = [await _open(channels[0]) for _ in range(4)]
        assert [await _first(call) for call in calls] == [_SERVING] * 4
        assert await _code(channels[0]) is grpc.StatusCode.RESOURCE_EXHAUSTED
        others = [await _open(channels[1]) for _ in range(2)]
        assert [await _first(call) for call in others] == [_SERVING] * 2
        assert await _code(channels[2]) is grpc.StatusCode.RESOURCE_EXHAUSTED
        # Check, which the supervisor asks by, always has room.
        check = health_pb2_grpc.HealthStub(channels[2]).Check(health_pb2.HealthCheckRequest(), timeout=60)
        assert (await check).status == _SERVING
        # A watch that ends makes room.
        calls[0].cancel()
        await _until_closed(bench, 5)
        assert await _first(await _open(channels[2])) == _SERVING


async def test_a_watch_keeps_no_large_request() -> None:
    async with serving() as bench, open_channel(bench.address) as channel:
        call = await _open(channel, "x" * 2_000)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await call.read()
        assert "1024" in (refusal.value.details() or "")
        assert len(bench.health.watches) == 0
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="x" * 100_000))
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND and len(unknown.value.details() or "") < 300


async def test_watches_that_end_leave_no_subscription_and_no_timer() -> None:
    progress = Progress(stall_s=0.05)
    watches = HealthWatches(progress)
    events = [watches.open("peer") for _ in range(3)]
    for event in events:
        watches.close(event)
    runs = watches.num_timer_runs
    await asyncio.sleep(0.3)
    assert watches.num_timer_runs == runs and len(watches) == 0
    assert progress.num_listeners == 0


async def _code(channel: grpc.aio.Channel) -> grpc.StatusCode:
    call = await _open(channel)
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        async with asyncio.timeout(60):
            await call.read()
    return refusal.value.code()
