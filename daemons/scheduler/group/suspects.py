"""Isolation of poison requests: those of which a worker group refuses plans, or dies.

A refused plan names its step: requests admitted in it may be the reason, and are if that happens twice. A worker that
dies says nothing. So a request that was in a slot at _MAX_LOSSES losses in a row, without a new token from one to the
next, is a suspect, and so are all that ran together with it. Suspects are probed one at a time, the oldest first, while
nothing else is admitted:

  suspect --alone but for those cleared--> probing --_CLEARED_AFTER tokens, or the end--> cleared
                                              |
                                              +--_MAX_PROBES losses without a token--> fails with STEP_FAILED

A loss is counted when the group is back: a restarted worker knows from its supervisor whether the one before it was
killed or asked to leave, and such a loss counts against no request. Where nobody can tell, it counts as a death. A step
that raises is a death: the worker ends by it.

Cleared requests run on. Of n suspects the harmless thus lose a few steps each, and the worker dies only twice more,
which is what costs most: halving the set would take log2(n) deaths. The second death allows for bad luck: a worker may
die of something else just then.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.scheduler.planning.epoch_state import EpochState
from radixmesh.daemons.scheduler.sequence import Lifecycle, Sequence

_MAX_REFUSALS = 2
_MAX_LOSSES = 3
_MAX_PROBES = 2
# More than plans are ever in flight: the token that is fatal may be the last of those under way at a loss.
_CLEARED_AFTER = 8
# Losses that count against no request: another scheduler took over.
_NO_DEATHS = frozenset({ErrorReason.ERROR_REASON_EPOCH_FENCED})


class _Loss(NamedTuple):
    """An epoch that ended with plans in flight: the requests that ran, and the one of them that was probed."""

    running: list[Sequence]
    probed: Sequence | None


@dataclass(slots=True)
class _Record:
    """Losses in a row at which a request ran, and the tokens of its output at the last of them."""

    num_losses: int
    num_output: int


class PoisonRequest(NamedTuple):
    """A request that must not run again, and the error that says why."""

    request: Sequence
    error: MeshError


class PoisonIsolation:
    """Counts by request, from one epoch to the next."""

    def __init__(self) -> None:
        self._refusals: Counter[Sequence] = Counter()
        self._records: dict[Sequence, _Record] = {}
        self._suspects: list[Sequence] = []
        """Requests to be probed, the oldest first. The first one is being probed."""
        self._loss: _Loss | None = None
        """The last loss, until it is counted."""

    def epoch_ended(self, state: EpochState, refused_step: int, error: MeshError | None) -> list[PoisonRequest]:
        """An epoch ends by `error`, if that is known: the group refused a step, or is lost (0)."""
        if error is not None and error.reason == ErrorReason.ERROR_REASON_TRANSFER_FAILED:
            return []  # By KV that another worker wrote.
        # A step that raised ends its worker: that is a death, whoever was admitted in it.
        if refused_step and (error is None or error.reason != ErrorReason.ERROR_REASON_STEP_FAILED):
            return self.refused(state, refused_step, error)
        self.lost(state, error)
        return []

    def refused(self, state: EpochState, step_id: int, error: MeshError | None) -> list[PoisonRequest]:
        """An epoch ends since the group refused a step with `error`."""
        plans = (step.plan for step in state.in_flight.steps() if step.plan.step_id == step_id)
        admitted = {admit.slot for plan in plans for admit in plan.admits}
        found = []
        for request in state.table.running():
            if request.slot in admitted:
                self._refusals[request] += 1
                if error is not None and self._refusals[request] >= _MAX_REFUSALS:
                    found.append(PoisonRequest(request, error))
        return found

    def lost(self, state: EpochState, error: MeshError | None) -> None:
        """An epoch ends since the group is lost, by `error` if that is known; regained() comes when it is back."""
        if not state.in_flight or (error is not None and _is_no_death(error)):
            return
        running, probed = state.table.running(), self.probing(state)
        self._loss = _Loss(running, probed if probed in running else None)

    def regained(self, *, from_outside: bool) -> list[PoisonRequest]:
        """The group is back, and all requests wait. from_outside: its worker was killed, or asked to leave."""
        loss, self._loss = self._loss, None
        if loss is None or from_outside:
            return []
        if loss.probed is not None:
            return self._probe_lost(loss.probed)
        for request in loss.running:
            if request.lifecycle is Lifecycle.FINISHED:
                continue
            num_output, record = len(request.output), self._records.get(request)
            if record is None or num_output > record.num_output:
                self._records[request] = _Record(1, num_output)
                continue
            record.num_losses += 1
            if record.num_losses >= _MAX_LOSSES and request not in self._suspects:
                self._suspects.append(request)
        return []

    def _probe_lost(self, probed: Sequence) -> list[PoisonRequest]:
        last = self._records.get(probed)
        if last is None:  # It ended meanwhile.
            return []
        if len(probed.output) > last.num_output:  # Further than ever: counted from there.
            last.num_losses, last.num_output = _MAX_LOSSES, len(probed.output)
            return []
        last.num_losses += 1
        is_deadly = last.num_losses == _MAX_LOSSES + _MAX_PROBES
        return [PoisonRequest(probed, _deadly(probed))] if is_deadly else []

    def probing(self, state: EpochState) -> Sequence | None:
        """The only request that may be admitted; None = none is suspected."""
        while self._suspects:
            first = self._suspects[0]
            if _num_output(state, first) < self._records[first].num_output + _CLEARED_AFTER:
                return first
            self.ended(first)
        return None

    def ended(self, request: Sequence) -> None:
        """A request is over, or cleared."""
        self._refusals.pop(request, None)
        if self._records.pop(request, None) is not None and request in self._suspects:
            self._suspects.remove(request)


def _is_no_death(error: MeshError) -> bool:
    # A worker that leaves says so, whoever supervises it.
    return error.reason in _NO_DEATHS or error.metadata.get("state") == "draining"


def _deadly(request: Sequence) -> MeshError:
    return MeshError(
        ErrorReason.ERROR_REASON_STEP_FAILED,
        f"the worker died {_MAX_LOSSES + _MAX_PROBES} times in a row while it ran this request, the last times without"
        " any other that is suspected: do not send it again unchanged",
        {"request_id": request.key.request_id, "deaths": str(_MAX_LOSSES + _MAX_PROBES)},
    )


def _num_output(state: EpochState, request: Sequence) -> int:
    """Tokens of a live request's output, those included that are only in its slot."""
    if request.slot < 0:
        return len(request.output)
    return state.table.total_len.item(request.slot) - request.prompt_len
