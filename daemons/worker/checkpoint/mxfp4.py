"""MXFP4 weights (OCP Microscaling Formats, 2023) of experts, as GPT-OSS stores them, made numbers when they are read.

NAME_blocks   U8 [experts, out, in / 32, 16]   two numbers of 4 bits (e2m1) a byte, the earlier one in the low bits
NAME_scales   U8 [experts, out, in / 32]       of 32 numbers; 2 to the power of it, less 127
NAME          [experts, in, out]               what a checkpoint that is not quantised holds
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from radixmesh.daemons.worker.checkpoint.config_reader import bad_checkpoint
from radixmesh.daemons.worker.checkpoint.tensor_index import TensorEntry

MXFP4 = "MXFP4"
_BLOCKS, _SCALES = "_blocks", "_scales"
_GROUP, _EXPONENT_BIAS = 32, 127
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def with_mxfp4(entries: Mapping[str, TensorEntry], folder: Path) -> dict[str, TensorEntry]:
    """The same with an entry of dtype MXFP4 and of the shape of its numbers in place of each pair of tensors.

    Raises MeshError BAD_CHECKPOINT for blocks without scales, or of shapes that do not go together.
    """
    merged = dict(entries)
    for name in [name for name, entry in entries.items() if name.endswith(_BLOCKS) and entry.dtype == "U8"]:
        base = name.removesuffix(_BLOCKS)
        blocks, scales = merged.pop(name), merged.pop(base + _SCALES, None)
        if scales is None:
            raise bad_checkpoint(folder, f"lacks tensor {base + _SCALES!r}, the scales of an MXFP4 weight", base)
        is_whole = len(blocks.shape) == 4 and blocks.shape[3] == _GROUP // 2
        if not is_whole or scales.shape != blocks.shape[:3] or scales.dtype != "U8":
            raise bad_checkpoint(
                blocks.file,
                f"holds blocks {name!r} of shape {list(blocks.shape)} with scales {scales.dtype} {list(scales.shape)}, "
                "expected [experts, out, in / 32, 16] with U8 [experts, out, in / 32]",
                name,
            )
        num_experts, num_out, num_groups, _ = blocks.shape
        merged[base] = TensorEntry(
            file=blocks.file,
            shape=(num_experts, num_groups * _GROUP, num_out),
            dtype=MXFP4,
            parts=((name, blocks), (base + _SCALES, scales)),
        )
    return merged


def numbers(blocks_EOGB: torch.Tensor, scales_EOG: torch.Tensor) -> torch.Tensor:
    """bfloat16 [E, in, out], exact but for scales that leave its range."""
    table = torch.tensor([*_E2M1, *(-x for x in _E2M1)], dtype=torch.bfloat16)
    # By byte: both of its numbers.
    bytes_256 = torch.arange(256)
    pairs = torch.stack((table[bytes_256 & 15], table[bytes_256 >> 4]), dim=1)
    num_experts, num_out, num_groups, _ = blocks_EOGB.shape
    result = torch.empty(num_experts, num_groups * _GROUP, num_out, dtype=torch.bfloat16)
    # Expert by expert: indices are eight times as large as what they index.
    for expert in range(num_experts):
        values = pairs[blocks_EOGB[expert].long()].flatten(-2)
        exponents = scales_EOG[expert].int() - _EXPONENT_BIAS
        result[expert] = torch.ldexp(values, exponents[..., None]).flatten(-2).t()
    return result
