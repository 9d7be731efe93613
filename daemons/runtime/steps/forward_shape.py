"""Checks of the shape of a forward, which a plan's header says for all ranks at once."""

from __future__ import annotations

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import DispatchMode
from radixmesh.worker.v1 import worker_pb2

DISPATCH_MODES = {mode.value: mode for mode in DispatchMode}
DISPATCH_TO_PROTO = {
    DispatchMode.UNSPECIFIED: worker_pb2.EXPERT_DISPATCH_UNSPECIFIED,
    DispatchMode.NORMAL: worker_pb2.EXPERT_DISPATCH_NORMAL,
    DispatchMode.LOW_LATENCY: worker_pb2.EXPERT_DISPATCH_LOW_LATENCY,
}

ONLY_DECODES = frozenset({worker_pb2.FORWARD_MODE_DECODE, worker_pb2.FORWARD_MODE_IDLE})
"""Modes of forwards in which no rank has chunks."""
HAVE_CHUNKS = frozenset({worker_pb2.FORWARD_MODE_EXTEND, worker_pb2.FORWARD_MODE_MIXED})
"""Modes of those in which some rank has."""
_FORWARD_MODES = frozenset(worker_pb2.ForwardMode.values()) - {worker_pb2.FORWARD_MODE_UNSPECIFIED}


def check_shape(header: worker_pb2.PlanHeader, *, has_chunks: bool) -> None:
    """Raises MISSING_FIELD, or INVALID_ARGUMENT for a mode that is none or not the rows'."""
    if not header.HasField("shape"):
        if has_chunks:
            raise missing_field("header.shape (the plan has chunks)")
        return
    if header.shape.dispatch not in DISPATCH_MODES:
        message = f"header.shape.dispatch is {header.shape.dispatch}: send NORMAL or LOW_LATENCY"
        raise MeshError(common_pb2.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "header.shape.dispatch"})
    mode = header.shape.mode
    if mode not in _FORWARD_MODES:
        raise missing_field("header.shape.mode")
    if has_chunks and mode in ONLY_DECODES:
        message = f"the plan has chunks, its mode is {worker_pb2.ForwardMode.Name(mode)}: send EXTEND or MIXED"
        raise MeshError(common_pb2.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "header.shape.mode"})


def missing_field(field: str) -> MeshError:
    """The error for a field that the receiver needs."""
    return MeshError(common_pb2.ERROR_REASON_MISSING_FIELD, f"{field} is missing: set it", {"field": field})
