"""Writes the machine code that comes with the sources: the GEMM variants that tuning tries for common models.

    python bench/gpu/ship_cubins.py

Compiles for compute capability 9.0 with the NVRTC that is installed, of which no GPU is needed: some minutes of one
core, or less where a worker has compiled them. The archive lies beside the sources, `kernels/gemm_sm90/`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from gpu.shapes import SHAPES

from radixmesh.kernels.gemm_sm90.candidates import candidates, few_rows_candidates
from radixmesh.kernels.gemm_sm90.nvrtc import Nvrtc, key_of
from radixmesh.kernels.gemm_sm90.shipped import archive, write_shipped
from radixmesh.kernels.gemm_sm90.variants import Variant, variant_of

MODELS = ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "qwen3-4b")
# Those that a worker tunes for.
_ROWS = (8, 16, 32, 64, 128, 256)


def variants() -> list[Variant]:
    """In bfloat16, each once."""
    found: dict[Variant, None] = {}
    for model in MODELS:
        for num_out, num_in, is_gated in _gemms(SHAPES[model]):
            for num_rows in _ROWS:
                few = few_rows_candidates(num_rows, num_out, num_in, is_gated=is_gated)
                for config in (*candidates(num_rows, num_out, num_in, is_gated=is_gated), *few):
                    found[variant_of(config, num_rows, is_gated, torch.bfloat16)] = None
    return list(found)


def _gemms(shape: Mapping[str, object]) -> Iterator[tuple[int, int, bool]]:
    """Features out (of gate alone) and in of a model's matrices; whether they are gate and up."""

    def size(name: str) -> int:
        value = shape[name]
        assert isinstance(value, int), name
        return value

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    head_dim = size("head_dim") if "head_dim" in shape else hidden // heads
    yield size("intermediate_size"), hidden, True
    yield hidden, size("intermediate_size"), False
    yield (heads + 2 * size("num_key_value_heads")) * head_dim, hidden, False
    yield hidden, heads * head_dim, False
    yield size("vocab_size"), hidden, False


def main() -> None:
    nvrtc = Nvrtc()
    major, minor = nvrtc.version
    codes = {key_of(source, nvrtc.version): nvrtc.cubin(source) for source in (v.source() for v in variants())}
    path = archive((int(major), int(minor)))
    write_shipped(path, codes)
    print(f"{len(codes)} kernels, {sum(map(len, codes.values()))} bytes, {path.stat().st_size} in {path}")


if __name__ == "__main__":
    main()
