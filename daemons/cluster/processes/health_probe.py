"""Asks a daemon how it is, over grpc.health.v1."""

import asyncio
from abc import ABC, abstractmethod
from types import TracebackType

import grpc
from grpc_health.v1 import health_pb2

from radixmesh.daemons.cluster.processes.hang_detector import ProbeAnswer
from radixmesh.daemons.runtime.rpc.cancellation import raise_if_cancelled
from radixmesh.daemons.runtime.rpc.channel import name_options
from radixmesh.daemons.runtime.security.tls_credentials import channel_credentials
from radixmesh.daemons.runtime.security.tls_files import TlsFiles

# The channel outlives the process it asks: after a restart it must reconnect as soon as the port is open again.
_CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 50),
    # Doubles as the time limit of one connection attempt: no smaller than a slow handshake.
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)

# Our daemons add to the answer which of the states that are not SERVING they are in.
_STATE_KEY = "radixmesh-state"


class HealthProbe(ABC):
    """A way to ask one process about its health, again and again."""

    @abstractmethod
    async def ask(self, timeout_s: float) -> ProbeAnswer:
        """Returns what is heard within `timeout_s` seconds; never raises for what the process does."""

    @abstractmethod
    async def close(self) -> None:
        """Lets the connection go."""

    async def __aenter__(self) -> "HealthProbe":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class GrpcHealthProbe(HealthProbe):
    """`grpc.health.v1.Health/Check` of the whole server, with the files of TLS that it has itself."""

    def __init__(self, address: str, tls: TlsFiles | None = None) -> None:
        if tls is None or not tls.has_client:
            self._channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        else:
            options = (*_CHANNEL_OPTIONS, *name_options(address, tls))
            self._channel = grpc.aio.secure_channel(address, channel_credentials(tls), options=options)
        self._check = self._channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )

    async def ask(self, timeout_s: float) -> ProbeAnswer:
        call = self._check(health_pb2.HealthCheckRequest(service=""), timeout=timeout_s)
        try:
            reply = await call
            state = (await call.trailing_metadata()).get(_STATE_KEY)
        except grpc.aio.AioRpcError as error:
            raise_if_cancelled()
            return _ANSWERS_BY_CODE.get(error.code(), ProbeAnswer.NOT_SERVING)
        if reply.status == health_pb2.HealthCheckResponse.SERVING:
            return ProbeAnswer.SERVING
        return ProbeAnswer.DRAINING if state == "draining" else ProbeAnswer.NOT_SERVING

    async def close(self) -> None:
        await self._channel.close()


class AlwaysServing(HealthProbe):
    """For services without a health check: alive is healthy, as it is for Docker."""

    async def ask(self, timeout_s: float) -> ProbeAnswer:
        await asyncio.sleep(0)
        return ProbeAnswer.SERVING

    async def close(self) -> None:
        return None


class NeverReached(HealthProbe):
    """For services whose health cannot be asked for."""

    async def ask(self, timeout_s: float) -> ProbeAnswer:
        await asyncio.sleep(0)
        return ProbeAnswer.REFUSED

    async def close(self) -> None:
        return None


_ANSWERS_BY_CODE = {
    grpc.StatusCode.DEADLINE_EXCEEDED: ProbeAnswer.SILENT,
    grpc.StatusCode.UNAVAILABLE: ProbeAnswer.REFUSED,
}
