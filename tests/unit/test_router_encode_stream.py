"""Encode calls over one stream: answers in any order, errors of their own, and what becomes of them when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.router.peers.encode_stream import EncodeStream
from radixmesh.daemons.router.peers.frame_stream import FrameStream
from radixmesh.daemons.runtime.encode_calls import MAX_CALL_BYTES, MAX_CALLS
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.tokenizer.v1 import tokenizer_pb2 as pb

Answers = asyncio.Queue[pb.EncodeEachResponse | MeshError | None]


class Peer(FrameStream[pb.EncodeEachRequest, pb.EncodeEachResponse]):
    """Keeps what is sent; gives what a test puts."""

    def __init__(self) -> None:
        self.sent: list[pb.EncodeEachRequest] = []
        self.answers: Answers = asyncio.Queue()
        self.is_closed = False

    async def send(self, frame: pb.EncodeEachRequest) -> None:
        self.sent.append(frame)

    async def receive(self) -> pb.EncodeEachResponse | None:
        answer = await self.answers.get()
        if isinstance(answer, MeshError):
            raise answer
        return answer

    async def close(self) -> None:
        self.is_closed = True


def request_of(text: str) -> pb.EncodeRequest:
    return pb.EncodeRequest(items=[pb.EncodeItem(text=text)])


def answer_to(call: pb.EncodeEachRequest) -> pb.EncodeEachResponse:
    """With the text in the place of ids."""
    response = pb.EncodeResponse(items=[pb.EncodedItem(ids=item.text.encode()) for item in call.request.items])
    return pb.EncodeEachResponse(call_id=call.call_id, response=response)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_so():
            await asyncio.sleep(0)


async def asked(stream: EncodeStream, peer: Peer, *texts: str) -> list[asyncio.Future[pb.EncodeResponse]]:
    """Calls that have reached the peer."""
    num = len(peer.sent)
    calls = [asyncio.ensure_future(stream.encode(request_of(text), "", 30.0)) for text in texts]
    await until(lambda: len(peer.sent) == num + len(texts))
    return calls


def reason_of(call: asyncio.Future[pb.EncodeResponse]) -> ErrorReason:
    error = call.exception()
    assert isinstance(error, MeshError)
    return error.reason


async def test_answers_find_their_calls_in_any_order() -> None:
    peer = Peer()
    stream = EncodeStream(peer, "t")
    calls = await asked(stream, peer, "a", "b", "c")
    for call in reversed(peer.sent):
        peer.answers.put_nowait(answer_to(call))
    assert [answer.items[0].ids for answer in await asyncio.gather(*calls)] == [b"a", b"b", b"c"]
    await stream.close()
    assert peer.is_closed and stream.is_over


async def test_a_call_that_is_refused_is_refused_alone() -> None:
    peer = Peer()
    stream = EncodeStream(peer, "t")
    first, second = await asked(stream, peer, "a", "b")
    error = MeshError(ErrorReason.ERROR_REASON_OVERLOADED, "later", {"retry_after_ms": "100"})
    peer.answers.put_nowait(pb.EncodeEachResponse(call_id=peer.sent[0].call_id, error=error.to_proto()))
    peer.answers.put_nowait(answer_to(peer.sent[1]))
    assert (await second).items[0].ids == b"b"
    assert reason_of(first) == ErrorReason.ERROR_REASON_OVERLOADED
    assert not stream.is_over
    await stream.close()


async def test_calls_fail_with_what_ended_the_stream() -> None:
    peer = Peer()
    stream = EncodeStream(peer, "t")
    calls = await asked(stream, peer, "a", "b")
    peer.answers.put_nowait(MeshError(ErrorReason.ERROR_REASON_UNSUPPORTED, "what is that?"))
    await asyncio.wait(calls)
    assert [reason_of(call) for call in calls] == [ErrorReason.ERROR_REASON_UNSUPPORTED] * 2
    assert stream.is_over and not stream.takes(10)
    await until(lambda: peer.is_closed)


async def test_an_end_without_a_reason_is_that_of_a_replica_that_left() -> None:
    peer = Peer()
    stream = EncodeStream(peer, "t")
    (call,) = await asked(stream, peer, "a")
    peer.answers.put_nowait(None)
    await asyncio.wait([call])
    assert reason_of(call) == ErrorReason.ERROR_REASON_NO_REPLICA


async def test_an_answer_to_no_call_ends_the_stream() -> None:
    peer = Peer()
    stream = EncodeStream(peer, "t")
    (call,) = await asked(stream, peer, "a")
    peer.answers.put_nowait(pb.EncodeEachResponse(call_id=peer.sent[0].call_id + 1))
    await asyncio.wait([call])
    assert reason_of(call) == ErrorReason.ERROR_REASON_PROTOCOL_VIOLATION


async def test_a_call_that_nobody_waits_for_takes_its_place_until_it_is_answered() -> None:
    peer = Peer()
    stream = EncodeStream(peer, "t")
    calls = await asked(stream, peer, *("x" * MAX_CALLS))
    assert not stream.takes(10)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    assert not stream.takes(10)
    peer.answers.put_nowait(answer_to(peer.sent[0]))
    await until(lambda: stream.takes(10))
    assert not stream.takes(MAX_CALL_BYTES)
    (last,) = await asked(stream, peer, "y")
    peer.answers.put_nowait(answer_to(peer.sent[-1]))
    assert (await last).items[0].ids == b"y"
    await stream.close()


async def test_a_peer_that_says_nothing_is_given_up_in_time() -> None:
    stream = EncodeStream(Peer(), "t")
    with pytest.raises(MeshError) as raised:
        await stream.encode(request_of("a"), "", 0.01)
    assert raised.value.status == "DEADLINE_EXCEEDED"
    await stream.close()


async def test_the_future_of_an_answer_needs_no_task_and_the_stream_says_when_it_is_known() -> None:
    peer = Peer()
    stream = EncodeStream(peer, "t")
    first, second = stream.begin(request_of("a"), "trace"), stream.begin(request_of("b"), "")
    await until(lambda: len(peer.sent) == 2)
    assert peer.sent[0].trace_context == "trace" and not stream.has_answered
    first.cancel()
    for call in peer.sent:
        peer.answers.put_nowait(answer_to(call))
    assert (await second).items[0].ids == b"b" and stream.has_answered
    lost = stream.begin(request_of("c"), "")
    peer.answers.put_nowait(None)
    with pytest.raises(MeshError) as raised:
        await lost
    assert raised.value.reason == ErrorReason.ERROR_REASON_NO_REPLICA
