"""Keys and values in FP8: kernels against their definitions, scales, and runners on both backends over such pages."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.deepseek_folders import TINY_DEEPSEEK
from support.device_settings import TINY_SETTINGS
from support.family_folders import family_folder, family_model
from support.llama_folders import TINY_LLAMA
from support.model_folders import random_model, save_model
from support.paged_pool import PagedPool
from support.rounding import attention_kernel_tolerance
from support.torch_flashinfer import use_torch_modules
from support.triton_interpreter import DEVICE

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.backends import load_model
from radixmesh.daemons.worker.config import WorkerSettings
from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.cpu.runner import CpuRunner
from radixmesh.daemons.worker.cuda.device import HostDevice
from radixmesh.daemons.worker.cuda.load import load_device_runner
from radixmesh.daemons.worker.cuda.runner import DeviceRunner
from radixmesh.daemons.worker.kv_pool import default_num_pages
from radixmesh.daemons.worker.models import cached_attention
from radixmesh.daemons.worker.models.kv_layout import KvLayout, KvPlane
from radixmesh.daemons.worker.runner import Segment
from radixmesh.kernels.attention.decode_attention import (
    DecodeWorkspace,
    paged_decode,
    paged_decode_reference,
    plan_decode,
)
from radixmesh.kernels.attention.extend_attention import paged_extend, paged_extend_reference
from radixmesh.kernels.attention.prefix_groups import PrefixGroup
from radixmesh.kernels.attention.shared_prefix_attention import (
    SharedPrefixWorkspace,
    paged_shared_decode,
    plan_shared_decode,
)
from radixmesh.kernels.deferred_norm import DeferredNormGemm
from radixmesh.kernels.kv_fp8 import KV_FP8, KvScales, take_rows, to_fp8
from radixmesh.kernels.rope_kv import (
    HeadNorms,
    HeadShape,
    KvTarget,
    RopeAngles,
    head_factors,
    rope_write_kv,
    rope_write_kv_reference,
)

_HOST = pytest.mark.skipif(torch.cuda.is_available(), reason="tensors of the host need Triton's interpreter")
_PAGE_SIZE, _HEADS, _KV_HEADS, _DIM = 4, 6, 2, 32


def _pool(lengths: list[int]) -> PagedPool:
    return PagedPool.random(lengths, _KV_HEADS, _DIM, _PAGE_SIZE, KV_FP8)


def _query(rows: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, _HEADS, _DIM, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)


def _tolerance(q: torch.Tensor, pool: PagedPool, lengths: list[int]) -> dict[str, float]:
    return attention_kernel_tolerance(q, pool.keys.float(), pool.values.float(), scale=0.3, num_keys=max(lengths))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decode_reads_numbers_as_they_are_stored(dtype: torch.dtype) -> None:
    lengths = [130, 1, 0, 33]
    pool, q = _pool(lengths), _query(4, dtype)
    workspace = DecodeWorkspace(6, _HEADS, _KV_HEADS, _DIM, DEVICE, KV_FP8)
    plan_decode(pool.lengths, workspace)
    inputs = (q, pool.keys, pool.values, pool.page_tables, pool.slots, pool.lengths, _PAGE_SIZE, 0.3, None)
    got = paged_decode(*inputs, workspace)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), paged_decode_reference(*inputs).float(), **_tolerance(q, pool, lengths))


@pytest.mark.parametrize("exponent", [-100, 60, 120])
def test_queries_of_any_size_are_read(exponent: int) -> None:
    """Float16 would hold none of these sizes; the second row has a NaN, and keeps it."""
    lengths = [70, 9, 33]
    pool, q = _pool(lengths), _query(3, torch.bfloat16) * 2.0**exponent
    q[1, 0, 3] = torch.nan
    workspace = DecodeWorkspace(3, _HEADS, _KV_HEADS, _DIM, DEVICE, KV_FP8)
    plan_decode(pool.lengths, workspace)
    inputs = (q, pool.keys, pool.values, pool.page_tables, pool.slots, pool.lengths, _PAGE_SIZE, 2.0**-120, None)
    got, want = paged_decode(*inputs, workspace).float(), paged_decode_reference(*inputs).float()
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2, equal_nan=True)
    assert got[1, 0].isnan().all() and not got[1, 3:].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shared_prefix_is_read_once_as_it_is_stored(dtype: torch.dtype) -> None:
    lengths = [70, 66, 41]
    pool, q = _pool(lengths), _query(3, dtype)
    pool.page_tables[pool.slots.long(), :8] = pool.page_tables[int(pool.slots[0]), :8].clone()
    workspace = SharedPrefixWorkspace(3, _HEADS, _KV_HEADS, _DIM, DEVICE, KV_FP8)
    workspace.set_groups([PrefixGroup(np.arange(3), 32)], pool.slots.tolist())
    plan_shared_decode(pool.lengths, workspace)
    inputs = (q, pool.keys, pool.values, pool.page_tables, pool.slots, pool.lengths, _PAGE_SIZE, 0.3)
    got = paged_shared_decode(*inputs, workspace)
    torch.testing.assert_close(got.float(), paged_decode_reference(*inputs).float(), **_tolerance(q, pool, lengths))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extend_reads_numbers_as_they_are_stored(dtype: torch.dtype) -> None:
    lengths = [50, 33]
    pool, q = _pool(lengths), _query(24, dtype)
    starts = torch.tensor([0, 7, 24], dtype=torch.int32, device=DEVICE)
    inputs = (q, pool.keys, pool.values, pool.page_tables, pool.slots, starts, pool.lengths, _PAGE_SIZE, 0.3, None)
    got = paged_extend(*inputs, 17)
    torch.testing.assert_close(got.float(), paged_extend_reference(*inputs).float(), **_tolerance(q, pool, lengths))


def test_a_pool_of_yet_another_dtype_is_refused() -> None:
    pool, q = PagedPool.random([5], _KV_HEADS, _DIM, _PAGE_SIZE, torch.float16), _query(1, torch.bfloat16)
    workspace = DecodeWorkspace(1, _HEADS, _KV_HEADS, _DIM, DEVICE, KV_FP8)
    rest = (pool.page_tables, pool.slots, pool.lengths, _PAGE_SIZE, 0.3, None, workspace)
    with pytest.raises(ValueError, match="float8"):
        paged_decode(q, pool.keys, pool.values, *rest)


@pytest.mark.parametrize("has_scales", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_are_quantised_where_they_are_written(dtype: torch.dtype, has_scales: bool) -> None:
    """Numbers far beyond what FP8 holds among them, and one row that is NaN."""
    torch.manual_seed(0)
    num_rows, shape = 6, HeadShape(_HEADS, _KV_HEADS, _DIM)
    sizes = 2.0 ** torch.arange(-6, 18, 4, device=DEVICE)
    qkv = torch.randn(num_rows, (_HEADS + 2 * _KV_HEADS) * _DIM).to(DEVICE) * sizes[:, None]
    qkv[2] = torch.nan
    angles = torch.rand(16, _DIM // 2, device=DEVICE) * 6
    target = KvTarget(
        torch.arange(num_rows, dtype=torch.int32, device=DEVICE),
        torch.zeros(num_rows, dtype=torch.int32, device=DEVICE),
        torch.tensor([[1, 0]], dtype=torch.int32, device=DEVICE),
        _PAGE_SIZE,
    )
    scales = KvScales(torch.tensor([0.03, 4.0], device=DEVICE), torch.tensor([0.5, 7.0], device=DEVICE))
    factors = head_factors(scales, shape) if has_scales else None
    results = []
    for function in (rope_write_kv, rope_write_kv_reference):
        planes = torch.zeros(2, 3 * _PAGE_SIZE, _KV_HEADS, _DIM, device=DEVICE).to(KV_FP8)
        gemm = DeferredNormGemm(qkv.to(dtype))
        q = function(gemm, RopeAngles(angles.cos(), angles.sin()), target, *planes, shape, HeadNorms(), factors)
        results.append((q, take_rows(planes.flatten(0, 1), torch.arange(24, device=DEVICE))))
    (q, stored), (expected_q, expected) = results
    unit = torch.finfo(dtype).eps
    # Relative to a row's numbers: a sum of two may be far smaller than either.
    q, expected_q = (rows / sizes[:, None, None].to(dtype) for rows in (q, expected_q))
    torch.testing.assert_close(q, expected_q, rtol=4 * unit, atol=4 * unit, equal_nan=True)
    # Sums that differ in their last bit may be rounded to neighbours: an eighth apart, or the least step.
    torch.testing.assert_close(stored, expected, rtol=0.126, atol=2.0**-9, equal_nan=True)
    same = (stored == expected) | (stored.isnan() & expected.isnan())
    assert same.float().mean() > 0.995
    assert expected.nan_to_num().abs().max() == 448 and expected.isnan().sum() == 2 * _KV_HEADS * _DIM


# Of runners: the tiny model and models with random weights.

_LENGTH = 24
_SETTINGS = replace(
    TINY_SETTINGS, page_size=4, num_pages=16, num_slots=2, max_tokens_per_step=_LENGTH, max_total_len=48,
    attention_backend="triton", kv_dtype="fp8",
)  # fmt: skip


def _with_scales(folder: Path, target: Path, scales: dict[str, torch.Tensor]) -> Path:
    shutil.copytree(folder, target)
    weights = load_file(target / "model.safetensors")
    save_file({**weights, **scales}, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _scales(
    num_layers: int, *, keys: list[float], values: list[float], name: str = "self_attn"
) -> dict[str, torch.Tensor]:
    scales = {}
    for layer in range(num_layers):
        scales[f"model.layers.{layer}.{name}.k_scale"] = torch.tensor(keys)
        scales[f"model.layers.{layer}.{name}.v_scale"] = torch.tensor(values)
    return scales


def _cpu(folder: Path, kv_dtype: str = "fp8", **more: object) -> CpuRunner:
    runner = load_cpu_runner(
        folder,
        page_size=4,
        num_pages=16,
        threads=1,
        max_total_len=48,
        kv_dtype=kv_dtype,
        **more,  # type: ignore[arg-type]
    )
    assert isinstance(runner, CpuRunner)
    return runner


def _logits(runner: CpuRunner | DeviceRunner, cuts: tuple[int, ...] = (15,)) -> torch.Tensor:
    """Of a prompt in chunks, so that later ones read what the first have written."""
    ids = np.random.default_rng(1).integers(0, 96, _LENGTH).astype(np.int32)
    pages, spans = np.arange(8, dtype=np.int32), zip((0, *cuts), (*cuts, _LENGTH), strict=True)
    parts = [Segment(slot=1, ids=ids[start:stop], start=start, pages=pages) for start, stop in spans]
    return torch.from_numpy(np.concatenate([runner.logits([part])[0] for part in parts]))


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    """Two KV heads, norms of heads."""
    return save_model(random_model("qwen3", seed=3), tmp_path / "qwen")


def _num_layers(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["num_hidden_layers"])


_HEAD_SCALES = {"keys": [0.02, 0.4], "values": [1.5, 0.01]}


@pytest.mark.parametrize("name", ["self_attn", "self_attn.attn"])
def test_logits_are_those_of_keys_and_values_rounded_by_the_checkpoints_scales(
    qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The oracle keeps keys and values in float32, rounded to what FP8 with these scales can say."""
    scaled = _with_scales(qwen, tmp_path / "scaled", _scales(_num_layers(qwen), name=name, **_HEAD_SCALES))
    runner = _cpu(scaled)
    got, unscaled = _logits(runner), _logits(_cpu(qwen))
    attend = cached_attention.attend_cached

    def attend_rounded(batch, layer, q_THd, k_TKd, v_TKd, **more):
        k, v = (torch.tensor(_HEAD_SCALES[plane])[:, None] for plane in ("keys", "values"))
        k_TKd, v_TKd = to_fp8(k_TKd * (1 / k)).float() * k, to_fp8(v_TKd * (1 / v)).float() * v
        return attend(batch, layer, q_THd, k_TKd, v_TKd, **more)

    monkeypatch.setattr("radixmesh.daemons.worker.models.decoder.model.attend_cached", attend_rounded)
    want = _logits(_cpu(qwen, kv_dtype="auto"))
    torch.testing.assert_close(got, want, atol=1e-4 * float(want.abs().max()), rtol=0)
    assert (got - unscaled).abs().max() > 1e-3 * want.abs().max(), "scales change what is rounded"
    assert runner.pool.tokens("keys", 0).dtype == KV_FP8


def test_a_scale_for_a_tensor_and_one_for_both_planes(qwen: Path, tmp_path: Path) -> None:
    """Powers of two change nothing but what is too small or too large; so far off nothing is left."""
    layers = range(_num_layers(qwen))
    both = {f"model.layers.{layer}.self_attn.kv_scale": torch.tensor(0.25) for layer in layers}
    one = {f"model.layers.{layer}.self_attn.kv_scale": torch.tensor([2.0**-40]) for layer in layers}
    plain = _logits(_cpu(qwen))
    got = _logits(_cpu(_with_scales(qwen, tmp_path / "both", both)))
    torch.testing.assert_close(got, plain, atol=2e-2 * float(plain.abs().max()), rtol=0)
    clamped = _logits(_cpu(_with_scales(qwen, tmp_path / "one", one)))
    assert (clamped - plain).abs().max() > 0.1 * plain.abs().max() and clamped.isfinite().all()


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({"model.layers.0.self_attn.k_scale": torch.tensor(0.0)}, "no positive number"),
        ({"model.layers.0.self_attn.v_scale": torch.tensor(float("nan"))}, "no positive number"),
        ({"model.layers.0.self_attn.k_scale": torch.tensor([1.0, -1.0])}, "no positive number"),
        # Its reciprocal is infinite: keys of 0 would be NaN.
        ({"model.layers.0.self_attn.k_scale": torch.tensor(1e-40)}, "no positive number"),
        ({"model.layers.0.self_attn.kv_scale": torch.tensor(3e38)}, "no positive number"),
        ({"model.layers.0.self_attn.v_scale": torch.ones(3)}, "one a KV head"),
        ({"model.layers.77.self_attn.v_scale": torch.ones(1)}, "layers"),
    ],
)
def test_scales_that_are_none_are_told_by_their_tensor(
    qwen: Path, tmp_path: Path, scales: dict[str, torch.Tensor], message: str
) -> None:
    folder = _with_scales(qwen, tmp_path / "broken", scales)
    with pytest.raises(MeshError, match=message) as caught:
        _cpu(folder)
    assert caught.value.reason_name == "BAD_CHECKPOINT"
    # Whoever keeps KV as the weights does not read them.
    assert _logits(_cpu(folder, kv_dtype="auto")).isfinite().all()


def test_a_worker_with_pages_of_fp8_is_another_model() -> None:
    """Nobody resumes or takes over what was begun over pages as the weights."""

    def fingerprint(**changes: str) -> str:
        settings = WorkerSettings(  # type: ignore[arg-type]
            listen="127.0.0.1:0", model=TINY_LLAMA, num_pages=64, cpu_threads=1, **changes
        )
        return load_model(settings).identity.model_fingerprint

    assert fingerprint(kv_dtype="fp8") != fingerprint() == fingerprint(kv_dtype="auto")


@_HOST
@pytest.mark.parametrize("attention", ["triton", "torch", "flashinfer"])
def test_a_device_stores_and_reads_what_the_cpu_does(
    qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attention: str
) -> None:
    use_torch_modules(monkeypatch)
    folder = _with_scales(qwen, tmp_path / "scaled", _scales(_num_layers(qwen), **_HEAD_SCALES))
    cpu = _cpu(folder)
    device = load_device_runner(folder, replace(_SETTINGS, attention_backend=attention), HostDevice())
    want, got = _logits(cpu), _logits(device)
    # float16 queries of FlashInfer's; and a number that is rounded to its neighbour here and there.
    torch.testing.assert_close(got, want, atol=2e-2 * float(want.abs().max()), rtol=0)
    for plane in ("keys", "values"):
        stored, expected = (runner.pool.tokens(plane, 0)[:_LENGTH].float() for runner in (device, cpu))
        assert (stored == expected).float().mean() > 0.99
    assert device.kv_dtype == cpu.kv_dtype == "float8_e4m3fn"
    assert (device.kv_layout == cpu.kv_layout) == (attention != "flashinfer")


@_HOST
def test_a_general_attention_applies_scales_too(tmp_path: Path) -> None:
    """OLMo 2: norms over all heads, behind the projections."""
    folder = family_folder(family_model("olmo2"), tmp_path / "olmo2")
    folder = _with_scales(folder, tmp_path / "scaled", _scales(_num_layers(folder), **_HEAD_SCALES))
    device = load_device_runner(folder, replace(_SETTINGS, attention_backend="torch"), HostDevice())
    want = _logits(_cpu(folder))
    torch.testing.assert_close(_logits(device), want, atol=2e-2 * float(want.abs().max()), rtol=0)


@_HOST
def test_the_error_against_full_pages_is_that_of_fp8s_mantissa(qwen: Path) -> None:
    """Random weights: a number is off by a sixteenth at most and a thirtieth on average, and sums of many by less."""
    full, fp8 = _logits(_cpu(qwen, kv_dtype="auto")), _logits(_cpu(qwen))
    error = float((fp8 - full).norm() / full.norm())
    assert 1e-3 < error < 0.06, error


@_HOST
def test_a_row_has_the_same_bits_however_its_prompt_is_cut(qwen: Path) -> None:
    """So a prefix that was cached says what computing it would."""
    runner = _cpu(qwen)
    assert torch.equal(_logits(runner), _logits(runner, cuts=(4, 5, 20)))


@_HOST
def test_latents_are_refused_with_a_reason(tmp_path: Path) -> None:
    """Before weights are read, which would fail."""
    (tmp_path / "config.json").write_text((TINY_DEEPSEEK / "config.json").read_text())
    for load in (lambda: _cpu(tmp_path), lambda: load_device_runner(tmp_path, _SETTINGS, HostDevice())):
        with pytest.raises(MeshError, match="latent") as caught:
            load()
        assert caught.value.reason_name == "UNSUPPORTED" and caught.value.metadata["field"] == "kv_dtype"


def test_pages_are_counted_by_what_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixmesh.daemons.worker.kv_pool.available_bytes", lambda: 1 << 24)
    layout = KvLayout(num_layers=2, planes=(KvPlane(name="keys", row_shape=(2, 16)),))
    half, fp8 = (
        default_num_pages(layout, page_size=4, dtype=dtype, max_total_len=8192) for dtype in (torch.bfloat16, KV_FP8)
    )
    assert fp8 == 2 * half
