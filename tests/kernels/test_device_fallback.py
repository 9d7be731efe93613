"""Models without a family on a device: transformers' modules with our attention over the paged pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.device_settings import TINY_SETTINGS
from support.fallback_models import FALLBACK_MODELS, fallback_model
from support.plan_driver import PLAIN_OPTIONS, check_same, drive, drive_hits, logprob_tolerance
from support.replaying_device import ReplayingDevice

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import Task
from radixmesh.daemons.worker.config import Backend, WorkerSettings
from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.cuda.device import Device, HostDevice
from radixmesh.daemons.worker.cuda.load import load_device_runner
from radixmesh.daemons.worker.cuda.model import fallback
from radixmesh.daemons.worker.runner import ModelRunner

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tensors of the host need Triton's interpreter")

_PAGES = 96
_SETTINGS = replace(TINY_SETTINGS, page_size=4, num_pages=_PAGES)
_NAME = "Starcoder2ForCausalLM"


def _folder(tmp_path: Path, architecture: str = _NAME) -> Path:
    fallback_model(architecture, **FALLBACK_MODELS[architecture]).save_pretrained(tmp_path)
    return tmp_path


def _cpu_runner(folder: Path, kv_dtype: str = "auto") -> ModelRunner:
    """Held to transformers by tests/unit/test_transformers_fallback.py."""
    return load_cpu_runner(
        folder,
        page_size=4,
        num_pages=_PAGES,
        threads=1,
        max_total_len=128,
        model_impl="transformers",
        kv_dtype=kv_dtype,
    )


def _runner(folder: Path, device: Device | None = None, **changes: object) -> ModelRunner:
    settings = replace(_SETTINGS, **{"model_impl": "transformers", **changes})  # type: ignore[arg-type]
    return load_device_runner(folder, settings, device or HostDevice())


@pytest.mark.parametrize("architecture", FALLBACK_MODELS)
def test_tokens_logprobs_and_pages_are_those_of_the_cpu_worker(architecture: str, tmp_path: Path) -> None:
    folder = _folder(tmp_path, architecture)
    runner = _runner(folder)
    assert runner.tasks == {Task.GENERATE, Task.EMBED}
    want = drive(_cpu_runner(folder), chunk_len=7, lag=0, options=PLAIN_OPTIONS)
    check_same(drive(runner, chunk_len=7, lag=2, options=PLAIN_OPTIONS), want, atol=logprob_tolerance(folder))


def test_chunks_go_on_behind_a_prefix_that_is_cached(tmp_path: Path) -> None:
    folder, text = _folder(tmp_path), [(7 * i) % 97 for i in range(60)]
    sizes = {"prefix_len": 40, "num_slots": 3, "chunk_len": 16}
    want = drive_hits(_cpu_runner(folder), text, lag=0, **sizes)  # type: ignore[arg-type]
    got = drive_hits(_runner(folder), text, lag=1, **sizes)  # type: ignore[arg-type]
    check_same(got, want, atol=logprob_tolerance(folder))


@pytest.mark.parametrize("device", [HostDevice(), ReplayingDevice()], ids=["alone", "captured"])
def test_our_kernels_attend_in_steps_that_are_captured_and_not(device: Device, tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    runner = _runner(folder, device, attention_backend="triton", cuda_graphs=True, num_slots=3, max_tokens_per_step=16)
    if isinstance(device, ReplayingDevice):
        runner.warm_up()
        device.replayed.clear()
    options = PLAIN_OPTIONS[:1] + PLAIN_OPTIONS[2:]
    sizes = {"chunk_len": 16, "num_steps": 6, "options": options}
    want = drive(_cpu_runner(folder), lag=0, **sizes)  # type: ignore[arg-type]
    check_same(drive(runner, lag=1, **sizes), want, atol=logprob_tolerance(folder))  # type: ignore[arg-type]
    if isinstance(device, ReplayingDevice):
        assert device.replayed


def test_keys_and_values_are_cached_in_fp8(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    runner = _runner(folder, kv_dtype="fp8")
    assert runner.kv_dtype == "float8_e4m3fn"
    want = drive(_cpu_runner(folder, "fp8"), chunk_len=16, lag=0, options=PLAIN_OPTIONS)
    check_same(drive(runner, chunk_len=16, lag=1, options=PLAIN_OPTIONS), want, atol=1e-3)


def test_modules_that_wait_for_the_device_are_not_captured_and_the_log_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(fallback, "_log", SimpleNamespace(warning=lambda event, **_: said.append(event)))
    create = fallback.LoadedFallback.__init__

    def waiting(self: fallback.LoadedFallback, *args: object) -> None:
        create(self, *args)  # type: ignore[arg-type]
        self.can_capture = False

    monkeypatch.setattr(fallback.LoadedFallback, "__init__", waiting)
    device = ReplayingDevice()
    runner = _runner(_folder(tmp_path), device, cuda_graphs=True)
    runner.warm_up()
    assert said == ["steps_not_captured"] and not device.replayed


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"deterministic": True, "attention_backend": "triton"}, "leave --deterministic out"),
        ({"load_format": "dummy"}, "--load-format dummy"),
        ({"quantization": "fp8"}, "--quantization fp8"),
    ],
)
def test_settings_that_the_modules_cannot_have_are_refused_before_weights_are_read(
    changes: Mapping[str, object], what: str, tmp_path: Path
) -> None:
    folder = _folder(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(MeshError, match=what) as caught:
        _runner(folder, **changes)
    assert caught.value.reason_name == "UNSUPPORTED"


def test_a_model_that_cannot_run_so_is_refused_with_the_families_that_there_are(tmp_path: Path) -> None:
    fallback_model("MambaForCausalLM", state_size=4).save_pretrained(tmp_path)
    with pytest.raises(MeshError, match=r"state.*LlamaForCausalLM") as caught:
        _runner(tmp_path, model_impl="auto")
    assert caught.value.reason_name == "UNSUPPORTED"


def test_an_encoder_is_sent_to_the_cpu_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    with pytest.raises(MeshError, match="encoder BertModel: use --backend cpu"):
        _runner(tmp_path)


def test_the_flag_is_for_backends_that_compute_a_model() -> None:
    settings = {"listen": "127.0.0.1:0", "model": Path("m"), "model_impl": "transformers"}
    assert WorkerSettings(**settings, backend=Backend.CUDA).model_impl == "transformers"  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"--model-impl .* transformers is for"):
        WorkerSettings(**settings, backend=Backend.SIMULATED)  # type: ignore[arg-type]
