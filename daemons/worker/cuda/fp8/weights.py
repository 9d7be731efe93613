"""The weights of a decoder whose projections are FP8, made from an FP8 checkpoint as it is, or from any other.

Each is made by itself on the device: beside those that are there, one is held in the model's dtype at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.checkpoint.loader import TensorTargets
from radixmesh.daemons.worker.checkpoint.quantization import CheckpointQuantization, Fp8Form
from radixmesh.daemons.worker.cuda.weights.source import StoredWeight, WeightSource
from radixmesh.daemons.worker.models.decoder.checkpoint import Part, layer_parts
from radixmesh.daemons.worker.models.decoder.config import DecoderConfig
from radixmesh.kernels.fp8.quantized import FP8, GROUP, QuantizedMatrix, quantize_matrix

# Whole blocks, so that they are quantised as those of the whole matrix.
_ROWS_AT_ONCE = 8 * GROUP

Matrix = torch.Tensor | QuantizedMatrix
"""[out, in]; a tensor of the model's dtype where it is not FP8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMatrices:
    """The projections of a layer: q, k, v are one, gate and up are one; None where experts replace the MLP."""

    qkv: Matrix
    o: Matrix
    gate_up: Matrix | None
    down: Matrix | None

    def all(self) -> tuple[Matrix, ...]:
        return tuple(each for each in (self.qkv, self.o, self.gate_up, self.down) if each is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedLayers:
    """num_plain: how many matrices of the layers stayed in the model's dtype."""

    form: Fp8Form
    layers: tuple[LayerMatrices, ...]

    @property
    def num_plain(self) -> int:
        return sum(isinstance(matrix, torch.Tensor) for layer in self.layers for matrix in layer.all())


def chosen_form(flag: str, checkpoint: CheckpointQuantization | None) -> Fp8Form | None:
    """Quantisation by --quantization and the checkpoint together; None: the model's dtype. Raises MeshError."""
    if flag == "none":
        return None
    if flag == "auto":
        return None if checkpoint is None else checkpoint.form
    if flag not in tuple(Fp8Form):
        choices = ", ".join(("auto", "none", *Fp8Form))
        raise _invalid(f"is {flag!r}: choose one of {choices}")
    form = Fp8Form(flag)
    if checkpoint is not None and checkpoint.form is not form:
        raise _invalid(f"{form} is not what the checkpoint holds, {checkpoint.form}: use --quantization auto, or none")
    return form


def load_layers(
    config: DecoderConfig,
    targets: TensorTargets,
    source: WeightSource,
    form: Fp8Form,
    *,
    dtype: torch.dtype,
    device: torch.device,
    is_online: bool,
) -> QuantizedLayers:
    """Takes all that the targets name: fills those with memory, and makes the projections of the layers, which have
    none. is_online: projections that come in another dtype are quantised; otherwise they stay as they are."""
    maker = MatrixMaker(source, form, dtype, device, is_online)
    for name, tensor in targets.tensors.items():
        if not tensor.is_meta:
            tensor.copy_(source.take(name).full())
    layers = []
    for index in range(config.num_layers):
        parts = layer_parts(config, index)
        layers.append(
            LayerMatrices(
                qkv=maker.make(*_names(parts.qkv)),
                o=maker.make(*_names(parts.o)),
                gate_up=maker.make(*_names(parts.gate_up)),
                down=maker.make(*_names(parts.down)),
            )
        )
    return QuantizedLayers(form=form, layers=tuple(layers))


class MatrixMaker:
    """Takes projections from a source, as FP8 matrices where they are stored so, or are to be quantised (is_online)."""

    def __init__(
        self, source: WeightSource, form: Fp8Form, dtype: torch.dtype, device: torch.device, is_online: bool
    ) -> None:
        self._source = source
        self._is_grouped = form is Fp8Form.BLOCK
        self._dtype = dtype
        self._device = device
        self._is_online = is_online

    def make(self, *modules: str) -> Matrix:
        """Of projections that become one matrix, in this order. Raises MeshError BAD_CHECKPOINT."""
        stored = [self._source.take(f"{module}.weight") for module in modules]
        scales = [weight.scales for weight in stored if weight.scales is not None]
        if len(scales) == len(stored):
            return self._as_it_is(stored, scales)
        plain_NK = self._joined([weight.full() for weight in stored], self._dtype)
        if self._is_online:
            return quantize_in_parts(plain_NK, is_grouped=self._is_grouped)
        # At least one part is not FP8: a fused matrix has one dtype.
        return plain_NK

    def _as_it_is(self, stored: Sequence[StoredWeight], scales: Sequence[torch.Tensor]) -> QuantizedMatrix:
        assert all(weight.data.dtype == FP8 for weight in stored)
        sizes = [weight.data.shape[0] for weight in stored]
        group_rows = GROUP if self._is_grouped else 1
        is_cut_within_block = any(
            size > 1 and len(of_part) == size for size, of_part in zip(sizes, scales, strict=True)
        )
        if self._is_grouped and (is_cut_within_block or any(size % GROUP for size in sizes[:-1])):
            # Blocks of the parts are none of the whole: each row has its own scales.
            group_rows = 1
            scales = [
                of_part if len(of_part) == size else of_part.repeat_interleave(GROUP, 0)[:size]
                for size, of_part in zip(sizes, scales, strict=True)
            ]
        # As bytes: not all builds of torch copy FP8.
        data_NK = self._joined([weight.data.view(torch.uint8) for weight in stored], torch.uint8).view(FP8)
        return QuantizedMatrix(data_NK, self._joined(scales, torch.float32), group_rows, self._is_grouped)

    def _joined(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """One below the other on the device, where they take the memory of the result alone."""
        joined = torch.empty(sum(map(len, parts)), parts[0].shape[1], dtype=dtype, device=self._device)
        first = 0
        for part in parts:
            joined[first : first + len(part)].copy_(part)
            first += len(part)
        return joined


def _names(parts: Sequence[Part]) -> list[str]:
    return [part.name for part in parts]


def quantize_in_parts(plain_NK: torch.Tensor, *, is_grouped: bool) -> QuantizedMatrix:
    """`quantize_matrix`, some rows at a time: it holds them in float32."""
    parts = [quantize_matrix(rows, is_grouped=is_grouped) for rows in torch.split(plain_NK, _ROWS_AT_ONCE)]
    data_NK = torch.cat([part.data_NK.view(torch.uint8) for part in parts]).view(FP8)
    return QuantizedMatrix(data_NK, torch.cat([part.scales for part in parts]), parts[0].group_rows, is_grouped)


def _invalid(what: str) -> MeshError:
    return MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, f"quantization {what}", {"field": "quantization"})
