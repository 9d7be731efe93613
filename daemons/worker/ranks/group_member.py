"""A worker as a rank of its group: its layout, and the collectives that it shares with the others.

ALONE --form--> MEMBER of a generation --abort, a lost rank, or a later form--> ALONE
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from radixmesh.daemons.runtime.rank_layout import RankLayout

if TYPE_CHECKING:
    from radixmesh.daemons.worker.experts.expert_dispatch import ExpertDispatch
    from radixmesh.daemons.worker.ranks.group import Group


class CollectiveAborted(Exception):
    """A step left a collective that was aborted. Its plan is discarded; the process waits for a new group."""


class RankLost(CollectiveAborted):
    """Another rank died, hangs or has left: the collective can never complete."""


class GroupMember(Protocol):
    """The collectives of one rank. Steps run in them on the step thread; form() and abort() come on other threads."""

    @property
    def layout(self) -> RankLayout: ...

    @property
    def rendezvous(self) -> str:
        """host:port where the group meets if this is rank 0; empty: none is needed."""
        ...

    @property
    def is_whole(self) -> bool:
        """False once a rank was lost, or the group was left: no collective works until form()."""
        ...

    @property
    def group(self) -> Group | None:
        """Those that hold the model together with this rank, for its maths; None: it computes alone."""
        ...

    @property
    def experts(self) -> ExpertDispatch | None:
        """Carries rows to the ranks that share the experts with this one; None: it has all of them."""
        ...

    def form(self, generation: int, rendezvous: str, member_instance_ids: Sequence[str]) -> None:
        """Meets the other ranks; blocks until all are there. Raises CollectiveAborted if abort() comes first."""
        ...

    def abort(self) -> None:
        """Ends collectives with CollectiveAborted: running ones and those to come until form(). Idempotent."""
        ...


class UnconnectedMember:
    """A rank whose steps need no collectives: the only one of its group, a data-parallel or a simulated one."""

    is_whole = True
    group: Group | None = None
    experts: ExpertDispatch | None = None

    def __init__(self, layout: RankLayout | None = None) -> None:
        self.layout = layout or RankLayout()
        self.rendezvous = ""

    def form(self, generation: int, rendezvous: str, member_instance_ids: Sequence[str]) -> None:
        return

    def abort(self) -> None:
        return
