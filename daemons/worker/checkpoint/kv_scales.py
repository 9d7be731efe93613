"""Scales of keys and values that a checkpoint brings for a KV cache of FP8.

Names end in k_scale, v_scale, or kv_scale for both, anywhere within a layer: `self_attn.k_scale` (compressed-tensors),
`self_attn.attn.k_scale`, `self_attn.k_proj.k_scale` (ModelOpt). A tensor has one number, or one for each KV head.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch

from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.checkpoint.config_reader import bad_checkpoint
from radixmesh.daemons.worker.checkpoint.tensor_index import TensorEntry, index_tensors
from radixmesh.daemons.worker.checkpoint.tensor_reader import TensorReader
from radixmesh.kernels.kv_fp8 import KvScales

_log = get_logger(__name__)

_NAME = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(?P<layer>\d{1,6})\.(?:[\w.]+\.)?(?P<plane>k|v|kv)_scale$")

# Beyond, scales or their reciprocals overflow float32 in products with queries and keys, whose NaN stays in the pages.
_LEAST, _MOST = 2.0**-64, 2.0**64


def is_kv_scale(name: str) -> bool:
    """True for the name of such a tensor."""
    return _NAME.search(name) is not None


def read_kv_scales(
    folder: Path, *, num_layers: int, num_kv_heads: int, heads: tuple[int, int], device: torch.device
) -> tuple[KvScales, ...] | None:
    """Of each layer, for the KV heads [start, stop) of this rank out of `num_kv_heads`; None where there are none.

    A plane that has none in a layer, while others have, has scale 1. Raises MeshError BAD_CHECKPOINT naming file and
    tensor where a scale is no positive number from 2^-64 to 2^64, of another shape, or of a layer beyond the model's.
    """
    entries = {name: entry for name, entry in index_tensors(folder).items() if is_kv_scale(name)}
    if not entries:
        _log.warning("kv_scales_missing", folder=str(folder), taken=1.0)
        return None
    planes = {plane: torch.ones(num_layers, num_kv_heads) for plane in ("k", "v")}
    with TensorReader(entries) as reader:
        # Those of both planes first: what is said of one alone counts more.
        for name in sorted(entries, key=lambda name: (not name.endswith("kv_scale"), name)):
            match = _NAME.search(name)
            assert match is not None
            layer = int(match["layer"])
            if layer >= num_layers:
                raise bad_checkpoint(entries[name].file, f"holds {name!r}, but the model has {num_layers} layers", name)
            scale = _read(reader, entries, name, num_kv_heads)
            for plane in match["plane"]:
                planes[plane][layer] = scale
    start, stop = heads
    _log.info("kv_scales_loaded", num_tensors=len(entries))
    keys_LK, values_LK = (planes[plane][:, start:stop].contiguous().to(device) for plane in ("k", "v"))
    return tuple(KvScales(keys_LK[layer], values_LK[layer]) for layer in range(num_layers))


def _read(reader: TensorReader, entries: Mapping[str, TensorEntry], name: str, num_kv_heads: int) -> torch.Tensor:
    scale = reader.read(name).float().flatten()
    if len(scale) not in (1, num_kv_heads):
        raise bad_checkpoint(
            entries[name].file,
            f"holds {name!r} of shape {list(entries[name].shape)}, expected 1 or one a KV head, {num_kv_heads}",
            name,
        )
    if not bool(((scale >= _LEAST) & (scale <= _MOST)).all()):
        raise bad_checkpoint(
            entries[name].file,
            f"holds {name!r}, which is no positive number from 2^-64 to 2^64: convert the checkpoint again",
            name,
        )
    return scale
