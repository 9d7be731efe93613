"""Servers, channels, health and reflection over TCP and unix sockets."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from support.runtime_servicers import frame, serving

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.channel import check_health, open_channel
from radixmesh.detokenizer.v1.detokenizer_pb2_grpc import DetokenizerServiceStub
from radixmesh.tokenizer.v1 import tokenizer_pb2
from radixmesh.tokenizer.v1.tokenizer_pb2_grpc import TokenizerServiceStub

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
_TOKENIZER = "radixmesh.tokenizer.v1.TokenizerService"


async def _tokens(address: str) -> list[str]:
    async with open_channel(address) as channel:
        answer = await TokenizerServiceStub(channel).GetVocabulary(tokenizer_pb2.GetVocabularyRequest(), timeout=60)
        return list(answer.tokens)


async def test_one_server_on_tcp_and_a_unix_socket(tmp_path: Path) -> None:
    async with serving("127.0.0.1:0", f"unix:{tmp_path}/s", "localhost:0") as bench:
        assert len(bench.addresses) == 3 and not any(address.endswith(":0") for address in bench.addresses)
        for address in bench.addresses:
            assert await _tokens(address) == ["a", "b"]
    assert not (tmp_path / "s").exists()


async def test_a_socket_that_a_killed_daemon_left_behind_is_taken_over(tmp_path: Path) -> None:
    async def listen_and_die() -> None:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            f"import socket, os; s = socket.socket(socket.AF_UNIX); s.bind('{tmp_path}/s'); s.listen(); os._exit(0)",
        )
        await child.wait()

    await listen_and_die()
    assert (tmp_path / "s").exists()
    async with serving(f"unix:{tmp_path}/s") as bench:
        assert await _tokens(bench.address) == ["a", "b"]


async def test_a_port_serves_one_daemon_only() -> None:
    async with serving() as bench:
        with pytest.raises(MeshError, match="cannot listen") as refusal:
            async with serving(bench.address):
                pass
        assert refusal.value.reason_name == "INVALID_ARGUMENT"
        assert await _tokens(bench.address) == ["a", "b"]


async def test_a_socket_in_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MeshError, match="cannot listen"):
        async with serving(f"unix:{tmp_path}/no/s"):
            pass


async def test_a_channel_finds_a_restarted_server_again_within_two_seconds(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    async with open_channel(address) as channel:
        stub = TokenizerServiceStub(channel)
        for _ in range(2):
            async with serving(address):
                started = time.monotonic()
                await stub.GetVocabulary(tokenizer_pb2.GetVocabularyRequest(), timeout=60, wait_for_ready=True)
                assert time.monotonic() - started < 15, "two seconds, on a machine that has time"
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Encode(tokenizer_pb2.EncodeRequest(), timeout=60)


async def test_an_http_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    async with serving() as bench:
        assert await _tokens(bench.address) == ["a", "b"]


async def test_stop_lets_a_call_finish_within_its_grace() -> None:
    async with serving() as bench, open_channel(bench.address) as channel:
        call = DetokenizerServiceStub(channel).Detokenize()
        await call.write(frame(1))
        await call.read()
        stopping = asyncio.create_task(bench.server.stop(90))
        await asyncio.sleep(0.1)
        await call.write(frame(2))
        assert (await call.read()).rows[0].handle == 2
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK
        async with asyncio.timeout(60):
            await stopping


async def _watch(channel: grpc.aio.Channel, service: str = "") -> AsyncIterator[int]:
    async for answer in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service)):
        yield answer.status


async def test_watch_pushes_every_change_and_ends_when_the_server_stops() -> None:
    async with serving(stall_s=0.4) as bench, open_channel(bench.address) as channel:
        watch = _watch(channel, _TOKENIZER)
        assert await anext(watch) == _SERVING
        bench.progress.work_pending(1)
        started = time.monotonic()
        assert await anext(watch) == _NOT_SERVING  # Stalled: nobody called anything, only time passed.
        assert time.monotonic() - started > 0.3
        bench.progress.completed()
        async with asyncio.timeout(60):
            assert await anext(watch) == _SERVING
        bench.progress.drain()
        assert await anext(watch) == _NOT_SERVING
        async with asyncio.timeout(60):
            await bench.server.stop(90)
        with pytest.raises(StopAsyncIteration):
            await anext(watch)


async def test_a_completion_in_another_thread_is_pushed_too() -> None:
    async with serving(stall_s=0.4) as bench, open_channel(bench.address) as channel:
        watch = _watch(channel)
        bench.progress.work_pending(1)
        assert [await anext(watch), await anext(watch)] == [_SERVING, _NOT_SERVING]
        await asyncio.to_thread(bench.progress.work_pending, 0)
        assert await anext(watch) == _SERVING


async def test_check_knows_the_services() -> None:
    async with serving() as bench, open_channel(bench.address) as channel:
        assert await check_health(bench.address) == "SERVING"
        assert await check_health(bench.address, service=_TOKENIZER) == "SERVING"
        assert await check_health(bench.address, service="no.such.Service") == "SERVICE_UNKNOWN"
        assert await anext(_watch(channel, "no.such.Service")) == _UNKNOWN
        bench.progress.drain()
        assert await check_health(bench.address) == "NOT_SERVING"
    assert await check_health("127.0.0.1:1", timeout_s=0.5) == "UNREACHABLE"


async def test_reflection_lists_and_describes_every_service() -> None:
    request = reflection_pb2.ServerReflectionRequest
    async with serving() as bench, open_channel(bench.address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([request(list_services=""), request(file_containing_symbol=_TOKENIZER)])
        )
        listed, described = [answer async for answer in call]
        names = {service.name for service in listed.list_services_response.service}
        assert {_TOKENIZER, "radixmesh.detokenizer.v1.DetokenizerService", "grpc.health.v1.Health"} <= names
        assert described.file_descriptor_response.file_descriptor_proto
