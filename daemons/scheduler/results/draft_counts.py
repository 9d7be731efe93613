"""Drafts that steps computed and accepted, and the check of what a worker says of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import StepResult

MAX_POSITIONS = 63
"""Positions that are told apart; a row drafts no more than a worker's limit allows, which is that."""


class DraftCounts:
    """Since the process started. int64 [MAX_POSITIONS]: drafts that were the n-th of their row in a step."""

    def __init__(self) -> None:
        self.drafted_by_position: npt.NDArray[np.int64] = np.zeros(MAX_POSITIONS, np.int64)
        self.accepted_by_position: npt.NDArray[np.int64] = np.zeros(MAX_POSITIONS, np.int64)

    def add(self, result: StepResult) -> None:
        """The drafts of a step's result."""
        if len(result.drafted):
            self.drafted_by_position += _by_position(result.drafted)
            if len(result.accepted):
                self.accepted_by_position += _by_position(result.accepted)


def check_drafts(result: StepResult, max_tokens_per_row: int) -> None:
    """Raises PROTOCOL_VIOLATION for more drafts than a row can have, and more accepted than drafted or yielded."""
    drafted, accepted = result.drafted, result.accepted
    if not len(drafted) and not len(accepted):
        return
    is_wrong = len(drafted) == 0 or drafted.max() >= max_tokens_per_row
    if not is_wrong and len(accepted):
        is_wrong = bool((accepted > np.minimum(drafted, np.maximum(result.counts - 1, 0))).any())
    if is_wrong:
        raise MeshError(
            ErrorReason.ERROR_REASON_PROTOCOL_VIOLATION,
            f"step {result.step_id} returned drafts that its rows cannot have: check the versions of both ends",
        )


def _by_position(numbers: IntArray) -> npt.NDArray[np.int64]:
    """Of rows with so many each: how many have at least 1, 2, ..."""
    num_rows = np.bincount(np.minimum(numbers, MAX_POSITIONS), minlength=MAX_POSITIONS + 1)
    return num_rows[:0:-1].cumsum()[::-1].astype(np.int64)
