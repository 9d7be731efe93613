"""From a folder and settings to a runner on a GPU."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.cuda.attention.choice import AttentionChoice, choose_attention
from radixmesh.daemons.worker.cuda.decoder import DeviceDecoder
from radixmesh.daemons.worker.cuda.device import CudaDevice, Device
from radixmesh.daemons.worker.cuda.fp8.decoder import Fp8Decoder
from radixmesh.daemons.worker.cuda.fp8.ops import Fp8Ops, TorchFp8Ops, TritonFp8Ops
from radixmesh.daemons.worker.cuda.fp8.tuning import create_fp8_gemm
from radixmesh.daemons.worker.cuda.gemm.backend import GemmBackend, TorchGemm
from radixmesh.daemons.worker.cuda.gemm.tuning import tuned_gemm
from radixmesh.daemons.worker.cuda.memory import MemorySettings, choose_num_pages, fitting
from radixmesh.daemons.worker.cuda.ops import Ops, TorchOps, TritonOps
from radixmesh.daemons.worker.cuda.runner import DeviceRunner, RunnerLimits
from radixmesh.daemons.worker.cuda.step.decode_graphs import default_graph_rows
from radixmesh.daemons.worker.cuda.step.late_compiles import watch_compiles
from radixmesh.daemons.worker.cuda.step.prompt_steps import default_prompt_rows
from radixmesh.daemons.worker.cuda.weights.loading import LoadedDecoder, load_decoder
from radixmesh.daemons.worker.group import LocalGroup
from radixmesh.daemons.worker.kv_pool import KvPool
from radixmesh.daemons.worker.models.decoder.model import DecoderModel
from radixmesh.daemons.worker.models.model import Placement
from radixmesh.kernels.hopper import has_gdc

_log = get_logger(__name__)

_DTYPES: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
KERNELS = ("triton", "compiled", "torch")
_MAX_ROWS = 65_535


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSettings:
    """Settings from the worker's flags of the same names; num_pages None = as many as fit."""

    dtype: str
    attention_backend: str
    load_format: str
    page_size: int
    num_pages: int | None
    num_slots: int
    max_tokens_per_step: int
    max_total_len: int | None
    mem_fraction: float
    cuda_graphs: bool
    use_pdl: bool
    deterministic: bool
    tune_gemm: bool = True
    kernels: str = "triton"
    kv_dtype: str = "auto"
    quantization: str = "auto"


def load_cuda_runner(folder: Path, settings: DeviceSettings) -> DeviceRunner:
    """Loads, sizes, compiles and captures. Raises MeshError UNSUPPORTED (no GPU), BAD_CHECKPOINT, INVALID_ARGUMENT."""
    if not torch.cuda.is_available():
        raise MeshError(
            ErrorReason.ERROR_REASON_UNSUPPORTED,
            "the cuda backend needs an NVIDIA GPU and a CUDA build of torch, and finds none here: use --backend cpu",
            {"feature": "cuda"},
        )
    with fitting("a CUDA context and what other processes hold", "--mem-fraction, or who else uses the GPU"):
        device = CudaDevice()
    # Older GPUs have nothing by which a kernel could wait for the one ahead of it.
    settings = replace(settings, use_pdl=settings.use_pdl and has_gdc(device.torch_device))
    runner = load_device_runner(folder, settings, device)
    started = time.monotonic()
    with fitting("captured graphs, or the longest prompts", "--mem-fraction, --num-slots or --max-tokens-per-step"):
        runner.warm_up()
    _log.info("graphs_captured", seconds=round(time.monotonic() - started, 3))
    watch_compiles()
    return runner


def load_device_runner(folder: Path, settings: DeviceSettings, device: Device) -> DeviceRunner:
    """Loads and sizes a runner on any device, without warm-up. Raises as `load_cuda_runner`."""
    dtype = _dtype("dtype", settings.dtype) or torch.bfloat16
    where = device.torch_device
    # Report wrong flags before reading the weights.
    attention = choose_attention(settings, dtype, _dtype("kv_dtype", settings.kv_dtype), where)
    _kernels_name(settings, where)
    _check_rows(settings)
    placement = Placement(device=where, dtype=dtype, group=LocalGroup(), is_out_first=True)
    with fitting("weights", "the model, --dtype or --quantization"):
        loaded = load_decoder(folder, placement, load_format=settings.load_format, quantization=settings.quantization)
    model = loaded.model
    layout = attention.layout(model.kv_layout)
    length = min(model.max_total_len, settings.max_total_len or model.max_total_len)
    create_attention = attention.creator(settings, model.attention_shape, model.config.windows)
    _check_tables(settings, length)
    limits = RunnerLimits(
        num_slots=settings.num_slots,
        max_tokens_per_step=settings.max_tokens_per_step,
        max_total_len=length,
        graph_rows=default_graph_rows(settings.num_slots) if settings.cuda_graphs else (),
        prompt_rows=default_prompt_rows(settings.max_tokens_per_step) if settings.cuda_graphs else (),
    )
    # Before the KV pool is sized, which counts the memory that the autotuner leaves in use.
    ops = _ops(settings, loaded, limits.graph_rows, where)
    fp8_ops = _fp8_ops(settings, loaded, ops, where)
    num_pages = _num_pages(settings, limits, attention, model, dtype, where)
    with torch.inference_mode(), fitting("KV pages and work space", "--mem-fraction or --num-pages"):
        pool = KvPool(layout, num_pages=num_pages, page_size=settings.page_size, dtype=attention.kv_dtype, device=where)
        decoder = _decoder(loaded, pool, ops, fp8_ops, length)
    with fitting("tables by slot", "--num-slots, --max-total-len or --mem-fraction"):
        return DeviceRunner(
            device,
            decoder,
            pool,
            create_attention,
            limits,
            is_deterministic=settings.deterministic,
            use_pdl=settings.use_pdl and where.type == "cuda",
        )


def _num_pages(
    settings: DeviceSettings,
    limits: RunnerLimits,
    attention: AttentionChoice,
    model: DecoderModel,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Pages of the KV pool: what fits the GPU; without one, the flag's number or one request of the longest length."""
    memory = MemorySettings(
        mem_fraction=settings.mem_fraction,
        num_pages=settings.num_pages,
        page_size=settings.page_size,
        num_slots=limits.num_slots,
        max_tokens_per_step=limits.max_tokens_per_step,
        max_total_len=limits.max_total_len,
        graph_rows=limits.graph_rows,
        prompt_rows=limits.prompt_rows,
        attention_bytes=attention.work_bytes(settings, model.attention_shape, model.config.windows, device),
    )
    if device.type != "cuda":
        return settings.num_pages or -(-limits.max_total_len // settings.page_size)
    token_bytes = attention.layout(model.kv_layout).bytes_per_token(attention.kv_dtype)
    return choose_num_pages(memory, model.config, token_bytes, dtype, device)


def _decoder(loaded: LoadedDecoder, kv: KvPool, ops: Ops, fp8_ops: Fp8Ops | None, max_total_len: int) -> DeviceDecoder:
    model, quantized = loaded.model, loaded.quantized
    if quantized is None:
        return DeviceDecoder(model.config, model.weights, kv, ops, max_total_len=max_total_len)
    assert fp8_ops is not None
    return Fp8Decoder(model.config, model.weights, quantized.layers, kv, ops, fp8_ops, max_total_len=max_total_len)


def _fp8_ops(settings: DeviceSettings, loaded: LoadedDecoder, ops: Ops, device: torch.device) -> Fp8Ops | None:
    """None where no weights are FP8."""
    if loaded.quantized is None:
        return None
    if _kernels_name(settings, device) == "torch":
        return TorchFp8Ops(ops)
    use_pdl = settings.use_pdl and device.type == "cuda"
    with torch.inference_mode():
        gemm = create_fp8_gemm(
            loaded.quantized.layers,
            loaded.model.weights.final_norm_D.dtype,
            device,
            max_rows=max(settings.num_slots, settings.max_tokens_per_step),
            use_pdl=use_pdl,
            is_deterministic=settings.deterministic,
            is_tuned=settings.tune_gemm,
        )
    return TritonFp8Ops(ops, gemm, use_pdl=use_pdl)


def _ops(settings: DeviceSettings, loaded: LoadedDecoder, graph_rows: Sequence[int], device: torch.device) -> Ops:
    model = loaded.model
    name = _kernels_name(settings, device)
    gemm: GemmBackend = TorchGemm()
    # Those of FP8 weights are tuned by themselves.
    is_tuned = settings.tune_gemm and not settings.deterministic and loaded.quantized is None
    if is_tuned and graph_rows and name != "torch" and device.type == "cuda":
        with torch.inference_mode():
            sizes = [size for size in graph_rows if size > 1]
            gemm = tuned_gemm(model.weights, sizes, device, use_pdl=settings.use_pdl)
    if name == "torch":
        return TorchOps()
    if name == "compiled":
        return _compiled_ops(settings, model, gemm, device)
    return TritonOps(
        use_pdl=settings.use_pdl,
        is_deterministic=settings.deterministic,
        gemm=gemm,
    )


def _compiled_ops(settings: DeviceSettings, model: DecoderModel, gemm: GemmBackend, device: torch.device) -> Ops:
    from radixmesh.daemons.worker.cuda.compiled_ops import CompiledOps

    is_cuda = device.type == "cuda"
    ops = CompiledOps(use_pdl=settings.use_pdl and is_cuda, max_fused_rows=int(is_cuda), gemm=gemm)
    ops.check(model.weights.final_norm_D, model.config.norm_eps)
    return ops


def _kernels_name(settings: DeviceSettings, device: torch.device) -> str:
    name = settings.kernels
    if name not in KERNELS or (settings.deterministic and name != "triton"):
        choices = "triton" if settings.deterministic else ", ".join(KERNELS)
        raise _invalid("kernels", f"is {name!r}: choose one of {choices}")
    return "torch" if name == "triton" and device.type != "cuda" else name


def _check_rows(settings: DeviceSettings) -> None:
    """Rows of a step are an axis of grids of kernels, which ends there."""
    for field in ("num_slots", "max_tokens_per_step"):
        if getattr(settings, field) > _MAX_ROWS:
            raise _invalid(field, f"is {getattr(settings, field)}: a GPU takes at most {_MAX_ROWS}")


def _check_tables(settings: DeviceSettings, max_total_len: int) -> None:
    """Places in the page tables, and the positions they stand for, are int32 on the device."""
    positions = (settings.num_slots + 1) * (max_total_len // settings.page_size + 1) * settings.page_size
    if positions >= 2**31:
        what = (
            f"x {max_total_len} tokens of a request pass 2^31 positions: set fewer slots or a shorter --max-total-len"
        )
        raise _invalid("num_slots", f"{settings.num_slots} {what}")


def _dtype(field: str, name: str) -> torch.dtype | None:
    """None: auto."""
    if name != "auto" and name not in _DTYPES:
        raise _invalid(field, f"is {name!r}: choose one of auto, {', '.join(_DTYPES)}")
    return _DTYPES.get(name)


def _invalid(field: str, what: str) -> MeshError:
    return MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, f"{field} {what}", {"field": field})
