"""A worker as a rank of its group: its layout, and the collectives that it shares with the others.

ALONE --form--> MEMBER of a generation --abort, or a later form--> ALONE
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from radixmesh.worker.v1 import worker_pb2


class CollectiveAborted(Exception):
    """A step left a collective that was aborted. Its plan is discarded; the process waits for a new group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """A rank's place in its group; the comments of worker.v1.RankLayout hold. Weights load by it."""

    tp_size: int = 1
    tp_rank: int = 0
    dp_size: int = 1
    dp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0

    def __post_init__(self) -> None:
        for kind in ("tp", "dp", "ep"):
            size, rank = getattr(self, f"{kind}_size"), getattr(self, f"{kind}_rank")
            if not 0 <= rank < size:
                raise ValueError(f"--{kind}-rank {rank} is outside [0, {size}) of --{kind}-size")

    @property
    def world_size(self) -> int:
        return self.tp_size * self.dp_size

    @property
    def rank(self) -> int:
        return self.dp_rank * self.tp_size + self.tp_rank

    def to_proto(self) -> worker_pb2.RankLayout:
        return worker_pb2.RankLayout(
            tp_size=self.tp_size,
            tp_rank=self.tp_rank,
            dp_size=self.dp_size,
            dp_rank=self.dp_rank,
            ep_size=self.ep_size,
            ep_rank=self.ep_rank,
        )


class GroupMember(Protocol):
    """The collectives of one rank. Steps run in them on the step thread; form() and abort() come on other threads."""

    @property
    def layout(self) -> RankLayout: ...

    @property
    def rendezvous(self) -> str:
        """host:port where the group meets if this is rank 0; empty: none is needed."""
        ...

    def form(self, generation: int, rendezvous: str, member_instance_ids: Sequence[str]) -> None:
        """Meets the other ranks; blocks until all are there. Raises CollectiveAborted if abort() comes first."""
        ...

    def abort(self) -> None:
        """Ends collectives with CollectiveAborted: running ones and those to come until form(). Idempotent."""
        ...


class UnconnectedMember:
    """A rank whose steps need no collectives: the only one of its group, or a simulated one."""

    def __init__(self, layout: RankLayout | None = None) -> None:
        self.layout = layout or RankLayout()
        self.rendezvous = ""

    def form(self, generation: int, rendezvous: str, member_instance_ids: Sequence[str]) -> None:
        return

    def abort(self) -> None:
        return
