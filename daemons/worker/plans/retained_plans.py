"""Plans that a rank keeps for the others: a scheduler that dies between two writes leaves ranks without a plan.

RECEIVED --its step ends here--> COMPLETED --a later plan's group_completed_step covers it--> dropped

A plan can complete on one rank before another one has received it, so completion here is no reason to drop it. A single
rank has nobody to keep plans for: there they are dropped when they complete.
"""

from __future__ import annotations

from radixmesh.worker.v1 import worker_pb2

# Of all retained plans of a hello: one plan may be 64 MiB, and so may the hello.
MAX_RETAINED_BYTES = 16 << 20


class RetainedPlans:
    """Plans of the current epoch by step id, in step order, without gaps up to the last one received.

    max_plans: completed and unfinished ones together; the oldest completed ones go first. Unfinished plans are bounded
    by max_plans_in_flight. max_bytes: of what encoded() returns.
    """

    def __init__(self, *, max_plans: int, keeps_completed: bool, max_bytes: int = MAX_RETAINED_BYTES) -> None:
        self._max_plans = max_plans
        self._keeps_completed = keeps_completed
        self._max_bytes = max_bytes
        self._plans: dict[int, worker_pb2.StepPlan] = {}
        self._completed_step = 0

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def has_unfinished(self) -> bool:
        """True if the last plan received has not completed here."""
        return bool(self._plans) and next(reversed(self._plans)) > self._completed_step

    def begin_epoch(self) -> None:
        """Plans of earlier epochs are void."""
        self._plans.clear()
        self._completed_step = 0

    def received(self, plan: worker_pb2.StepPlan) -> None:
        """The next plan of the epoch came: those that it says are complete on all ranks go."""
        self._plans[plan.header.step_id] = plan
        self._drop(plan.header.group_completed_step)

    def completed(self, step_id: int) -> None:
        """A step ended here, well or not."""
        self._completed_step = max(self._completed_step, step_id)
        self._drop(0 if self._keeps_completed else step_id)

    def encoded(self) -> list[bytes]:
        """An ExecuteRequest for each plan, the newest of max_bytes in all."""
        found: list[bytes] = []
        num_bytes = 0
        for plan in reversed(self._plans.values()):
            num_bytes += plan.ByteSize()
            if num_bytes > self._max_bytes:
                break
            found.append(worker_pb2.ExecuteRequest(plan=plan).SerializeToString())
        return found[::-1]

    def _drop(self, upto_step: int) -> None:
        upto_step = min(upto_step, self._completed_step)
        for step_id in list(self._plans):
            is_surplus = len(self._plans) > self._max_plans and step_id <= self._completed_step
            if step_id > upto_step and not is_surplus:
                return
            del self._plans[step_id]
