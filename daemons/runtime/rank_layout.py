"""The position of a rank among those that hold one model together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from radixmesh.worker.v1 import worker_pb2

MAX_RANKS = 1024
"""Ranks of one group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """A rank's position in its group; the comments of worker.v1.RankLayout hold. Weights load by it.

    Raises ValueError, which names the flag, for a position that no group has.
    """

    tp_size: int = 1
    tp_rank: int = 0
    dp_size: int = 1
    dp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0

    def __post_init__(self) -> None:
        for kind in ("tp", "dp", "ep"):
            size, rank = getattr(self, f"{kind}_size"), getattr(self, f"{kind}_rank")
            if not 1 <= size <= MAX_RANKS:
                raise ValueError(f"--{kind}-size is {size}: choose 1 to {MAX_RANKS}")
            if not 0 <= rank < size:
                raise ValueError(f"--{kind}-rank {rank} is outside [0, {size}) of --{kind}-size")
        if self.world_size > MAX_RANKS:
            raise ValueError(f"--tp-size x --dp-size is {self.world_size}: at most {MAX_RANKS} ranks make a group")
        if self.world_size % self.ep_size:
            raise ValueError(
                f"--ep-size {self.ep_size} does not divide the {self.world_size} ranks of --tp-size x --dp-size"
            )
        if self.ep_rank != self.rank % self.ep_size:
            raise ValueError(
                f"--ep-rank of rank {self.rank} (--dp-rank x --tp-size + --tp-rank) is {self.rank % self.ep_size},"
                f" its remainder by --ep-size, not {self.ep_rank}"
            )

    @classmethod
    def of_rank(cls, rank: int, *, tp_size: int, dp_size: int, ep_size: int) -> Self:
        """The layout of a rank in [0, tp_size x dp_size)."""
        return cls(
            tp_size=tp_size,
            tp_rank=rank % tp_size,
            dp_size=dp_size,
            dp_rank=rank // tp_size,
            ep_size=ep_size,
            ep_rank=rank % ep_size,
        )

    @classmethod
    def from_proto(cls, message: worker_pb2.RankLayout) -> Self:
        """Sizes of 0 are 1: an older worker leaves them out. Raises ValueError, as the constructor."""
        return cls(
            tp_size=message.tp_size or 1,
            tp_rank=message.tp_rank,
            dp_size=message.dp_size or 1,
            dp_rank=message.dp_rank,
            ep_size=message.ep_size or 1,
            ep_rank=message.ep_rank,
        )

    @property
    def world_size(self) -> int:
        return self.tp_size * self.dp_size

    @property
    def rank(self) -> int:
        return self.dp_rank * self.tp_size + self.tp_rank

    @property
    def flags(self) -> str:
        """The flags that a worker at this position is started with."""
        return " ".join(
            f"--{kind}-size {getattr(self, f'{kind}_size')} --{kind}-rank {getattr(self, f'{kind}_rank')}"
            for kind in ("tp", "dp", "ep")
            if getattr(self, f"{kind}_size") > 1
        )

    def to_proto(self) -> worker_pb2.RankLayout:
        return worker_pb2.RankLayout(
            tp_size=self.tp_size,
            tp_rank=self.tp_rank,
            dp_size=self.dp_size,
            dp_rank=self.dp_rank,
            ep_size=self.ep_size,
            ep_rank=self.ep_rank,
        )
