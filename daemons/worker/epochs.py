"""Who holds the worker. Claims are ordered by (epoch, instance id); the highest wins, for good.

UNCLAIMED --claim--> HELD, connected --stream ends--> HELD, disconnected --higher claim--> HELD by another
                       `-----------higher claim: the old stream is fenced----------------^
"""

from __future__ import annotations

import time
from collections.abc import Callable

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError

# Epochs count up by one; ranks of a group differ by the epochs that one of them missed. Without a bound a single claim
# of the highest number there is would leave no higher one to anybody.
_MAX_JUMP = 1 << 32


class EpochLedger:
    """The highest claim ever accepted here, how far its plans got, and whether its holder lives.

    clock: monotonic seconds.
    """

    def __init__(self, group_generation: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.group_generation = group_generation
        self.highest_epoch = 0
        self.holder_instance_id = ""
        self.is_holder_connected = False
        self.last_received_step = 0
        self.last_completed_step = 0
        self._clock = clock
        self._heard_at = clock()

    @property
    def holder_silent_ms(self) -> int:
        """Time since it was the connected holder's turn to speak; 0 if none is connected."""
        return int((self._clock() - self._heard_at) * 1000.0) if self.is_holder_connected else 0

    def claim(self, epoch: int, instance_id: str, group_generation: int) -> None:
        """Makes the claimant the holder.

        Raises GROUP_GENERATION, EPOCH_FENCED if its claim is not the highest, or INVALID_ARGUMENT if it is beyond all
        that a group can have counted to.
        """
        if group_generation != self.group_generation:
            raise MeshError(
                ErrorReason.ERROR_REASON_GROUP_GENERATION,
                f"the claim is for group generation {group_generation}, the worker joined {self.group_generation}",
                {"group_generation": str(self.group_generation)},
            )
        if (epoch, instance_id) <= (self.highest_epoch, self.holder_instance_id):
            raise self.fenced()
        if epoch > self.highest_epoch + _MAX_JUMP:
            message = f"epoch {epoch} is far beyond {self.highest_epoch}, the highest here: claim the next one"
            details = {"field": "claim.epoch", "max": str(self.highest_epoch + _MAX_JUMP)}
            raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, details)
        self.highest_epoch, self.holder_instance_id = epoch, instance_id
        self.is_holder_connected = True
        self.last_received_step = self.last_completed_step = 0
        self._heard_at = self._clock()

    def heard(self) -> None:
        """The holder sent something, or was sent what it waited for."""
        self._heard_at = self._clock()

    def disconnected(self) -> None:
        """The holder's stream ended; it stays the holder until somebody claims higher."""
        self.is_holder_connected = False

    def check_holder(self, epoch: int, instance_id: str) -> None:
        """Raises EPOCH_FENCED unless that is the claim that holds the worker."""
        if epoch == 0 or (epoch, instance_id) != (self.highest_epoch, self.holder_instance_id):
            raise self.fenced()

    def fenced(self) -> MeshError:
        """What everybody but the holder is told."""
        holder = self.holder_instance_id or "nobody"
        return MeshError(
            ErrorReason.ERROR_REASON_EPOCH_FENCED,
            f"epoch {self.highest_epoch} of {holder} is the highest here: claim a higher one",
            {"epoch": str(self.highest_epoch), "holder": self.holder_instance_id},
        )
