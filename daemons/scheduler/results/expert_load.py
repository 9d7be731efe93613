"""Load of the ranks that share experts, recent steps weighing most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from radixmesh.daemons.scheduler.planning.experts.expert_placement import balancedness

# A step's weight halves about every 70 steps.
_DECAY = 0.99
REPORT_STEPS = 32
"""Steps from one report of picks to the next, by workers that count no rows."""


@dataclass(slots=True)
class ExpertLoad:
    """rows: pairs of a row and an expert that each rank computed, by rank; empty: ranks share no experts."""

    rows: list[float] = field(default_factory=list)

    def add(self, rows: Sequence[float], num_steps: int = 1) -> None:
        """Those of so many steps; a step without a forward has none."""
        if not rows:
            return
        if len(rows) != len(self.rows):
            self.rows = [0.0] * len(rows)
        decay = _DECAY**num_steps
        self.rows = [decay * before + num for before, num in zip(self.rows, rows, strict=True)]

    @property
    def balancedness(self) -> float:
        """Mean over most, in (0, 1]; 0: no experts are shared, or nothing has run."""
        return balancedness(self.rows) if any(self.rows) else 0.0
