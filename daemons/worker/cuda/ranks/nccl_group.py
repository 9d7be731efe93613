"""Ranks whose sums go through NCCL, inside CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from radixmesh.daemons.worker.collectives.rank_group import RankGroup
from radixmesh.daemons.worker.cuda.device import Device
from radixmesh.daemons.worker.cuda.ranks.device_group import DeviceGroup
from radixmesh.daemons.worker.cuda.ranks.nccl_ranks import NcclRanks


class NcclGroup(DeviceGroup):
    is_captured_anew = True

    def __init__(self, ranks: RankGroup, device: Device) -> None:
        """Raises MeshError UNSUPPORTED where this torch has no NCCL."""
        super().__init__(ranks)
        self._nccl = NcclRanks(ranks, device, "nccl", "--tp-collectives peer or host")

    def form(self) -> None:
        self._nccl.form()

    def leave(self) -> None:
        self._nccl.leave()

    def add_reduced(self, x_TN: torch.Tensor, residual_TN: torch.Tensor) -> None:
        residual_TN += self.all_reduce(x_TN)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        if self._nccl.is_formed:
            self._nccl.sum(x)
        return x

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        widest = max(widths)
        own = x.new_zeros(len(x), widest)
        own[:, : x.shape[1]] = x
        if self._nccl.is_formed:
            parts = self._nccl.gather(own)
        else:
            parts = x.new_zeros(self.size, len(x), widest)
            parts[self.rank] = own
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)
