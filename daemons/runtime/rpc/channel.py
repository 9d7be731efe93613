"""A grpc.aio channel with the one set of defaults of the mesh."""

from __future__ import annotations

import json

import grpc
from grpc_health.v1 import health_pb2

from radixmesh.daemons.runtime.addresses import UNIX_PREFIX, authority_of, parse_address, split_host_port
from radixmesh.daemons.runtime.rpc.server import KEEPALIVE, MAX_MESSAGE_BYTES
from radixmesh.daemons.runtime.security.tls_credentials import channel_credentials
from radixmesh.daemons.runtime.security.tls_files import TlsFiles

# Read-only verbs that any peer may be asked twice. Encode is not here: the router retries it on *another* replica.
_IDEMPOTENT = (
    ("radixmesh.router.v1.RouterService", "GetModelInfo"),
    ("radixmesh.router.v1.RouterAdminService", "ListSchedulers"),
    ("radixmesh.scheduler.v1.SchedulerService", "GetState"),
    ("radixmesh.tokenizer.v1.TokenizerService", "GetVocabulary"),
    ("radixmesh.worker.v1.WorkerService", "GetCapabilities"),
)
_SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [{"service": service, "method": method} for service, method in _IDEMPOTENT],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.05s",
                "maxBackoff": "0.5s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}
_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    *KEEPALIVE,
    # A daemon that was restarted is found again at once, not after grpc's backoff of up to 120 s.
    ("grpc.initial_reconnect_backoff_ms", 50),
    # Doubles as the time limit of one connection attempt: no smaller than a slow handshake.
    ("grpc.min_reconnect_backoff_ms", 1_000),
    # Streams wait for a restarted peer: looking for it four times a second costs nothing worth their stall.
    ("grpc.max_reconnect_backoff_ms", 250),
    # A name is asked for again after a loss, but by default not before 30 s have passed: a container that comes back at
    # another address would be missed for as long. Once a second, as name_watch.py asks for peers.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    # A name server that says nothing: by default for 120 s. What is resolved by then is used meanwhile.
    ("grpc.dns_ares_query_timeout", 2_000),
    # Channels to one address share neither connection nor backoff: closing one and opening another starts afresh.
    ("grpc.use_local_subchannel_pool", 1),
    # The mesh talks to itself: an http_proxy of the environment is never meant for it.
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 1),
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
)


def open_channel(address: str, tls: TlsFiles | None = None) -> grpc.aio.Channel:
    """A channel to "host:port" or "unix:/path"; connects lazily. tls: None or without authorities = plain.

    Raises MeshError INVALID_ARGUMENT for other text, and for a file of TLS that cannot be used.
    """
    target = parse_address(address)
    options = (*_OPTIONS, *_authority_options(address))
    if tls is None or not tls.has_client:
        return grpc.aio.insecure_channel(target, options=options)
    names = name_options(target, tls) or _verified_options(address)
    return grpc.aio.secure_channel(target, channel_credentials(tls), options=(*options, *names))


def _authority_options(address: str) -> tuple[tuple[str, str], ...]:
    """A pinned address is dialled by its IP address, but spoken to by its name."""
    authority = authority_of(address)
    return () if authority is None else (("grpc.default_authority", authority),)


def _verified_options(address: str) -> tuple[tuple[str, str], ...]:
    """Certificates carry names, so the name behind a pinned address is what must be in them."""
    authority = authority_of(address)
    return () if authority is None else (("grpc.ssl_target_name_override", split_host_port(authority)[0]),)


def name_options(target: str, tls: TlsFiles) -> tuple[tuple[str, str], ...]:
    """Options of a channel under TLS for the name that the server's certificate must have."""
    name = tls.verified_name(is_unix=target.startswith(UNIX_PREFIX))
    return () if name is None else (("grpc.ssl_target_name_override", name),)


async def check_health(address: str, timeout_s: float = 1.0, service: str = "", tls: TlsFiles | None = None) -> str:
    """Status by grpc.health.v1: "SERVING", "NOT_SERVING", or "UNREACHABLE" if nobody answers in time."""
    async with open_channel(address, tls) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            answer = await check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return "SERVICE_UNKNOWN" if error.code() is grpc.StatusCode.NOT_FOUND else "UNREACHABLE"
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
