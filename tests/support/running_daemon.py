"""A daemon in this process over real gRPC, for tests that look inside, and one in a process of its own."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from radixmesh.daemons.runtime.lifecycle import Daemon, Runtime
from radixmesh.daemons.runtime.rpc.health.progress import Progress
from radixmesh.daemons.runtime.rpc.health.service import HealthService
from radixmesh.daemons.runtime.rpc.server import MeshServer
from radixmesh.daemons.runtime.telemetry.metrics import Metrics

D = TypeVar("D", bound=Daemon)
S = TypeVar("S")
SOURCES = Path(__file__).parents[2] / "src"


@dataclass(slots=True)
class Running(Generic[D]):
    daemon: D
    runtime: Runtime
    address: str


@asynccontextmanager
async def running(
    make: Callable[[Runtime, S], D],
    settings: S,
    *,
    load: bool = True,
    instance_id: str = "here",
    address: str = "127.0.0.1:0",
) -> AsyncIterator[Running[D]]:
    """load=False leaves the daemon LOADING."""
    progress = Progress()
    metrics = Metrics()
    server = MeshServer(HealthService(progress), metrics.count_error)
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    runtime = Runtime(
        name="test", instance_id=instance_id, progress=progress, metrics=metrics, server=server, failed=failed
    )
    daemon = make(runtime, settings)
    (address,) = await server.start([address])
    try:
        if load:
            await daemon.load()
            progress.loaded()
        yield Running(daemon, runtime, address)
    finally:
        await daemon.close()
        await server.stop(0.1)
        failed.cancel()


@asynccontextmanager
async def process_of(
    module: str, argv: Sequence[str], address_file: Path, pid_file: Path | None = None
) -> AsyncIterator[tuple[str, float]]:
    """Runs a daemon's module; yields its address and the seconds from start to its listening."""
    start = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *argv,
        "--address-file",
        str(address_file),
        env={**os.environ, "PYTHONPATH": str(SOURCES)},
    )
    if pid_file is not None:
        pid_file.write_text(str(process.pid))
    try:
        while not address_file.exists():
            assert process.returncode is None, f"{module} left with {process.returncode}"
            await asyncio.sleep(0.01)
        yield address_file.read_text().split()[0], time.monotonic() - start
    finally:
        if process.returncode is None:
            process.terminate()
        assert await asyncio.wait_for(process.wait(), 60) == 0
