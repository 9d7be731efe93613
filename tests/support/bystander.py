"""A mesh watched while somebody attacks it: bystanders' streams, each daemon's answers, memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.rpc.channel import check_health, open_channel
from radixmesh.router.v1 import router_pb2, router_pb2_grpc
from support.mesh import SERVICES, Mesh

_TEXT = "The Tyger of the night"
_SAMPLE_S = 0.05


@dataclass(slots=True)
class Seen:
    """Seconds and MiB. stall_s: the longest that a stream was without news, its first included. silence_s: of a daemon,
    the longest answer to a health check. lag_s: the longest that the watching loop itself was late: what it saw may be
    so much too long. errors: of bystanders.
    """

    ttfts_s: list[float] = field(default_factory=list)
    stall_s: float = 0.0
    silence_s: dict[str, float] = field(default_factory=dict)
    lag_s: float = 0.0
    rss_mib: dict[str, float] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


@asynccontextmanager
async def watched(mesh: Mesh, *, num_streams: int = 2, num_tokens: int = 40) -> AsyncIterator[Seen]:
    """Within it bystanders send one short request after another, and the mesh is looked at all the time."""
    seen = Seen()
    async with open_channel(mesh.routers[0]) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        tasks = [asyncio.ensure_future(_stand_by(stub, seen, num_tokens)) for _ in range(num_streams)]
        for service in SERVICES:
            tasks.append(asyncio.ensure_future(_knock(mesh.cluster.address(service), service, seen)))
        tasks += [asyncio.ensure_future(_weigh(mesh, seen)), asyncio.ensure_future(_lag(seen))]
        try:
            yield seen
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
    broken = [error for error in ended if isinstance(error, Exception)]
    assert not broken, broken


async def _stand_by(stub: router_pb2_grpc.RouterServiceAsyncStub, seen: Seen, num_tokens: int) -> None:
    stop = common_pb2.StopParams(max_tokens=num_tokens, ignore_eos=True)
    while True:
        since_s = last_s = time.monotonic()
        has_begun = False
        try:
            async for message in stub.Generate(router_pb2.GenerateRequest(text=_TEXT, stop=stop), timeout=120):
                now_s = time.monotonic()
                seen.stall_s = max(seen.stall_s, now_s - last_s)
                last_s = now_s
                if message.deltas and not has_begun:
                    has_begun = True
                    seen.ttfts_s.append(now_s - since_s)
        except grpc.RpcError as error:
            seen.stall_s = max(seen.stall_s, time.monotonic() - last_s)
            seen.errors.append(f"{error.code().name}: {error.details()}")  # type: ignore[attr-defined]
            await asyncio.sleep(_SAMPLE_S)
        except asyncio.CancelledError:
            # The last wait counts too, though nothing came.
            seen.stall_s = max(seen.stall_s, time.monotonic() - last_s)
            raise


async def _knock(address: str, service: str, seen: Seen) -> None:
    seen.silence_s[service] = 0.0
    while True:
        since_s = time.monotonic()
        try:
            await check_health(address, timeout_s=60)
        finally:
            seen.silence_s[service] = max(seen.silence_s[service], time.monotonic() - since_s)
        await asyncio.sleep(_SAMPLE_S)


async def _lag(seen: Seen) -> None:
    while True:
        due_s = time.monotonic() + _SAMPLE_S
        await asyncio.sleep(_SAMPLE_S)
        seen.lag_s = max(seen.lag_s, time.monotonic() - due_s)


async def _weigh(mesh: Mesh, seen: Seen) -> None:
    while True:
        for name, pid in mesh.cluster.pids.items():
            seen.rss_mib[name] = max(seen.rss_mib.get(name, 0.0), rss_mib(pid))
        await asyncio.sleep(_SAMPLE_S)


def rss_mib(pid: int) -> float:
    """Resident memory of a process now; 0 where it is no more."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0.0
    return int(fields[1]) * 4096 / (1 << 20)
