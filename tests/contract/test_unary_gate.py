"""Unary calls of a server with little memory: who waits, who is refused, who is ended."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable, Coroutine

import grpc
import pytest
from support.runtime_servicers import Tokenizer, serving
from support.wire import Refusal, raw_channel, refusal_from, refusal_of

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.gates.fair_semaphore import FairSemaphore
from radixmesh.daemons.runtime.rpc.gates.unary_gate import Room, UnaryLimits
from radixmesh.tokenizer.v1 import tokenizer_pb2 as pb

MIB = 1 << 20
_SERVICE = "/radixmesh.tokenizer.v1.TokenizerService/"
_DECODE = f"{_SERVICE}Decode"
_LIMITS = UnaryLimits(max_message_bytes=4 * MIB, max_bytes=4 * MIB, patience_s=1.0)


class _Echo(Tokenizer):
    """Decode answers as many texts of 1 MiB as it was sent lists, once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.num_running = 0

    async def Decode(self, request: pb.DecodeRequest, context: object) -> pb.DecodeResponse:
        self.num_running += 1
        try:
            await self.go.wait()
        finally:
            self.num_running -= 1
        return pb.DecodeResponse(texts=["x" * MIB] * len(request.ids))


async def _until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0.01)


async def _said(call: Awaitable[bytes]) -> Refusal | int:
    try:
        return len(await call)
    except grpc.aio.AioRpcError as error:
        return refusal_from(error)


async def _until_answered(ask: Callable[[], Awaitable[Refusal | int]]) -> None:
    async with asyncio.timeout(60):
        while isinstance(await ask(), Refusal):
            await asyncio.sleep(0.05)


def _request(num_lists: int, num_bytes: int = 0) -> bytes:
    return pb.DecodeRequest(ids=[b""] * num_lists, tenant="x" * num_bytes).SerializeToString()


async def test_a_message_beyond_the_limit_is_refused_unread() -> None:
    async with serving(unary_limits=_LIMITS) as bench, raw_channel(bench.address) as channel:
        refusal = await _said(channel.unary_unary(_DECODE)(b"\x0a\x00" * (3 * MIB)))
        assert isinstance(refusal, Refusal) and (refusal.status, refusal.reason) == ("RESOURCE_EXHAUSTED", "TOO_LARGE")


async def test_requests_that_are_here_have_a_bound_and_small_ones_go_on() -> None:
    large = pb.DecodeRequest(ids=[b"\x00" * (MIB + MIB // 3)]).SerializeToString()
    echo = _Echo()
    async with serving(unary_limits=_LIMITS, tokenizer=echo) as bench, raw_channel(bench.address) as channel:
        decode = channel.unary_unary(_DECODE)
        held = [asyncio.ensure_future(_said(decode(large))) for _ in range(2)]
        await _until(lambda: echo.num_running == 2)
        refusal = await _said(decode(large))
        assert isinstance(refusal, Refusal) and refusal.reason == "OVERLOADED" and refusal.metadata["retry_after_ms"]
        small = asyncio.ensure_future(_said(decode(_request(0))))
        await _until(lambda: echo.num_running == 3)
        echo.go.set()
        assert await small == 0 and all(isinstance(size, int) for size in await asyncio.gather(*held))
        assert await _said(decode(large)) > MIB, "their room is given back"  # type: ignore[operator]


async def test_a_message_that_is_there_at_once_costs_no_task_of_its_own() -> None:
    echo = _Echo()
    echo.go.set()
    async with serving(unary_limits=_LIMITS, tokenizer=echo) as bench, raw_channel(bench.address) as channel:
        loop, names = asyncio.get_running_loop(), list[str]()

        def make(loop: asyncio.AbstractEventLoop, coro: Coroutine[object, object, object], **how: object) -> object:
            names.append(coro.__qualname__)
            return asyncio.Task(coro, loop=loop, **how)  # type: ignore[arg-type]

        loop.set_task_factory(make)  # type: ignore[arg-type]
        try:
            for _ in range(8):
                await channel.unary_unary(_DECODE)(_request(0))
        finally:
            loop.set_task_factory(None)
        # Tasks of grpc's alone, those of a call and of its server's handler.
        assert names and not [name for name in names if "read" in name.lower()], names


async def test_who_sends_nothing_is_told_so_and_holds_nobody_else_up() -> None:
    """Each connection has two of three places at most."""
    echo = _Echo()
    echo.go.set()
    async with serving(unary_limits=_LIMITS, tokenizer=echo) as bench, raw_channel(bench.address) as channel:
        # To the server half of a message is the same as none: it waits for the whole one.
        begun = [channel.stream_stream(_DECODE)() for _ in range(8)]
        async with raw_channel(bench.address) as other:
            for _ in range(20):
                assert isinstance(await _said(other.unary_unary(_DECODE)(_request(0))), int)
        refusals = [await refusal_of(call) for call in begun]
        reasons = {refusal.reason if refusal else "" for refusal in refusals}
        assert "CLIENT_STALLED" in reasons <= {"CLIENT_STALLED", "OVERLOADED"}
        assert isinstance(await _said(channel.unary_unary(_DECODE)(_request(0))), int)


async def test_who_reads_no_answer_is_ended_and_gives_its_place_back() -> None:
    echo = _Echo()
    echo.go.set()
    async with serving(unary_limits=_LIMITS, tokenizer=echo) as bench, raw_channel(bench.address) as channel:
        deaf = [channel.stream_stream(_DECODE)() for _ in range(2)]
        for call in deaf:
            await call.write(_request(3, 60 << 10))  # Counts as large: it is in the room.
            await call.done_writing()
        async with raw_channel(bench.address) as other:
            assert await _said(other.unary_unary(_DECODE)(_request(3))) > 3 * MIB  # type: ignore[operator]
        # Room for them is back, though they are still there.
        large = pb.DecodeRequest(ids=[b"\x00" * (3 * MIB - (20 << 10))]).SerializeToString()
        await _until_answered(lambda: _said(channel.unary_unary(_DECODE)(large)))
        for call in deaf:
            call.cancel()


async def test_refused_requests_are_let_go_at_once() -> None:
    """Not when the collector comes to the cycle that grpc makes of an aborted call."""

    class Noted:
        pass

    seen: list[weakref.ref[Noted]] = []

    class Refusing(Tokenizer):
        async def Encode(self, request: pb.EncodeRequest, context: object) -> pb.EncodeResponse:
            local = Noted()
            seen.append(weakref.ref(local))  # As a message that the handler's frame holds.
            raise MeshError(ErrorReason.ERROR_REASON_OVERLOADED, "no")

    async with serving(tokenizer=Refusing()) as bench, raw_channel(bench.address) as channel:
        gc.disable()
        try:
            assert isinstance(await _said(channel.unary_unary(f"{_SERVICE}Encode")(b"")), Refusal)
            await _until(lambda: seen[0]() is None)
        finally:
            gc.enable()


async def test_a_peer_may_hold_three_quarters_of_the_room() -> None:
    room = Room(4 * MIB)
    with room.held("a", 2 * MIB):
        with pytest.raises(MeshError, match="yours"), room.held("a", MIB + MIB // 2):
            pass
        with room.held("b", MIB + MIB // 2), pytest.raises(MeshError), room.held("b", MIB):
            pass
    with room.held("a", 400 * MIB), pytest.raises(MeshError), room.held("b", MIB):
        pass


async def test_turns_go_to_the_peer_that_holds_least() -> None:
    semaphore, order, go = FairSemaphore(1, max_per_peer=1, max_waiting=5), list[str](), asyncio.Event()

    async def call(peer: str) -> None:
        async with semaphore.permit(peer):
            order.append(peer)
            await go.wait()

    calls = [asyncio.ensure_future(call(peer)) for peer in ("a", "a", "a", "b", "a", "b")]
    await asyncio.sleep(0)
    with pytest.raises(MeshError, match="wait already"):
        await call("a")
    calls[2].cancel()
    go.set()
    await asyncio.gather(*calls, return_exceptions=True)
    assert order == ["a", "a", "b", "a", "b"]
    await call("c")


async def test_where_too_many_wait_the_peer_with_most_of_them_gives_way() -> None:
    semaphore, order, go = FairSemaphore(1, max_per_peer=1, max_waiting=4), list[str](), asyncio.Event()

    async def call(name: str) -> None:
        async with semaphore.permit(name[0]):
            order.append(name)
            await go.wait()

    held = asyncio.ensure_future(call("a0"))
    waiting = [asyncio.ensure_future(call(name)) for name in ("a1", "a2", "a3", "a4")]
    await asyncio.sleep(0)
    others = [asyncio.ensure_future(call(name)) for name in ("b1", "c1")]
    with pytest.raises(MeshError, match="wait already"):
        await waiting[3]
    with pytest.raises(MeshError, match="wait already"):
        await waiting[2]
    go.set()
    await asyncio.gather(held, *waiting[:2], *others)
    assert sorted(order) == ["a0", "a1", "a2", "b1", "c1"]
    assert order.index("b1") < order.index("a2") and order.index("c1") < order.index("a2")
