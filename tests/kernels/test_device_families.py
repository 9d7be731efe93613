"""Decoders of all families on a device, with plain torch for kernels, against transformers in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.device_settings import TINY_SETTINGS
from support.family_folders import FAMILIES, family_folder, family_model
from support.model_folders import SHAPES, random_model
from transformers import PreTrainedModel

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.cuda.device import HostDevice
from radixmesh.daemons.worker.cuda.load import load_device_runner
from radixmesh.daemons.worker.cuda.runner import DeviceRunner
from radixmesh.daemons.worker.runner import Segment

_LENGTH = 60
_SETTINGS = replace(
    TINY_SETTINGS, page_size=4, num_pages=40, num_slots=2, max_tokens_per_step=_LENGTH, max_total_len=_LENGTH + 4
)
_TOLERANCE = 1e-4


def _logits(folder: Path, ids: np.ndarray, lengths: Sequence[int], **changes: str) -> np.ndarray:
    runner = load_device_runner(folder, replace(_SETTINGS, **changes), HostDevice())  # type: ignore[arg-type]
    assert isinstance(runner, DeviceRunner)
    pages = np.random.default_rng(0).permutation(_SETTINGS.num_pages or 0)[: -(-_LENGTH // 4)].astype(np.int32)
    parts, start = [], 0
    for length in lengths:
        segment = Segment(slot=1, ids=ids[start : start + length], start=start, pages=pages)
        parts += runner.logits([segment])
        start += length
    return np.concatenate(parts)


def _check(model: PreTrainedModel, folder: Path, **changes: str) -> None:
    ids = np.random.default_rng(1).integers(0, model.config.vocab_size, _LENGTH).astype(np.int32)
    with torch.inference_mode():
        want = model(torch.from_numpy(ids).long()[None]).logits[0].numpy()
    np.testing.assert_allclose(_logits(folder, ids, (37, 1, 22), **changes), want, rtol=0, atol=_TOLERANCE * want.std())


@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_computed(name: str, tmp_path: Path) -> None:
    model = family_model(name)
    _check(model, family_folder(model, tmp_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="tensors of the host need Triton's interpreter")
@pytest.mark.parametrize("attention", ["triton", "flashinfer"])
@pytest.mark.parametrize(
    ("name", "feature"),
    [("gemma2", "soft-capped"), ("gpt_oss", "attention sinks"), ("llama4", "chunked attention")],
)
def test_scores_and_masks_of_some_families_are_computed_by_our_kernels_and_refused_by_flashinfer(
    attention: str, name: str, feature: str, tmp_path: Path
) -> None:
    model = family_model(name)
    folder = family_folder(model, tmp_path)
    if attention == "triton":
        _check(model, folder, attention_backend=attention)
        return
    # Before weights are read, which would fail.
    (folder / "model.safetensors").unlink()
    with pytest.raises(MeshError, match=feature) as caught:
        load_device_runner(folder, replace(_SETTINGS, attention_backend=attention), HostDevice())
    assert caught.value.reason_name == "UNSUPPORTED"


@pytest.mark.parametrize("quantization", ["fp8", "fp8-block"])
@pytest.mark.parametrize("name", ["phi4_longrope", "glm4", "gemma3"])
def test_fp8_matrices_serve_every_part(name: str, quantization: str, tmp_path: Path) -> None:
    """Rows of queries and keys are reordered for RoPE with their scales."""
    model = family_model(name)
    folder = family_folder(model, tmp_path)
    ids = np.random.default_rng(1).integers(0, model.config.vocab_size, _LENGTH).astype(np.int32)
    with torch.inference_mode():
        want = model(torch.from_numpy(ids).long()[None]).logits[0].numpy()
    got = _logits(folder, ids, (_LENGTH,), quantization=quantization)
    # Weights and rows have 3 bits behind the leading one.
    assert np.linalg.norm(got - want) < 0.3 * np.linalg.norm(want)


@pytest.mark.parametrize(("name", "what"), [("gpt2", "lie \\[in, out\\]"), ("gpt_neox", "by head")])
def test_fp8_is_refused_where_projections_lie_otherwise(name: str, what: str, tmp_path: Path) -> None:
    folder = family_folder(family_model(name), tmp_path)
    with pytest.raises(MeshError, match=what):
        load_device_runner(folder, replace(_SETTINGS, quantization="fp8"), HostDevice())


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_computed(name: str, tmp_path: Path) -> None:
    model = random_model(name)
    model.save_pretrained(tmp_path)
    _check(model, tmp_path)
