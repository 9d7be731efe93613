"""Limits of a worker: the numbers that plans are checked against."""

from __future__ import annotations

from dataclasses import dataclass

from radixmesh.daemons.runtime.sampling import MAX_STOP_IDS
from radixmesh.daemons.runtime.steps.step import Task

MAX_TOKENS_PER_ROW = 64
"""Most tokens that any worker yields for a row in one step."""
MAX_TREE_CANDIDATES = 4096
"""Most drafts among which a GPU chooses those of a row: as MAX_CANDIDATES of its kernels."""
# A request's own stop ids, and the model's ends.
MAX_SUPPRESSED_IDS = MAX_STOP_IDS + 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes of the device tables, in tokens, pages and slots."""

    page_size: int
    num_pages: int
    num_slots: int
    vocab_size: int
    max_total_len: int
    max_tokens_per_step: int
    max_tokens_per_row: int = 1
    tasks: frozenset[Task] = frozenset({Task.GENERATE})
    takes_grammars: bool = False

    def __post_init__(self) -> None:
        for name in ("page_size", "num_pages", "num_slots", "vocab_size", "max_total_len", "max_tokens_per_step"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, not {getattr(self, name)}")

    @property
    def max_pages_per_slot(self) -> int:
        """Pages that the longest request needs, and one to be granted ahead of need."""
        return min(self.num_pages, self.max_total_len // self.page_size + 1)
