"""A channel to a name finds the daemon that comes back at another address, within the bound that channel.py sets."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from types import TracebackType

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from radixmesh.daemons.runtime.rpc.channel import _OPTIONS

_TYPE_A = 1
# A second between two questions for a name, a quarter of one between two connections; the rest is the machine's.
_BOUND_S = 8.0


class NameServer(asyncio.DatagramProtocol):
    """Answers every question for an A record with one address, at a port of this machine."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.port = 0

    async def __aenter__(self) -> NameServer:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=("127.0.0.1", 0))
        self.port = self._transport.get_extra_info("sockname")[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._transport.close()

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        end = data.index(0, 12) + 1
        (kind,) = struct.unpack_from(">H", data, end)
        answer = b""
        if kind == _TYPE_A:
            # A pointer to the name in the question; class IN, no time to live.
            answer = b"\xc0\x0c" + struct.pack(">HHIH", _TYPE_A, 1, 0, 4) + socket.inet_aton(self.address)
        head = data[:2] + b"\x81\x80" + struct.pack(">HHHH", 1, bool(answer), 0, 0)
        self._transport.sendto(head + data[12 : end + 4] + answer, addr)


async def _serve(address: str) -> tuple[grpc.aio.Server, int]:
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port(address)
    await server.start()
    return server, port


async def test_a_name_that_gets_another_address_is_found_soon() -> None:
    """By gRPC's own bound it takes 30 s: the name is not asked for again before."""
    question = health_pb2.HealthCheckRequest()
    async with NameServer("127.0.0.2") as names:
        first, port = await _serve("127.0.0.2:0")
        target = f"dns://127.0.0.1:{names.port}/router.test:{port}"
        async with grpc.aio.insecure_channel(target, options=_OPTIONS) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            await stub.Check(question, timeout=10)
            await first.stop(0)
            lost = time.monotonic()
            # The channel asks at once, and is told the old address: the name changes a moment later.
            await asyncio.sleep(0.5)
            second, _ = await _serve(f"127.0.0.3:{port}")
            names.address = "127.0.0.3"
            while time.monotonic() - lost < 40.0:
                try:
                    await stub.Check(question, timeout=2)
                    break
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.05)
            took_s = time.monotonic() - lost
        await second.stop(0)
    assert took_s < _BOUND_S
