"""Clients that do what none of ours does, for as long as they are let: each visit is one kind of nuisance."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress

import grpc

from radixmesh.common.v1.common_pb2 import SamplingParams, StopParams
from radixmesh.daemons.cluster.local_cluster import LocalCluster
from radixmesh.daemons.runtime.arrays import pack_ints
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.router.v1 import router_pb2, router_pb2_grpc
from support.wire import Method, methods, raw_channel, send_raw

_GENERATE = "/radixmesh.router.v1.RouterService/Generate"
_HTTP_PORT = 8000
# More than any message may have.
_TOO_LARGE = 20 << 20
_REFUSED = (grpc.RpcError, OSError, TimeoutError, asyncio.IncompleteReadError)


class HostileClients:
    """`run` visits one daemon after the other. counts: visits by kind. Whatever answers they get is right."""

    def __init__(self, cluster: LocalCluster, rng: random.Random) -> None:
        self._cluster = cluster
        self._rng = rng
        self._daemons = [status for status in cluster.processes if status.service != "front"]
        self._methods = list(methods())
        self._visits: tuple[Callable[[], Awaitable[None]], ...] = (
            self._vanish,
            self._never_read,
            self._send_garbage,
            self._send_too_much,
            self._leave_a_head_unfinished,
            self._break_http,
            self._abort_strangers,
        )
        self.counts: Counter[str] = Counter()

    async def run(self, until: float) -> None:
        """until: monotonic."""
        while time.monotonic() < until:
            visit = self._rng.choice(self._visits)
            self.counts[visit.__name__.strip("_")] += 1
            with suppress(*_REFUSED):
                async with asyncio.timeout(15):
                    await visit()
            await asyncio.sleep(self._rng.uniform(0, 0.3))

    async def _vanish(self) -> None:
        """Closes the connection somewhere in a stream."""
        async with open_channel(self._router()) as channel:
            call = router_pb2_grpc.RouterServiceStub(channel).Generate(self._long(n=2))
            for _ in range(self._rng.randrange(6)):
                if await call.read() is grpc.aio.EOF:
                    return

    async def _never_read(self) -> None:
        async with raw_channel(self._router()) as channel:
            request = self._long(n=4)
            request.sampling.CopyFrom(SamplingParams(num_top_logprobs=64))
            call = channel.unary_stream(_GENERATE)(request.SerializeToString())
            await call.read()
            await asyncio.sleep(self._rng.uniform(0.5, 4))

    async def _send_garbage(self) -> None:
        """Bytes that are no message, to any method of any daemon."""
        status = self._rng.choice(self._daemons)
        kind = status.service.split("-")[0]
        method = self._rng.choice([method for method in self._methods if method.daemon == kind])
        await self._send(self._cluster.address(status.service, status.replica), method, self._rng.randrange(1, 65_536))

    async def _send_too_much(self) -> None:
        method = next(method for method in self._methods if method.path == _GENERATE)
        await self._send(self._router(), method, _TOO_LARGE)

    async def _send(self, address: str, method: Method, size: int) -> None:
        async with raw_channel(address) as channel:
            await send_raw(channel, method, [b"\xff" * size])

    async def _leave_a_head_unfinished(self) -> None:
        _, writer = await self._http()
        try:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
            for _ in range(self._rng.randrange(8)):
                writer.write(b"a" * self._rng.randrange(20_000))
                await writer.drain()
                await asyncio.sleep(0.2)
        finally:
            writer.transport.abort()

    async def _break_http(self) -> None:
        """A body that is no JSON, or one that is, whose answer is not read to its end."""
        bodies = [
            b"[" * 50_000,
            b'{"prompt": ',
            b"\x00" * 1000,
            b'{"prompt": "abc", "max_tokens": 500, "stream": true}',
        ]
        body = self._rng.choice(bodies)
        reader, writer = await self._http()
        try:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
            writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            await reader.readexactly(self._rng.randrange(1, 400))
        finally:
            writer.transport.abort()

    async def _abort_strangers(self) -> None:
        async with open_channel(self._router()) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            for _ in range(20):
                await stub.Abort(router_pb2.AbortRequest(request_id=f"stranger-{self._rng.random()}"), timeout=10)

    def _long(self, *, n: int) -> router_pb2.GenerateRequest:
        ids = pack_ints([self._rng.randrange(10, 200) for _ in range(self._rng.randrange(1, 300))])
        return router_pb2.GenerateRequest(prompt_ids=ids, n=n, stop=StopParams(max_tokens=800, ignore_eos=True))

    def _router(self) -> str:
        return self._cluster.address("router", self._rng.choice((1, 2)))

    async def _http(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        address = self._cluster.address("router", self._rng.choice((1, 2)), _HTTP_PORT)
        host, _, port = address.rpartition(":")
        return await asyncio.open_connection(host, int(port))
