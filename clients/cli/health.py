"""`radixmesh health ADDRESS`: one grpc.health.v1 check. Exit code 0 if it serves, 1 if not. Made to start fast."""

import argparse
import sys


def run(arguments: list[str]) -> int:
    """Asks the daemon once and prints what it says of itself."""
    parser = argparse.ArgumentParser(prog="radixmesh health", description="Ask one daemon whether it serves.")
    parser.add_argument("address", help="host:port or unix:/path of the daemon")
    parser.add_argument("--timeout", type=float, default=1.0, metavar="SECONDS", help="wait for the answer (default 1)")
    options = parser.parse_args(arguments)
    answer = _ask(options.address, options.timeout)
    print(answer, file=sys.stdout if answer == "SERVING" else sys.stderr)
    return 0 if answer == "SERVING" else 1


def _ask(address: str, timeout_s: float) -> str:
    # The sync API, and only what the check needs: this runs once a second in every container.
    import grpc
    from grpc_health.v1 import health_pb2

    with grpc.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel:
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
