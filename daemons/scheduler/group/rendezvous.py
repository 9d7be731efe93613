"""Where the ranks of a worker group meet: everybody waits until all are there, and gets the same answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.hello import check_peer_names

# Generations are 64 bits: whoever joins, enough of them are left.
_MAX_LAST_GENERATION = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Joiner:
    """A rank that wants to join; the comments of JoinGroupRequest hold."""

    rank: int
    instance_id: str
    address: str
    last_group_generation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A complete group; tuples by rank."""

    generation: int
    addresses: tuple[str, ...]
    instance_ids: tuple[str, ...]


class Rendezvous:
    """Forms generation after generation of a group of `world_size` ranks."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._generation = 0
        self._joiners: dict[int, Joiner] = {}
        self._complete: asyncio.Future[Joined] | None = None

    async def join(self, joiner: Joiner, world_size: int) -> Joined:
        """Returns when every rank has joined. A rank that joins again (restarted, or called twice) replaces itself.

        Raises INVALID_ARGUMENT for another world size, a rank outside it or a generation that leaves none to come,
        MISSING_FIELD without an instance id.
        """
        check_peer_names(instance_id=joiner.instance_id, address=joiner.address)
        self._check(joiner, world_size)
        if self._complete is None:
            self._complete = asyncio.get_running_loop().create_future()
        complete = self._complete
        self._joiners[joiner.rank] = joiner
        if len(self._joiners) == self._world_size:
            members = [self._joiners[rank] for rank in range(self._world_size)]
            # Ranks may remember a generation of an earlier scheduler: never go back.
            self._generation = 1 + max(self._generation, *(m.last_group_generation for m in members))
            self._joiners, self._complete = {}, None
            complete.set_result(
                Joined(
                    generation=self._generation,
                    addresses=tuple(m.address for m in members),
                    instance_ids=tuple(m.instance_id for m in members),
                )
            )
        try:
            # Shielded: one rank that gives up must not cancel what the others wait for.
            return await asyncio.shield(complete)
        except asyncio.CancelledError:
            if self._joiners.get(joiner.rank) is joiner:
                del self._joiners[joiner.rank]
            raise

    def _check(self, joiner: Joiner, world_size: int) -> None:
        if world_size != self._world_size:
            message = f"this scheduler's group has {self._world_size} ranks, not {world_size}: configure both alike"
            raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "world_size"})
        if not 0 <= joiner.rank < self._world_size:
            message = f"rank {joiner.rank} is outside [0, {self._world_size})"
            raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "rank"})
        if joiner.last_group_generation > _MAX_LAST_GENERATION:
            message = f"last_group_generation is at most {_MAX_LAST_GENERATION}: send the one that the rank was told"
            raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "last_group_generation"})
        if not joiner.instance_id:
            raise MeshError(ErrorReason.ERROR_REASON_MISSING_FIELD, "set instance_id", {"field": "instance_id"})
