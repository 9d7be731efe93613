"""Sources of a device's weights, taken one by one: a folder, or random ones of the same shapes.

N rows (features out), K columns (features in).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from radixmesh.daemons.worker.checkpoint.load_progress import LoadProgress, stored_bytes
from radixmesh.daemons.worker.checkpoint.loader import TensorTargets, check_tensors
from radixmesh.daemons.worker.checkpoint.quantization import CheckpointQuantization
from radixmesh.daemons.worker.checkpoint.scaled_weights import ScaledWeights, dequantized
from radixmesh.daemons.worker.checkpoint.tensor_index import index_tensors
from radixmesh.daemons.worker.checkpoint.tensor_reader import TensorReader
from radixmesh.daemons.worker.checkpoint.tensor_slice import TensorSlice


class StoredWeight(NamedTuple):
    """data [N, K], FP8 where there are scales: float32 [N, 1], or [N / 128, K / 128] rounded up."""

    data: torch.Tensor
    scales: torch.Tensor | None

    def full(self) -> torch.Tensor:
        """[N, K] in the stored dtype, or float32 where it is multiplied by scales."""
        return self.data if self.scales is None else dequantized(self.data, self.scales)


class WeightSource(ABC):
    """num_bytes: taken so far."""

    num_bytes: int

    @abstractmethod
    def take(self, name: str) -> StoredWeight:
        """A tensor by its name in a checkpoint. Raises MeshError BAD_CHECKPOINT."""


class FolderSource(WeightSource):
    def __init__(self, reader: TensorReader, scaled: ScaledWeights, slices: Mapping[str, TensorSlice]) -> None:
        self._reader = reader
        self._scaled = scaled
        self._slices = slices

    @property
    def num_bytes(self) -> int:  # type: ignore[override]
        return self._reader.num_bytes

    def cut_to(self, slices: Mapping[str, TensorSlice]) -> FolderSource:
        """The same folder, of which other parts of some tensors are taken."""
        return FolderSource(self._reader, self._scaled, {**self._slices, **slices})

    def take(self, name: str) -> StoredWeight:
        cut = self._slices.get(name)
        scales = self._scaled.read_scales(self._reader, name, cut) if name in self._scaled else None
        return StoredWeight(self._reader.read(name, cut), scales)


class RandomSource(WeightSource):
    """The numbers that `fill_randomly` puts into the same targets, and no others."""

    def __init__(self, targets: TensorTargets, device: torch.device, router_skew: float = 0.0) -> None:
        self._targets, self._router_skew = targets, router_skew
        self._device = device
        self._seeds: dict[str, int] = {}
        self.num_bytes = 0
        for name, tensor in targets.tensors.items():
            self._seeds[name] = self.num_bytes
            self.num_bytes += tensor.nbytes

    def take(self, name: str) -> StoredWeight:
        target = self._targets.tensors[name]
        tensor = torch.empty(target.shape, dtype=target.dtype, device=self._device)
        make_random(name, tensor, self._seeds[name], self._router_skew)
        return StoredWeight(tensor, None)


@contextmanager
def folder_source(
    folder: Path, targets: TensorTargets, quantization: CheckpointQuantization | None
) -> Iterator[FolderSource]:
    """Checks all names and shapes first. Raises MeshError BAD_CHECKPOINT."""
    entries = index_tensors(folder)
    scaled = ScaledWeights(folder, entries, quantization)
    check_tensors(folder, entries, targets, scaled)
    total_bytes = sum(stored_bytes(entries[name], targets.slices.get(name)) for name in targets.tensors)
    with TensorReader(entries, LoadProgress(total_bytes)) as reader:
        yield FolderSource(reader, scaled, targets.slices)


def make_random(name: str, tensor: torch.Tensor, seed: int, router_skew: float = 0.0) -> None:
    """Fills a tensor of that name in a checkpoint: ones where it is a norm's weight.

    router_skew: the logits of expert e of E are multiplied by exp(router_skew x (1 / 2 - e / E)), so that the first
    ones are picked more often than the last ones; 0: all are alike.
    """
    if tensor.dim() == 1 and "norm" in name:
        tensor.fill_(1.0)
    else:
        tensor.normal_(0.0, 0.02, generator=torch.Generator(tensor.device).manual_seed(seed))
    if router_skew and tensor.dim() == 2 and name.endswith(".gate.weight"):
        experts_E = torch.arange(len(tensor), device=tensor.device) / len(tensor)
        tensor.mul_(torch.exp(router_skew * (0.5 - experts_E))[:, None].to(tensor.dtype))


def fill_randomly(targets: TensorTargets, router_skew: float = 0.0) -> int:
    """Weights of the right shape and no meaning, the same ones every time: for measuring speed. Returns their bytes.
    router_skew: as of make_random()."""
    num_bytes = 0
    for name, tensor in targets.tensors.items():
        make_random(name, tensor, num_bytes, router_skew)
        num_bytes += tensor.nbytes
    return num_bytes
