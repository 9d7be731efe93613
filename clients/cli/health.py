"""`radixmesh health ADDRESS`: one grpc.health.v1 check. Exit code 0 if it serves, 1 if not. Made to start fast."""

import argparse
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import grpc


def run(arguments: list[str]) -> int:
    """Asks the daemon once and prints what it says of itself."""
    parser = argparse.ArgumentParser(prog="radixmesh health", description="Ask one daemon whether it serves.")
    parser.add_argument("address", help="host:port or unix:/path of the daemon")
    parser.add_argument("--timeout", type=float, default=1.0, metavar="SECONDS", help="wait for the answer (default 1)")
    options = parser.parse_args(arguments)
    answer = _ask_fast(options.address, options.timeout) or _ask(options.address, options.timeout)
    # Details of an error are the other end's words.
    print(
        "".join(c if c.isprintable() else ascii(c)[1:-1] for c in answer),
        file=sys.stdout if answer == "SERVING" else sys.stderr,
    )
    return 0 if answer == "SERVING" else 1


def _ask_fast(address: str, timeout_s: float) -> str | None:
    if os.environ.get("RADIXMESH_TLS_CA_FILE"):
        return None
    from radixmesh.cli.plain_health import ask_plain

    return ask_plain(address, timeout_s)


def _open(address: str) -> "grpc.Channel | str":
    """With the files of TLS that the daemon beside us has; what is wrong with those, in words, where something is."""
    import grpc

    options: tuple[tuple[str, int | str], ...] = (("grpc.enable_http_proxy", 0),)
    if not os.environ.get("RADIXMESH_TLS_CA_FILE"):
        return grpc.insecure_channel(address, options=options)
    from radixmesh.daemons.runtime.errors import MeshError
    from radixmesh.daemons.runtime.security.tls_credentials import channel_credentials
    from radixmesh.daemons.runtime.security.tls_files import TlsFiles

    try:
        tls = TlsFiles.from_environment(os.environ)
        name = tls.verified_name(is_unix=address.startswith("unix:"))
        if name is not None:
            options = (*options, ("grpc.ssl_target_name_override", name))
        return grpc.secure_channel(address, channel_credentials(tls), options=options)
    except MeshError as error:
        return str(error)


def _ask(address: str, timeout_s: float) -> str:
    # The sync API, and only what the check needs.
    import grpc
    from grpc_health.v1 import health_pb2

    opened = _open(address)
    if isinstance(opened, str):
        return opened
    with opened as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            reply = check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))
