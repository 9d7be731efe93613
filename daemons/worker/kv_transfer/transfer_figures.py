"""Figures of KV transfers for /metrics: bytes and seconds by stage, failures by reason."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.runtime.telemetry.metrics import Metrics

STAGES = ("gather", "gather_on_device", "send", "receive", "scatter", "scatter_on_device", "hand_over")
"""on_device: device time of the copies alone, where they run on a GPU. hand_over: of the chunk that moves behind the
prefill, from the launch of its gather to KV that is scattered and validated."""

log = get_logger(__name__)


class TransferFigures:
    """metrics: None = nobody reads them."""

    def __init__(self, metrics: Metrics | None = None) -> None:
        self._metrics = metrics

    def passed(self, stage: str, num_bytes: int, seconds: float) -> None:
        """So many bytes went through one of STAGES."""
        if self._metrics is not None:
            self._metrics.kv_transfer_bytes.labels(stage).inc(num_bytes)
            self._metrics.kv_transfer_seconds.labels(stage).observe(seconds)

    @contextmanager
    def timed(self, stage: str, num_bytes: int) -> Iterator[None]:
        """Counts what is done inside, unless it raises."""
        began = time.monotonic()
        yield
        self.passed(stage, num_bytes, time.monotonic() - began)

    def failed(self, reason: str) -> None:
        """A transfer failed at this end."""
        if self._metrics is not None:
            self._metrics.kv_transfer_failures.labels(reason).inc()


def trace(event: str, transfer_id: str, **fields: object) -> None:
    """Logs when a transfer came to a point: bench/gpu/pd_load.py tells of the last ones."""
    log.debug(event, transfer=transfer_id, **fields)
