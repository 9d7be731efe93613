"""The metrics port under clients that say nothing, little, or much."""

from __future__ import annotations

import gzip
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from radixmesh.daemons.runtime.telemetry.metrics import Metrics
from radixmesh.daemons.runtime.telemetry.metrics_server import (
    MAX_CONNECTIONS,
    MAX_HEAD_BYTES,
    MetricsServer,
    serve_metrics,
)

DEADLINE_S = 60.0


@pytest.fixture
def endpoint() -> Iterator[MetricsServer]:
    metrics = Metrics()
    metrics.output_tokens.inc(7)
    endpoint = serve_metrics(metrics, "127.0.0.1:0")
    yield endpoint
    endpoint.close()
    endpoint.close()


def connect(endpoint: MetricsServer) -> socket.socket:
    host, _, port = endpoint.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=DEADLINE_S)


def scrape(endpoint: MetricsServer, path: str = "/metrics", **headers: str) -> tuple[bytes, str]:
    request = urllib.request.Request(f"http://{endpoint.address}{path}", headers=headers)
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        return answer.read(), answer.headers["content-type"]


def said(endpoint: MetricsServer, request: bytes) -> bytes:
    with connect(endpoint) as connection:
        connection.sendall(request)
        return connection.makefile("rb").read()


def test_scrapers_get_the_format_that_they_ask_for(endpoint: MetricsServer) -> None:
    plain, kind = scrape(endpoint)
    assert b"radixmesh_output_tokens_total 7.0" in plain and kind.startswith("text/plain")
    openmetrics, kind = scrape(endpoint, accept="application/openmetrics-text; version=1.0.0")
    assert openmetrics.endswith(b"# EOF\n") and kind.startswith("application/openmetrics-text")
    packed, _ = scrape(endpoint, **{"accept-encoding": "gzip"})
    assert b"radixmesh_output_tokens_total 7.0" in gzip.decompress(packed)
    one, _ = scrape(endpoint, "/metrics?name[]=radixmesh_output_tokens_total")
    assert one.count(b"# HELP") == 1


def test_idle_connections_cost_no_thread_and_keep_nobody_out(endpoint: MetricsServer) -> None:
    before = set(threading.enumerate())
    with ExitStack() as stack:
        idle = [stack.enter_context(connect(endpoint)) for _ in range(8 * MAX_CONNECTIONS)]
        for connection in idle[::2]:
            connection.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        assert b"radixmesh_output_tokens_total 7.0" in scrape(endpoint)[0]
        # Threads of a pool, or one for each connection, would be many; some other test's may begin meanwhile.
        assert len(set(threading.enumerate()) - before) < len(idle) // 4
        # All but the youngest have had to go.
        for connection in idle[: -MAX_CONNECTIONS - 1]:
            with suppress(ConnectionError):
                assert connection.recv(1) == b""


def test_a_connection_has_an_end(endpoint: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixmesh.daemons.runtime.telemetry.metrics_server.CONNECTION_S", 0.5)
    with connect(endpoint) as connection:
        start = time.monotonic()
        while not has_ended(connection):
            assert time.monotonic() - start < DEADLINE_S
            with suppress(ConnectionError):
                connection.sendall(b"X")


def has_ended(connection: socket.socket) -> bool:
    connection.settimeout(0.05)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /metrics HTTP/1.1\r\nX: " + b"a" * (2 * MAX_HEAD_BYTES), b"431"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"\r\n\r\n", b"405"),
        (b"GET http://[ HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.1\r\n\r\n" + b"x" * 100_000, b"200"),
    ],
    ids=["head", "method", "nothing", "address", "more"],
)
def test_what_is_no_scrape_is_answered(endpoint: MetricsServer, request_bytes: bytes, status: bytes) -> None:
    assert said(endpoint, request_bytes).startswith(b"HTTP/1.1 " + status)
    assert b"radixmesh" in scrape(endpoint)[0]


def test_a_head_asks_for_no_body(endpoint: MetricsServer) -> None:
    answer = said(endpoint, b"HEAD /metrics HTTP/1.0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"\r\n\r\n") and b"Content-Length: 0" not in answer
