"""The MLP of a layer, from the residual to the residual."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from radixmesh.daemons.worker.cuda.linear import Linear, Norm, Residual


class Mlp(ABC):
    """One layer's: dense, or routed to experts."""

    @abstractmethod
    def run(self, residual: Residual) -> None:
        """Adds what it makes of the residual's rows to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlp(Mlp):
    """down(silu(gate) x up) (Shazeer 2020); gate and up are one projection."""

    norm: Norm
    gate_up: Linear
    down: Linear

    def run(self, residual: Residual) -> None:
        self.down.add_gated_to(residual, self.gate_up.gated(residual, self.norm), self.norm.eps)
