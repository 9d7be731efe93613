"""Peers of this contract version and of the one before are understood: their recorded bytes get the recorded answers.

RADIXMESH_RECORD=3 writes the conversations of version 3 anew: only before that version has been released.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from support.conversation import Conversation, speak
from support.plans import first_plan
from support.running_daemon import Running, running

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.arrays import as_ints, pack_ints, unpack_ints
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.daemons.runtime.rpc.hello import make_hello
from radixmesh.daemons.runtime.steps.step import StepPlan
from radixmesh.daemons.runtime.steps.step_codec import encode_plan
from radixmesh.daemons.scheduler.__main__ import SchedulerDaemon
from radixmesh.daemons.scheduler.config import SchedulerSettings
from radixmesh.daemons.scheduler.group.worker_stream import WorkerStream
from radixmesh.daemons.scheduler.group_service import GrpcRank
from radixmesh.daemons.worker.__main__ import WorkerDaemon
from radixmesh.daemons.worker.config import Backend, WorkerSettings
from radixmesh.daemons.worker.simulated.clock import ClockKind
from radixmesh.scheduler.v1 import scheduler_pb2
from radixmesh.worker.v1 import worker_pb2

EXECUTE = "/radixmesh.worker.v1.WorkerService/Execute"
SERVE = "/radixmesh.scheduler.v1.SchedulerService/Serve"
VERSIONS = [2, 3]
NUM_TOKENS = 12


@asynccontextmanager
async def worker() -> AsyncIterator[Running[WorkerDaemon]]:
    settings = WorkerSettings(
        backend=Backend.SIMULATED, simulated_time=ClockKind.VIRTUAL, num_pages=128, simulated_vocab_size=100
    )
    async with running(WorkerDaemon, settings) as running_worker:
        yield running_worker


def _hello(daemon: str, version: int) -> common_pb2.Hello:
    hello = make_hello("recorder", daemon)
    hello.max_contract_version = version
    return hello


def _execute_requests(version: int) -> list[bytes]:
    messages = [worker_pb2.ExecuteRequest(hello=_hello("scheduler", version))]
    if version >= 3:
        messages.append(worker_pb2.ExecuteRequest(fence=worker_pb2.Fence(epoch=1)))
    messages.append(worker_pb2.ExecuteRequest(claim=worker_pb2.Claim(epoch=1)))
    plans = [encode_plan(first_plan())]
    for step in range(2, NUM_TOKENS + 1):
        plan = StepPlan(epoch=1, step_id=step, decode_set=as_ints([0]) if step == 2 else None)
        plans.append(encode_plan(plan, step - 1 if version >= 3 else 0))
    return [*(message.SerializeToString() for message in messages), *plans]


def _serve_requests(version: int) -> list[bytes]:
    submit = scheduler_pb2.Submit(
        handle=1,
        request_id="r",
        sequence=1,
        task=common_pb2.TASK_GENERATE,
        prompt_ids=pack_ints([5, 6, 7, 8]),
        sampling=common_pb2.SamplingParams(temperature=0.0, seed=5),
        stop=common_pb2.StopParams(max_tokens=NUM_TOKENS),
    )
    messages = [
        scheduler_pb2.ServeRequest(hello=_hello("router", version)),
        scheduler_pb2.ServeRequest(submits=[submit]),
    ]
    return [message.SerializeToString() for message in messages]


def _execute_meaning(frames: list[bytes]) -> list[object]:
    """The answers without times and without fields that a later version may add."""
    found: list[object] = []
    for frame in frames:
        message = worker_pb2.ExecuteResponse.FromString(frame)
        result = message.result
        if message.HasField("result"):
            found.append((result.epoch, result.step_id, unpack_ints(result.counts, "").tolist(), result.ids))
        else:
            found.append([field.name for field, _ in message.ListFields()])
    return found


def _serve_meaning(frames: list[bytes]) -> tuple[list[int], int]:
    """The tokens of the one output, and why it ended."""
    tokens: list[int] = []
    reason = 0
    for frame in frames:
        message = scheduler_pb2.ServeResponse.FromString(frame)
        tokens += unpack_ints(message.tokens.ids, "").tolist()
        reason = max([reason, *(finished.reason for finished in message.finished)])
    return tokens, reason


def _is_finished(frames: list[bytes]) -> bool:
    return any(scheduler_pb2.ServeResponse.FromString(frame).finished for frame in frames)


async def _said(method: str, requests: list[bytes]) -> list[bytes]:
    async with worker() as daemon:
        if method == EXECUTE:
            return await speak(daemon.address, method, requests, lambda answers: len(answers) == len(requests))
        settings = SchedulerSettings(workers=(daemon.address,))
        async with running(SchedulerDaemon, settings) as scheduler:
            return await speak(scheduler.address, method, requests, _is_finished)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["execute", "serve"])
async def test_a_recorded_peer_gets_the_recorded_answers(name: str, version: int) -> None:
    method = EXECUTE if name == "execute" else SERVE
    if os.environ.get("RADIXMESH_RECORD") == str(version):
        requests = _execute_requests(version) if name == "execute" else _serve_requests(version)
        answers = await _said(method, requests)
        Conversation(version, method, [r.hex() for r in requests], [a.hex() for a in answers]).save(f"{name}-{version}")
    recorded = Conversation.load(f"{name}-{version}")
    answers = await _said(method, [bytes.fromhex(request) for request in recorded.requests])
    before = [bytes.fromhex(response) for response in recorded.responses]
    if name == "execute":
        assert _execute_meaning(answers) == _execute_meaning(before)
    else:
        assert _serve_meaning(answers) == _serve_meaning(before)
        assert len(_serve_meaning(answers)[0]) == NUM_TOKENS


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_scheduler_understands_a_recorded_worker(version: int) -> None:
    recorded = Conversation.load(f"execute-{version}")
    received: list[bytes] = []

    async def execute(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        for response in recorded.responses:
            received.append(await anext(requests))
            await context.write(bytes.fromhex(response))
        await asyncio.Event().wait()

    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(execute)
    service = EXECUTE.split("/")[1]
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Execute": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            stream = WorkerStream(GrpcRank(channel), make_hello("now", "scheduler"))
            hello = await stream.hello()
            stream.contract_version = min(stream.contract_version, version)
            assert hello.capabilities.num_pages == 128
            await stream.fence(1)
            await stream.claim(1, 0)
            results = stream.results()
            tokens: list[int] = []
            for plan in recorded.requests[-NUM_TOKENS:]:
                await stream.send(bytes.fromhex(plan))
                tokens += (await anext(results)).ids.tolist()
            assert len(tokens) == NUM_TOKENS
            fields = [[f.name for f, _ in worker_pb2.ExecuteRequest.FromString(r).ListFields()] for r in received[:3]]
            assert fields == [["hello"], *([["fence"]] if version >= 3 else []), ["claim"], ["plan"]][:3]
            stream.close()
    finally:
        await server.stop(0)
