"""FormGroup and LeaveGroup: verbs of the scheduler that holds the fence. They wait for no step to end by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.ranks.group_member import CollectiveAborted, GroupMember
from radixmesh.daemons.worker.stream.epochs import EpochLedger
from radixmesh.worker.v1 import worker_pb2

log = get_logger(__name__)


class GroupFormation:
    """Takes one worker into and out of groups, on the step thread by these two:

    reset: empties slots, and KV and page records where other ranks have parts of the same KV, and takes over a
    placement of shared experts. agree: settles with the other ranks how they compute together.
    """

    def __init__(
        self,
        ledger: EpochLedger,
        member: GroupMember,
        reset: Callable[[worker_pb2.ExpertPlacement | None], Awaitable[None]],
        agree: Callable[[], Awaitable[None]],
    ) -> None:
        self._ledger = ledger
        self._member = member
        self._reset = reset
        self._agree = agree

    async def form(self, request: worker_pb2.FormGroupRequest) -> None:
        """Makes the worker a rank of a new generation; its KV is that of completed steps, or none.

        Raises EPOCH_FENCED, GROUP_GENERATION or GROUP_LOST; INVALID_ARGUMENT or BAD_CHECKPOINT for experts that it
        cannot have.
        """
        ledger, member = self._ledger, self._member
        ledger.check_holder(request.epoch, request.instance_id)
        self._check_layout(request.layout)
        if request.generation <= ledger.highest_generation:
            raise MeshError(
                ErrorReason.ERROR_REASON_GROUP_GENERATION,
                f"the worker was in generation {ledger.highest_generation}: form a higher one",
                {"group_generation": str(ledger.highest_generation)},
            )
        # Taken at once: of two requests for one generation the second is refused, whoever is formed first.
        ledger.highest_generation = request.generation
        await self.leave(request.epoch, request.instance_id)
        # Steps that waited in collectives have left them: the step thread gets here.
        await self._reset(request.experts if request.HasField("experts") else None)
        members = tuple(request.member_instance_ids)
        try:
            await asyncio.to_thread(member.form, request.generation, request.rendezvous, members)
            await self._agree()
        except CollectiveAborted as error:
            message = f"the group was left while it formed: fence and form it again ({error})"
            raise MeshError(ErrorReason.ERROR_REASON_GROUP_LOST, message) from error
        ledger.check_holder(request.epoch, request.instance_id)
        ledger.formed(request.generation)
        log.info("group_formed", generation=request.generation, rank=member.layout.rank)

    def _check_layout(self, layout: worker_pb2.RankLayout) -> None:
        """Weights have loaded by this worker's own flags: as any other rank it would compute with the wrong ones."""
        ours = self._member.layout
        if layout != ours.to_proto():
            theirs = ", ".join(f"{field.name} {value}" for field, value in layout.ListFields()) or "one rank"
            raise MeshError(
                ErrorReason.ERROR_REASON_GROUP_GENERATION,
                f"the worker was started with {ours.flags or 'no rank flags'}, the scheduler takes it for {theirs}:"
                " start it with the flags of that position, or name the workers in the order of their ranks",
                {"group_generation": str(self._ledger.highest_generation)},
            )

    async def leave(self, epoch: int, instance_id: str) -> None:
        """Aborts the collectives; steps that waited in them are discarded. Raises EPOCH_FENCED."""
        self._ledger.check_holder(epoch, instance_id)
        self._ledger.formed(0)
        # On a thread of its own: aborting a communicator may block.
        await asyncio.to_thread(self._member.abort)
