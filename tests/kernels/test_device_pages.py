"""Pages of the device's runner and of the CPU's: of one fingerprint only where their numbers mean the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.deepseek_folders import random_deepseek
from support.device_settings import TINY_SETTINGS
from support.family_folders import family_folder, family_model
from support.model_folders import random_model

from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.cpu.runner import CpuRunner
from radixmesh.daemons.worker.cuda.device import HostDevice
from radixmesh.daemons.worker.cuda.load import load_device_runner
from radixmesh.daemons.worker.cuda.runner import DeviceRunner
from radixmesh.daemons.worker.runner import Segment

_LENGTH, _PAGES = 24, 8
_SETTINGS = replace(
    TINY_SETTINGS, page_size=4, num_pages=_PAGES, num_slots=2, max_tokens_per_step=_LENGTH, max_total_len=_LENGTH + 4
)


def _on_device(folder: Path) -> DeviceRunner:
    runner = load_device_runner(folder, _SETTINGS, HostDevice())
    assert isinstance(runner, DeviceRunner)
    return runner


def _on_cpu(folder: Path, max_total_len: int = _LENGTH + 4) -> CpuRunner:
    runner = load_cpu_runner(folder, page_size=4, num_pages=_PAGES, threads=1, max_total_len=max_total_len)
    assert isinstance(runner, CpuRunner)
    return runner


def _written(runner: CpuRunner | DeviceRunner, plane: str) -> torch.Tensor:
    """A layer's numbers for a few tokens, [_LENGTH, *row_shape]."""
    ids = np.random.default_rng(1).integers(0, 100, _LENGTH).astype(np.int32)
    runner.logits([Segment(slot=1, ids=ids, start=0, pages=np.arange(6, dtype=np.int32))])
    return runner.pool.tokens(plane, 1)[:_LENGTH].float().clone()


@pytest.mark.parametrize(
    ("model", "plane", "is_one"),
    [
        (lambda: random_model("qwen3"), "keys", True),
        (lambda: family_model("phi4_longrope"), "keys", False),
        (lambda: family_model("glm4"), "keys", False),
        (lambda: random_deepseek("v3_groups"), "latents", True),
    ],
    ids=["qwen3", "partial_rope", "interleaved_rope", "deepseek"],
)
def test_equal_fingerprints_mean_equal_numbers(
    model: Callable[[], torch.nn.Module], plane: str, is_one: bool, tmp_path: Path
) -> None:
    folder = family_folder(model(), tmp_path)  # type: ignore[arg-type]
    device, cpu = _on_device(folder), _on_cpu(folder)
    assert device.kv_dtype == cpu.kv_dtype == "float32" and device.kv_layout and cpu.kv_layout
    got, want = _written(device, plane), _written(cpu, plane)
    assert torch.allclose(got, want, rtol=0, atol=1e-4 * float(want.std())) == is_one
    assert (device.kv_layout == cpu.kv_layout) == is_one


def test_factors_of_longrope_are_part_of_the_fingerprint(tmp_path: Path) -> None:
    """One list of two serves a worker, by the longest sequence that it takes."""
    folder = family_folder(family_model("phi4_longrope"), tmp_path)
    short, same, long = (_on_cpu(folder, length) for length in (28, 32, 33))
    assert short.kv_layout == same.kv_layout != long.kv_layout
    assert not torch.allclose(_written(short, "keys"), _written(long, "keys"))
