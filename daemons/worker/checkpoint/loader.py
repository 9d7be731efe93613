"""Fills a model's tensors from a folder, one tensor in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from radixmesh.daemons.worker.checkpoint.config_reader import bad_checkpoint
from radixmesh.daemons.worker.checkpoint.load_progress import LoadProgress, stored_bytes
from radixmesh.daemons.worker.checkpoint.mxfp4 import with_mxfp4
from radixmesh.daemons.worker.checkpoint.quantization import CheckpointQuantization
from radixmesh.daemons.worker.checkpoint.scaled_weights import ScaledWeights
from radixmesh.daemons.worker.checkpoint.tensor_index import TensorEntry, index_tensors
from radixmesh.daemons.worker.checkpoint.tensor_reader import TensorReader
from radixmesh.daemons.worker.checkpoint.tensor_slice import TensorSlice

_SHOWN_NAMES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherTarget:
    """A tensor that some checkpoints hold in the place of the tensors named `replaces`: renamed, or all in one."""

    tensor: torch.Tensor
    replaces: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorTargets:
    """Destinations of the tensors of a checkpoint.

    tensors: name in the checkpoint -> the tensor to fill, of the checkpoint's shape; often a view (a transposed slice
    of a fused weight). One of more than two dims may have neighbouring dims that are one in the checkpoint, as those of
    tensors whose rows are in another order than ours. is_ignored: names that may be there and mean nothing to this
    model. others: names of other
    layouts of the same checkpoint; one that is there stands for those that it replaces. slices: by name, that of
    `tensors` or `others`, the share that a target is of the checkpoint's tensor; targets of other names are of the
    whole. elsewhere: names of tensors that other ranks hold.
    """

    tensors: Mapping[str, torch.Tensor]
    is_ignored: Callable[[str], bool]
    others: Mapping[str, OtherTarget] = field(default_factory=dict)
    slices: Mapping[str, TensorSlice] = field(default_factory=dict)
    elsewhere: frozenset[str] = frozenset()

    def in_layout_of(self, names: Collection[str]) -> TensorTargets:
        """The same without others: each tensor by the name that a checkpoint with these names has it under."""
        others = {name: other for name, other in self.others.items() if name in names}
        replaced = {name for other in others.values() for name in other.replaces}
        tensors = {name: tensor for name, tensor in self.tensors.items() if name not in replaced}
        tensors.update((name, other.tensor) for name, other in others.items())
        slices = {name: cut for name, cut in self.slices.items() if name in tensors}
        for name, other in others.items():
            if name in self.slices:
                slices[name] = self.slices[name]
                continue
            cuts = {self.slices[replaced] for replaced in other.replaces if replaced in self.slices}
            # Of a tensor that is renamed; what stands for several has a share of its own name.
            assert len(cuts) <= len(other.replaces) == 1 or not cuts, f"{name} is in the place of shares"
            slices.update((name, cut) for cut in cuts)
        return replace(self, tensors=tensors, others={}, slices=slices)

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor in the checkpoint."""
        shape = tuple(self.tensors[name].shape)
        return self.slices[name].whole_shape(shape) if name in self.slices else shape


def load_tensors(folder: Path, targets: TensorTargets, quantization: CheckpointQuantization | None = None) -> int:
    """Copies every tensor of the folder into its target, converting dtype and device. Returns the bytes read.

    Weights that are FP8, as `quantization` says, are multiplied by their scales, as are those that are MXFP4. All names
    and shapes are checked before any data is read. Raises MeshError BAD_CHECKPOINT naming file and tensor.
    """
    entries = with_mxfp4(index_tensors(folder), folder)
    targets = targets.in_layout_of(entries)
    scaled = ScaledWeights(folder, entries, quantization)
    check_tensors(folder, entries, targets, scaled)
    names = [name for name in entries if name in targets.tensors]
    progress = LoadProgress(sum(stored_bytes(entries[name], targets.slices.get(name)) for name in names))
    with TensorReader(entries, progress) as reader:
        for name in sorted(names, key=lambda name: entries[name].file):
            target = targets.tensors[name]
            target.copy_(scaled.read(reader, name, targets.slices.get(name)).reshape(target.shape))
        return reader.num_bytes


def check_tensors(
    folder: Path, entries: Mapping[str, TensorEntry], targets: TensorTargets, scaled: ScaledWeights
) -> None:
    """Raises MeshError BAD_CHECKPOINT for a missing, unexpected or wrongly shaped tensor.

    `targets` are without others; what goes beside the `scaled` ones has no place of its own.
    """
    assert not targets.others, sorted(targets.others)
    missing = [name for name in targets.tensors if name not in entries]
    if missing:
        expected = f"{missing[0]!r} of shape {list(targets.stored_shape(missing[0]))}"
        raise bad_checkpoint(folder, f"lacks tensor {expected}{_and_others(missing)}", missing[0])
    unexpected = [
        name
        for name in entries
        if name not in targets.tensors
        and name not in targets.elsewhere
        and not targets.is_ignored(name)
        and not scaled.is_side(name)
    ]
    if unexpected:
        name = unexpected[0]
        raise bad_checkpoint(
            entries[name].file,
            f"holds tensor {name!r}, which config.json has no place for{_and_others(unexpected)}: "
            "is it the config of another model?",
            name,
        )
    for name, entry in entries.items():
        if entry.dtype == "U8":
            what = f"holds tensor {name!r} as U8, which is for the blocks and scales of MXFP4 experts alone"
            raise bad_checkpoint(entry.file, what, name)
        if entry.dtype in ("I64", "BOOL") and name in targets.tensors and targets.tensors[name].is_floating_point():
            raise bad_checkpoint(entry.file, f"holds tensor {name!r} as {entry.dtype}, which is no weight", name)
    for name in targets.tensors:
        expected_shape = targets.stored_shape(name)
        if not _is_merged(expected_shape, entries[name].shape):
            raise bad_checkpoint(
                entries[name].file,
                f"holds tensor {name!r} of shape {list(entries[name].shape)}, expected {list(expected_shape)}",
                name,
            )


def _is_merged(shape: tuple[int, ...], stored: tuple[int, ...]) -> bool:
    """True if `stored` is `shape`, or that with some neighbouring dims as one."""
    if len(stored) >= len(shape):
        return shape == stored
    if not stored:
        return False
    size, num_dims = 1, 0
    while num_dims < len(shape) and size < stored[0]:
        size *= shape[num_dims]
        num_dims += 1
    return size == stored[0] and (num_dims > 0) and _is_merged(shape[num_dims:], stored[1:])


def _and_others(names: list[str]) -> str:
    if len(names) == 1:
        return ""
    others = ", ".join(repr(name) for name in names[1 : 1 + _SHOWN_NAMES])
    return f" and {len(names) - 1} more ({others}{', ...' if len(names) > 1 + _SHOWN_NAMES else ''})"
