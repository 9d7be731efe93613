"""The runner with FlashInfer's attention on the host, its compiled modules replaced by torch: rows stored longer than
heads, pages of two bytes beside a model of four, prefixes read once. tests/gpu/test_cuda_runner.py has the kernels."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.device_settings import TINY_SETTINGS
from support.jobs import recited_ids
from support.model_folders import random_model, save_model
from support.plan_driver import (
    GREEDY_OPTIONS,
    PLAIN_OPTIONS,
    PlanDriver,
    check_same,
    drive,
    drive_hits,
    logprob_tolerance,
)
from support.replaying_device import ReplayingDevice
from support.torch_flashinfer import use_torch_modules

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader
from radixmesh.daemons.worker.config import Backend, WorkerSettings
from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.cuda.device import Device, HostDevice
from radixmesh.daemons.worker.cuda.flashinfer import plan as flashinfer_plan
from radixmesh.daemons.worker.cuda.load import create_runner, load_device_runner, load_on_device
from radixmesh.daemons.worker.cuda.runner import DeviceRunner
from radixmesh.daemons.worker.runner import ModelRunner

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tensors of the host need Triton's interpreter")

TINY = Path(__file__).parents[2] / "compose" / "models" / "tiny-llama"
PAGES = 2048
PREFIX_LEN = 288
SETTINGS = replace(
    TINY_SETTINGS,
    attention_backend="flashinfer",
    num_pages=PAGES,
    num_slots=12,
    max_total_len=384,
)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory) -> Path:
    """Heads of 16, windows of 25."""
    return save_model(random_model("mistral", seed=2), tmp_path_factory.mktemp("mistral"))


def _runner(folder: Path, device: Device | None = None, **changes: object) -> DeviceRunner:
    runner = load_device_runner(folder, replace(SETTINGS, **changes), device or HostDevice())  # type: ignore[arg-type]
    if runner.device.can_capture:
        runner.warm_up()
    # Tokens that were not written are NaN; padding of rows is not theirs.
    runner.clear()
    return runner


def _cpu_runner(folder: Path, page_size: int) -> ModelRunner:
    return load_cpu_runner(
        folder,
        page_size=page_size,
        num_pages=PAGES,
        threads=1,
        is_deterministic=True,
        attention_backend="paged_torch",
        dtype="float32",
        max_total_len=384,
        embed_pooling="mean",
    )


@pytest.mark.parametrize(("page_size", "chunk_len", "lag", "is_hopper"), [(1, 7, 2, True), (16, 64, 1, False)])
@pytest.mark.parametrize("is_windowed", [False, True])
def test_greedy_tokens_are_those_of_the_cpu_worker_in_float32(
    windowed, monkeypatch, is_windowed, page_size, chunk_len, lag, is_hopper
):
    folder = windowed if is_windowed else TINY
    atol = logprob_tolerance(folder, torch.float16)
    want = drive(_cpu_runner(folder, page_size), chunk_len=chunk_len, lag=0, options=GREEDY_OPTIONS)
    ran = use_torch_modules(monkeypatch, is_hopper=is_hopper)
    runner = _runner(folder, page_size=page_size)
    check_same(drive(runner, chunk_len=chunk_len, lag=lag, options=GREEDY_OPTIONS), want, atol=atol)
    assert set(ran) == {"decode", "fa3" if is_hopper else "fa2"}
    _check_pool(runner, torch.float16, padding=64 - ConfigReader.open(folder).integer("head_dim"))


def _check_pool(runner: DeviceRunner, dtype: torch.dtype, *, padding: int) -> None:
    for name in ("keys", "values"):
        plane = runner.pool.tokens(name, 1)
        num_tokens, num_heads, size = plane.shape
        width = size + padding
        stored = plane.as_strided((num_tokens, num_heads, width), (num_heads * width, width, 1))
        assert stored.dtype == dtype and (stored[..., size:] == 0).all()
        assert plane.isfinite().any() and plane.isnan().any()


@pytest.mark.parametrize(("page_size", "lag"), [(1, 2), (16, 0)])
def test_rows_that_share_a_prefix_read_it_once(monkeypatch, page_size, lag):
    text = recited_ids("gettysburg-address")

    def driven(runner: ModelRunner, lag: int) -> PlanDriver:
        return drive_hits(runner, text, prefix_len=PREFIX_LEN, num_slots=12, chunk_len=50, lag=lag)

    want = driven(_cpu_runner(TINY, page_size), 0)
    for slot, tokens in want.tokens.items():
        begin = PREFIX_LEN + 3 + slot
        assert len(tokens) > 5 and tokens == text[begin : begin + len(tokens)], "what transformers recites"
    ran = use_torch_modules(monkeypatch)
    runner = _runner(TINY, ReplayingDevice(), page_size=page_size, cuda_graphs=True)
    ran.clear()
    check_same(driven(runner, lag), want, atol=logprob_tolerance(TINY, torch.float16))
    layers = runner.num_layers
    assert ran.count("merge") >= 4 * layers and ran.count("fa2") == ran.count("merge")
    assert ran.count("fa3") >= 12 * layers, "chunks, beside rows that share too"


@pytest.mark.parametrize(
    ("attention", "kv_dtype"), [("torch", "float16"), ("torch", "bfloat16"), ("triton", "float16")]
)
def test_pages_of_another_dtype_than_the_models(monkeypatch, attention, kv_dtype):
    options = PLAIN_OPTIONS[::2]
    want = drive(_cpu_runner(TINY, 4), chunk_len=16, lag=0, num_steps=8, options=options)
    runner = _runner(TINY, page_size=4, attention_backend=attention, kv_dtype=kv_dtype)
    got = drive(runner, chunk_len=16, lag=1, num_steps=8, options=options)
    atol = logprob_tolerance(TINY, getattr(torch, kv_dtype))
    if kv_dtype == "float16":
        check_same(got, want, atol=atol)
    else:
        first = [next(p.logprobs.own for r in driver.results for p in r.prompt_logprobs) for driver in (got, want)]
        torch.testing.assert_close(*map(torch.from_numpy, first), atol=atol, rtol=0)
    _check_pool(runner, getattr(torch, kv_dtype), padding=0)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"kv_dtype": "int3"}, "kv_dtype"),
        ({"kv_dtype": "float32"}, "kv_dtype"),
        ({"kv_dtype": "float32", "dtype": "bfloat16"}, "kv_dtype"),
    ],
)
def test_pages_that_flashinfer_does_not_read_are_told_by_their_flag(changes, field):
    with pytest.raises(MeshError) as caught:
        _runner(TINY, **changes)
    assert caught.value.metadata["field"] == field


def test_pages_of_their_own_dtype_are_for_a_gpu():
    with pytest.raises(ValueError, match="kv-dtype"):
        WorkerSettings(backend=Backend.CPU, model=TINY, kv_dtype="float16")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, torch.float16),
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"kv_dtype": "bfloat16"}, torch.bfloat16),
        ({"attention_backend": "triton"}, torch.float32),
        ({"attention_backend": "triton", "dtype": "float16", "kv_dtype": "float32"}, torch.float32),
    ],
)
def test_the_pools_dtype_follows_the_flags(monkeypatch, caplog, changes, expected):
    use_torch_modules(monkeypatch)
    with caplog.at_level(logging.INFO):
        runner = _runner(TINY, **changes)
    assert runner.pool.tokens("keys", 0).dtype == expected
    assert ("kv_dtype_chosen" in caplog.text) == (not changes)


def test_what_plans_take_is_counted_ahead(monkeypatch):
    """All plans are made after the pages are sized; `allocate_workspace` makes the tensors that were counted."""
    use_torch_modules(monkeypatch)
    made: list[int] = []
    allocate = flashinfer_plan.allocate_workspace

    def make(*args, **sizes):
        workspace = allocate(*args, **sizes)
        made.append(len(workspace.floats) + len(workspace.ints))
        return workspace

    monkeypatch.setattr(flashinfer_plan, "allocate_workspace", make)
    loaded = load_on_device(TINY, SETTINGS, HostDevice())
    model = loaded.model
    counted = loaded.attention.work_bytes(SETTINGS, model.attention_shape, model.windows, torch.device("cpu"))
    assert not made
    create_runner(loaded)
    assert len(made) == 4 and counted == sum(made)


def test_heads_larger_than_all_of_flashinfers_are_refused(tmp_path, monkeypatch):
    use_torch_modules(monkeypatch)
    folder = save_model(random_model("qwen3", head_dim=258), tmp_path)
    with pytest.raises(MeshError, match="head_dim 258") as caught:
        _runner(folder)
    assert caught.value.reason_name == "UNSUPPORTED"
