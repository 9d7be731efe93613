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
    there. HIT: share of their tokens that the router knew to be cached there. Lines for each
    router's queue and sources follow.
    """
    access = access_from_environment()
    rows: list[tuple[str, ...]] = []
    queues: list[str] = []
    failures = 0
    for address in routers:
        # A key goes to nobody that was not named, unless it is a port of ours.
        named = access if may_send_key(address, access) else Access(tls=access.tls)
        try:
            answer = asyncio.run(_ask(address, timeout_s, named))
        except grpc.RpcError as error:
            terminal.error(f"radixmesh status: {address}: {mesh_error_from_rpc(error)}")
            failures += 1
            continue
        for scheduler in answer.schedulers if is_json else ():
            terminal.line(json.dumps({"router": address, **_record(scheduler)}))
        if is_json:
            terminal.line(json.dumps({"router": address, "queue": _queue_record(answer.queue)}))
        for source in answer.sources if is_json else ():
            terminal.line(json.dumps({"router": address, **_source_record(source)}))
        rows += [(address, *_row(scheduler)) for scheduler in answer.schedulers]
        queues.append(f"{address}: {_queue_line(answer.queue)}")
        queues += [f"{address}: {_source_line(source)}" for source in answer.sources]
    if not is_json:
        terminal.table(_COLUMNS, rows)
        for line in queues:
            terminal.line(line)
    return 1 if failures else 0


async def _ask(address: str, timeout_s: float, access: Access) -> router_pb2.ListSchedulersResponse:
    async with open_channel(address, access.tls) as channel:
        stub = router_pb2_grpc.RouterAdminServiceStub(channel)
        request = router_pb2.ListSchedulersRequest()
        return await stub.ListSchedulers(request, timeout=timeout_s, metadata=access.metadata)


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


def _queue_record(queue: router_pb2.QueueInfo) -> dict[str, object]:
    return {
        "outputs": queue.num_outputs,
        "max_outputs": queue.max_outputs,
        "bytes": queue.num_bytes,
        "tenants": queue.num_tenants,
        "longest_wait_ms": queue.longest_wait_ms,
        "refused": queue.num_refused,
        "retry_after_ms": queue.retry_after_ms,
    }


def _queue_line(queue: router_pb2.QueueInfo) -> str:
    refused = f"{queue.num_refused} requests refused since the start"
    if not queue.num_outputs:
        return f"nothing waits in the router, {refused}"
    wait_s = queue.longest_wait_ms / 1000
    return f"{queue.num_outputs} outputs of {queue.num_tenants} tenants wait, the longest for {wait_s:.1f} s; {refused}"


def _source_record(source: router_pb2.DiscoverySourceInfo) -> dict[str, object]:
    return {
        "source": source.source,
        "addresses": source.num_addresses,
        "ignored": source.num_ignored,
        "error": source.error,
    }


def _source_line(source: router_pb2.DiscoverySourceInfo) -> str:
    ignored = f", {source.num_ignored} of them ignored" if source.num_ignored else ""
    failed = f"; the last list holds: {source.error}" if source.error else ""
    return f"{source.source} names {source.num_addresses} schedulers{ignored}{failed}"


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
