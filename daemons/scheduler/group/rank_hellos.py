"""Hellos of all ranks as one: whether another scheduler holds the group, and what the group is."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from radixmesh.common.v1 import common_pb2
from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rank_layout import RankLayout
from radixmesh.daemons.scheduler.group.group_info import GroupInfo
from radixmesh.daemons.scheduler.group.shared_experts import shared_experts_of
from radixmesh.daemons.scheduler.messages import group_from_proto
from radixmesh.worker.v1 import worker_pb2

# A live holder sends something to every rank every second.
HOLDER_SILENT_MS = 5_000
# A worker that says more than anybody can have counted to would leave no higher number.
_MAX_COUNTER = 1 << 62
_LEAST = ("num_pages", "num_host_pages", "num_slots", "max_tokens_per_step", "max_plans_in_flight", "max_total_len")


def is_held(hellos: Sequence[worker_pb2.WorkerHello], instance_id: str) -> bool:
    """True if another scheduler lives on the group.

    A rank with unfinished plans cannot tell that its holder hangs: it may wait in a collective for a rank that never
    got the plan. So a rank of the same epoch that finds the holder gone or silent decides against those that do not.
    """
    alive: set[tuple[int, str]] = set()
    gone: set[tuple[int, str]] = set()
    for hello in hellos:
        holder = (hello.highest_epoch, hello.holder_instance_id)
        if hello.holder_instance_id in ("", instance_id):
            continue
        is_alive = hello.is_holder_connected and hello.holder_silent_ms <= HOLDER_SILENT_MS
        (alive if is_alive else gone).add(holder)
    return bool(alive - gone)


def group_of(hellos: Sequence[worker_pb2.WorkerHello]) -> GroupInfo:
    """Sizes that all ranks have; group_generation 0 unless all are in the same group.

    Raises NOT_SERVING if a rank is not ready, VERSION_MISMATCH, MODEL_MISMATCH or INVALID_ARGUMENT if the ranks do not
    belong together.
    """
    for hello in hellos:
        if hello.capabilities.state != worker_pb2.WORKER_STATE_READY:
            raise MeshError(ErrorReason.ERROR_REASON_NOT_SERVING, "a worker is loading, or failed: waiting")
        for name, value in (
            ("highest_epoch", hello.highest_epoch),
            ("group_generation", hello.capabilities.group_generation),
        ):
            if value > _MAX_COUNTER:
                message = f"the worker's {name} is {value}: nothing counts so far; restart the worker"
                raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": name})
    _check_builds(hellos)
    infos = [group_from_proto(hello) for hello in hellos]
    first = infos[0]
    layout = RankLayout()
    if hellos[0].capabilities.world_size > 1 or len(hellos) > 1:
        layout = _layout_of(hellos)
    for rank, (hello, info) in enumerate(zip(hellos, infos, strict=True)):
        ours, theirs = hellos[0].hello.model.model_fingerprint, hello.hello.model.model_fingerprint
        if ours != theirs:
            message = "the ranks of the group serve different models: start all on one folder, with the same dtype"
            raise MeshError(ErrorReason.ERROR_REASON_MODEL_MISMATCH, message, {"ours": ours, "theirs": theirs})
        if hello.capabilities.backend != hellos[0].capabilities.backend:
            names = f"{hellos[0].capabilities.backend} and {hello.capabilities.backend}"
            message = f"the ranks of the group have different backends, {names}: start all with the same settings"
            raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "backend"})
        # Ranks may have different numbers of heads; the same one of each data-parallel rank has as many.
        counterpart = infos[rank % layout.tp_size]
        for name in ("page_size", "vocab_size", "eos_ids", "kv_dtype", "kv_layout"):
            if getattr(info, name) != getattr(counterpart if name == "kv_layout" else first, name):
                message = f"the ranks of the group differ in {name}: start all with the same settings"
                raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": name})
    least = {name: min(getattr(info, name) for info in infos) for name in _LEAST}
    generations = {info.group_generation for info in infos}
    return replace(
        first,
        **least,
        dp_size=layout.dp_size,
        ep_size=layout.ep_size,
        experts=shared_experts_of(hellos, layout.ep_size),
        has_transfers=all(info.has_transfers for info in infos),
        kv_shares=tuple(share for info in infos[: layout.tp_size] for share in info.kv_shares),
        has_kv_store=all(info.has_kv_store for info in infos),
        kv_store_id=_store_id([info.kv_store_id for info in infos], layout.tp_size),
        tasks=frozenset.intersection(*(info.tasks for info in infos)),
        barrier_ops=frozenset.intersection(*(info.barrier_ops for info in infos)),
        group_generation=generations.pop() if len(generations) == 1 else 0,
        other_ranks=tuple((info.instance_id, info.predecessor_end) for info in infos[1:]),
    )


def _store_id(of_ranks: Sequence[str], tp_size: int) -> str:
    """That of a data-parallel rank, whose workers keep a share of each page; empty where these ranks have stores of
    their own, or a worker's is its own."""
    shares = of_ranks[:tp_size]
    if not all(shares) or list(of_ranks) != list(shares) * (len(of_ranks) // tp_size):
        return ""
    return shares[0] if tp_size == 1 else hashlib.sha256(" ".join(shares).encode()).hexdigest()[:32]


def _check_builds(hellos: Sequence[worker_pb2.WorkerHello]) -> None:
    """Raises VERSION_MISMATCH unless all ranks are of one build: they would meet in other collectives, or in none.

    Whoever does not say of which build it is, as older workers, is compared by its contract alone.
    """
    first = hellos[0].hello
    for rank, other in enumerate(hello.hello for hello in hellos):
        for what, ours, theirs in (
            ("contract versions", _contracts(first), _contracts(other)),
            ("builds", first.build, other.build),
        ):
            if ours != theirs and ours and theirs:
                raise MeshError(
                    ErrorReason.ERROR_REASON_VERSION_MISMATCH,
                    f"the ranks of the group are of different {what}, rank 0 of {ours} and rank {rank} of {theirs}:"
                    " start one release with one torch on all of them",
                    {"ours": ours, "theirs": theirs},
                )


def _contracts(hello: common_pb2.Hello) -> str:
    return f"{hello.min_contract_version}-{hello.max_contract_version}"


def _layout_of(hellos: Sequence[worker_pb2.WorkerHello]) -> RankLayout:
    """Rank 0's layout, whose sizes are those of all.

    Raises INVALID_ARGUMENT unless each worker is at its position in a group of as many as there are, of rank 0's sizes.
    """
    try:
        sizes = RankLayout.from_proto(hellos[0].capabilities.layout)
        if sizes.world_size != len(hellos):
            raise ValueError(
                f"worker 0 was started for {sizes.world_size} ranks (--tp-size x --dp-size), and --workers names"
                f" {len(hellos)}: name all workers of the group"
            )
        for rank, hello in enumerate(hellos):
            theirs = RankLayout.from_proto(hello.capabilities.layout)
            ours = RankLayout.of_rank(rank, tp_size=sizes.tp_size, dp_size=sizes.dp_size, ep_size=sizes.ep_size)
            if theirs != ours:
                raise ValueError(
                    f"worker {rank} of --workers was started with {theirs.flags or 'no rank flags'}: name the workers"
                    f" in the order of their ranks, or start it with {ours.flags}"
                )
    except ValueError as error:
        details = {"field": "capabilities.layout"}
        raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, str(error), details) from error
    return sizes
