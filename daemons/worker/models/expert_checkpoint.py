"""Names of routed experts in a checkpoint, in both layouts: three tensors an expert, or all experts in two tensors."""

from __future__ import annotations

from typing import NamedTuple

from radixmesh.daemons.worker.checkpoint.loader import OtherTarget, TensorTargets
from radixmesh.daemons.worker.models.experts import ExpertWeights


class ExpertNames(NamedTuple):
    """A family's names for an expert's projections."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


def expert_targets(
    prefix: str, weights: ExpertWeights, *, names: ExpertNames | None = None, fused_prefix: str | None = None
) -> TensorTargets:
    """`prefix`: what comes before the expert's number, e.g. "model.layers.3.mlp.experts".

    The fused layout is [experts, 2 x mlp size, hidden] of gate_up_proj and [experts, hidden, mlp size] of down_proj
    under `fused_prefix`, by default the same prefix.
    """
    names = names or ExpertNames()
    fused = fused_prefix or prefix
    mlp_size = weights.w_down_EFD.shape[1]
    gate_up, down = {}, {}
    for index, (gate_up_DF2, down_FD) in enumerate(zip(weights.w_gate_up_EDF2, weights.w_down_EFD, strict=True)):
        gate_up[f"{prefix}.{index}.{names.gate}.weight"] = gate_up_DF2[:, :mlp_size].t()
        gate_up[f"{prefix}.{index}.{names.up}.weight"] = gate_up_DF2[:, mlp_size:].t()
        down[f"{prefix}.{index}.{names.down}.weight"] = down_FD.t()
    return TensorTargets(
        tensors=gate_up | down,
        is_ignored=lambda name: False,
        others={
            f"{fused}.gate_up_proj": OtherTarget(
                tensor=weights.w_gate_up_EDF2.transpose(1, 2), replaces=tuple(gate_up)
            ),
            f"{fused}.down_proj": OtherTarget(tensor=weights.w_down_EFD.transpose(1, 2), replaces=tuple(down)),
        },
    )
