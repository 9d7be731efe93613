"""The plans that were sent and not answered, and what each row of their results means."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import IntArray, empty_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import StepPlan, StepResult
from radixmesh.daemons.scheduler.planning.sequence_table import SequenceTable

_NUM_REMEMBERED = 4


@dataclass(frozen=True, slots=True)
class Rows:
    """Result rows: slots and generations int32 [rows]."""

    slots: IntArray
    generations: IntArray

    @classmethod
    def of(cls, table: SequenceTable, slots: IntArray) -> Rows:
        """Rows of the requests that are in these slots now."""
        generations = table.live.take(slots)
        assert np.count_nonzero(generations) == len(generations), slots[generations == 0]
        return cls(slots, generations)

    @classmethod
    def none(cls) -> Rows:
        return cls(empty_ints(), empty_ints())

    def still_in(self, table: SequenceTable) -> Rows:
        """Those whose requests are in their slots still."""
        is_live = table.live.take(self.slots) == self.generations
        return Rows(self.slots[is_live], self.generations[is_live])

    def plus(self, other: Rows) -> Rows:
        if not len(other.slots):
            return self
        return Rows(
            np.concatenate([self.slots, other.slots]),
            np.concatenate([self.generations, other.generations]),
        )

    def __len__(self) -> int:
        return len(self.slots)


class PlannedChunk(NamedTuple):
    """A prefill chunk that was sent."""

    slot: int
    generation: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A plan that was sent. The first `num_decodes` rows are decodes, the rest finishing prefills."""

    plan: StepPlan
    rows: Rows
    num_decodes: int
    chunks: tuple[PlannedChunk, ...]
    num_tokens: int
    sent_s: float


class InFlight:
    """Plans of one epoch in step order; results answer the oldest."""

    def __init__(self) -> None:
        self._steps: deque[PlannedStep] = deque()
        self._answered: deque[PlannedStep] = deque(maxlen=_NUM_REMEMBERED)
        self.last_processed = 0
        """Highest step id whose result was processed."""

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def oldest(self) -> PlannedStep | None:
        return self._steps[0] if self._steps else None

    def steps(self) -> tuple[PlannedStep, ...]:
        return tuple(self._steps)

    def last_steps(self) -> tuple[PlannedStep, ...]:
        """The last few that were answered, and those in flight: for the log when something is wrong."""
        return (*self._answered, *self._steps)

    def sent(self, step: PlannedStep) -> None:
        self._steps.append(step)

    def answered(self, result: StepResult) -> PlannedStep:
        """Takes the plan that a result answers.

        Raises STEP_GAP if that is not the oldest one, PROTOCOL_VIOLATION if its rows are not the plan's: the worker has
        diverged, and nothing of its epoch can be trusted any more.
        """
        if not self._steps or self._steps[0].plan.step_id != result.step_id:
            expected = self._steps[0].plan.step_id if self._steps else 0
            message = f"the worker answered step {result.step_id}, not {expected}: results come in step order, once"
            raise MeshError(
                ErrorReason.ERROR_REASON_STEP_GAP, message, {"expected": str(expected), "got": str(result.step_id)}
            )
        step = self._steps[0]
        if len(result.counts) != len(step.rows) or not _fits(result.counts, result.ids):
            message = (
                f"result {result.step_id} has {len(result.counts)} rows and {len(result.ids)} ids,"
                f" its plan {len(step.rows)} rows"
            )
            raise MeshError(ErrorReason.ERROR_REASON_PROTOCOL_VIOLATION, message)
        self._answered.append(self._steps.popleft())
        self.last_processed = result.step_id
        return step


def _fits(counts: IntArray, ids: IntArray) -> bool:
    """True if rows of so many ids make up all ids. Nearly always every row has one."""
    if len(counts) == len(ids) == np.count_nonzero(counts == 1):
        return True
    return bool(counts.min(initial=0) >= 0 and counts.sum() == len(ids))
