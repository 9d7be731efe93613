"""Agreement of ranks on what none of them may decide alone."""

from __future__ import annotations

import hashlib

import torch

from radixmesh.daemons.worker.collectives.rank_group import RankGroup
from radixmesh.daemons.worker.ranks.group_member import CollectiveAborted


def agree_on_steps(ranks: RankGroup, facts: object, flags: str) -> None:
    """Raises CollectiveAborted unless all ranks pad, cut and capture steps alike: they would meet with other rows.

    facts: all that decides it, of one repr on all ranks. flags: those that it follows from.
    """
    digest = hashlib.sha256(repr(facts).encode()).digest()
    told = ranks.stack(torch.frombuffer(bytearray(digest), dtype=torch.uint8))
    if not bool((told == told[0]).all()):
        raise CollectiveAborted(f"the ranks run steps of other sizes: give all of them the same {flags}")
