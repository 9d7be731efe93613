"""The tables of `radixmesh status --routes`: where each router sends requests, and what it knows to be cached there."""

import asyncio
import json
from collections.abc import Sequence

import grpc

from radixmesh.cli.access import Access, access_from_environment
from radixmesh.cli.routers import may_send_key
from radixmesh.cli.terminal import Terminal
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.daemons.runtime.rpc.rpc_errors import mesh_error_from_rpc
from radixmesh.router.v1 import router_pb2, router_pb2_grpc

_COLUMNS = ("ROUTER", "SCHEDULER", "STATE", "OUTPUTS", "OWN", "QUEUED", "ROUTED", "HIT")


def show_routes(terminal: Terminal, routers: Sequence[str], timeout_s: float, *, is_json: bool) -> int:
    """Prints a row for each scheduler of each router: 0 if all routers have answered, 1 otherwise.

    OUTPUTS run or wait there, OWN are this router's. QUEUED: tokens still to be prefilled. ROUTED: requests placed
    there. HIT: share of their tokens that the router knew to be cached there.
    """
    access = access_from_environment()
    rows: list[tuple[str, ...]] = []
    failures = 0
    for address in routers:
        # A key goes to nobody that was not named, unless it is a port of ours.
        named = access if may_send_key(address, access) else Access(tls=access.tls)
        try:
            schedulers = asyncio.run(_ask(address, timeout_s, named))
        except grpc.RpcError as error:
            terminal.error(f"radixmesh status: {address}: {mesh_error_from_rpc(error)}")
            failures += 1
            continue
        for scheduler in schedulers if is_json else ():
            terminal.line(json.dumps({"router": address, **_record(scheduler)}))
        rows += [(address, *_row(scheduler)) for scheduler in schedulers]
    if not is_json:
        terminal.table(_COLUMNS, rows)
    return 1 if failures else 0


async def _ask(address: str, timeout_s: float, access: Access) -> Sequence[router_pb2.SchedulerInfo]:
    async with open_channel(address, access.tls) as channel:
        stub = router_pb2_grpc.RouterAdminServiceStub(channel)
        request = router_pb2.ListSchedulersRequest()
        return (await stub.ListSchedulers(request, timeout=timeout_s, metadata=access.metadata)).schedulers


def _record(scheduler: router_pb2.SchedulerInfo) -> dict[str, object]:
    return {
        "scheduler": scheduler.address,
        "state": _state_of(scheduler),
        "outputs": scheduler.num_outputs,
        "own_outputs": scheduler.num_running,
        "queued_tokens": scheduler.queued_tokens,
        "routed": scheduler.num_routed,
        "hit_rate": _hit_rate(scheduler),
    }


def _row(scheduler: router_pb2.SchedulerInfo) -> tuple[str, ...]:
    hit_rate = _hit_rate(scheduler)
    return (
        scheduler.address,
        _state_of(scheduler),
        str(scheduler.num_outputs),
        str(scheduler.num_running),
        str(scheduler.queued_tokens),
        str(scheduler.num_routed),
        "" if hit_rate is None else f"{100 * hit_rate:.0f}%",
    )


def _state_of(scheduler: router_pb2.SchedulerInfo) -> str:
    if not scheduler.is_connected:
        return "away"
    if scheduler.is_draining:
        return "draining"
    return scheduler.trust if scheduler.trust not in ("", "sound") else scheduler.group


def _hit_rate(scheduler: router_pb2.SchedulerInfo) -> float | None:
    return round(scheduler.routed_cached_tokens / scheduler.routed_tokens, 4) if scheduler.routed_tokens else None
