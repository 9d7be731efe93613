"""Names of routed experts in a checkpoint, in both layouts: three tensors an expert, or all experts in two tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from radixmesh.daemons.worker.checkpoint.loader import OtherTarget, TensorTargets, load_tensors
from radixmesh.daemons.worker.checkpoint.quantization import CheckpointQuantization
from radixmesh.daemons.worker.checkpoint.tensor_slice import TensorSlice
from radixmesh.daemons.worker.experts.expert_dispatch import ExpertShare
from radixmesh.daemons.worker.models.experts import ExpertWeights
from radixmesh.daemons.worker.models.sharding import Share


class ExpertNames(NamedTuple):
    """A family's names for an expert's projections."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


class ExpertSource(NamedTuple):
    """The experts of one layer in the checkpoint. targets_of: from some slots of `weights` to their tensors."""

    weights: ExpertWeights
    targets_of: Callable[[ExpertWeights], TensorTargets]


def read_experts(
    folder: Path,
    quantization: CheckpointQuantization | None,
    sources: Sequence[ExpertSource],
    wanted: Sequence[tuple[int, int, int]],
) -> None:
    """Fills slots with experts of the folder: (index in `sources`, slot, expert). Raises BAD_CHECKPOINT."""
    waiting = list(wanted)
    while waiting:
        # One of each layer at a time: in some layouts all experts of a layer are one tensor.
        chosen = {layer: (layer, slot, expert) for layer, slot, expert in reversed(waiting)}
        waiting = [item for item in waiting if chosen[item[0]] != item]
        tensors: dict[str, torch.Tensor] = {}
        others: dict[str, OtherTarget] = {}
        slices: dict[str, TensorSlice] = {}
        for layer, slot, expert in chosen.values():
            weights = sources[layer].weights.of(slot, 1, ExpertShare(expert, expert + 1))
            targets = sources[layer].targets_of(weights)
            tensors.update(targets.tensors)
            others.update(targets.others)
            fused = [*targets.tensors.items(), *((name, other.tensor) for name, other in targets.others.items())]
            cut = TensorSlice(0, ((expert, expert + 1),), weights.num_experts)
            slices.update((name, cut) for name, tensor in fused if tensor.dim() == 3)
        with torch.inference_mode():
            only = TensorTargets(tensors=tensors, is_ignored=lambda name: True, others=others, slices=slices)
            load_tensors(folder, only, quantization)


def expert_targets(
    prefix: str, weights: ExpertWeights, *, names: ExpertNames | None = None, fused_prefix: str | None = None
) -> TensorTargets:
    """`prefix`: what comes before the expert's number, e.g. "model.layers.3.mlp.experts".

    The fused layout is [experts, 2 x mlp size, hidden] of gate_up_proj and [experts, hidden, mlp size] of down_proj
    under `fused_prefix`, by default the same prefix.
    """
    names, weights = names or ExpertNames(), weights.loaded
    fused = fused_prefix or prefix
    mlp_size = weights.w_down_EFD.shape[1]
    gate_up, down = {}, {}
    share = weights.share
    experts = zip(range(share.start, share.stop), weights.w_gate_up_EDF2, weights.w_down_EFD, strict=True)
    for index, gate_up_DF2, down_FD in experts:
        gate_up[f"{prefix}.{index}.{names.gate}.weight"] = gate_up_DF2[:, :mlp_size].t()
        gate_up[f"{prefix}.{index}.{names.up}.weight"] = gate_up_DF2[:, mlp_size:].t()
        down[f"{prefix}.{index}.{names.down}.weight"] = down_FD.t()
    others = [index for index in range(weights.num_experts) if not share.start <= index < share.stop]
    return TensorTargets(
        elsewhere=frozenset(f"{prefix}.{index}.{name}.weight" for index in others for name in names),
        tensors=gate_up | down,
        is_ignored=lambda name: False,
        others={
            f"{fused}.gate_up_proj": OtherTarget(
                tensor=weights.w_gate_up_EDF2.transpose(1, 2), replaces=tuple(gate_up)
            ),
            f"{fused}.down_proj": OtherTarget(tensor=weights.w_down_EFD.transpose(1, 2), replaces=tuple(down)),
        },
    )


def fused_expert_targets(prefix: str, weights: ExpertWeights, *, is_interleaved: bool) -> TensorTargets:
    """All experts of a layer in tensors of [experts, in, out], with biases where the weights have them.

    is_interleaved: columns of gate and up alternate in gate_up_proj.
    """
    weights = weights.loaded
    columns, biases = weights.w_gate_up_EDF2, weights.b_gate_up_EF2
    if is_interleaved:
        columns = _alternating(columns)
        biases = None if biases is None else _alternating(biases)
    tensors = {f"{prefix}.gate_up_proj": columns, f"{prefix}.down_proj": weights.w_down_EFD}
    if biases is not None and weights.b_down_ED is not None:
        tensors |= {f"{prefix}.gate_up_proj_bias": biases, f"{prefix}.down_proj_bias": weights.b_down_ED}
    return TensorTargets(tensors=tensors, is_ignored=lambda name: False)


def mlp_slices(
    prefix: str, share: Share, size: int, names: ExpertNames | None = None
) -> Iterator[tuple[str, TensorSlice]]:
    """A rank's share of a gated MLP of `size`, which computes that part of its width."""
    names = names or ExpertNames()
    yield f"{prefix}.{names.gate}.weight", TensorSlice(0, (share,), size)
    yield f"{prefix}.{names.up}.weight", TensorSlice(0, (share,), size)
    yield f"{prefix}.{names.down}.weight", TensorSlice(1, (share,), size)


def expert_slices(
    prefix: str,
    num_experts: int,
    share: Share,
    mlp_size: int,
    names: ExpertNames | None = None,
    fused_prefix: str | None = None,
) -> Iterator[tuple[str, TensorSlice]]:
    """A rank's share of every expert, in both layouts of `expert_targets`."""
    for index in range(num_experts):
        yield from mlp_slices(f"{prefix}.{index}", share, mlp_size, names)
    fused, (start, stop) = fused_prefix or prefix, share
    yield f"{fused}.gate_up_proj", TensorSlice(1, (share, (mlp_size + start, mlp_size + stop)), 2 * mlp_size)
    yield f"{fused}.down_proj", TensorSlice(2, (share,), mlp_size)


def placed_expert_slices(prefix: str, placed: ExpertShare, num_experts: int) -> Iterator[tuple[str, TensorSlice]]:
    """Of the tensors that hold all experts, those that a rank holds whole."""
    for name in ("gate_up_proj", "down_proj"):
        yield f"{prefix}.{name}", TensorSlice(0, ((placed.start, placed.stop),), num_experts)


def fused_expert_slices(prefix: str, share: Share, mlp_size: int) -> Iterator[tuple[str, TensorSlice]]:
    """The same for `fused_expert_targets` without biases, gate and up one behind the other."""
    start, stop = share
    yield f"{prefix}.gate_up_proj", TensorSlice(2, (share, (mlp_size + start, mlp_size + stop)), 2 * mlp_size)
    yield f"{prefix}.down_proj", TensorSlice(1, (share,), mlp_size)


def _alternating(halves: torch.Tensor) -> torch.Tensor:
    """View [..., F, 2] of [..., 2F]: what alternates in the checkpoint lies one half behind the other with us."""
    *outer, size = halves.shape
    return halves.view(*outer, 2, size // 2).transpose(-1, -2)
