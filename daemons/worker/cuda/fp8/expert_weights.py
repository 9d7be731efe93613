"""FP8 routed experts of a layer, made from an FP8 checkpoint as they are, or from any other.

Legend: E experts, D hidden size, F mlp size of an expert.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.cuda.fp8.weights import quantize_in_parts
from radixmesh.daemons.worker.cuda.weights.source import StoredWeight, WeightSource
from radixmesh.daemons.worker.experts.expert_dispatch import ExpertShare
from radixmesh.kernels.moe.quantized_experts import QuantizedExperts

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class PlainExpertWeights:
    """In the model's dtype; gate's rows are the first F of an expert's gate_up."""

    w_gate_up_E2FD: torch.Tensor
    w_down_EDF: torch.Tensor

    @property
    def expert_bytes(self) -> int:
        return self.w_gate_up_E2FD[0].nbytes + self.w_down_EDF[0].nbytes


ExpertMatrices = QuantizedExperts | PlainExpertWeights
_Projection = tuple[str, int, str, StoredWeight]
"""Name, slot and projection of a weight, in any order that files may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMaker:
    """share: experts of a layer that this rank loads, into the first of its num_slots. is_online: experts that come in
    another dtype are quantised; otherwise they stay as they are. is_fused: the source has all experts of a layer in two
    tensors."""

    source: WeightSource
    share: ExpertShare
    num_slots: int
    hidden: int
    mlp: int
    dtype: torch.dtype
    device: torch.device
    is_online: bool

    def make(self, prefix: str, *, is_fused: bool) -> ExpertMatrices:
        """prefix: what comes before an expert's number, e.g. "model.layers.3.mlp.experts".

        Raises MeshError BAD_CHECKPOINT, also where some of a layer's experts are FP8 and others are not.
        """
        weights = self._weights(prefix, is_fused=is_fused)
        first = next(weights)
        is_stored_fp8 = first[3].scales is not None
        if is_stored_fp8 or self.is_online:
            made: ExpertMatrices = QuantizedExperts.empty(self.num_slots, self.hidden, self.mlp, self.device)
        else:
            made = PlainExpertWeights(
                torch.empty(self.num_slots, 2 * self.mlp, self.hidden, dtype=self.dtype, device=self.device),
                torch.empty(self.num_slots, self.hidden, self.mlp, dtype=self.dtype, device=self.device),
            )
        self._put(made, (first, *weights), is_stored_fp8=is_stored_fp8)
        return made

    def refill(self, made: ExpertMatrices, slot: int, prefix: str, *, is_fused: bool) -> None:
        """Puts the experts of `share` into slots from that one on. Raises MeshError BAD_CHECKPOINT."""
        weights = [
            (name, slot + index, projection, stored)
            for name, index, projection, stored in self._weights(prefix, is_fused=is_fused)
        ]
        self._put(made, weights, is_stored_fp8=weights[0][3].scales is not None)

    def _put(self, made: ExpertMatrices, weights: Iterable[_Projection], *, is_stored_fp8: bool) -> None:
        for name, expert, projection, stored in weights:
            if (stored.scales is not None) is not is_stored_fp8:
                raise _mixed(name, is_stored_fp8=is_stored_fp8)
            if isinstance(made, QuantizedExperts):
                self._put_quantized(made, expert, projection, stored)
            else:
                _plain(made, expert, projection).copy_(stored.data)

    def _put_quantized(self, made: QuantizedExperts, expert: int, projection: str, stored: StoredWeight) -> None:
        of = {"gate_proj": made.gate, "up_proj": made.up, "down_proj": made.down}[projection](expert)
        data_NK, scales = stored.data, stored.scales
        if scales is None:
            plain_NK = data_NK.to(device=self.device, dtype=self.dtype)
            quantized = quantize_in_parts(plain_NK, is_grouped=True)
            data_NK, scales = quantized.data_NK, quantized.scales
        # As bytes: not all builds of torch copy FP8.
        of.data_NK.view(torch.uint8).copy_(data_NK.view(torch.uint8))
        of.scales.copy_(scales)

    def _weights(self, prefix: str, *, is_fused: bool) -> Iterator[_Projection]:
        return self._fused(prefix) if is_fused else self._single(prefix)

    def _single(self, prefix: str) -> Iterator[_Projection]:
        for slot, expert in enumerate(range(self.share.start, self.share.stop)):
            for projection in _PROJECTIONS:
                name = f"{prefix}.{expert}.{projection}.weight"
                yield name, slot, projection, self.source.take(name)

    def _fused(self, prefix: str) -> Iterator[_Projection]:
        name = f"{prefix}.gate_up_proj"
        for expert, gate_up in enumerate(self.source.take(name).data):
            yield name, expert, "gate_proj", StoredWeight(gate_up[: self.mlp], None)
            yield name, expert, "up_proj", StoredWeight(gate_up[self.mlp :], None)
        name = f"{prefix}.down_proj"
        for expert, down in enumerate(self.source.take(name).data):
            yield name, expert, "down_proj", StoredWeight(down, None)


def _plain(made: PlainExpertWeights, expert: int, projection: str) -> torch.Tensor:
    mlp = made.w_down_EDF.shape[2]
    match projection:
        case "gate_proj":
            return made.w_gate_up_E2FD[expert, :mlp]
        case "up_proj":
            return made.w_gate_up_E2FD[expert, mlp:]
    return made.w_down_EDF[expert]


def _mixed(name: str, *, is_stored_fp8: bool) -> MeshError:
    what = (
        "is not FP8, but the first expert of its layer is" if is_stored_fp8 else "is FP8, but the first expert is not"
    )
    return MeshError(
        ErrorReason.ERROR_REASON_BAD_CHECKPOINT,
        f"tensor {name!r} {what}: use --quantization none, which dequantises all of them",
        {"tensor": name},
    )
