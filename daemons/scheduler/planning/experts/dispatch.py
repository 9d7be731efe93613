"""The mode in which experts are reached, chosen for all ranks at once."""

from __future__ import annotations

from dataclasses import dataclass

from radixmesh.daemons.runtime.steps.step import DispatchMode
from radixmesh.daemons.scheduler.group.group_info import GroupInfo

DISPATCH_CHOICES = {"auto": None, "normal": DispatchMode.NORMAL, "low-latency": DispatchMode.LOW_LATENCY}


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchChoice:
    """mode: of every step; None: low latency where no rank has prefill chunks, nor more than max_tokens rows."""

    mode: DispatchMode | None = None
    max_tokens: int = 128

    def of(self, group: GroupInfo, max_tokens_per_rank: int, *, has_chunks: bool) -> DispatchMode:
        """The mode of a step. max_tokens_per_rank: of all ranks, the most that one has."""
        if group.ep_size == 1:
            return DispatchMode.UNSPECIFIED
        if self.mode is not None:
            return self.mode
        is_low_latency = not has_chunks and max_tokens_per_rank <= self.max_tokens
        return DispatchMode.LOW_LATENCY if is_low_latency else DispatchMode.NORMAL
