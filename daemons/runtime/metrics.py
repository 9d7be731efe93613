"""Every metric of the mesh, by name, unit and help. A daemon sets those that concern it.

Names start with radixmesh_; units are in the names (seconds, bytes, tokens). One registry a daemon, so that several can
live in one process.
"""

from __future__ import annotations

from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from .addresses import split_host_port
from .errors import MeshError

_LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_STEP_S = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """The metrics of one daemon."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._make_request_metrics(self.registry)
        self._make_step_metrics(self.registry)
        self._make_cache_metrics(self.registry)
        self.errors = Counter(
            "radixmesh_errors_total", "Typed errors that left this daemon.", ["reason"], registry=self.registry
        )
        self.restarts = Counter(
            "radixmesh_restarts_total",
            "Peers that were lost and replaced or reconnected, by kind of peer.",
            ["peer"],
            registry=self.registry,
        )

    def count_error(self, error: MeshError) -> None:
        """Counts an error that leaves this daemon."""
        self.errors.labels(error.reason_name).inc()

    def _make_request_metrics(self, registry: CollectorRegistry) -> None:
        self.requests_started = Counter("radixmesh_requests_started_total", "Requests accepted.", registry=registry)
        self.requests_finished = Counter(
            "radixmesh_requests_finished_total", "Requests that ended, by finish reason.", ["reason"], registry=registry
        )
        self.requests_running = Gauge("radixmesh_requests_running", "Requests that hold a slot.", registry=registry)
        self.requests_queued = Gauge("radixmesh_requests_queued", "Requests that wait for a slot.", registry=registry)
        self.requests_retracted = Counter(
            "radixmesh_requests_retracted_total", "Times a running request gave up its pages.", registry=registry
        )
        self.requests_resumed = Counter(
            "radixmesh_requests_resumed_total", "Attempts after the first: replays after a loss.", registry=registry
        )
        self.prompt_tokens = Counter("radixmesh_prompt_tokens_total", "Prompt tokens accepted.", registry=registry)
        self.cached_tokens = Counter(
            "radixmesh_cached_tokens_total", "Prompt tokens whose KV was found in the cache.", registry=registry
        )
        self.output_tokens = Counter("radixmesh_output_tokens_total", "Output tokens delivered.", registry=registry)
        self.first_token_seconds = Histogram(
            "radixmesh_first_token_seconds", "Acceptance to first output token.", buckets=_LATENCY_S, registry=registry
        )
        self.inter_token_seconds = Histogram(
            "radixmesh_inter_token_seconds", "Time between deltas of one output.", buckets=_LATENCY_S, registry=registry
        )
        self.request_seconds = Histogram(
            "radixmesh_request_seconds", "Acceptance to the end of a request.", buckets=_LATENCY_S, registry=registry
        )
        self.journal_bytes = Gauge(
            "radixmesh_journal_bytes", "Bytes that the request journal holds.", registry=registry
        )
        self.detokenizer_entries = Gauge(
            "radixmesh_detokenizer_entries", "Outputs that are open at a detokenizer.", registry=registry
        )

    def _make_step_metrics(self, registry: CollectorRegistry) -> None:
        self.steps = Counter("radixmesh_steps_total", "Steps completed.", registry=registry)
        self.step_tokens = Counter(
            "radixmesh_step_tokens_total", "Tokens that steps computed, by kind.", ["kind"], registry=registry
        )
        self.step_seconds = Histogram(
            "radixmesh_step_seconds", "Device time of a step.", buckets=_STEP_S, registry=registry
        )
        self.plan_seconds = Histogram(
            "radixmesh_plan_seconds", "Host time to plan a step.", buckets=_STEP_S, registry=registry
        )
        self.batch_size = Histogram("radixmesh_batch_size", "Decode rows of a step.", buckets=_BATCH, registry=registry)
        self.plans_in_flight = Gauge("radixmesh_plans_in_flight", "Plans sent and not answered.", registry=registry)
        self.device_idle_ratio = Gauge(
            "radixmesh_device_idle_ratio",
            "Share of the last second in which the device ran no step.",
            registry=registry,
        )
        self.epoch = Gauge("radixmesh_epoch", "Epoch that this daemon holds or serves.", registry=registry)
        self.refusals = Counter(
            "radixmesh_refusals_total", "Plans refused by a worker, by reason.", ["reason"], registry=registry
        )

    def _make_cache_metrics(self, registry: CollectorRegistry) -> None:
        self.pages = Gauge(
            "radixmesh_pages",
            "KV pages by state: free, cached, owned, leased, quarantined.",
            ["state"],
            registry=registry,
        )
        self.page_evictions = Counter("radixmesh_page_evictions_total", "Cached pages evicted.", registry=registry)
        self.readopted_tokens = Counter(
            "radixmesh_readopted_tokens_total",
            "Tokens of KV taken over from a worker at a new epoch.",
            registry=registry,
        )


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
