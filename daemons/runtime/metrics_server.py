"""Serves a daemon's metrics over HTTP."""

from __future__ import annotations

from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import start_http_server

from .addresses import split_host_port
from .metrics import Metrics


def serve_metrics(metrics: Metrics, address: str) -> MetricsServer:
    """Serves metrics over HTTP at "host:port" (0: any free port) from a thread, until closed.

    Raises MeshError INVALID_ARGUMENT for other text, OSError if the port is taken.
    """
    host, port = split_host_port(address)
    server, thread = start_http_server(port, host, metrics.registry)
    return MetricsServer(server, thread)


class MetricsServer:
    """A running metrics endpoint."""

    def __init__(self, server: WSGIServer, thread: Thread) -> None:
        self._server = server
        self._thread = thread

    @property
    def address(self) -> str:
        """Bound "host:port"."""
        return f"{self._server.server_address[0]!s}:{self._server.server_port}"

    def close(self) -> None:
        """Stops serving and frees the port. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=1.0)
