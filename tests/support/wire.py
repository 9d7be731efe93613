"""Raw calls, raw connections and what answers them, for tests that send what no client of ours would."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple

import grpc

from radixmesh.daemons.runtime.rpc.rpc_errors import mesh_error_from_rpc
from radixmesh.detokenizer.v1 import detokenizer_pb2
from radixmesh.router.v1 import router_pb2
from radixmesh.scheduler.v1 import scheduler_pb2
from radixmesh.tokenizer.v1 import tokenizer_pb2
from radixmesh.worker.v1 import worker_pb2

_FILES = {
    "router": router_pb2.DESCRIPTOR,
    "tokenizer": tokenizer_pb2.DESCRIPTOR,
    "detokenizer": detokenizer_pb2.DESCRIPTOR,
    "scheduler": scheduler_pb2.DESCRIPTOR,
    "worker": worker_pb2.DESCRIPTOR,
}
_UNLIMITED = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)
TIMEOUT_S = 10.0


class Method(NamedTuple):
    """One method of one daemon."""

    daemon: str
    path: str
    is_request_stream: bool
    is_response_stream: bool

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Refusal of a call. `reason` is ErrorInfo's; where none came, what our clients make of the status."""

    status: str
    reason: str
    message: str
    metadata: dict[str, str]


def methods() -> Iterator[Method]:
    """Every method of every service of the contracts, from their descriptors."""
    for daemon, file in _FILES.items():
        for service in file.services_by_name.values():
            for method in service.methods:
                path = f"/{service.full_name}/{method.name}"
                yield Method(daemon, path, method.client_streaming, method.server_streaming)


@asynccontextmanager
async def raw_channel(address: str) -> AsyncIterator[grpc.aio.Channel]:
    """A channel that sends and takes messages of any size."""
    async with grpc.aio.insecure_channel(address, options=_UNLIMITED) as channel:
        yield channel


async def send_raw(channel: grpc.aio.Channel, method: Method, messages: Sequence[bytes]) -> Refusal | None:
    """Calls with those bytes (one message unless requests are a stream) and reads to the end; None: it ended well."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            if not method.is_request_stream:
                (message,) = messages
                if not method.is_response_stream:
                    await channel.unary_unary(method.path)(message)
                    return None
                return await refusal_of(channel.unary_stream(method.path)(message))
            call = channel.stream_stream(method.path)()
            # A stream that ended meanwhile says why when it is read.
            with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.UsageError, grpc.RpcError):
                for message in messages:
                    await call.write(message)
            return await refusal_of(call)
    except grpc.aio.AioRpcError as error:
        return refusal_from(error)


async def refusal_of(call: AsyncIterator[object]) -> Refusal | None:
    """Reads a call to its end; None: it ended well."""
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return refusal_from(error)
    return None


def refusal_from(error: grpc.aio.AioRpcError) -> Refusal:
    typed = mesh_error_from_rpc(error)
    return Refusal(error.code().name, typed.reason_name, typed.message, dict(typed.metadata))


async def metrics_of(address: str) -> dict[str, float]:
    """A daemon's Prometheus samples, `name{labels}` -> value."""

    def fetch() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
            return str(answer.read(), "utf-8")

    samples = (line.rpartition(" ") for line in (await asyncio.to_thread(fetch)).splitlines() if line[0] != "#")
    return {name: float(value) for name, _, value in samples}


class Proxy:
    """A TCP proxy whose cable can be pulled: from then on nothing passes and nobody is told."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._server: asyncio.Server | None = None
        self._pumps: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self._passes = asyncio.Event()
        self._passes.set()

    @property
    def address(self) -> str:
        assert self._server is not None
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()

    def pull(self) -> None:
        """No byte passes any more, in either direction; both connections stay open."""
        self._passes.clear()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        self._writers += [writer, far_writer]
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            pump = asyncio.ensure_future(self._pump(source, sink))
            self._pumps.add(pump)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65_536):
                await self._passes.wait()
                sink.write(data)
                await sink.drain()
            sink.close()
