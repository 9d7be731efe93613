"""A broadcast that outlives its sender: plans that only some ranks received, from those that kept them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.wire_bounds import parse_frame
from radixmesh.worker.v1 import worker_pb2


class MissingPlans(NamedTuple):
    """plans: by rank, the plans to send it, in step order. is_whole: afterwards all ranks have received the same."""

    plans: list[list[bytes]]
    is_whole: bool


def missing_plans(hellos: Sequence[worker_pb2.WorkerHello]) -> MissingPlans:
    """Plans of the highest epoch that only some ranks received. Raises MALFORMED_MESSAGE for plans that are none.

    A rank that never saw that epoch missed its fence, so that no plan of it was sent, or was restarted and has no KV.
    """
    if len(hellos) == 1:
        return MissingPlans([[]], True)
    epoch = max(hello.highest_epoch for hello in hellos)
    present = [hello for hello in hellos if hello.highest_epoch == epoch]
    last = max(hello.last_received_step for hello in present)
    kept: dict[int, bytes] = {}
    for hello in present:
        for data in hello.retained_plans:
            kept.setdefault(_step_of(data), data)
    is_whole = len(present) == len(hellos) or last == 0
    plans: list[list[bytes]] = []
    for hello in hellos:
        steps = range(hello.last_received_step + 1, last + 1) if hello.highest_epoch == epoch else range(0)
        if all(step in kept for step in steps):
            plans.append([kept[step] for step in steps])
        else:
            plans.append([])
            is_whole = False
    return MissingPlans(plans, is_whole)


def _step_of(data: bytes) -> int:
    try:
        # Bytes within a message: the scan of the frame has not looked into them.
        step_id: int = parse_frame(data, worker_pb2.ExecuteRequest).plan.header.step_id
    except MeshError as error:
        message = f"a worker retained something that is no plan: check the versions of both ends ({error})"
        raise MeshError(error.reason, message, {"field": "retained_plans"}) from error
    return step_id
