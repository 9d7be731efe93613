"""A daemon's life, the same for all.

start: bind, serve health (LOADING) -> load() -> SERVING -> SIGTERM / SIGINT -> DRAINING: drain() within drain_s
  -> close() -> stop the server -> exit 0
A second signal leaves at once (130). A background task that fails takes the daemon down (1): something outside
restarts it, and its peers treat it as any death.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import uvloop
from google.protobuf.internal import api_implementation

from radixmesh.daemons.runtime.common_settings import CommonSettings
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.gates.stream_gate import StreamLimits
from radixmesh.daemons.runtime.rpc.gates.unary_gate import UnaryLimits
from radixmesh.daemons.runtime.rpc.health.progress import Progress
from radixmesh.daemons.runtime.rpc.health.service import HealthService
from radixmesh.daemons.runtime.rpc.server import MeshServer
from radixmesh.daemons.runtime.telemetry.logs import configure_logging, get_logger
from radixmesh.daemons.runtime.telemetry.metrics import Metrics
from radixmesh.daemons.runtime.telemetry.metrics_server import MetricsServer, serve_metrics
from radixmesh.daemons.runtime.telemetry.tracing import NoTracer, Tracer, make_tracer

log = get_logger(__name__)

_T = TypeVar("_T")
# Streams that are still open after drain() belong to peers that hold them for as long as we live.
_STOP_GRACE_S = 0.5


class ExitCode(IntEnum):
    CLEAN = 0
    CRASHED = 1
    USAGE = 2  # Wrong settings: argparse's own status.
    NOT_STARTED = 3
    DRAINED_LATE = 4
    SECOND_SIGNAL = 130


class Daemon(ABC):
    """A daemon as run_daemon() runs it. Every method is called at most once, in this order, on the event loop."""

    async def load(self) -> None:
        """Makes the daemon able to serve: files, models, peers. Health is LOADING meanwhile.

        Anything slow runs off the loop, or health would not answer. A MeshError ends the process with NOT_STARTED.
        """
        return

    @abstractmethod
    async def drain(self) -> None:
        """Returns once no work is left; Progress.require_serving refuses new work already. Cancelled after drain_s."""

    @abstractmethod
    async def close(self) -> None:
        """Ends tasks and connections. Called also when load() or a background task failed."""


@dataclass(slots=True, kw_only=True)
class Runtime:
    """Objects that the process gives a daemon."""

    name: str
    instance_id: str
    progress: Progress
    metrics: Metrics
    server: MeshServer
    tracer: Tracer = field(default_factory=NoTracer)
    failed: asyncio.Future[None]
    _tasks: set[asyncio.Task[object]] = field(default_factory=set)

    def spawn(self, work: Coroutine[object, object, _T], name: str) -> asyncio.Task[_T]:
        """Runs work in the background; an exception in it ends the daemon. Cancel the task in Daemon.close()."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def fail(self, error: BaseException) -> None:
        """Ends the daemon because of error, as if a background task had failed with it."""
        if not self.failed.done():
            self.failed.set_exception(error)

    def _on_done(self, task: asyncio.Task[_T]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            log.error("background_task_failed", task=task.get_name(), error=repr(error))
            self.fail(error)


def run_daemon(
    name: str,
    settings: CommonSettings,
    build: Callable[[Runtime], Awaitable[Daemon]],
    unary_limits: UnaryLimits | None = None,
    stream_limits: StreamLimits | None = None,
) -> int:
    """Runs a daemon until it is told to leave. Returns the exit code for sys.exit().

    build makes the daemon and registers its services (runtime.server.add); it does nothing slow. unary_limits,
    stream_limits: of its server.
    """
    instance_id = uuid4().hex
    configure_logging(settings.log_level, name, instance_id)
    assert_upb()
    try:
        return int(uvloop.run(_live(name, instance_id, settings, build, unary_limits, stream_limits)))
    except KeyboardInterrupt:
        return int(ExitCode.SECOND_SIGNAL)


def assert_upb() -> None:
    """Exits unless protobuf runs on upb: its pure-python twin is 27 to 170 times slower, which looks like a hang."""
    implementation = api_implementation.Type()
    if implementation != "upb":
        log.error("protobuf_is_not_upb", implementation=implementation, hint="install protobuf from a wheel")
        sys.exit(ExitCode.NOT_STARTED)


async def _live(
    name: str,
    instance_id: str,
    settings: CommonSettings,
    build: Callable[[Runtime], Awaitable[Daemon]],
    unary_limits: UnaryLimits | None,
    stream_limits: StreamLimits | None,
) -> ExitCode:
    asked_to_leave = _leave_on_signals()
    try:
        tracer = make_tracer(settings.otlp_endpoint, name, instance_id)
    except MeshError as error:
        log.error("not_started", error=str(error))
        return ExitCode.NOT_STARTED
    progress = Progress(stall_s=settings.stall_s)
    metrics = Metrics(name)
    loop = asyncio.get_running_loop()
    metrics.tasks.set_function(lambda: len(asyncio.all_tasks(loop)))
    runtime = Runtime(
        name=name,
        instance_id=instance_id,
        progress=progress,
        metrics=metrics,
        server=MeshServer(
            HealthService(progress),
            metrics.count_error,
            settings.tls,
            follows_traces=tracer.is_on,
            unary_limits=unary_limits,
            stream_limits=stream_limits,
        ),
        tracer=tracer,
        failed=asyncio.get_running_loop().create_future(),
    )
    daemon: Daemon | None = None
    endpoint: MetricsServer | None = None
    try:
        try:
            settings.tls.check()
            daemon = await build(runtime)
            endpoint = serve_metrics(metrics, settings.metrics_listen) if settings.metrics_listen else None
            await _announce(runtime, settings, endpoint)
            loading = asyncio.ensure_future(daemon.load())
            if not await _finished_before(loading, asked_to_leave, runtime.failed):
                return ExitCode.CLEAN
            _spare_collector()
        except (MeshError, OSError) as error:
            log.error("not_started", error=str(error))
            return ExitCode.NOT_STARTED
        progress.loaded()
        log.info("serving", addresses=runtime.server.addresses)
        await asyncio.wait((asked_to_leave, runtime.failed), return_when=asyncio.FIRST_COMPLETED)
        if runtime.failed.done():
            runtime.failed.result()
        return await _drain(daemon, runtime, settings.drain_s)
    except Exception:
        log.exception("crashed")
        return ExitCode.CRASHED
    finally:
        progress.drain()
        await _close(daemon, runtime, endpoint, settings)


def _spare_collector() -> None:
    """Modules and the model live as long as the daemon: a full collection of them costs 15 ms in mid-stream."""
    gc.collect()
    gc.freeze()


async def _announce(runtime: Runtime, settings: CommonSettings, endpoint: MetricsServer | None) -> None:
    addresses = await runtime.server.start(settings.listen)
    if settings.address_file is not None:
        _write_whole(settings.address_file, "".join(f"{address}\n" for address in addresses))
    log.info("listening", addresses=addresses, metrics=endpoint.address if endpoint else None, pid=os.getpid())


async def _finished_before(
    work: asyncio.Future[None], asked_to_leave: asyncio.Future[str], failed: asyncio.Future[None]
) -> bool:
    """True if work finished before the process was asked to stop. Raises what work or a background task raised."""
    await asyncio.wait((work, asked_to_leave, failed), return_when=asyncio.FIRST_COMPLETED)
    if failed.done():
        work.cancel()
        failed.result()
    if not work.done():
        work.cancel()
        await asyncio.wait((work,), timeout=1.0)
        log.info("left_while_loading")
        return False
    work.result()
    return True


async def _drain(daemon: Daemon, runtime: Runtime, drain_s: float) -> ExitCode:
    runtime.progress.drain()
    log.info("draining", drain_s=drain_s, pending=runtime.progress.num_pending)
    drained = asyncio.ensure_future(daemon.drain())
    await asyncio.wait((drained, runtime.failed), timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
    if not drained.done():
        drained.cancel()
        await asyncio.wait((drained,), timeout=1.0)
        if runtime.failed.done():
            runtime.failed.result()
        log.warning("drained_late", drain_s=drain_s, pending=runtime.progress.num_pending)
        return ExitCode.DRAINED_LATE
    drained.result()
    log.info("drained")
    return ExitCode.CLEAN


async def _close(
    daemon: Daemon | None, runtime: Runtime, endpoint: MetricsServer | None, settings: CommonSettings
) -> None:
    """Ends everything, whatever fails on the way."""
    try:
        if daemon is not None:
            await daemon.close()
    except Exception:
        log.exception("close_failed")
    await runtime.server.stop(_STOP_GRACE_S)
    if endpoint is not None:
        endpoint.close()
    await asyncio.to_thread(runtime.tracer.close)
    if settings.address_file is not None:
        settings.address_file.unlink(missing_ok=True)
    log.info("left")


def _leave_on_signals() -> asyncio.Future[str]:
    """A future that the first SIGTERM or SIGINT sets to its name; the second one ends the process at once."""
    loop = asyncio.get_running_loop()
    asked: asyncio.Future[str] = loop.create_future()

    def on_signal(name: str) -> None:
        if asked.done():
            log.warning("second_signal", signal=name)
            os._exit(ExitCode.SECOND_SIGNAL)
        log.info("asked_to_leave", signal=name)
        asked.set_result(name)

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, on_signal, signum.name)
    return asked


def _write_whole(path: Path, text: str) -> None:
    # Readers poll for the file: they must never see half of it.
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)
