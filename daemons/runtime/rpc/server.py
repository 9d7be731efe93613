"""A grpc.aio server with the one set of defaults of the mesh, health and reflection included."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar, cast

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.addresses import UNIX_PREFIX, parse_address
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.auth_interceptor import AuthInterceptor
from radixmesh.daemons.runtime.rpc.gates.stream_gate import StreamGate, StreamLimits
from radixmesh.daemons.runtime.rpc.gates.unary_gate import UnaryGate, UnaryLimits
from radixmesh.daemons.runtime.rpc.health.service import HealthService
from radixmesh.daemons.runtime.rpc.rpc_errors import ErrorInterceptor
from radixmesh.daemons.runtime.rpc.trace_interceptor import TraceInterceptor
from radixmesh.daemons.runtime.security.key_guard import KeyGuard
from radixmesh.daemons.runtime.security.tls_credentials import server_credentials
from radixmesh.daemons.runtime.security.tls_files import TlsFiles

_Servicer = TypeVar("_Servicer")
# A grace that stop() always cuts short.
_NEVER_S = 7 * 24 * 3600.0

# A step's plan or a detokenizer batch is KBs; blobs (grammars, images) are the largest messages.
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
MAX_CONCURRENT_STREAMS = 65_536
# For both ends: a peer that is silent without having closed (SIGSTOP, partition) fails its streams after 2 + 3 s.
KEEPALIVE: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    # Without this one grpc 1.85 waits 60 s for the answer to a keepalive ping, whatever the line above says.
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_concurrent_streams", MAX_CONCURRENT_STREAMS),
    # Two daemons on one port would share its connections at random: the second must fail to bind.
    ("grpc.so_reuseport", 0),
    *KEEPALIVE,
    # Our channels ping every 2 s; grpc's own default would answer that with GOAWAY "too_many_pings".
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
)


class MeshServer:
    """Serves the services of one daemon on any number of addresses.

    health: its service is registered here, and closed first on stop. on_error: told of every typed error that leaves.
    tls: what every address is served under; None or without a certificate = plain. follows_traces: handlers learn the
    trace that their caller names. unary_limits: of a daemon whose unary calls would take too much memory together.
    stream_limits: of a daemon whose clients send streams.
    """

    def __init__(
        self,
        health: HealthService,
        on_error: Callable[[MeshError], None] | None = None,
        tls: TlsFiles | None = None,
        *,
        follows_traces: bool = False,
        unary_limits: UnaryLimits | None = None,
        stream_limits: StreamLimits | None = None,
    ) -> None:
        self._health = health
        self._tls = tls
        self._auth = AuthInterceptor()
        interceptors: list[grpc.aio.ServerInterceptor] = [ErrorInterceptor(on_error), self._auth]
        if follows_traces:
            interceptors.append(TraceInterceptor())
        options = dict(_OPTIONS)
        if unary_limits is not None:
            interceptors.append(UnaryGate(unary_limits))
            options["grpc.max_receive_message_length"] = unary_limits.max_message_bytes
            # Else windows grow to MiBs, which arrive of a message that nobody has asked for yet.
            options["grpc.http2.bdp_probe"] = 0
        if stream_limits is not None:
            interceptors.append(StreamGate(stream_limits))
            options["grpc.max_receive_message_length"] = stream_limits.max_message_bytes
            options["grpc.http2.bdp_probe"] = 0  # As above: of streams that wait to be read.
        self._server = grpc.aio.server(interceptors=interceptors, options=tuple(options.items()))
        self._service_names: list[str] = []
        self._addresses: tuple[str, ...] = ()
        self._retiring: asyncio.Future[None] | None = None
        self.add(health_pb2_grpc.add_HealthServicer_to_server, health)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses that start() bound; empty before."""
        return self._addresses

    def add(self, add_to_server: Callable[[_Servicer, grpc.aio.Server], None], servicer: _Servicer) -> None:
        """Registers a servicer with the function that was generated for it. Before start() only."""
        recorder = _Recorder(self._server)
        add_to_server(servicer, cast(grpc.aio.Server, recorder))
        for name in recorder.service_names:
            self._service_names.append(name)
            self._health.add_service(name)

    def guard(self, guard: KeyGuard) -> None:
        """From now on every call but health needs a key that the guard knows."""
        self._auth.guard = guard

    async def start(self, listen: Sequence[str]) -> tuple[str, ...]:
        """Binds "host:port" (port 0: any free one) and "unix:/path" addresses and serves.

        Returns the bound addresses, ports filled in. Raises MeshError INVALID_ARGUMENT if one cannot be bound, or a
        file of TLS cannot be used.
        """
        if not listen:
            raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, "name at least one address to listen on")
        reflection.enable_server_reflection((*self._service_names, reflection.SERVICE_NAME), self._server)
        credentials = server_credentials(self._tls) if self._tls is not None and self._tls.has_server else None
        self._addresses = tuple(self._bind(address, credentials) for address in listen)
        await self._server.start()
        return self._addresses

    def retire(self) -> None:
        """Takes no more connections and tells clients (GOAWAY) to go elsewhere; running calls go on until stop()."""
        if self._retiring is None:
            self._retiring = asyncio.ensure_future(self._server.stop(_NEVER_S))

    async def stop(self, grace_s: float) -> None:
        """Takes no new calls, gives the running ones grace_s seconds, then cancels them. Idempotent."""
        self._health.close()
        await self._server.stop(grace_s)

    async def wait(self) -> None:
        """Returns when the server has stopped."""
        await self._server.wait_for_termination()

    def _bind(self, address: str, credentials: grpc.ServerCredentials | None) -> str:
        target = parse_address(address)
        try:
            if credentials is None:
                port = self._server.add_insecure_port(target)
            else:
                port = self._server.add_secure_port(target, credentials)
        except RuntimeError as error:
            message = f"cannot listen on {address} ({error}): is another process there, or the folder missing?"
            raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "listen"}) from error
        if target.startswith(UNIX_PREFIX):
            return target
        return f"{target.rpartition(':')[0]}:{port}"


class _Handlers(Protocol):
    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None: ...

    def add_registered_method_handlers(
        self, service_name: str, handlers: Mapping[str, grpc.RpcMethodHandler[object, object]]
    ) -> None: ...


class _Recorder:
    """Stands in for the server while generated code registers a servicer, and learns the service's name from it."""

    def __init__(self, server: _Handlers) -> None:
        self._server = server
        self.service_names: list[str] = []

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        handlers = tuple(handlers)
        self.service_names += [h.service_name() for h in handlers if isinstance(h, grpc.ServiceRpcHandler)]
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(
        self, service_name: str, handlers: Mapping[str, grpc.RpcMethodHandler[object, object]]
    ) -> None:
        self._server.add_registered_method_handlers(service_name, handlers)
