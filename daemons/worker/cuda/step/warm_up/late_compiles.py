"""Says when Triton compiles a kernel for which requests wait: what the warm-up did not run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from triton import knobs

from radixmesh.daemons.runtime.telemetry.logs import get_logger

_log = get_logger(__name__)


class _Source(Protocol):
    name: str


class _Times(Protocol):
    total: int
    """Microseconds."""


def watch_compiles() -> None:
    """From now on every kernel that is compiled, or loaded from Triton's cache, is one line of the log."""
    # One for the process, and Triton's own way of telling.
    knobs.compilation.listener = _compiled


def expect_compiles() -> None:
    """Until then none is: another runner starts in the process, as in benchmarks."""
    knobs.compilation.listener = None


def _compiled(
    *, src: _Source, metadata: Mapping[str, object], metadata_group: object, times: _Times, cache_hit: bool
) -> None:
    _log.warning("kernel_compiled_late", kernel=src.name, seconds=round(times.total * 1e-6, 3), is_from_cache=cache_hit)
