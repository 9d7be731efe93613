"""Experts that the ranks of a group share, as the workers describe them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import IntArray, unpack_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.worker.v1 import worker_pb2

_MAX_LAYERS = 1024
_MAX_EXPERTS = 65_536
# Of all layers together: what the placement of the largest models has, some ten times.
_MAX_SLOTS = 1 << 20
_MAX_VERSION = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExperts:
    """experts_LS: int32 [layers x slots], the expert at each slot, -1: none. Slots of a rank are neighbours."""

    num_ranks: int
    num_experts: int
    expert_bytes: int
    version: int
    experts_LS: IntArray

    @property
    def num_layers(self) -> int:
        return len(self.experts_LS)

    @property
    def num_slots(self) -> int:
        return int(self.experts_LS.shape[1])

    def placed(self, placement: worker_pb2.ExpertPlacement) -> SharedExperts:
        """The same experts with another placement. Raises INVALID_ARGUMENT unless each expert has a slot."""
        experts = unpack_ints(placement.experts, "placement.experts")
        if len(experts) != self.experts_LS.size:
            raise _invalid(f"the worker's placement has {len(experts)} slots of experts, not {self.experts_LS.size}")
        if len(experts) and (experts.min() < -1 or experts.max() >= self.num_experts):
            raise _invalid(f"the worker's placement names experts outside [-1, {self.num_experts})")
        experts_LS = experts.reshape(self.experts_LS.shape)
        for layer, experts_S in enumerate(experts_LS):
            if len(np.unique(experts_S[experts_S >= 0])) != self.num_experts:
                raise _invalid(f"the worker's placement leaves experts of layer {layer} without a slot")
        return replace(self, version=placement.version, experts_LS=experts_LS)


def shared_experts_of(hellos: Sequence[worker_pb2.WorkerHello], ep_size: int) -> SharedExperts | None:
    """Experts as the rank with the latest placement has them; None: none are shared, or a worker cannot move them.

    Raises INVALID_ARGUMENT for sizes that differ, or that no model has.
    """
    said = [hello.capabilities.experts for hello in hellos if hello.capabilities.HasField("experts")]
    if ep_size == 1 or len(said) < len(hellos):
        return None
    sizes = {(s.num_layers, s.num_experts, s.places_per_rank, s.expert_bytes) for s in said}
    if len(sizes) > 1:
        raise _invalid(f"the ranks have different slots for experts, {sorted(sizes)}: start all with the same flags")
    num_layers, num_experts, slots, expert_bytes = sizes.pop()
    num_slots = slots * ep_size
    is_possible = 1 <= num_layers <= _MAX_LAYERS and 1 <= num_experts <= min(_MAX_EXPERTS, num_slots)
    if not is_possible or num_layers * num_slots > _MAX_SLOTS or not expert_bytes:
        raise _invalid(f"{num_layers} layers of {num_experts} experts of {expert_bytes} bytes on {num_slots} slots")
    latest = max((s.placement for s in said), key=lambda placement: placement.version)
    if latest.version > _MAX_VERSION:
        raise _invalid(
            f"the worker's placement has version {latest.version}: nothing counts so far; restart the worker"
        )
    shape = SharedExperts(
        num_ranks=ep_size,
        num_experts=num_experts,
        expert_bytes=expert_bytes,
        version=0,
        experts_LS=np.full((num_layers, num_slots), -1, np.int32),
    )
    return shape.placed(latest)


def latest_placement(hellos: Sequence[worker_pb2.WorkerHello]) -> worker_pb2.ExpertPlacement | None:
    """The placement that was committed last, on any rank: one that was restarted has that of its weights. None: no rank
    has another."""
    placements = [hello.capabilities.experts.placement for hello in hellos]
    latest = max(placements, key=lambda placement: placement.version)
    return latest if latest.version else None


def _invalid(message: str) -> MeshError:
    return MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "capabilities.experts"})
