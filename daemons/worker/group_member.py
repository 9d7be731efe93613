"""A worker as a rank of its group: its layout, and the collectives that it shares with the others.

ALONE --form--> MEMBER of a generation --abort, or a later form--> ALONE
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from radixmesh.daemons.runtime.rank_layout import RankLayout


class CollectiveAborted(Exception):
    """A step left a collective that was aborted. Its plan is discarded; the process waits for a new group."""


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
