"""Errors of handlers, bytes that are no message, and clients that vanish: over real gRPC."""

import asyncio

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc._cython import cygrpc
from support.runtime_servicers import Bench, frame, serving

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.daemons.runtime.rpc.health.service import HealthService, Progress
from radixmesh.daemons.runtime.rpc.rpc_errors import REQUEST_ID_KEY, mesh_error_from_rpc
from radixmesh.daemons.runtime.rpc.server import MeshServer
from radixmesh.detokenizer.v1.detokenizer_pb2 import DetokenizeResponse, TextRow
from radixmesh.detokenizer.v1.detokenizer_pb2_grpc import (
    DetokenizerServiceServicer,
    DetokenizerServiceStub,
    add_DetokenizerServiceServicer_to_server,
)
from radixmesh.tokenizer.v1 import tokenizer_pb2
from radixmesh.tokenizer.v1.tokenizer_pb2_grpc import TokenizerServiceStub

_GARBAGE = b"\xff\xff\xff\xff"


async def _works(bench: Bench) -> bool:
    async with open_channel(bench.address) as channel:
        answer = await TokenizerServiceStub(channel).GetVocabulary(tokenizer_pb2.GetVocabularyRequest(), timeout=60)
        return list(answer.tokens) == ["a", "b"]


async def test_a_mesh_error_arrives_as_status_and_error_info() -> None:
    async with serving() as bench, open_channel(bench.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await TokenizerServiceStub(channel).Encode(tokenizer_pb2.EncodeRequest())
        assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        details = dict(failure.value.trailing_metadata())["grpc-status-details-bin"]
        status, info = status_pb2.Status.FromString(details), error_details_pb2.ErrorInfo()
        assert status.code == 3 and status.details[0].Unpack(info)
        assert (info.reason, info.domain, dict(info.metadata)) == ("EMPTY_PROMPT", "radixmesh", {"field": "items"})
        error = mesh_error_from_rpc(failure.value)
        assert (error.reason_name, error.message, error.metadata) == (
            "EMPTY_PROMPT",
            "send at least one token: ü",
            {"field": "items"},
        )
        assert [e.reason_name for e in bench.errors] == ["EMPTY_PROMPT"]


@pytest.mark.parametrize("quote", ["日" * 100_000, "broken \ud800 text"])
async def test_an_error_that_quotes_a_client_keeps_its_reason(quote: str) -> None:
    async with serving() as bench, open_channel(bench.address) as channel:
        bench.tokenizer.quote = quote
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await TokenizerServiceStub(channel).Encode(tokenizer_pb2.EncodeRequest())
        error = mesh_error_from_rpc(failure.value)
        assert error.reason_name == "TOO_MANY_STOPS"
        assert error.message[:6] == error.metadata["key0"][:6] == quote[:6]
        assert await _works(bench)


async def test_a_bug_is_internal_logged_and_tells_no_details(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as bench, open_channel(bench.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await TokenizerServiceStub(channel).Decode(tokenizer_pb2.DecodeRequest())
        error = mesh_error_from_rpc(failure.value)
        assert (error.status, error.reason_name) == ("INTERNAL", "INTERNAL")
        assert "secret detail" not in error.message
        assert "secret detail" in caplog.text
        assert await _works(bench)


@pytest.mark.parametrize(
    "error",
    [
        grpc.aio.InternalError("a batch could not be started"),
        # As grpc raises it out of a stream that is read while its server stops.
        cygrpc._ServerStoppedError("Server already stopped."),
    ],
    ids=["write", "stop"],
)
async def test_what_grpc_cannot_write_or_read_is_no_bug_of_the_handlers(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as bench, open_channel(bench.address) as channel:
        bench.tokenizer.bug = error
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await TokenizerServiceStub(channel).Decode(tokenizer_pb2.DecodeRequest())
        assert failure.value.code() is grpc.StatusCode.INTERNAL
        assert "call_broken" in caplog.text and "handler_failed" not in caplog.text
        assert await _works(bench)


async def test_a_verb_without_handler_is_unsupported() -> None:
    async with serving() as bench, open_channel(bench.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await TokenizerServiceStub(channel).CompileGrammar(tokenizer_pb2.CompileGrammarRequest())
        assert mesh_error_from_rpc(failure.value).reason_name == "UNSUPPORTED"
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await channel.unary_unary("/radixmesh.nobody.v1.NobodyService/Ask")(b"")
        assert mesh_error_from_rpc(failure.value).reason_name == "UNSUPPORTED"


async def test_malformed_bytes_are_refused_and_the_server_lives() -> None:
    async with serving() as bench, open_channel(bench.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await channel.unary_unary("/radixmesh.tokenizer.v1.TokenizerService/Encode")(_GARBAGE)
        assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert mesh_error_from_rpc(failure.value).reason_name == "MALFORMED_MESSAGE"
        assert await _works(bench)


async def test_malformed_bytes_on_a_stream_end_it_typed() -> None:
    async with serving() as bench, open_channel(bench.address) as channel:
        call = channel.stream_stream("/radixmesh.detokenizer.v1.DetokenizerService/Detokenize")()
        await call.write(frame(7).SerializeToString())
        assert await call.read()
        await call.write(_GARBAGE)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call.read()
        assert mesh_error_from_rpc(failure.value).reason_name == "MALFORMED_MESSAGE"
        assert bench.detokenizer.num_closed == 1
        assert await _works(bench)


@pytest.mark.parametrize(("handle", "reason"), [(-1, "TOO_MANY_STOPS"), (-2, "INTERNAL")])
async def test_a_stream_that_fails_delivers_what_came_before(handle: int, reason: str) -> None:
    async with serving() as bench, open_channel(bench.address) as channel:
        call = DetokenizerServiceStub(channel).Detokenize()
        for sent in (5, handle):
            await call.write(frame(sent))
        assert (await call.read()).rows[0].handle == 5
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call.read()
        assert mesh_error_from_rpc(failure.value).reason_name == reason


class _WritingDetokenizer(DetokenizerServiceServicer):
    """The other style of handler: a coroutine that writes by itself."""

    async def Detokenize(self, request_iterator, context) -> None:  # type: ignore[no-untyped-def]
        async for request in request_iterator:
            if request.opens[0].handle < 0:
                raise MeshError(ErrorReason.ERROR_REASON_TOO_MANY_STOPS, "send fewer")
            await context.write(DetokenizeResponse(rows=[TextRow(handle=request.opens[0].handle)]))


async def test_a_handler_that_writes_by_itself_fails_typed_too() -> None:
    server = MeshServer(HealthService(Progress()))
    server.add(add_DetokenizerServiceServicer_to_server, _WritingDetokenizer())
    (address,) = await server.start(["127.0.0.1:0"])
    async with open_channel(address) as channel:
        call = DetokenizerServiceStub(channel).Detokenize(iter([frame(4), frame(5), frame(-1)]))
        handles = []
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            async for answer in call:
                handles.append(answer.rows[0].handle)
        assert handles == [4, 5]
        assert mesh_error_from_rpc(failure.value).reason_name == "TOO_MANY_STOPS"
    await server.stop(0)


async def test_a_half_closed_stream_ends_with_ok() -> None:
    async with serving() as bench, open_channel(bench.address) as channel:
        call = DetokenizerServiceStub(channel).Detokenize()
        await call.write(frame(5))
        await call.done_writing()
        assert [answer.rows[0].handle async for answer in call] == [5]
        assert await call.code() is grpc.StatusCode.OK


async def test_a_handler_is_closed_at_once_when_its_client_vanishes() -> None:
    async with serving() as bench:
        async with open_channel(bench.address) as channel:
            call = DetokenizerServiceStub(channel).Detokenize()
            await call.write(frame(-3))
            async with asyncio.timeout(60):
                while not bench.detokenizer.num_open:
                    await asyncio.sleep(0.01)
            assert bench.detokenizer.num_closed == 0
        await asyncio.wait_for(bench.detokenizer.closed.wait(), 60)
        assert isinstance(bench.detokenizer.errors[0], asyncio.CancelledError)
        assert bench.errors == [], "an abort by the client is no error of ours"
        assert await _works(bench)


async def test_the_request_id_of_a_call_is_bound_in_its_handler() -> None:
    async with serving() as bench, open_channel(bench.address) as channel:
        stub = TokenizerServiceStub(channel)
        await stub.GetVocabulary(tokenizer_pb2.GetVocabularyRequest(), metadata=((REQUEST_ID_KEY, "r-1"),))
        await stub.GetVocabulary(tokenizer_pb2.GetVocabularyRequest())
        assert bench.tokenizer.request_ids == ["r-1", ""]


async def test_a_message_beyond_the_limit_is_refused_and_one_of_several_mib_is_not() -> None:
    async with serving() as bench, open_channel(bench.address) as channel:
        encode = channel.unary_unary("/radixmesh.tokenizer.v1.TokenizerService/Encode")
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await encode(b"\x0a" * (8 << 20))
        # It was read: what is wrong with it is said, not that it is long.
        assert mesh_error_from_rpc(failure.value).metadata.get("field", "").endswith("EncodeRequest.items")
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await encode(bytes(65 << 20))
        assert mesh_error_from_rpc(failure.value).reason_name == "TOO_LARGE"
        assert await _works(bench)


async def test_nobody_there_is_no_replica() -> None:
    async with open_channel("127.0.0.1:1") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await TokenizerServiceStub(channel).Encode(tokenizer_pb2.EncodeRequest(), timeout=60)
    assert mesh_error_from_rpc(failure.value).reason_name == "NO_REPLICA"
