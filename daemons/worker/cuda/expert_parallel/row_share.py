"""Rows of a step that one rank brings to the experts, where the ranks of its batch all have them (tensor parallel)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowShare:
    """Part `part` of the `num_parts` parts of a step's rows, which lie side by side and differ by one row at most."""

    part: int = 0
    num_parts: int = 1

    def of(self, num_rows: int) -> slice:
        """The part of so many rows; empty on some ranks where there are fewer rows than parts."""
        return slice(num_rows * self.part // self.num_parts, num_rows * (self.part + 1) // self.num_parts)

    def most(self, num_rows: int) -> int:
        """Rows of the largest part of so many."""
        return -(-num_rows // self.num_parts)


WHOLE = RowShare()
