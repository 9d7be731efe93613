"""Intake of submits: accepts new ones, attaches those that continue a live output, refuses the rest."""

from __future__ import annotations

from collections.abc import Callable

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.finish_reason import FinishReason
from radixmesh.daemons.scheduler.group.group_info import GroupInfo
from radixmesh.daemons.scheduler.planning.counters import PlannerCounters
from radixmesh.daemons.scheduler.planning.epoch_state import EpochState
from radixmesh.daemons.scheduler.queue.deadlines import Deadlines
from radixmesh.daemons.scheduler.queue.limits import QueueLimits
from radixmesh.daemons.scheduler.queue.queue import WaitingQueue
from radixmesh.daemons.scheduler.queue.submissions import Submissions
from radixmesh.daemons.scheduler.queue.validation import (
    check_same_prompt,
    check_submission,
    is_continued_alike,
    make_sequence,
)
from radixmesh.daemons.scheduler.results.outputs import Finished, Outputs, Rejected, TokenRow, rows_of
from radixmesh.daemons.scheduler.results.stop_conditions import SequenceEnd, StopWatch, end_of
from radixmesh.daemons.scheduler.sequence import Sequence, Submission
from radixmesh.daemons.scheduler.sequence_observer import SequenceObserver

Finish = Callable[[Sequence, SequenceEnd, MeshError | None], None]


class Intake:
    """Validates and queues submits. finish: ends a live request."""

    def __init__(
        self,
        submissions: Submissions,
        queue: WaitingQueue,
        limits: QueueLimits,
        deadlines: Deadlines,
        counters: PlannerCounters,
        finish: Finish,
        observer: SequenceObserver,
    ) -> None:
        self._submissions = submissions
        self._queue = queue
        self._limits = limits
        self._deadlines = deadlines
        self._counters = counters
        self._finish = finish
        self._observer = observer
        self._num_arrived = 0

    def submit(
        self,
        submission: Submission,
        group: GroupInfo | None,
        state: EpochState | None,
        watch: StopWatch,
        outputs: Outputs,
    ) -> None:
        """Queues a request, or says in `outputs` why not. group None: none was ever there; state None: none is now."""
        try:
            if not self._is_known(submission) and not self._attach(submission, state, outputs):
                self._enter(submission, group, state, watch, outputs)
        except MeshError as error:
            s = submission
            self._counters.num_rejected += 1
            outputs.rejected.append(Rejected(owner=s.owner, handle=s.handle, attempt=s.attempt, error=error))

    def _is_known(self, submission: Submission) -> bool:
        """True if this very submit was taken before. Raises STALE_ATTEMPT, or PROTOCOL_VIOLATION for its handle."""
        live = self._submissions.get(submission.key)
        is_live = live is not None and (live.owner, live.handle) == (submission.owner, submission.handle)
        if is_live or self._submissions.is_repeat(submission):
            return True
        self._submissions.check_handle(submission)
        self._submissions.check_attempt(submission)
        return False

    def _attach(self, submission: Submission, state: EpochState | None, outputs: Outputs) -> bool:
        """The same attempt comes by another stream: rows go there, from where that stream's journal ends.

        The stream that had them is told SUPERSEDED: it may be open still, since a router that died and one whose client
        asks elsewhere once more look alike from here. False if there is nothing to attach to, or the submit has to
        replace it: a higher attempt, or it knows more tokens than we have, or wants other sampling (a client
        that got no answer sent its request once more: it has another seed now). Raises DUPLICATE_REQUEST if it is
        another request of that name.
        """
        live = self._submissions.get(submission.key)
        if live is None:
            return False
        check_same_prompt(live, submission)
        if live.submission.attempt != submission.attempt or not is_continued_alike(live, submission):
            return False
        if state is not None:
            state.settle(live)
        known, output = submission.resumed_output_ids, live.output_ids()
        if len(known) > len(output) or (output[: len(known)] != known).any():
            return False
        outputs.finished.append(Finished.of(live, SequenceEnd(FinishReason.ABORT), _superseded(), None))
        self._submissions.attach(live, submission.owner, submission.handle)
        if live.slot >= 0 and state is not None:
            state.table.owner[live.slot] = submission.owner
            state.table.handle[live.slot] = submission.handle
        if len(output) > len(known):
            row = TokenRow(submission.owner, submission.handle, submission.attempt, len(known), output[len(known) :])
            outputs.rows.append(rows_of([row]))
        return True

    def _enter(
        self,
        submission: Submission,
        group: GroupInfo | None,
        state: EpochState | None,
        watch: StopWatch,
        outputs: Outputs,
    ) -> None:
        """A new request, or one in the place of a lower attempt. Raises what keeps it out."""
        if group is None:
            raise MeshError(ErrorReason.ERROR_REASON_NOT_SERVING, "no worker group yet: retry elsewhere, or later")
        check_submission(submission, group)
        live = self._submissions.get(submission.key)
        if live is not None:
            self._finish(live, SequenceEnd(FinishReason.ABORT), _superseded())
        elif self._submissions.was_aborted(submission):
            outputs.finished.append(_ended_before(submission))
            return
        else:
            num_running = state.table.num_running if state is not None else 0
            self._limits.check(len(self._submissions) - num_running, self._queue.waiting_tokens)
        self._num_arrived += 1
        self._add(make_sequence(submission, group, self._num_arrived), watch)

    def _add(self, sequence: Sequence, watch: StopWatch) -> None:
        self._submissions.add(sequence)
        sequence.trace_context = self._observer.accepted(sequence)
        self._counters.num_submitted += 1
        self._counters.prompt_tokens += sequence.prompt_len
        self._deadlines.add(sequence)
        watch.watch(sequence.end_ids)
        self._queue.push(sequence)
        ending = end_of(sequence)
        if ending is not None:  # Resumed with an output that is complete.
            self._finish(sequence, ending, None)


def aborted_error(request_id: str, below_attempt: int | None) -> MeshError:
    """Why an output ended that somebody aborted."""
    details = {"request_id": request_id}
    if below_attempt is not None:
        return MeshError(ErrorReason.ERROR_REASON_SUPERSEDED, "a higher attempt took over: drop this one", details)
    return MeshError(ErrorReason.ERROR_REASON_ABORTED, "the request was aborted", details)


def _superseded() -> MeshError:
    return MeshError(ErrorReason.ERROR_REASON_SUPERSEDED, "another attempt or stream took over: drop this one")


def _ended_before(submission: Submission) -> Finished:
    """The answer to a later attempt of a request that was aborted."""
    return Finished(
        owner=submission.owner,
        handle=submission.handle,
        attempt=submission.attempt,
        reason=FinishReason.ABORT,
        num_output=len(submission.resumed_output_ids),
        prompt_tokens=len(submission.prompt_ids),
        error=aborted_error(submission.key.request_id, None),
    )
