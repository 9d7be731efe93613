"""Calls of one EncodeEach stream at the tokenizer: order of answers, bounds, errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.encode_calls import MAX_CALL_BYTES, MAX_CALLS
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.tokenizer.encode_calls import EncodeCalls
from radixmesh.tokenizer.v1 import tokenizer_pb2 as pb


class World:
    """Calls come as a test puts them. Texts that begin with "slow" are answered once they are released."""

    def __init__(self) -> None:
        self.incoming: asyncio.Queue[pb.EncodeEachRequest | None] = asyncio.Queue()
        self.num_read = 0
        self.released = asyncio.Event()
        self.errors: list[MeshError] = []
        self.calls = EncodeCalls(self._encode, lambda call: not self._is_slow(call), self.errors.append)
        self.reader = asyncio.ensure_future(self.calls.read_all(self._requests()))

    def put(self, call_id: int, text: str) -> None:
        request = pb.EncodeRequest(items=[pb.EncodeItem(text=text)])
        self.incoming.put_nowait(pb.EncodeEachRequest(call_id=call_id, request=request))

    async def answer(self) -> pb.EncodeEachResponse | None:
        async with asyncio.timeout(30):
            return await self.calls.next_answer()

    async def _requests(self) -> AsyncIterator[pb.EncodeEachRequest]:
        while (call := await self.incoming.get()) is not None:
            self.num_read += 1
            yield call

    async def _encode(self, call: pb.EncodeEachRequest) -> pb.EncodeResponse:
        text = call.request.items[0].text
        if text == "refused":
            raise MeshError(ErrorReason.ERROR_REASON_OVERLOADED, "later")
        if text == "bug":
            raise ZeroDivisionError("secret detail")
        if self._is_slow(call):
            await self.released.wait()
        return pb.EncodeResponse(items=[pb.EncodedItem(ids=text.encode())])

    def _is_slow(self, call: pb.EncodeEachRequest) -> bool:
        return call.request.items[0].text.startswith("slow")


async def test_a_slow_call_holds_up_no_other() -> None:
    world = World()
    world.put(7, "slow")
    world.put(8, "quick")
    answer = await world.answer()
    assert answer is not None and (answer.call_id, answer.response.items[0].ids) == (8, b"quick")
    world.incoming.put_nowait(None)
    world.released.set()
    answer = await world.answer()
    assert answer is not None and (answer.call_id, answer.response.items[0].ids) == (7, b"slow")
    assert await world.answer() is None
    await world.reader


async def test_errors_are_the_calls_own() -> None:
    world = World()
    for number, text in enumerate(("refused", "bug", "x" * MAX_CALL_BYTES, "fine")):
        world.put(number, text)
    answers = [await world.answer() for _ in range(4)]
    assert all(answer is not None for answer in answers)
    reasons = [MeshError.from_proto(a.error).reason_name for a in answers if a is not None and a.HasField("error")]
    assert reasons == ["OVERLOADED", "INTERNAL", "TOO_LARGE"]
    assert [error.reason_name for error in world.errors] == reasons
    assert answers[1] is not None and "secret" not in answers[1].error.message
    assert answers[3] is not None and answers[3].response.items[0].ids == b"fine"
    world.reader.cancel()


async def test_a_peer_that_reads_nothing_gets_no_more_calls_in() -> None:
    world = World()
    for number in range(MAX_CALLS + 10):
        world.put(number, "quick" if number % 2 else "slow")
    world.released.set()
    for _ in range(10 * MAX_CALLS):
        await asyncio.sleep(0)
    # One has been read, and waits.
    assert world.num_read == MAX_CALLS + 1
    seen = set()
    for _ in range(MAX_CALLS + 10):
        answer = await world.answer()
        assert answer is not None
        seen.add(answer.call_id)
    assert seen == set(range(MAX_CALLS + 10))
    world.reader.cancel()


async def test_a_stream_that_is_gone_leaves_no_call_behind() -> None:
    world = World()
    world.put(1, "slow")
    while not world.num_read:
        await asyncio.sleep(0)
    (task,) = world.calls.running
    world.calls.close()
    with pytest.raises(asyncio.CancelledError):
        await task
    world.reader.cancel()


async def test_a_daemon_that_leaves_ends_the_stream_behind_what_is_answered() -> None:
    world = World()
    world.put(1, "quick")
    while not world.num_read:
        await asyncio.sleep(0)
    world.calls.finish()
    answer = await world.answer()
    assert answer is not None and answer.call_id == 1
    assert await world.answer() is None
    world.reader.cancel()
