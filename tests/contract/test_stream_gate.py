"""Request streams of a server with little memory: which frames are received, which wait, and what is held of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import pytest
from support.runtime_servicers import Detokenizer, serving
from support.wire import raw_channel, refusal_of

from radixmesh.daemons.runtime.rpc.frames import (
    MAX_ENTRY_BYTES,
    MAX_FRAME_BYTES,
    MAX_OPEN_BYTES,
    MAX_OPEN_FRAME_BYTES,
    MAX_PLAN_BYTES,
    MAX_SERVE_FRAME_BYTES,
)
from radixmesh.daemons.runtime.rpc.gates import stream_gate
from radixmesh.daemons.runtime.rpc.gates.stream_gate import StreamLimits
from radixmesh.detokenizer.v1 import detokenizer_pb2 as pb

MIB = 1 << 20
_DETOKENIZE = "/radixmesh.detokenizer.v1.DetokenizerService/Detokenize"
_LIMITS = StreamLimits(max_message_bytes=4 * MIB, max_streams=2, patience_s=1.0)


class _Slow(Detokenizer):
    """Takes frames, each until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.num_begun: dict[int, int] = {}
        self.most_large = self.num_large = 0

    async def Detokenize(self, request_iterator, context):  # type: ignore[no-untyped-def, override]
        async for request in request_iterator:
            handle = request.opens[0].handle
            is_large = request.ByteSize() > 16 << 10
            self.num_large += is_large
            self.most_large = max(self.most_large, self.num_large)
            self.num_begun[handle] = self.num_begun.get(handle, 0) + 1
            try:
                await (self.go.wait() if handle == 0 else asyncio.sleep(0.02))
            finally:
                self.num_large -= is_large
            yield pb.DetokenizeResponse(rows=[pb.TextRow(handle=handle)])


def _frame(handle: int, num_bytes: int = 0) -> bytes:
    return pb.DetokenizeRequest(opens=[pb.Open(handle=handle, eos_ids=bytes(num_bytes))]).SerializeToString()


async def _until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0.01)


async def _echoed(channel: grpc.aio.Channel, handle: int, num_bytes: int, num_frames: int = 1) -> int:
    call = channel.stream_stream(_DETOKENIZE)()
    for _ in range(num_frames):
        await call.write(_frame(handle, num_bytes))
    await call.done_writing()
    return len([answer async for answer in call])


async def test_a_frame_beyond_the_largest_legal_one_is_refused_unread() -> None:
    async with serving(stream_limits=_LIMITS) as bench, raw_channel(bench.address) as channel:
        assert await _echoed(channel, 1, 4 * MIB - 1024) == 1
        call = channel.stream_stream(_DETOKENIZE)()
        await call.write(_frame(1, 4 * MIB))
        refusal = await refusal_of(call)
        assert refusal is not None and (refusal.status, refusal.reason) == ("RESOURCE_EXHAUSTED", "TOO_LARGE")


async def test_large_frames_are_handled_one_at_a_time_of_a_connection_and_small_ones_pass_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # However busy the machine is, none of these counts as one that waits.
    monkeypatch.setattr(stream_gate, "_TURN_S", 100.0)
    slow = _Slow()
    limits = StreamLimits(max_message_bytes=4 * MIB, max_streams=16)
    async with serving(stream_limits=limits, detokenizer=slow) as bench, raw_channel(bench.address) as channel:
        async with asyncio.timeout(60):
            small = _echoed(channel, 2, 0, 8)
            large = [_echoed(channel, 1, MIB, 3) for _ in range(8)]
            assert await asyncio.gather(*large, small) == [3] * 8 + [8]
        assert slow.most_large == 1
        others = [raw_channel(bench.address) for _ in range(3)]
        channels = [await other.__aenter__() for other in others]
        try:
            async with asyncio.timeout(60):
                await asyncio.gather(*(_echoed(each, 1, MIB, 3) for each in channels for _ in range(3)))
        finally:
            for other in others:
                await other.__aexit__(None, None, None)
        assert slow.most_large <= 2


async def test_a_stream_that_waits_for_something_itself_holds_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = _Slow()
    async with serving(stream_limits=_LIMITS, detokenizer=slow) as bench, raw_channel(bench.address) as channel:
        stuck = asyncio.ensure_future(_echoed(channel, 0, MIB))
        await _until(lambda: 0 in slow.num_begun)
        async with asyncio.timeout(60):
            assert await _echoed(channel, 1, MIB, 5) == 5
        monkeypatch.setattr(stream_gate, "_TURN_S", 100.0)
        slow.go.set()
        assert await stuck == 1
        # The turn was given back once: nobody waits for it, and it is there once.
        async with asyncio.timeout(60):
            assert await asyncio.gather(*(_echoed(channel, 1, MIB, 3) for _ in range(2))) == [3, 3]
        assert slow.most_large == 2, "the one that was stuck, and one more"


async def test_streams_beyond_those_that_are_read_wait_and_then_are_told_so() -> None:
    slow = _Slow()
    async with serving(stream_limits=_LIMITS, detokenizer=slow) as bench, raw_channel(bench.address) as channel:
        stuck = [asyncio.ensure_future(_echoed(channel, 0, 0)) for _ in range(2)]
        await _until(lambda: slow.num_begun.get(0) == 2)
        async with raw_channel(bench.address) as other:
            assert await _echoed(other, 1, MIB) == 1, "another connection has streams of its own"
        refusal = await refusal_of(channel.stream_stream(_DETOKENIZE)())
        assert refusal is not None and refusal.reason == "OVERLOADED" and refusal.metadata["max"] == "2"
        waiting = asyncio.ensure_future(_echoed(channel, 1, 0))
        slow.go.set()
        assert await asyncio.gather(*stuck, waiting) == [1, 1, 1]


async def test_calls_that_are_cancelled_give_back_what_they_held() -> None:
    slow = _Slow()
    async with serving(stream_limits=_LIMITS, detokenizer=slow) as bench, raw_channel(bench.address) as channel:
        for _ in range(4):
            calls = [channel.stream_stream(_DETOKENIZE)() for _ in range(2)]
            slow.num_begun.clear()
            for call in calls:
                await call.write(_frame(0, MIB))
            await _until(lambda: 0 in slow.num_begun)
            for call in calls:
                call.cancel()
        async with asyncio.timeout(60):
            assert await _echoed(channel, 1, MIB, 3) == 3


@pytest.mark.parametrize(
    ("most", "largest"),
    [
        (MAX_OPEN_FRAME_BYTES, max(MAX_OPEN_BYTES, MAX_FRAME_BYTES)),
        (MAX_SERVE_FRAME_BYTES, MAX_ENTRY_BYTES),
        (MAX_PLAN_BYTES, MAX_FRAME_BYTES + MAX_ENTRY_BYTES),
    ],
)
async def test_a_server_takes_the_largest_frame_and_what_is_around_it(most: int, largest: int) -> None:
    assert largest + MIB <= most < 48 * MIB
