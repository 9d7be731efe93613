"""The kernels of a model on a device: those that the flags ask for, with GEMMs tuned for the model's matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.cuda.fp8.ops import Fp8Ops, TorchFp8Ops, TritonFp8Ops
from radixmesh.daemons.worker.cuda.fp8.tuning import create_fp8_gemm
from radixmesh.daemons.worker.cuda.gemm.backend import GemmBackend, TorchGemm
from radixmesh.daemons.worker.cuda.gemm.tuning import tuned_gemm
from radixmesh.daemons.worker.cuda.gemm.tuning_notes import TuningNotes
from radixmesh.daemons.worker.cuda.model.device_model import Kernels, LoadedModel
from radixmesh.daemons.worker.cuda.ops import Ops, TorchOps, TritonOps

if TYPE_CHECKING:
    from radixmesh.daemons.worker.cuda.load import DeviceSettings

KERNELS = ("triton", "compiled", "torch")


def create_kernels(
    settings: DeviceSettings, model: LoadedModel, graph_rows: Sequence[int], device: torch.device
) -> Kernels:
    """graph_rows: sizes of the decode steps that are captured, for which GEMMs are tuned.

    To be called before the KV pool is sized, which counts the memory that the autotuner leaves in use.
    """
    plain = _plain_ops(settings, model, graph_rows, device)
    return Kernels(plain, _fp8_ops(settings, model, plain, device))


def check_kernels(settings: DeviceSettings) -> None:
    """Raises MeshError INVALID_ARGUMENT."""
    name = settings.kernels
    if name not in KERNELS or (settings.deterministic and name != "triton"):
        choices = "triton" if settings.deterministic else ", ".join(KERNELS)
        raise MeshError(
            ErrorReason.ERROR_REASON_INVALID_ARGUMENT,
            f"kernels is {name!r}: choose one of {choices}",
            {"field": "kernels"},
        )


def _plain_ops(settings: DeviceSettings, model: LoadedModel, graph_rows: Sequence[int], device: torch.device) -> Ops:
    name = kernels_name(settings, device)
    gemm: GemmBackend = TorchGemm()
    matrices = model.tunable_matrices()
    # FP8 matrices have a tuner of their own.
    is_tuned = bool(matrices) and settings.tune_gemm and not settings.deterministic and model.quantization == "none"
    if is_tuned and graph_rows and name != "torch" and device.type == "cuda":
        with torch.inference_mode():
            sizes = [size for size in graph_rows if size > 1]
            gemm = tuned_gemm(
                matrices,
                model.dtype,
                sizes,
                device,
                use_pdl=settings.use_pdl,
                notes=TuningNotes.of_device(device),
            )
    if name == "torch":
        return TorchOps()
    if name == "compiled":
        return _compiled_ops(settings, model, gemm, device)
    # Priority over the main stream, whose large kernels would take all SMs first.
    side_stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    return TritonOps(
        use_pdl=settings.use_pdl, is_deterministic=settings.deterministic, gemm=gemm, side_stream=side_stream
    )


def _fp8_ops(settings: DeviceSettings, model: LoadedModel, plain: Ops, device: torch.device) -> Fp8Ops | None:
    """None where no weights are FP8."""
    if model.quantization == "none":
        return None
    if kernels_name(settings, device) == "torch":
        return TorchFp8Ops(plain)
    use_pdl = settings.use_pdl and device.type == "cuda"
    with torch.inference_mode():
        gemm = create_fp8_gemm(
            model.tunable_matrices(),
            model.dtype,
            device,
            max_rows=max(settings.num_slots, settings.max_tokens_per_step),
            use_pdl=use_pdl,
            is_deterministic=settings.deterministic,
            is_tuned=settings.tune_gemm,
            notes=TuningNotes.of_device(device) if device.type == "cuda" else None,
        )
    return TritonFp8Ops(plain, gemm, use_pdl=use_pdl, is_deterministic=settings.deterministic)


def _compiled_ops(settings: DeviceSettings, model: LoadedModel, gemm: GemmBackend, device: torch.device) -> Ops:
    from radixmesh.daemons.worker.cuda.compiled_ops import CompiledOps

    is_cuda = device.type == "cuda"
    ops = CompiledOps(use_pdl=settings.use_pdl and is_cuda, max_fused_rows=int(is_cuda), gemm=gemm)
    ops.check(torch.ones(model.hidden_size, dtype=model.dtype, device=device))
    return ops


def kernels_name(settings: DeviceSettings, device: torch.device) -> str:
    return "torch" if settings.kernels == "triton" and device.type != "cuda" else settings.kernels
