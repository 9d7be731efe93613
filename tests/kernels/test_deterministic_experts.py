"""Deterministic mode with routed experts: the bits of a sequence do not depend on who shares its step or a tile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.deepseek_folders import random_deepseek, save_deepseek
from support.device_settings import TINY_SETTINGS
from support.fp8_folders import Form, write_fp8
from support.model_folders import random_model

from radixmesh.daemons.worker.cuda import kernel_choice
from radixmesh.daemons.worker.cuda.device import HostDevice
from radixmesh.daemons.worker.cuda.load import load_device_runner
from radixmesh.daemons.worker.runner import ModelRunner, Segment

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tensors of the host need Triton's interpreter")

_SETTINGS = replace(
    TINY_SETTINGS,
    page_size=4,
    num_pages=60,
    num_slots=4,
    max_total_len=48,
    max_tokens_per_step=64,
    attention_backend="triton",
    dtype="bfloat16",
    deterministic=True,
)
_LENS = (3, 1, 29)


@pytest.mark.parametrize(
    "name", ["deepseek-fp8", *(pytest.param(name, marks=pytest.mark.full) for name in ("deepseek", "mixtral"))]
)
def test_a_sequence_has_the_same_bits_alone_and_among_others(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 33 rows on 8 experts, tiles have other rows in them; without the mode, libraries would compute so many."""
    monkeypatch.setattr(kernel_choice, "kernels_name", lambda settings, device: "triton")
    runner = load_device_runner(_folder(name, tmp_path), _SETTINGS, HostDevice())
    segments = [_segment(slot, length) for slot, length in enumerate(_LENS, start=1)]
    together = _logits(runner, segments)
    for index, segment in enumerate(segments[:2]):
        (alone,) = _logits(runner, [segment])
        assert np.array_equal(alone.view(np.int32), together[index].view(np.int32)), index


def _folder(name: str, tmp_path: Path) -> Path:
    if name == "mixtral":
        random_model("mixtral").save_pretrained(tmp_path / "plain")
        return tmp_path / "plain"
    folder = save_deepseek(random_deepseek("v3_groups"), tmp_path / "plain")
    return folder if name == "deepseek" else write_fp8(folder, tmp_path / "fp8", Form.BLOCK)


def _segment(slot: int, length: int) -> Segment:
    ids = (np.arange(length) * 7 % 90 + 11 * slot).astype(np.int32)
    return Segment(slot=slot, ids=ids, start=0, pages=np.arange(12 * slot, 12 * slot + 12, dtype=np.int32))


def _logits(runner: ModelRunner, segments: list[Segment]) -> list[np.ndarray]:
    return [np.asarray(part, np.float32) for part in runner.logits(segments)]  # type: ignore[attr-defined]
