"""Direct round trips of single hops, nothing else running: what a message costs before any work is done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from hop_ladder.report import Figures, percentile
from hop_ladder.serve_stream import ServeStream
from hop_ladder.step_link import StepLink
from radixmesh.daemons.router.peers.grpc_peers import GrpcTokenizer
from radixmesh.daemons.runtime.arrays import pack_ints
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.daemons.runtime.rpc.hello import make_hello
from radixmesh.daemons.runtime.steps.step import StepPlan, StepResult
from radixmesh.detokenizer.v1 import detokenizer_pb2, detokenizer_pb2_grpc
from radixmesh.router.v1 import router_pb2, router_pb2_grpc
from radixmesh.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc

_WARM_UP = 20
_TIMEOUT_S = 30.0


async def encode(address: str, text: str, num: int) -> list[float]:
    """TokenizerService.Encode of one text, unary; microseconds."""
    async with open_channel(address) as channel:
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        request = tokenizer_pb2.EncodeRequest(items=[tokenizer_pb2.EncodeItem(text=text)])
        return await _timed(lambda: stub.Encode(request), num)


async def encode_on_stream(address: str, text: str, num: int) -> list[float]:
    """The same text over EncodeEach, by a router's own client; microseconds."""
    tokenizer = GrpcTokenizer(address)
    request = tokenizer_pb2.EncodeRequest(items=[tokenizer_pb2.EncodeItem(text=text)])
    try:
        return await _timed(lambda: tokenizer.encode(request, _TIMEOUT_S), num)
    finally:
        await tokenizer.close()


async def tokenize(address: str, text: str, num: int) -> list[float]:
    """RouterService.Tokenize: a unary call to the router, which asks the tokenizer over its stream; microseconds."""
    async with open_channel(address) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        request = router_pb2.TokenizeRequest(items=[tokenizer_pb2.EncodeItem(text=text)])
        return await _timed(lambda: stub.Tokenize(request), num)


async def detokenize(address: str, ids: Sequence[int], num_rows: int, num: int) -> list[float]:
    """A Detokenize frame with one token for each of num_rows entries, until the text of all is back; microseconds."""
    async with open_channel(address) as channel:
        call = detokenizer_pb2_grpc.DetokenizerServiceStub(channel).Detokenize()
        opens = [detokenizer_pb2.Open(handle=handle) for handle in range(num_rows)]
        hello = make_hello(daemon="router", instance_id="hops")
        await call.write(detokenizer_pb2.DetokenizeRequest(hello=hello, opens=opens))
        await call.read()
        position = 0

        async def push() -> None:
            nonlocal position
            rows = detokenizer_pb2.TokenRows(
                handles=pack_ints(range(num_rows)),
                first_output_indexes=pack_ints([position] * num_rows),
                counts=pack_ints([1] * num_rows),
                ids=pack_ints([ids[(row + position) % len(ids)] for row in range(num_rows)]),
            )
            position += 1
            await call.write(detokenizer_pb2.DetokenizeRequest(tokens=rows))
            num_back = 0
            while num_back < num_rows:
                frame = await call.read()
                if not isinstance(frame, detokenizer_pb2.DetokenizeResponse) or frame.failures:
                    raise RuntimeError(f"no text but {frame}")
                num_back += len(frame.rows)

        times = await _timed(push, num)
        call.cancel()
        return times


async def serve(stream: ServeStream, num: int) -> list[float]:
    """A frame to the scheduler's loop and its answer, on an open Serve stream; microseconds."""
    return await _timed(stream.ping, num)


async def empty_plan(link: StepLink, num: int) -> list[float]:
    """A plan without a forward and its result, one at a time; microseconds. The link is closed afterwards."""
    arrived: asyncio.Queue[StepResult | Exception] = asyncio.Queue()
    held = await link.open(arrived.put_nowait)
    step_id = 0

    async def step() -> None:
        nonlocal step_id
        step_id += 1
        await link.send(StepPlan(epoch=held.epoch, step_id=step_id, has_forward=False))
        result = await arrived.get()
        if isinstance(result, Exception):
            raise result

    try:
        return await _timed(step, num)
    finally:
        await link.close()


def figures(times_us: Sequence[float]) -> Figures:
    ordered = sorted(times_us)
    return {
        "p50_us": round(percentile(ordered, 0.5), 1),
        "p99_us": round(percentile(ordered, 0.99), 1),
        "count": len(ordered),
    }


async def _timed(action: Callable[[], Awaitable[object]], num: int) -> list[float]:
    for _ in range(_WARM_UP):
        await action()
    times_us = []
    for _ in range(num):
        start = time.perf_counter()
        await action()
        times_us.append(1e6 * (time.perf_counter() - start))
    return times_us
