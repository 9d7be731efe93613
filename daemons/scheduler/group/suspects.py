"""Which request keeps a worker group from serving.

A refused plan names its step: who was admitted in it may be the reason, and is if that happens twice. A worker that
dies says nothing. So who was in a slot at _MAX_LOSSES losses in a row, without a new token from one to the next, is a
suspect, and all that ran together are. Suspects are tried one at a time, the oldest first, while nobody else is
admitted:

  suspect --alone but for those acquitted--> on trial --_ACQUITTED_AFTER tokens, or the end--> acquitted
                                                |
                                                +--_MAX_TRIALS losses without a token--> fails with STEP_FAILED

A loss is judged when the group is back: a restarted worker knows from its supervisor whether the one before it was
killed or asked to leave, and such a loss is nobody's fault. Where nobody can tell, it counts as a death. A step that
raises is a death: the worker ends by it.

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
from radixmesh.daemons.scheduler.planning.epoch_state import EpochState
from radixmesh.daemons.scheduler.sequence import Lifecycle, Request

_MAX_REFUSALS = 2
_MAX_LOSSES = 3
_MAX_TRIALS = 2
# More than plans are ever in flight: the token that is fatal may be the last of those under way at a loss.
_ACQUITTED_AFTER = 8
# Losses that are nobody's fault: another scheduler took over.
_NO_DEATHS = frozenset({ErrorReason.ERROR_REASON_EPOCH_FENCED})


class _Loss(NamedTuple):
    """An epoch that ended with plans in flight; who ran, and who of them was on trial."""

    running: list[Request]
    tried: Request | None


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
        self._loss: _Loss | None = None
        """The last loss, until it is judged."""

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

    def lost(self, state: EpochState, error: MeshError | None) -> None:
        """An epoch ends since the group is lost, by `error` if that is known; judge() comes when it is back."""
        if not state.in_flight or (error is not None and _is_no_death(error)):
            return
        running, tried = state.table.running(), self.on_trial(state)
        self._loss = _Loss(running, tried if tried in running else None)

    def judge(self, *, from_outside: bool) -> list[Verdict]:
        """The group is back, and all requests wait. from_outside: its worker was killed, or asked to leave."""
        loss, self._loss = self._loss, None
        if loss is None or from_outside:
            return []
        if loss.tried is not None:
            return self._judge_tried(loss.tried)
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

    def _judge_tried(self, tried: Request) -> list[Verdict]:
        last = self._records.get(tried)
        if last is None:  # It ended meanwhile.
            return []
        if len(tried.output) > last.num_output:  # Further than ever: tried from there.
            last.num_losses, last.num_output = _MAX_LOSSES, len(tried.output)
            return []
        last.num_losses += 1
        is_deadly = last.num_losses == _MAX_LOSSES + _MAX_TRIALS
        return [Verdict(tried, _deadly(tried))] if is_deadly else []

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


def _is_no_death(error: MeshError) -> bool:
    # A worker that leaves says so, whoever supervises it.
    return error.reason in _NO_DEATHS or error.metadata.get("state") == "draining"


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
