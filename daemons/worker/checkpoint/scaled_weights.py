"""Weights that a checkpoint holds as FP8 (e4m3) beside their scales.

N rows (features out), K columns (features in); weight[n, k] = stored[n, k] * scale of its row, block or tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from radixmesh.daemons.worker.checkpoint.config_reader import bad_checkpoint
from radixmesh.daemons.worker.checkpoint.kv_scales import is_kv_scale
from radixmesh.daemons.worker.checkpoint.quantization import BLOCK, CheckpointQuantization, Fp8Form
from radixmesh.daemons.worker.checkpoint.tensor_index import TensorEntry
from radixmesh.daemons.worker.checkpoint.tensor_reader import TensorReader
from radixmesh.daemons.worker.checkpoint.tensor_slice import TensorSlice

_FP8 = "F8_E4M3"
# Suffixes that follow the name of the weight. Both tensors are factors of the stored numbers.
_SUFFIXES = ("_scale_inv", "_scale")
# Scales for rows and results: found here when the rows are there. Those of the KV cache are `kv_scales.py`'s.
_UNUSED = (".input_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale", ".kv_scale")


class ScaledWeights:
    """FP8 tensors of a folder, and the tensors of their scales.

    Raises MeshError BAD_CHECKPOINT where one has no scales, scales of another shape, or is said to be none.
    """

    def __init__(
        self, folder: Path, entries: Mapping[str, TensorEntry], quantization: CheckpointQuantization | None
    ) -> None:
        self._quantization = quantization
        self._scales: dict[str, str] = {}
        for name, entry in entries.items():
            if entry.dtype == _FP8:
                self._scales[name] = _scales_of(folder, name, entries, quantization)
        self._sides = frozenset(self._scales.values())

    def __contains__(self, name: str) -> bool:
        return name in self._scales

    def is_side(self, name: str) -> bool:
        """True if a tensor belongs to such weights, or to an FP8 KV cache, and is not loaded with them."""
        return name in self._sides or is_kv_scale(name) or (self._quantization is not None and name.endswith(_UNUSED))

    def read_scales(self, reader: TensorReader, name: str, cut: TensorSlice | None = None) -> torch.Tensor:
        """Of the weight [N, K] of that name: float32 [N, 1], or [N / 128, K / 128] rounded up in the form of blocks.

        cut: of the share of a rank; a share of rows that begins or ends within a block gets a row of scales for each.
        Features in are cut at blocks.
        """
        assert self._quantization is not None
        scales_name, shape = self._scales[name], reader.entries[name].shape
        scales = reader.read(scales_name).float()
        if not bool((torch.isfinite(scales) & (scales >= 0)).all()):
            raise bad_checkpoint(
                reader.entries[scales_name].file,
                f"holds scales {scales_name!r} that are no positive numbers: convert the checkpoint again",
                scales_name,
            )
        if self._quantization.form is Fp8Form.BLOCK:
            if cut is None:
                return scales
            if cut.dim == 0 and not cut.is_aligned(BLOCK):
                return cut.take(scales.repeat_interleave(BLOCK, 0)[: shape[0]].__getitem__)
            return cut.in_blocks(BLOCK).take(scales.__getitem__).contiguous()
        scales = scales.reshape(-1, 1).expand(shape[0], 1)
        return scales if cut is None or cut.dim else cut.take(scales.__getitem__)

    def read(self, reader: TensorReader, name: str, cut: TensorSlice | None = None) -> torch.Tensor:
        """A tensor or a rank's share: as it is stored, or where it is FP8 float32 [N, K], multiplied by its scales."""
        stored = reader.read(name, cut)
        if name not in self._scales:
            return stored
        return dequantized(stored, self.read_scales(reader, name, cut))


def dequantized(stored_NK: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 [N, K], exact; `scales` as ScaledWeights.read_scales gives them."""
    weight_NK = stored_NK.float()
    num_rows, num_columns = stored_NK.shape
    if scales.shape[0] != num_rows:
        scales = scales.repeat_interleave(BLOCK, 0)[:num_rows]
    if scales.shape[1] != 1:
        scales = scales.repeat_interleave(BLOCK, 1)[:, :num_columns]
    return weight_NK.mul_(scales)


def _scales_of(
    folder: Path, name: str, entries: Mapping[str, TensorEntry], quantization: CheckpointQuantization | None
) -> str:
    entry = entries[name]
    if quantization is None:
        what = f"holds tensor {name!r} as {_FP8}, but config.json has no quantization_config that says how"
        raise bad_checkpoint(entry.file, f"{what}: take it from where the model came from", name)
    if quantization.keeps(name.removesuffix(".weight")):
        what = f"holds tensor {name!r} as {_FP8}, which config.json's quantization_config says is not quantised"
        raise bad_checkpoint(entry.file, what, name)
    if len(entry.shape) != 2:
        what = f"holds tensor {name!r} of shape {list(entry.shape)} as {_FP8}: only matrices may be, also of experts"
        raise bad_checkpoint(entry.file, what, name)
    scales = next((name + suffix for suffix in _SUFFIXES if name + suffix in entries), None)
    if scales is None:
        raise bad_checkpoint(folder, f"lacks tensor '{name}_scale' (or _scale_inv), the scales of an FP8 weight", name)
    expected = _scale_shapes(entry.shape, quantization.form)
    if entries[scales].shape not in expected:
        raise bad_checkpoint(
            entries[scales].file,
            f"holds scales {scales!r} of shape {list(entries[scales].shape)}, expected {list(expected[-1])} "
            f"for a weight {list(entry.shape)} quantised as {quantization.form}",
            scales,
        )
    return scales


def _scale_shapes(shape: tuple[int, ...], form: Fp8Form) -> tuple[tuple[int, ...], ...]:
    """Those that may be there, of a matrix."""
    if form is Fp8Form.BLOCK:
        return ((-(-shape[0] // BLOCK), -(-shape[1] // BLOCK)),)
    return ((), (1,), (1, 1), (shape[0],), (shape[0], 1))
