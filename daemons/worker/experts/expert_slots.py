"""Slots of the experts of one layer on the ranks that share them, and the copy of an expert that a row goes to."""

from __future__ import annotations

import torch


class ExpertSlots:
    """Slot p of a layer is the (p % per_rank)-th of rank p // per_rank. It never changes: a placement that takes
    effect is another object.

    experts_S: int64 [ranks x per_rank], the expert at each slot, -1: none. Each expert has a slot.
    picks_E: int64, how often rows of this rank have picked each expert; counted on, from placement to placement.
    """

    def __init__(
        self, experts_S: torch.Tensor, num_experts: int, num_ranks: int, rank: int, picks_E: torch.Tensor | None = None
    ) -> None:
        self.experts_S = experts_S
        self.num_experts = num_experts
        self.per_rank = len(experts_S) // num_ranks
        self._rank = rank
        self.picks_E = torch.zeros(num_experts, dtype=torch.int64) if picks_E is None else picks_E
        is_filled_S = experts_S >= 0
        copies_E = experts_S[is_filled_S].bincount(minlength=num_experts)
        assert len(copies_E) == num_experts and int(copies_E.min()) > 0, "each expert has a slot"
        # By expert, then by slot: the copies of each expert are neighbours.
        self._order_S = is_filled_S.nonzero().flatten()[experts_S[is_filled_S].argsort(stable=True)]
        self._firsts_E = copies_E.cumsum(0) - copies_E
        self._copies_E = copies_E

    def choose(self, experts_P: torch.Tensor, rows_P: torch.Tensor) -> torch.Tensor:
        """int64 [P]: a slot of each pair's expert. Rows take its copies in turn; results do not depend on that."""
        self.picks_E += experts_P.bincount(minlength=self.num_experts)
        turn_P = (rows_P + self._rank) % self._copies_E[experts_P]
        return self._order_S[self._firsts_E[experts_P] + turn_P]

    def replaced(self, experts_S: torch.Tensor, num_ranks: int) -> ExpertSlots:
        """The same layer with other slots."""
        return ExpertSlots(experts_S, self.num_experts, num_ranks, self._rank, self.picks_E)
