"""Reservations of routers: validated, handed to the planner, and answered when the workers have a region, or will
not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import unpack_ints
from radixmesh.daemons.runtime.cache_namespace import cache_name
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.kv_share import unpack_shares
from radixmesh.daemons.scheduler.planning.planner import Planner
from radixmesh.daemons.scheduler.transfers.arrivals import MAX_LEASE_S
from radixmesh.daemons.scheduler.transfers.kv_target import MAX_TRANSFER_ID_BYTES, KvTarget
from radixmesh.scheduler.v1 import scheduler_pb2

_MAX_NAME_BYTES = 1024

Send = Callable[[scheduler_pb2.ServeResponse], None]


class Reservations:
    """is_on: this scheduler takes KV from others, now. clock: monotonic seconds."""

    def __init__(self, planner: Planner, *, is_on: Callable[[], bool], clock: Callable[[], float]) -> None:
        self._planner = planner
        self._is_on = is_on
        self._clock = clock
        self.answers: dict[str, Callable[[str, KvTarget | None, MeshError | None], None]] = {}
        """By transfer id: tells the router that waits. Emptied by whoever answers."""

    def take(self, reservation: scheduler_pb2.Reservation, send: Send) -> None:
        """One of a router's frame, new or renewed. send: to that router; it gets one answer to each new one."""
        transfer_id = reservation.transfer_id

        def answer(transfer_id: str, target: KvTarget | None, error: MeshError | None) -> None:
            result = scheduler_pb2.ReservationResult(
                transfer_id=transfer_id,
                target=target.to_proto() if target is not None else None,
                error=error.to_proto() if error is not None else None,
            )
            send(scheduler_pb2.ServeResponse(reservation_results=[result]))

        try:
            if self._begin(reservation):
                self.answers[transfer_id] = answer
            elif reservation.prompt_ids:
                answer(transfer_id, None, None)
        except MeshError as error:
            answer(transfer_id[:MAX_TRANSFER_ID_BYTES], None, error)

    def _begin(self, reservation: scheduler_pb2.Reservation) -> bool:
        """True if it is to be answered later. Raises what keeps it out."""
        planner, state, now = self._planner, self._planner.state, self._clock()
        transfer_id, lease_s = reservation.transfer_id, reservation.lease_ms / 1000
        _check(reservation)
        if state is None or not self._is_on() or not state.group.has_transfers:
            message = "KV transfer is not offered here now: prefill where the request decodes"
            raise MeshError(ErrorReason.ERROR_REASON_UNSUPPORTED, message, {"feature": "KV transfer"})
        if reservation.is_cancelled:
            planner.arrivals.cancel(state, transfer_id)
            return False
        if not reservation.prompt_ids:
            planner.arrivals.renew(transfer_id, lease_s, now)
            return False
        if reservation.model not in ("", state.group.model_name):
            message = f"this scheduler serves {state.group.model_name!r}, not {reservation.model!r}"
            raise MeshError(ErrorReason.ERROR_REASON_UNKNOWN_MODEL, message, {"model": reservation.model})
        ids = unpack_ints(reservation.prompt_ids, "prompt_ids")
        if len(ids) >= state.group.max_total_len or ((ids < 0) | (ids >= state.group.vocab_size)).any():
            message = "prompt_ids are not those of a prompt for this model: see Submit.prompt_ids"
            raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "prompt_ids"})
        name, granule = cache_name("", reservation.cache_salt), max(1, reservation.granule)
        writers = unpack_shares(reservation.kv_heads, "kv_heads")
        found = planner.arrivals.reserve(state, transfer_id, np.array(ids), name, lease_s, granule, now, writers)
        return found is not None


def _check(reservation: scheduler_pb2.Reservation) -> None:
    for field, most in (
        ("transfer_id", MAX_TRANSFER_ID_BYTES),
        ("model", _MAX_NAME_BYTES),
        ("cache_salt", _MAX_NAME_BYTES),
    ):
        size = len(getattr(reservation, field).encode())
        if size > most or (field == "transfer_id" and not size):
            message = f"{field} of a reservation has {size} bytes: send at most {most}, and an id"
            raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": field, "max": str(most)})
    if not 0 < reservation.lease_ms <= 1000 * MAX_LEASE_S and not reservation.is_cancelled:
        message = f"lease_ms of a reservation is {reservation.lease_ms}: choose 1 to {int(1000 * MAX_LEASE_S)}"
        raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "lease_ms"})
