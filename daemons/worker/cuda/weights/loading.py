"""From a folder to the weights of a decoder on a device, in the model's dtype or with projections that are FP8."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader
from radixmesh.daemons.worker.checkpoint.loader import TensorTargets, load_tensors
from radixmesh.daemons.worker.checkpoint.quantization import CheckpointQuantization, Fp8Form, read_quantization
from radixmesh.daemons.worker.checkpoint.tensor_index import index_tensors
from radixmesh.daemons.worker.cuda.attention.choice import AttentionChoice
from radixmesh.daemons.worker.cuda.fp8.deepseek_weights import QuantizedDeepseek, load_deepseek, refill_experts
from radixmesh.daemons.worker.cuda.fp8.weights import QuantizedLayers, chosen_form, load_layers
from radixmesh.daemons.worker.cuda.model.decoder import LoadedDecoder, check_decoder
from radixmesh.daemons.worker.cuda.model.deepseek import LoadedDeepseek
from radixmesh.daemons.worker.cuda.model.device_model import LoadedModel
from radixmesh.daemons.worker.cuda.weights.source import RandomSource, WeightSource, fill_randomly, folder_source
from radixmesh.daemons.worker.experts.expert_moves import ReadExperts, Wanted
from radixmesh.daemons.worker.models.decoder.config import RouterKind
from radixmesh.daemons.worker.models.decoder.model import DecoderModel
from radixmesh.daemons.worker.models.deepseek.model import DeepseekModel
from radixmesh.daemons.worker.models.encoder import ENCODER_ARCHITECTURES
from radixmesh.daemons.worker.models.expert_checkpoint import read_experts
from radixmesh.daemons.worker.models.model import BuiltModel, Model, Placement
from radixmesh.daemons.worker.models.registry import model_families
from radixmesh.daemons.worker.models.transformers_fallback import is_chosen

_log = get_logger(__name__)

# Compute capability from which on tensor cores and conversions take e4m3.
_LEAST_CAPABILITY = (8, 9)


def load_model(
    folder: Path,
    placement: Placement,
    *,
    load_format: str,
    quantization: str,
    attention: AttentionChoice | None = None,
    model_impl: str = "auto",
    is_said: bool = True,
) -> LoadedModel:
    """load_format, quantization and model_impl as the worker's flags of these names; attention: what will read the
    model's KV. is_said: the log tells of it. Raises MeshError BAD_CHECKPOINT, UNSUPPORTED or INVALID_ARGUMENT."""
    started = time.monotonic()
    config = ConfigReader.open(folder)
    architecture = config.strings("architectures")[0]
    if architecture in ENCODER_ARCHITECTURES:
        raise MeshError(
            ErrorReason.ERROR_REASON_UNSUPPORTED,
            f"the cuda backend does not compute the encoder {architecture}: use --backend cpu",
            {"feature": architecture},
        )
    if is_chosen(architecture, model_impl):
        if placement.group.size > 1 or placement.experts.size > 1:
            raise MeshError(
                ErrorReason.ERROR_REASON_UNSUPPORTED,
                f"{architecture}, computed by modules of transformers, is not divided among ranks: set --tp-size 1 and "
                "--ep-size 1",
                {"feature": "tp_size"},
            )
        # Here alone: transformers is installed where such models are served.
        from radixmesh.daemons.worker.cuda.model.fallback import load_fallback

        return load_fallback(folder, placement, load_format=load_format, quantization=quantization, attention=attention)
    stored = read_quantization(config)
    form = chosen_form(quantization, stored)
    if form is not None:
        check_device(placement.device, form)
        placement = replace(placement, has_projections=False)
    is_dummy = load_format == "dummy"
    quantized: QuantizedLayers | QuantizedDeepseek | None = None
    targets = None
    with torch.inference_mode():
        built = model_families().create(architecture).build(config, placement)
        check_model(architecture, built.model, form=form, attention=attention)
        if placement.experts.size > 1:
            check_shared_out(architecture, built.model)
        if form is not None:
            targets = _layout(folder, built.targets, is_dummy=is_dummy)
            skew = _router_skew(config) if is_dummy else None
            with _source(folder, targets, stored, placement.device, skew) as source:
                is_online = is_dummy or stored is None
                quantized = _load_quantized(built.model, targets, source, form, placement, is_online)
                num_bytes = source.num_bytes
        elif is_dummy:
            num_bytes = fill_randomly(built.targets, _router_skew(config))
        else:
            num_bytes = load_tensors(folder, built.targets, stored)
        loaded = _loaded(built.model, quantized, is_share=placement.group.size > 1)
        loaded.kv_heads = built.kv_heads
        if placement.experts.size > 1 and not is_dummy:
            loaded.read_experts = _expert_reader(folder, built, quantized, targets, stored, placement)
    if placement.device.type == "cuda":
        # Memory that was used while making them is free for KV.
        torch.cuda.empty_cache()
    if not is_said:
        return loaded
    _log.info(
        "weights_loaded",
        folder=str(folder),
        architecture=architecture,
        quantization=loaded.quantization,
        stored_as="none" if stored is None or is_dummy else str(stored.form),
        # Of a quantised model, matrices of its layers that are not.
        num_plain=loaded.num_plain,
        bytes=num_bytes,
        seconds=round(time.monotonic() - started, 3),
    )
    return loaded


def check_model(
    architecture: str, model: Model, *, form: Fp8Form | None, attention: AttentionChoice | None = None
) -> None:
    """Raises MeshError UNSUPPORTED for what only the CPU backend or another attention computes, before weights are
    read."""
    if isinstance(model, DecoderModel):
        check_decoder(model.config, is_quantized=form is not None)
        if attention is not None:
            chunks = [chunk for chunk in model.config.chunks or () if chunk is not None]
            attention.check_masks(architecture, has_sinks=model.config.has_sinks, attention_chunks=chunks)
        if attention is not None and model.attention_shape.softcap is not None:
            attention.check_softcap(architecture)
    elif not isinstance(model, DeepseekModel):
        raise MeshError(
            ErrorReason.ERROR_REASON_UNSUPPORTED,
            f"the cuda backend does not compute {architecture} yet: use --backend cpu",
            {"feature": architecture},
        )
    elif form is Fp8Form.CHANNEL:
        raise MeshError(
            ErrorReason.ERROR_REASON_UNSUPPORTED,
            f"the cuda backend computes {architecture} with FP8 weights that have a scale a block, not one a channel: "
            f"use --quantization {Fp8Form.BLOCK} for weights that are not quantised yet, or none",
            {"feature": "FP8 weights by channel with latent attention"},
        )
    elif attention is not None:
        attention.check_latents(architecture)


def check_shared_out(architecture: str, model: Model) -> None:
    """Raises MeshError UNSUPPORTED for experts that ranks of this backend do not share."""
    experts = model.config.experts if isinstance(model, DecoderModel) else None
    if experts is not None and experts.router is RouterKind.SIGMOID:
        raise MeshError(
            ErrorReason.ERROR_REASON_UNSUPPORTED,
            f"{architecture} scales what its experts read: ranks of the cuda backend do not share those, set --ep-size "
            "1",
            {"feature": "ep_size"},
        )


def _loaded(model: Model, quantized: QuantizedLayers | QuantizedDeepseek | None, *, is_share: bool) -> LoadedModel:
    if isinstance(model, DecoderModel):
        assert not isinstance(quantized, QuantizedDeepseek)
        return LoadedDecoder(model, quantized, is_share=is_share)
    assert isinstance(model, DeepseekModel) and not isinstance(quantized, QuantizedLayers)
    return LoadedDeepseek(model, quantized, is_share=is_share)


def _load_quantized(
    model: Model,
    targets: TensorTargets,
    source: WeightSource,
    form: Fp8Form,
    placement: Placement,
    is_online: bool,
) -> QuantizedLayers | QuantizedDeepseek:
    dtype, device = placement.dtype, placement.device
    if isinstance(model, DeepseekModel):
        return load_deepseek(
            model.config, targets, source, dtype=dtype, device=device, is_online=is_online, experts=placement.experts
        )
    assert isinstance(model, DecoderModel)
    return load_layers(model.config, targets, source, form, dtype=dtype, device=device, is_online=is_online)


def _expert_reader(
    folder: Path,
    built: BuiltModel,
    quantized: QuantizedLayers | QuantizedDeepseek | None,
    targets: TensorTargets | None,
    stored: CheckpointQuantization | None,
    placement: Placement,
) -> ReadExperts:
    """Fills slots of this rank with experts of the folder, in the form in which the others are."""
    if quantized is None:
        return partial(read_experts, folder, stored, built.expert_sources)
    model = built.model
    assert isinstance(model, DeepseekModel) and isinstance(quantized, QuantizedDeepseek) and targets is not None
    dtype, device = placement.dtype, placement.device

    def read(wanted: Sequence[Wanted]) -> None:
        with torch.inference_mode(), folder_source(folder, targets, stored) as source:
            refill_experts(
                model.config, quantized, targets, source, wanted, dtype=dtype, device=device, is_online=stored is None
            )

    return read


def _router_skew(config: ConfigReader) -> float:
    """Of random weights: no model's own config has it."""
    return config.number("dummy_router_skew", 0.0, can_be_zero=True)


def _layout(folder: Path, targets: TensorTargets, *, is_dummy: bool) -> TensorTargets:
    """The names that the source has tensors under."""
    return targets.in_layout_of(() if is_dummy else index_tensors(folder))


@contextmanager
def _source(
    folder: Path,
    targets: TensorTargets,
    stored: CheckpointQuantization | None,
    device: torch.device,
    router_skew: float | None,
) -> Iterator[WeightSource]:
    """router_skew: of random weights; None: they are the folder's."""
    if router_skew is not None:
        yield RandomSource(targets, device, router_skew)
        return
    with folder_source(folder, targets, stored) as source:
        yield source


def check_device(device: torch.device, form: Fp8Form) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        raise MeshError(
            ErrorReason.ERROR_REASON_UNSUPPORTED,
            f"{form} weights need a GPU of compute capability 8.9 or later: use --quantization none, which dequantises "
            "them",
            {"feature": str(form)},
        )
