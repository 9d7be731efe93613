"""The holder of the worker. Fences and claims are ordered by (epoch, instance id); the highest wins, for good.

UNCLAIMED --fence--> FENCED --claim of the same--> HELD, connected --stream ends--> HELD, disconnected
                       ^                              |                               |
                       +------ higher fence: the old stream is fenced out ------------+

A claim without a fence before it fences by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.worker.v1 import worker_pb2

# Epochs count up by one; ranks of a group differ by the epochs that one of them missed. Without a bound a single claim
# of the highest number there is would leave no higher one to anybody.
_MAX_JUMP = 1 << 32
# A live holder sends something every second.
HOLDER_TIMEOUT_S = 5.0


class Holder(Protocol):
    """The stream that holds the worker, as the core needs it."""

    def deliver(self, response: worker_pb2.ExecuteResponse) -> None:
        """Sends an answer."""

    def fail(self, error: MeshError) -> None:
        """Ends the stream with an error."""


class EpochLedger:
    """The highest claim ever accepted here, how far its plans got, and whether its holder lives.

    clock: monotonic seconds.
    """

    def __init__(
        self,
        group_generation: int = 0,
        clock: Callable[[], float] = time.monotonic,
        holder_timeout_s: float = HOLDER_TIMEOUT_S,
    ) -> None:
        self.group_generation = group_generation
        """0 = in no group."""
        self.highest_generation = group_generation
        self.holder_timeout_s = holder_timeout_s
        self.highest_epoch = 0
        self.holder_instance_id = ""
        self.is_holder_connected = False
        self.last_received_step = 0
        self.last_completed_step = 0
        self._clock = clock
        self.heard_at = clock()
        self._is_only_fenced = False

    @property
    def holder_silent_ms(self) -> int:
        """Time since it was the connected holder's turn to speak; 0 if none is connected."""
        return int((self._clock() - self.heard_at) * 1000.0) if self.is_holder_connected else 0

    def may_complete(self, *, has_unfinished: bool) -> bool:
        """True if others may complete the holder's broadcast: it is gone, or silent past the timeout.

        has_unfinished: the holder waits for the worker.
        """
        if self._is_only_fenced:
            return False  # Nothing has been sent in this epoch.
        silent_s = 0.0 if has_unfinished else self._clock() - self.heard_at
        return not self.is_holder_connected or silent_s > self.holder_timeout_s

    def claim(self, epoch: int, instance_id: str, group_generation: int) -> None:
        """Makes the claimant the holder, whether it fenced the worker before or not.

        Raises GROUP_GENERATION, EPOCH_FENCED if its claim is not the highest, or INVALID_ARGUMENT if it is beyond all
        that a group can have counted to.
        """
        if group_generation != self.group_generation:
            raise MeshError(
                ErrorReason.ERROR_REASON_GROUP_GENERATION,
                f"the claim is for group generation {group_generation}, the worker joined {self.group_generation}",
                {"group_generation": str(self.group_generation)},
            )
        if not (self._is_only_fenced and (epoch, instance_id) == (self.highest_epoch, self.holder_instance_id)):
            self.fence(epoch, instance_id)
        self._is_only_fenced = False
        self.heard_at = self._clock()

    def fence(self, epoch: int, instance_id: str) -> None:
        """Shuts out all lower claims. Raises EPOCH_FENCED or INVALID_ARGUMENT, as claim()."""
        if (epoch, instance_id) <= (self.highest_epoch, self.holder_instance_id):
            raise self.fenced()
        if epoch > self.highest_epoch + _MAX_JUMP:
            message = f"epoch {epoch} is far beyond {self.highest_epoch}, the highest here: claim the next one"
            details = {"field": "claim.epoch", "max": str(self.highest_epoch + _MAX_JUMP)}
            raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, details)
        self.highest_epoch, self.holder_instance_id = epoch, instance_id
        self.is_holder_connected = self._is_only_fenced = True
        self.last_received_step = self.last_completed_step = 0
        self.heard_at = self._clock()

    def formed(self, generation: int) -> None:
        """The worker is in a group of that generation; 0: in none any more."""
        self.group_generation = generation
        self.highest_generation = max(self.highest_generation, generation)

    def heard(self) -> None:
        """The holder sent something, or was sent what it waited for."""
        self.heard_at = self._clock()

    def disconnected(self) -> None:
        """The holder's stream ended; it stays the holder until somebody claims higher."""
        self.is_holder_connected = False

    def check_holder(self, epoch: int, instance_id: str) -> None:
        """Raises EPOCH_FENCED unless that is the claim that holds the worker."""
        if epoch == 0 or (epoch, instance_id) != (self.highest_epoch, self.holder_instance_id):
            raise self.fenced()

    def fenced(self) -> MeshError:
        """Error for everybody but the holder."""
        holder = self.holder_instance_id or "nobody"
        return MeshError(
            ErrorReason.ERROR_REASON_EPOCH_FENCED,
            f"epoch {self.highest_epoch} of {holder} is the highest here: claim a higher one",
            {"epoch": str(self.highest_epoch), "holder": self.holder_instance_id},
        )
