"""Asks a daemon of any kind what it is doing: health, epoch and load, in words."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import grpc
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from grpc_health.v1 import health_pb2

from radixmesh.cli.access import Access, access_from_environment
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.router.v1 import router_pb2, router_pb2_grpc
from radixmesh.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from radixmesh.worker.v1 import worker_pb2, worker_pb2_grpc


class _Answer(NamedTuple):
    epoch: int | None
    load: str
    figures: Mapping[str, int | float | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonReport:
    """Answers of one daemon; empty where its kind has no such thing, or did not answer."""

    health: str
    epoch: int | None = None
    load: str = ""
    figures: Mapping[str, int | float | str] = field(default_factory=dict)
    """The same as `load`, for programs."""


async def ask_daemon(address: str, timeout_s: float, access: Access | None = None) -> DaemonReport:
    """Asks the daemon at `address`; one that does not answer makes a report that says so. Never takes more than twice
    `timeout_s` seconds. The kind of daemon is found out by which of the services it has. access: None = the
    environment's.
    """
    access = access or access_from_environment()
    async with open_channel(address, access.tls) as channel:
        health = await _ask_health(channel, timeout_s)
        if health in ("refused", "silent"):
            return DaemonReport(health=health)
        asked: tuple[Callable[[grpc.aio.Channel, float], Awaitable[_Answer]], ...] = (
            _ask_scheduler,
            _ask_worker,
            lambda channel, timeout_s: _ask_router(channel, timeout_s, access),
        )
        answers = await asyncio.gather(*(ask(channel, timeout_s) for ask in asked), return_exceptions=True)
    for answer in answers:
        if isinstance(answer, _Answer):
            return DaemonReport(health=health, epoch=answer.epoch, load=answer.load, figures=answer.figures)
        if not isinstance(answer, grpc.aio.AioRpcError):
            raise answer
    return DaemonReport(health=health)


async def _ask_health(channel: grpc.aio.Channel, timeout_s: float) -> str:
    call = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )(health_pb2.HealthCheckRequest(), timeout=timeout_s)
    try:
        reply = await call
        state = (await call.trailing_metadata()).get("radixmesh-state")
    except grpc.aio.AioRpcError as error:
        return "silent" if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED else "refused"
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
    return state if isinstance(state, str) else status.lower().replace("_", " ")


async def _ask_scheduler(channel: grpc.aio.Channel, timeout_s: float) -> _Answer:
    stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
    state = await stub.GetState(scheduler_pb2.GetStateRequest(), timeout=timeout_s)
    load = state.load
    group = _label(scheduler_pb2.GroupState, load.group, "GROUP_STATE_")
    pages = f"pages {load.free_pages} free {load.cached_pages} cached of {load.total_pages}"
    parts = [f"group {group}", f"{load.num_running} running {load.num_waiting} waiting", pages]
    if state.quarantined_pages:
        parts.append(f"{state.quarantined_pages} quarantined")
    if state.expert_balancedness:
        placed = f" ({state.num_expert_placements} placements)" if state.num_expert_placements else ""
        parts.append(f"experts balanced {state.expert_balancedness:.2f}{placed}")
    role = _label(scheduler_pb2.SchedulerRole, state.hello.role, "SCHEDULER_ROLE_")
    if state.hello.role:
        counts = f"{state.num_kv_handed_over} handed over" if role == "prefill" else f"{state.num_kv_arrived} arrived"
        parts.append(f"{role}, KV {counts}, {state.num_kv_arriving} arriving, {state.num_kv_failed} failed")
    figures: dict[str, int | float | str] = {
        "kind": "scheduler",
        "group": group,
        "running": load.num_running,
        "waiting": load.num_waiting,
        "free_pages": load.free_pages,
        "cached_pages": load.cached_pages,
        "total_pages": load.total_pages,
        "quarantined_pages": state.quarantined_pages,
        "expert_balancedness": round(state.expert_balancedness, 3),
        "expert_placements": state.num_expert_placements,
        "role": role if state.hello.role else "both",
        "kv_arrived": state.num_kv_arrived,
        "kv_failed": state.num_kv_failed,
        "kv_handed_over": state.num_kv_handed_over,
        "kv_arriving": state.num_kv_arriving,
    }
    return _Answer(load.epoch, ", ".join(parts), figures)


def _label(enum: EnumTypeWrapper, number: int, prefix: str) -> str:
    """Name of an enum's value; its number, where a newer daemon sends one that has no name here."""
    return enum.Name(number).removeprefix(prefix).lower() if number in enum.values() else str(number)


async def _ask_worker(channel: grpc.aio.Channel, timeout_s: float) -> _Answer:
    stub = worker_pb2_grpc.WorkerServiceStub(channel)
    reply = await stub.GetCapabilities(worker_pb2.GetCapabilitiesRequest(), timeout=timeout_s)
    what = reply.capabilities
    rank = ""
    if what.world_size > 1:
        generation = f"generation {what.group_generation}" if what.group_generation else "in no group"
        rank = f", {_place_of(what)}, {generation}"
    figures: dict[str, int | float | str] = {
        "kind": "worker",
        "backend": what.backend,
        "slots": what.num_slots,
        "pages": what.num_pages,
        "rank": what.rank,
        "world_size": what.world_size,
        "tp_rank": what.layout.tp_rank,
        "tp_size": what.layout.tp_size or 1,
        "dp_rank": what.layout.dp_rank,
        "dp_size": what.layout.dp_size or 1,
        "ep_rank": what.layout.ep_rank,
        "ep_size": what.layout.ep_size or 1,
        "group_generation": what.group_generation,
    }
    load = f"{what.backend}, {what.num_slots} slots, {what.num_pages} pages{rank}"
    if reply.HasField("transfers"):
        kv = reply.transfers
        load += f", KV {kv.num_sending} sending {kv.num_receiving} receiving, {kv.num_failed} failed"
        load += f", {kv.quarantined_bytes} bytes quarantined" if kv.quarantined_bytes else ""
        rate = 1e-3 * kv.hand_over_bytes / kv.hand_over_us if kv.hand_over_us else 0.0
        load += f", hand-overs at {rate:.3g} GB/s" if rate else ""
        figures |= {
            "kv_sending": kv.num_sending,
            "kv_receiving": kv.num_receiving,
            "kv_staging_bytes": kv.staging_bytes,
            "kv_quarantined_bytes": kv.quarantined_bytes,
            "kv_sent": kv.num_sent,
            "kv_received": kv.num_received,
            "kv_failed": kv.num_failed,
            "kv_hand_over_bytes": kv.hand_over_bytes,
        }
        if rate:
            figures["kv_hand_over_gb_s"] = round(rate, 3)
    return _Answer(reply.highest_epoch, load, figures)


def _place_of(what: worker_pb2.Capabilities) -> str:
    """The rank, and its index in each kind of parallelism that there is."""
    layout = what.layout
    kinds = (
        ("tp", layout.tp_rank, layout.tp_size),
        ("dp", layout.dp_rank, layout.dp_size),
        ("ep", layout.ep_rank, layout.ep_size),
    )
    indexes = " ".join(f"{kind} {rank}/{size}" for kind, rank, size in kinds if size > 1)
    return f"rank {what.rank} of {what.world_size}" + (f" ({indexes})" if indexes else "")


async def _ask_router(channel: grpc.aio.Channel, timeout_s: float, access: Access) -> _Answer:
    stub = router_pb2_grpc.RouterAdminServiceStub(channel)
    request = router_pb2.ListSchedulersRequest()
    schedulers = (await stub.ListSchedulers(request, timeout=timeout_s, metadata=access.metadata)).schedulers
    connected = sum(scheduler.is_connected for scheduler in schedulers)
    running = sum(scheduler.num_running for scheduler in schedulers)
    figures: dict[str, int | float | str] = {
        "kind": "router",
        "running": running,
        "schedulers_connected": connected,
        "schedulers": len(schedulers),
    }
    return _Answer(None, f"{running} running, schedulers {connected} of {len(schedulers)} connected", figures)
