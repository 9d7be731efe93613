"""From a folder and settings to a runner."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.kv_share import KvShare
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader
from radixmesh.daemons.worker.checkpoint.kv_scales import read_kv_scales
from radixmesh.daemons.worker.checkpoint.loader import TensorTargets, load_tensors
from radixmesh.daemons.worker.checkpoint.quantization import read_quantization
from radixmesh.daemons.worker.collectives.expert_all_to_all import AllToAllDispatch
from radixmesh.daemons.worker.cpu.attention.backend import AttentionPlacement
from radixmesh.daemons.worker.cpu.attention.registry import attention_backends
from radixmesh.daemons.worker.cpu.determinism import verified_tiles
from radixmesh.daemons.worker.cpu.encoder_runner import EncoderRunner
from radixmesh.daemons.worker.cpu.pooling import hidden_pools
from radixmesh.daemons.worker.cpu.runner import CpuRunner
from radixmesh.daemons.worker.experts.expert_dispatch import ExpertDispatch, LocalDispatch
from radixmesh.daemons.worker.experts.expert_moves import ExpertMoves
from radixmesh.daemons.worker.kv_pool import KvPool, default_num_pages, latents_in_fp8
from radixmesh.daemons.worker.models.encoder import ENCODER_ARCHITECTURES
from radixmesh.daemons.worker.models.encoder.config import read_encoder_config
from radixmesh.daemons.worker.models.encoder.model import EncoderModel
from radixmesh.daemons.worker.models.expert_checkpoint import read_experts
from radixmesh.daemons.worker.models.model import BuiltModel, Placement
from radixmesh.daemons.worker.models.registry import model_families
from radixmesh.daemons.worker.models.sharding import Share
from radixmesh.daemons.worker.models.transformers_fallback import is_chosen
from radixmesh.daemons.worker.ranks.group import Group, LocalGroup
from radixmesh.daemons.worker.tiles import RowTiles
from radixmesh.kernels.kv_fp8 import KV_FP8, KvScales

_log = get_logger(__name__)

MODEL_IMPLS = ("auto", "radixmesh", "transformers")
_DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_runner(
    model: Path,
    *,
    page_size: int,
    num_pages: int | None,
    threads: int | None,
    is_deterministic: bool,
    attention_backend: str,
    dtype: str,
    kv_dtype: str = "auto",
    max_total_len: int | None,
    embed_pooling: str,
    model_impl: str = "auto",
    group: Group | None = None,
    experts: ExpertDispatch | None = None,
    two_batch_min_rows: int = 0,
) -> CpuRunner | EncoderRunner:
    """See `load_cpu_runner`."""
    _check_settings(page_size=page_size, num_pages=num_pages, threads=threads, max_total_len=max_total_len)
    if model_impl not in MODEL_IMPLS:
        raise _invalid("model_impl", f"is {model_impl!r}: choose one of {', '.join(MODEL_IMPLS)}")
    if dtype not in _DTYPES:
        raise _invalid("dtype", f"is {dtype!r}: choose one of {', '.join(_DTYPES)}")
    if kv_dtype not in ("auto", "fp8"):
        raise _invalid("kv_dtype", f"is {kv_dtype!r}: on a CPU choose auto (as the weights) or fp8")
    create_attention = attention_backends().create(attention_backend)
    hidden_pool = hidden_pools().create(embed_pooling)
    group, experts = group or LocalGroup(), experts or LocalDispatch()
    # Ranks of a group on CPUs share a machine, as long as nobody says otherwise.
    num_threads = threads or max(1, torch.get_num_threads() // max(group.size, experts.size))
    torch.set_num_threads(num_threads)
    placement = Placement(
        device=torch.device("cpu"), dtype=_DTYPES[dtype], group=group, max_total_len=max_total_len, experts=experts
    )
    if group.size > 1 or experts.size > 1:
        _check_can_shard(model, model_impl)
    if _architecture(model) in ENCODER_ARCHITECTURES:
        if kv_dtype != "auto":
            raise _invalid("kv_dtype", f"is {kv_dtype!r}, but an encoder keeps no KV: choose auto")
        encoder = load_encoder(model, placement)
        return EncoderRunner(
            encoder,
            hidden_pool,
            page_size=page_size,
            num_pages=num_pages,
            max_total_len=min(encoder.config.max_total_len, max_total_len or encoder.config.max_total_len),
            num_threads=num_threads,
        )
    built = load_model(model, placement, model_impl, has_fp8_kv=kv_dtype == "fp8")
    length = min(built.model.max_total_len, max_total_len or built.model.max_total_len)
    layout = built.model.kv_layout
    pool_dtype, scales = placement.dtype, None
    if kv_dtype == "fp8":
        pool_dtype, scales = KV_FP8, _kv_scales(model, built)
    if num_pages is None:
        num_pages = default_num_pages(
            layout, page_size=page_size, dtype=pool_dtype, max_total_len=length, num_ranks=group.size
        )
    with torch.inference_mode(), group.alone():
        attention = create_attention(
            built.model.attention_shape,
            AttentionPlacement(device=placement.device, dtype=placement.dtype, is_deterministic=is_deterministic),
        )
        is_tiled = is_deterministic and built.model.is_batch_invariant
        tiles = verified_tiles(built.model.row_probes(), placement.device) if is_tiled else RowTiles(None)
        pool = KvPool(
            layout,
            num_pages=num_pages,
            page_size=page_size,
            dtype=pool_dtype,
            device=placement.device,
            scales=scales,
            share=built.kv_heads and KvShare(*built.kv_heads.share, built.kv_heads.total),
        )
    runner = CpuRunner(
        built.model,
        pool,
        attention,
        tiles,
        hidden_pool,
        max_total_len=length,
        num_threads=num_threads,
        group=group,
        experts=experts,
        two_batch_min_rows=two_batch_min_rows,
    )
    if experts.size > 1:
        assert isinstance(experts, AllToAllDispatch)
        quantization = read_quantization(ConfigReader.open(model))
        read = partial(read_experts, model, quantization, built.expert_sources)
        runner.expert_moves = ExpertMoves(built.model.routed_experts(), experts.group, read)
    return runner


def load_model(folder: Path, placement: Placement, model_impl: str = "auto", *, has_fp8_kv: bool = False) -> BuiltModel:
    """Reads config and weights. model_impl: a family of ours (radixmesh), modules of transformers (transformers), or
    the first that there is (auto). has_fp8_kv: a model that caches latents is refused before its weights are read.
    Raises MeshError BAD_CHECKPOINT or UNSUPPORTED."""
    started = time.monotonic()
    config = ConfigReader.open(folder)
    architecture = config.strings("architectures")[0]
    if is_chosen(architecture, model_impl):
        return _load_by_transformers(folder, placement)
    quantization = read_quantization(config)
    with torch.inference_mode():
        built = model_families().create(architecture).build(config, placement)
        if has_fp8_kv and {plane.name for plane in built.model.kv_layout.planes} != {"keys", "values"}:
            raise latents_in_fp8()
        num_bytes = load_tensors(folder, built.targets, quantization)
    seconds = round(time.monotonic() - started, 3)
    _log.info(
        "weights_loaded",
        folder=str(folder),
        architecture=architecture,
        quantization="none",
        stored_as="none" if quantization is None else str(quantization.form),
        bytes=num_bytes,
        seconds=seconds,
    )
    return built


def _kv_scales(folder: Path, built: BuiltModel) -> tuple[KvScales, ...] | None:
    """Of this rank's KV heads. Raises MeshError BAD_CHECKPOINT."""
    num_heads = built.model.attention_shape.num_kv_heads
    total, share = (num_heads, Share(0, num_heads)) if built.kv_heads is None else built.kv_heads
    return read_kv_scales(
        folder,
        num_layers=built.model.kv_layout.num_layers,
        num_kv_heads=total,
        heads=(share.start, share.stop),
        device=torch.device("cpu"),
    )


def load_encoder(folder: Path, placement: Placement) -> EncoderModel:
    """Reads config and weights. Raises MeshError BAD_CHECKPOINT or UNSUPPORTED."""
    config = ConfigReader.open(folder)
    with torch.inference_mode():
        model = EncoderModel(read_encoder_config(config), placement)
        load_tensors(folder, model.targets(), read_quantization(config))
    return model


def _check_can_shard(folder: Path, model_impl: str) -> None:
    """Raises MeshError UNSUPPORTED for a model that no family of ours computes."""
    architecture = _architecture(folder)
    what = ""
    if architecture in ENCODER_ARCHITECTURES:
        what = f"the encoder {architecture}"
    elif is_chosen(architecture, model_impl):
        what = f"{architecture}, computed by modules of transformers,"
    if what:
        raise MeshError(
            common_pb2.ERROR_REASON_UNSUPPORTED,
            f"{what} is not divided among ranks: set --tp-size 1 and --ep-size 1",
            {"feature": "tp_size"},
        )


def _architecture(folder: Path) -> str:
    return ConfigReader.open(folder).strings("architectures")[0]


def _load_by_transformers(folder: Path, placement: Placement) -> BuiltModel:
    from radixmesh.daemons.worker.models.transformers_fallback.loading import load_transformers_model

    model = load_transformers_model(folder, placement)
    return BuiltModel(model, TensorTargets(tensors={}, is_ignored=lambda name: True))


def _check_settings(**settings: int | None) -> None:
    for name, value in settings.items():
        if value is not None and value < 1:
            raise _invalid(name, f"is {value}: choose a number >= 1")


def _invalid(field: str, what: str) -> MeshError:
    return MeshError(common_pb2.ERROR_REASON_INVALID_ARGUMENT, f"{field} {what}", {"field": field})
