"""FP8 experts and DeepSeek with FP8 weights on a GPU, in captured graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.deepseek_folders import TINY_DEEPSEEK
from support.device_settings import TINY_SETTINGS
from support.fp8_experts import random_experts
from support.fp8_folders import Form, write_fp8
from support.plan_driver import check_same, drive
from support.rounding import typical_chain_error, typical_fp8_error
from transformers import AutoConfig

from radixmesh.daemons.worker.cuda.device import HostDevice
from radixmesh.daemons.worker.cuda.load import load_cuda_runner, load_device_runner
from radixmesh.daemons.worker.runner import Segment
from radixmesh.kernels.fp8.quantized import FP8
from radixmesh.kernels.moe.fp8_grouped_gemm import (
    default_fp8_config,
    fp8_routed_experts,
    fp8_routed_experts_reference,
)
from radixmesh.kernels.moe.route import Routes

pytestmark = pytest.mark.gpu

# Hidden size, mlp size, experts and picks.
_SHAPES = {"deepseek-v3-narrow": (7168, 2048, 16, 8), "odd": (200, 328, 8, 2), "tiny-deepseek": (128, 64, 8, 2)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", _SHAPES)
def test_captured_experts_are_torchs(shape: str, dtype: torch.dtype) -> None:
    """From one row to more than a tile of each expert, in the configuration for so many and in the fixed one."""
    hidden, mlp, num_experts, num_picks = _SHAPES[shape]
    for num_rows in (1, 9, 40, 300):
        experts, x_TD, routes = random_experts(
            num_rows, num_experts, num_picks, hidden, mlp, dtype, torch.device("cuda")
        )
        want = fp8_routed_experts_reference(x_TD[-16:], Routes(*(part[-16:] for part in routes)), experts).float()
        for config in (None, default_fp8_config(1, 1)):
            fp8_routed_experts(x_TD, routes, experts, config=config)
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                got = fp8_routed_experts(x_TD, routes, experts, config=config)
            graph.replay()
            torch.cuda.synchronize()
            error = float((got[-16:].float() - want).norm() / want.norm())
            # Numbers that lie in the middle of two of FP8 are rounded by the last bit of what comes before.
            assert error < typical_chain_error(1, FP8), (num_rows, config, error)


def test_a_rows_bits_do_not_depend_on_the_others() -> None:
    experts, x_TD, routes = random_experts(64, 16, 8, 7168, 2048, torch.bfloat16, torch.device("cuda"))
    config = default_fp8_config(1, 1)
    together = fp8_routed_experts(x_TD, routes, experts, config=config)
    for row in (0, 33, 63):
        own = Routes(*(part[row : row + 1].contiguous() for part in routes))
        assert torch.equal(fp8_routed_experts(x_TD[row : row + 1], own, experts, config=config)[0], together[row])


@pytest.mark.parametrize("deterministic", [False, True])
def test_tiny_deepseek_is_near_the_references(deterministic: bool, tmp_path: Path) -> None:
    folder = write_fp8(TINY_DEEPSEEK, tmp_path / "fp8", Form.BLOCK)
    settings = replace(TINY_SETTINGS, attention_backend="triton", num_pages=2048, max_total_len=128, cuda_graphs=True)
    runner = load_cuda_runner(folder, replace(settings, use_pdl=True, deterministic=deterministic))
    host = load_device_runner(folder, replace(settings, attention_backend="torch", cuda_graphs=False), HostDevice())
    ids, pages = np.arange(3, 63, dtype=np.int32), np.arange(60, dtype=np.int32)
    for count in (1, 60):
        segments = [Segment(slot=1, ids=ids[:count], start=0, pages=pages)]
        (got,), (want,) = runner.logits(segments), host.logits(segments)
        errors = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
        assert np.median(errors) < typical_fp8_error(AutoConfig.from_pretrained(TINY_DEEPSEEK)), errors
    want = drive(runner, chunk_len=16, lag=0)
    runner.clear()
    check_same(drive(runner, chunk_len=16, lag=2), want, atol=1e-4)
