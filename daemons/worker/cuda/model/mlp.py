"""The MLP of a layer, from the residual to the residual."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from radixmesh.daemons.worker.cuda.linear import Linear, Norm, Residual


class Mlp(ABC):
    """One layer's: dense, or routed to experts."""

    @abstractmethod
    def run(self, residual: Residual, source_TD: torch.Tensor | None = None) -> None:
        """Adds what it makes of rows to the residual: of the residual's own, or of `source_TD`."""

    def stages(self, residual: Residual) -> Iterator[None]:
        """As run(), in pieces: yields while rows are under way to other ranks. Default: in one."""
        self.run(residual)
        return iter(())


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlp(Mlp):
    """down(silu(gate) x up) (Shazeer 2020); gate and up are one projection."""

    norm: Norm
    gate_up: Linear
    down: Linear

    def run(self, residual: Residual, source_TD: torch.Tensor | None = None) -> None:
        assert source_TD is None, "the norm is fused with the residual"
        self.down.add_gated_to(residual, self.gate_up.gated(residual, self.norm), self.norm.eps)
