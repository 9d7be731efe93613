"""DeepSeek on a device's runner: latent attention and routed experts as parts of the seam, in float32."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.deepseek_folders import TINY_DEEPSEEK, V2_SHAPES, V3_SHAPES, random_deepseek
from support.device_settings import TINY_SETTINGS
from support.plan_driver import GREEDY
from support.replaying_device import ReplayingDevice

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import Admit, Chunk, Grant, StepPlan
from radixmesh.daemons.worker.cuda import kernel_choice
from radixmesh.daemons.worker.cuda.attention import latent_kernels
from radixmesh.daemons.worker.cuda.attention.latent_kernels import LatentKernels
from radixmesh.daemons.worker.cuda.device import HostDevice
from radixmesh.daemons.worker.cuda.load import load_device_runner
from radixmesh.daemons.worker.cuda.runner import DeviceRunner
from radixmesh.daemons.worker.plans.executor import StepExecutor
from radixmesh.daemons.worker.runner import ModelRunner, Segment

_SETTINGS = replace(
    TINY_SETTINGS, page_size=4, num_pages=400, num_slots=8, max_total_len=256, cuda_graphs=True, max_tokens_per_step=128
)

# Others cost CPU time each: the CPU worker's tests have all.
_DAILY = ("v2_groups_yarn", "v3_groups", "v3_biases_tied")
_NUM_TEXTS = 4
_NUM_DECODES = 4
_SHAPES = [name if name in _DAILY else pytest.param(name, marks=pytest.mark.full) for name in (*V2_SHAPES, *V3_SHAPES)]


@pytest.mark.parametrize("shape", _SHAPES)
def test_logits_are_those_of_transformers(shape: str, tmp_path: Path) -> None:
    model = random_deepseek(shape)
    model.save_pretrained(tmp_path)
    runner = load_device_runner(tmp_path, _SETTINGS, HostDevice())
    assert isinstance(runner, DeviceRunner)
    ids = np.random.default_rng(0).integers(0, 131, 40).astype(np.int32)
    pages, parts = np.arange(20, 30, dtype=np.int32), []
    for start, stop in ((0, 25), (25, 26), (26, 40)):
        parts += runner.logits([Segment(slot=1, ids=ids[start:stop], start=start, pages=pages)])
    with torch.inference_mode():
        want = model(torch.from_numpy(ids).long()[None]).logits[0].numpy()
    np.testing.assert_allclose(np.concatenate(parts), want, rtol=0, atol=1e-4 * want.std())


def test_the_tiny_model_knows_its_texts() -> None:
    """Every token of the shorter texts from the true ones before it."""
    settings = replace(_SETTINGS, max_total_len=1200, max_tokens_per_step=1200)
    runner = load_device_runner(TINY_DEEPSEEK, settings, HostDevice())
    assert isinstance(runner, DeviceRunner)
    num_wrong = num_tokens = 0
    texts = json.loads((TINY_DEEPSEEK / "recitations.json").read_text(encoding="utf-8"))
    for text in sorted(texts, key=lambda text: len(text["expected_ids"]))[:_NUM_TEXTS]:
        ids = np.array([*text["prompt_ids"], *text["expected_ids"]], np.int32)
        first, pages = len(text["prompt_ids"]), np.arange(-(-len(ids) // 4), dtype=np.int32)
        (logits,) = runner.logits([Segment(slot=1, ids=ids, start=0, pages=pages)])
        num_wrong += int((logits[first - 1 : -1].argmax(-1) != ids[first:]).sum())
        num_tokens += len(ids) - first
    assert num_wrong == 0 and num_tokens > 50 * _NUM_TEXTS // 4


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="tensors of the host need Triton's interpreter")
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_kernels_and_captured_steps_sample_what_torch_does(
    is_deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The project's kernels in every part, in replayed steps that are launched ahead: chunks, then decodes."""
    random_deepseek("v3_groups").save_pretrained(tmp_path)
    settings = replace(
        _SETTINGS, num_pages=30, num_slots=2, max_total_len=40, max_tokens_per_step=16, attention_backend="torch"
    )
    want = _greedy_ids(load_device_runner(tmp_path, settings, HostDevice()), lag=0)
    monkeypatch.setattr(kernel_choice, "kernels_name", lambda settings, device: "triton")
    device = ReplayingDevice()
    settings = replace(settings, attention_backend="triton", deterministic=is_deterministic)
    runner = load_device_runner(tmp_path, settings, device)
    assert isinstance(runner, DeviceRunner)
    runner.warm_up()
    device.replayed.clear()
    assert _greedy_ids(runner, lag=2) == want and len(set(want)) > 2
    assert len(device.replayed) == 2 + _NUM_DECODES


@pytest.mark.skipif(torch.cuda.is_available(), reason="tensors of the host need Triton's interpreter")
def test_projected_chunks_beside_decodes_sample_what_torch_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_deepseek("v2_groups_yarn").save_pretrained(tmp_path)
    settings = replace(_SETTINGS, num_pages=30, num_slots=2, max_total_len=40, max_tokens_per_step=32)
    settings = replace(settings, cuda_graphs=False, attention_backend="torch")
    want = _mixed_ids(load_device_runner(tmp_path, settings, HostDevice()))
    monkeypatch.setattr(latent_kernels, "_LEAST_PROJECTED", 1)
    monkeypatch.setattr(latent_kernels, "is_projection_faster", lambda *_: True)
    num_rows = []
    project = LatentKernels.extend_projected
    monkeypatch.setattr(
        LatentKernels, "extend_projected", lambda *args: (num_rows.append(len(args[-1])), project(*args))
    )
    got = _mixed_ids(load_device_runner(tmp_path, replace(settings, attention_backend="triton"), HostDevice()))
    assert got == want and len(set(want)) > 2
    assert set(num_rows) == {13, 8, 1 + 8, 1 + 12} and len(num_rows) % 3 == 0


def _mixed_ids(runner: ModelRunner) -> list[int]:
    """Ids of two prompts of two chunks each, the first one's decodes beside the second one's chunks."""
    executor = StepExecutor(runner, num_slots=2, max_tokens_per_step=32)
    executor.begin_epoch(1)
    none, first, both = np.zeros(0, np.int32), np.array([0], np.int32), np.array([0, 1], np.int32)
    ids = np.arange(20, 41, dtype=np.int32) % 17 + 30
    admits = [
        Admit(
            slot=slot,
            generation=1,
            request_id=str(slot),
            prompt_ids=ids[slot:],
            max_total_len=40,
            sampling=GREEDY,
            cached_len=0,
            cached_pages=none,
            cached_page_generations=none,
        )
        for slot in (0, 1)
    ]
    grants = [Grant(slot=slot, pages=np.arange(14 + 10 * slot, 4 + 10 * slot, -1, dtype=np.int32)) for slot in (0, 1)]
    plans: list[dict[str, object]] = [
        {"admits": (admits[0],), "grants": (grants[0],), "chunks": (Chunk(slot=0, length=13),), "decode_set": none},
        {"chunks": (Chunk(slot=0, length=8),), "decode_set": none},
        {
            "admits": (admits[1],),
            "grants": (grants[1],),
            "chunks": (Chunk(slot=1, length=8),),
            "decode_set": first,
        },
        {"chunks": (Chunk(slot=1, length=12),), "decode_set": first},
        {"decode_set": both},
        {"decode_set": both},
    ]
    got: list[int] = []
    for step_id, parts in enumerate(plans, start=1):
        got += executor.launch(StepPlan(epoch=1, step_id=step_id, **parts)).result().ids.tolist()
    return got


def _greedy_ids(runner: ModelRunner, *, lag: int) -> list[int]:
    """Ids of a prompt in two chunks and of decodes, with `lag` steps launched ahead."""
    executor = StepExecutor(runner, num_slots=2, max_tokens_per_step=16)
    executor.begin_epoch(1)
    none, decodes, ids = np.zeros(0, np.int32), np.array([1], np.int32), np.arange(20, 41, dtype=np.int32) % 17 + 30
    admit = Admit(
        slot=1,
        generation=1,
        request_id="r",
        prompt_ids=ids,
        max_total_len=40,
        sampling=GREEDY,
        cached_len=0,
        cached_pages=none,
        cached_page_generations=none,
    )
    grants = (Grant(slot=1, pages=np.arange(15, 5, -1, dtype=np.int32)),)
    plans: list[dict[str, object]] = [
        {"admits": (admit,), "grants": grants, "chunks": (Chunk(slot=1, length=13),), "decode_set": none},
        {"chunks": (Chunk(slot=1, length=len(ids) - 13),), "decode_set": none},
        *({"decode_set": decodes} for _ in range(_NUM_DECODES)),
    ]
    launched, got = [], []
    for step_id, parts in enumerate(plans, start=1):
        launched.append(executor.launch(StepPlan(epoch=1, step_id=step_id, **parts)))
        while len(launched) > lag:
            got += launched.pop(0).result().ids.tolist()
    for step in launched:
        got += step.result().ids.tolist()
    return got


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        ({"attention_backend": "flashinfer"}, "--attention-backend triton"),
        ({"kv_dtype": "fp8"}, "not yet for the latents.*--kv-dtype auto"),
    ],
)
def test_attention_without_latents_is_refused_before_weights_are_read(
    flags: dict[str, str], hint: str, tmp_path: Path
) -> None:
    """There are none: reading them would fail."""
    (tmp_path / "config.json").write_text((TINY_DEEPSEEK / "config.json").read_text())
    with pytest.raises(MeshError, match=hint) as refused:
        load_device_runner(tmp_path, replace(_SETTINGS, **flags), HostDevice())
    assert refused.value.reason_name == "UNSUPPORTED"
