"""Which request keeps a worker group from serving.

A refused plan names its step: who was admitted in it may be the reason, and is if that happens twice. A worker that
dies says nothing. So who was in a slot at _MAX_LOSSES losses in a row, without a new token from one to the next, is a
suspect, and all that ran together are. Suspects are tried one at a time, the oldest first, while nobody else is
admitted:

  suspect --alone but for those acquitted--> on trial --_ACQUITTED_AFTER tokens, or the end--> acquitted
                                                |
                                                +--_MAX_TRIALS losses without a token--> fails with STEP_FAILED

Acquitted ones run on. Of n suspects the innocent thus lose a few steps each, and the worker dies only twice more, which
is what costs most: halving the set would take log2(n) deaths. The second one is for bad luck: a worker may die of
something else just then.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.scheduler.epoch_state import EpochState
from radixmesh.daemons.scheduler.request import Request

_MAX_REFUSALS = 2
_MAX_LOSSES = 3
_MAX_TRIALS = 2
# More than plans are ever in flight: the token that is fatal may be the last of those under way at a loss.
_ACQUITTED_AFTER = 8
# Losses that are nobody's fault: another scheduler took over.
_NO_DEATHS = frozenset({ErrorReason.ERROR_REASON_EPOCH_FENCED})


@dataclass(slots=True)
class _Record:
    """Losses in a row at which a request ran, and the tokens of its output at the last of them."""

    num_losses: int
    num_output: int


class Verdict(NamedTuple):
    """A request that must not run again, and why."""

    request: Request
    error: MeshError


class Blame:
    """Counts by request, from one epoch to the next."""

    def __init__(self) -> None:
        self._refusals: Counter[Request] = Counter()
        self._records: dict[Request, _Record] = {}
        self._suspects: list[Request] = []
        """Who is to be tried, the oldest first. The first one is on trial."""

    def refused(self, state: EpochState, step_id: int, error: MeshError | None) -> list[Verdict]:
        """An epoch ends since the group refused a step with `error`."""
        plans = (step.plan for step in state.in_flight.steps() if step.plan.step_id == step_id)
        admitted = {admit.slot for plan in plans for admit in plan.admits}
        verdicts = []
        for request in state.table.running():
            if request.slot in admitted:
                self._refusals[request] += 1
                if error is not None and self._refusals[request] >= _MAX_REFUSALS:
                    verdicts.append(Verdict(request, error))
        return verdicts

    def lost(self, state: EpochState, error: MeshError | None) -> list[Verdict]:
        """An epoch ends since the group is lost, by `error` if that is known."""
        if not state.in_flight or (error is not None and error.reason in _NO_DEATHS):
            return []
        running = state.table.running()
        tried = self.on_trial(state)
        if tried is not None and tried in running:
            last, num_output = self._records[tried], _num_output(state, tried)
            if num_output > last.num_output:  # Further than ever: tried from there.
                last.num_losses, last.num_output = _MAX_LOSSES, num_output
                return []
            last.num_losses += 1
            is_deadly = last.num_losses == _MAX_LOSSES + _MAX_TRIALS
            return [Verdict(tried, _deadly(tried))] if is_deadly else []
        for request in running:
            num_output, record = _num_output(state, request), self._records.get(request)
            if record is None or num_output > record.num_output:
                self._records[request] = _Record(1, num_output)
                continue
            record.num_losses += 1
            if record.num_losses >= _MAX_LOSSES and request not in self._suspects:
                self._suspects.append(request)
        return []

    def on_trial(self, state: EpochState) -> Request | None:
        """Who alone may be admitted; None = nobody is suspected."""
        while self._suspects:
            first = self._suspects[0]
            if _num_output(state, first) < self._records[first].num_output + _ACQUITTED_AFTER:
                return first
            self.ended(first)
        return None

    def ended(self, request: Request) -> None:
        """A request is over, or acquitted."""
        self._refusals.pop(request, None)
        if self._records.pop(request, None) is not None and request in self._suspects:
            self._suspects.remove(request)


def _deadly(request: Request) -> MeshError:
    return MeshError(
        ErrorReason.ERROR_REASON_STEP_FAILED,
        f"the worker died {_MAX_LOSSES + _MAX_TRIALS} times in a row while it ran this request, the last times without"
        " any other that is suspected: do not send it again unchanged",
        {"request_id": request.key.request_id, "deaths": str(_MAX_LOSSES + _MAX_TRIALS)},
    )


def _num_output(state: EpochState, request: Request) -> int:
    """Tokens of a live request's output, those included that are only in its slot."""
    if request.slot < 0:
        return len(request.output)
    return state.table.total_len.item(request.slot) - request.prompt_len
