"""From a folder and settings to a runner on a GPU."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.kv_share import KvShare
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader
from radixmesh.daemons.worker.checkpoint.kv_scales import read_kv_scales
from radixmesh.daemons.worker.checkpoint.quantization import read_quantization
from radixmesh.daemons.worker.collectives.expert_all_to_all import AllToAllDispatch
from radixmesh.daemons.worker.collectives.rank_group import RankGroup
from radixmesh.daemons.worker.cuda.attention.choice import AttentionChoice, choose_attention
from radixmesh.daemons.worker.cuda.compilers.client import KernelCompilers
from radixmesh.daemons.worker.cuda.compilers.launchers import hash_triton
from radixmesh.daemons.worker.cuda.device import CudaDevice, Device
from radixmesh.daemons.worker.cuda.drafting.load import (
    load_network,
    network_creator,
    network_work_bytes,
    token_bytes,
)
from radixmesh.daemons.worker.cuda.drafting.network import LoadedNetwork
from radixmesh.daemons.worker.cuda.expert_parallel.choice import create_device_dispatch
from radixmesh.daemons.worker.cuda.expert_parallel.expert_moves import DeviceExpertMoves, moving_bytes
from radixmesh.daemons.worker.cuda.expert_parallel.row_share import WHOLE, RowShare
from radixmesh.daemons.worker.cuda.kernel_choice import check_kernels, create_kernels
from radixmesh.daemons.worker.cuda.memory import MemorySettings, choose_num_pages, fitting
from radixmesh.daemons.worker.cuda.model.device_model import Kernels, LoadedModel, SharedOut
from radixmesh.daemons.worker.cuda.ranks.choice import create_device_group
from radixmesh.daemons.worker.cuda.ranks.device_group import DeviceGroup
from radixmesh.daemons.worker.cuda.runner import DeviceRunner
from radixmesh.daemons.worker.cuda.step.prompt_steps import default_prompt_rows
from radixmesh.daemons.worker.cuda.step.step_forwards import RunnerLimits
from radixmesh.daemons.worker.cuda.step.step_graphs import default_graph_rows, tuned_rows
from radixmesh.daemons.worker.cuda.step.warm_up.late_compiles import expect_compiles, watch_compiles
from radixmesh.daemons.worker.cuda.weights.loading import load_model
from radixmesh.daemons.worker.experts.expert_dispatch import ExpertDispatch, LocalDispatch
from radixmesh.daemons.worker.kv_pool import KvPool
from radixmesh.daemons.worker.models.model import Placement
from radixmesh.daemons.worker.models.transformers_fallback import is_chosen
from radixmesh.daemons.worker.ranks.group import LocalGroup
from radixmesh.daemons.worker.speculation.settings import Speculation
from radixmesh.kernels.hopper import has_gdc
from radixmesh.kernels.kv_fp8 import KV_FP8, KvScales

_log = get_logger(__name__)

_DTYPES: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
_KV_DTYPES = {**_DTYPES, "fp8": KV_FP8}
_MAX_ROWS = 65_535
# Of a pool in which nothing is stored.
_PAGES_TO_COMPILE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSettings:
    """Settings from the worker's flags of the same names; num_pages None = as many as fit. speculation: a network
    that it names is loaded beside the model. max_drafts: of a row in the steps that verify drafts. staging_bytes: of
    the GPU's memory that KV transfers will take."""

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
    embed_pooling: str = "mean"
    model_impl: str = "auto"
    speculation: Speculation | None = None
    max_drafts: int = 0
    tp_collectives: str = "auto"
    ep_transport: str = "auto"
    staging_bytes: int = 0
    two_batch_min_rows: int = 0
    mask_processes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOnDevice:
    """All of a worker's start that outlives a pool, its graphs and a group of ranks: weights, and tuned kernels for
    them. `create_runner` makes the rest, as often as that is lost."""

    settings: DeviceSettings
    device: Device
    attention: AttentionChoice
    model: LoadedModel
    kernels: Kernels
    limits: RunnerLimits
    kv_scales: tuple[KvScales, ...] | None = None
    network: LoadedNetwork | None = None
    experts: SharedOut | None = None


def load_cuda_runner(
    folder: Path,
    settings: DeviceSettings,
    verify: Callable[[DeviceRunner], None] | None = None,
    compilers: KernelCompilers | None = None,
    *,
    meanwhile: Callable[[], object] = lambda: None,
    index: int = 0,
    ranks: RankGroup | None = None,
    experts: ExpertDispatch | None = None,
) -> DeviceRunner:
    """Loads, sizes, compiles and captures. verify: has the runner verify drafts, at the end; its decodes are then
    captured by that alone, if its attention can. compilers: compile kernels while GEMMs are tuned; meanwhile: work for
    the time that they still take after it. index: of the GPU. ranks: those that hold the model together.
    experts: places experts on the ranks that share them, and knows these.

    Raises MeshError UNSUPPORTED (no GPU), BAD_CHECKPOINT, INVALID_ARGUMENT.
    """
    if not torch.cuda.is_available():
        raise MeshError(
            ErrorReason.ERROR_REASON_UNSUPPORTED,
            "the cuda backend needs an NVIDIA GPU and a CUDA build of torch, and finds none here: use --backend cpu",
            {"feature": "cuda"},
        )
    if index >= torch.cuda.device_count():
        raise _invalid("cuda_device", f"is {index}: this process sees {torch.cuda.device_count()} GPUs, from 0 on")
    expect_compiles()
    with fitting("a CUDA context and what other processes hold", "--mem-fraction, or who else uses the GPU"):
        device = CudaDevice(index)
    threading.Thread(target=hash_triton, name="triton", daemon=True).start()
    # Older GPUs have nothing by which a kernel could wait for the one ahead of it.
    settings = replace(settings, use_pdl=settings.use_pdl and has_gdc(device.torch_device))
    group = _create_group(settings, ranks, device)
    shared = create_shared_out(settings, experts, device, ranks)
    runner = create_runner(load_on_device(folder, settings, device, compilers, group, shared))
    if compilers is not None:
        compilers.wait(meanwhile)
    started = time.monotonic()
    with fitting("captured graphs, or the longest prompts", "--mem-fraction, --num-slots or --max-tokens-per-step"):
        runner.warm_up(has_decodes=verify is None or not runner.can_verify)
        if verify is not None:
            verify(runner)
    _log.info("graphs_captured", seconds=round(time.monotonic() - started, 3))
    if compilers is not None:
        compilers.keep()
    watch_compiles()
    return runner


def load_device_runner(
    folder: Path,
    settings: DeviceSettings,
    device: Device,
    group: DeviceGroup | None = None,
    experts: SharedOut | None = None,
) -> DeviceRunner:
    """Loads and sizes a runner on any device, without warm-up. Raises as `load_cuda_runner`."""
    return create_runner(load_on_device(folder, settings, device, group=group, experts=experts))


def load_on_device(
    folder: Path,
    settings: DeviceSettings,
    device: Device,
    compilers: KernelCompilers | None = None,
    group: DeviceGroup | None = None,
    experts: SharedOut | None = None,
    *,
    is_said: bool = True,
) -> ModelOnDevice:
    """First phase of a start: reads the weights and tunes kernels for them. compilers: are told which Triton kernels
    there will be before anything is tuned, and before weights are read where their values decide nothing. is_said: the
    log tells of the weights. Raises as `load_cuda_runner`."""
    dtype = _dtype("dtype", settings.dtype) or torch.bfloat16
    where = device.torch_device
    # Report wrong flags before reading the weights.
    attention = choose_attention(settings, dtype, _dtype("kv_dtype", settings.kv_dtype, _KV_DTYPES), where)
    check_kernels(settings)
    _check_rows(settings)
    _check_deterministic(folder, settings)
    if compilers is not None and _has_kernels_of_shapes(folder, settings):
        of_shapes = replace(settings, load_format="dummy", tune_gemm=False)
        _ask(compilers, lambda: load_on_device(folder, of_shapes, device, is_said=False))
        compilers = None
    placement = Placement(
        device=where,
        dtype=dtype,
        group=group or LocalGroup(),
        is_out_first=True,
        max_total_len=settings.max_total_len,
        experts=LocalDispatch() if experts is None else experts.placed,
    )
    with fitting("weights", "the model, --dtype or --quantization"):
        model = load_model(
            folder,
            placement,
            load_format=settings.load_format,
            quantization=settings.quantization,
            attention=attention,
            model_impl=settings.model_impl,
            is_said=is_said,
        )
    if model.latent_rank is not None:
        attention = attention.of_latents(model.latent_rank)
    kv_scales = _kv_scales(folder, settings, model, where) if attention.kv_dtype == KV_FP8 else None
    links = (group, None if experts is None else experts.dispatch)
    can_capture = all(link.can_capture for link in links if link is not None)
    has_graphs = settings.cuda_graphs and model.can_capture and can_capture
    travels = experts is not None and experts.dispatch.travels
    length = min(model.max_total_len, settings.max_total_len or model.max_total_len)
    _check_tables(settings, length)
    limits = RunnerLimits(
        num_slots=settings.num_slots,
        max_tokens_per_step=settings.max_tokens_per_step,
        max_total_len=length,
        graph_rows=default_graph_rows(settings.num_slots) if has_graphs else (),
        # Steps with chunks are normal forwards: rows that travel are counted by the host first.
        prompt_rows=() if travels or not has_graphs else default_prompt_rows(settings.max_tokens_per_step),
        two_batch_min_rows=settings.two_batch_min_rows if travels else 0,
        mask_processes=settings.mask_processes,
    )
    with fitting("weights of the network that drafts", "--speculative-algorithm, its folder, or the model"):
        network = load_network(settings.speculation, folder, model, placement, settings, limits.graph_rows)
    loaded = partial(
        ModelOnDevice,
        settings=settings,
        device=device,
        attention=attention,
        model=model,
        limits=limits,
        kv_scales=kv_scales,
        network=network,
        experts=experts,
    )

    def with_kernels(settings: DeviceSettings, graph_rows: tuple[int, ...]) -> ModelOnDevice:
        has_levels = network is not None and settings.speculation is not None and settings.speculation.tree is None
        sizes = tuned_rows(graph_rows, settings.max_drafts, limits.two_batch_min_rows, has_levels=has_levels)
        return loaded(kernels=replace(create_kernels(settings, model, sizes, where), group=group, experts=experts))

    if compilers is not None and settings.kernels == "triton":
        _ask(compilers, lambda: with_kernels(replace(settings, tune_gemm=False), ()))
    return with_kernels(settings, limits.graph_rows)


def _has_kernels_of_shapes(folder: Path, settings: DeviceSettings) -> bool:
    """True if random weights on the device have the same kernels as the folder's, and take no time: those that are
    quantised are made by kernels, which would be compiled one by one. Scales of FP8 KV are in the folder."""
    config = ConfigReader.open(folder)
    return (
        settings.kernels == "triton"
        and settings.load_format != "dummy"
        and settings.kv_dtype != "fp8"
        and settings.speculation is None
        and settings.quantization in ("auto", "none")
        and read_quantization(config) is None
        and not is_chosen(config.strings("architectures")[0], settings.model_impl)
    )


def _ask(compilers: KernelCompilers, untuned: Callable[[], ModelOnDevice]) -> None:
    """Has the kernels of a warm-up compiled. Those that tuned GEMMs add are compiled when the warm-up comes to them."""
    try:
        runner = create_runner(untuned(), num_pages=_PAGES_TO_COMPILE)
        if runner.can_compile_ahead:
            compilers.ask(runner.launch_all)
        # It is part of cycles: its memory would be missing when the pool is sized.
        del runner
        gc.collect()
        torch.cuda.empty_cache()
    # The start does not depend on it; what is wrong with the settings is said again, by what does.
    except Exception as error:
        _log.warning("kernels_not_compiled_beside", reason=f"{type(error).__name__}: {error}")


def create_runner(loaded: ModelOnDevice, num_pages: int | None = None) -> DeviceRunner:
    """Second phase: the pool, sized by the memory that weights and tuning left, and the runner over it, without
    warm-up. num_pages: of the pool, without regard to memory. Raises MeshError INVALID_ARGUMENT or UNSUPPORTED."""
    settings, model, limits, attention = loaded.settings, loaded.model, loaded.limits, loaded.attention
    where = loaded.device.torch_device
    create_attention = attention.creator(
        settings, model.attention_shape, model.windows, model.attention_chunks, has_sinks=model.has_sinks
    )
    layout = attention.layout(model.kv_layout)
    if num_pages is None:
        num_pages = _num_pages(loaded, layout.bytes_per_token(attention.kv_dtype) + token_bytes(loaded.network))
    with torch.inference_mode(), fitting("KV pages and work space", "--mem-fraction or --num-pages"):
        pool = KvPool(
            layout,
            num_pages=num_pages,
            page_size=settings.page_size,
            dtype=attention.kv_dtype,
            device=where,
            scales=loaded.kv_scales,
            share=model.kv_heads and KvShare(*model.kv_heads.share, model.kv_heads.total),
        )
        device_model = model.create(loaded.kernels, pool, limits.max_total_len)
    with fitting("tables by slot", "--num-slots, --max-total-len or --mem-fraction"):
        runner = DeviceRunner(
            loaded.device,
            device_model,
            pool,
            create_attention,
            limits,
            is_deterministic=settings.deterministic,
            use_pdl=settings.use_pdl and where.type == "cuda",
            embed_pooling=settings.embed_pooling,
            create_network=network_creator(loaded, num_pages, device_model),
            group=loaded.kernels.group,
            experts=None if loaded.experts is None else loaded.experts.dispatch,
        )
    if loaded.experts is not None:
        layers, dispatch = device_model.shared_experts(), loaded.experts.dispatch
        runner.expert_moves = DeviceExpertMoves(layers, dispatch, loaded.device, model.read_experts)
    return runner


def _num_pages(loaded: ModelOnDevice, token_bytes: int) -> int:
    """Pages of the KV pool: what fits the GPU; without one, the flag's number or one request of the longest length."""
    settings, model, limits, device = loaded.settings, loaded.model, loaded.limits, loaded.device.torch_device
    if device.type != "cuda":
        return settings.num_pages or -(-limits.max_total_len // settings.page_size)
    memory = MemorySettings(
        mem_fraction=settings.mem_fraction,
        num_pages=settings.num_pages,
        page_size=settings.page_size,
        num_slots=limits.num_slots,
        max_tokens_per_step=limits.max_tokens_per_step,
        max_total_len=limits.max_total_len,
        graph_rows=limits.graph_rows,
        prompt_rows=limits.prompt_rows,
        attention_bytes=loaded.attention.work_bytes(settings, model.attention_shape, model.windows, device)
        * (2 if limits.two_batch_min_rows else 1)
        + network_work_bytes(loaded.network, settings, limits.max_total_len)
        + _tree_bytes(loaded)
        + _dispatch_bytes(loaded)
        + settings.staging_bytes,
        others_rows=0 if loaded.experts is None else loaded.experts.dispatch.others_rows(limits.max_tokens_per_step),
    )
    return choose_num_pages(memory, model, token_bytes, device)


def _tree_bytes(loaded: ModelOnDevice) -> int:
    """Memory that trees of drafts take beside chains: attention over prefixes, in float32, and logits of a level."""
    speculation, model, num_slots = loaded.settings.speculation, loaded.model, loaded.limits.num_slots
    if loaded.network is None or speculation is None or speculation.tree is None:
        return 0
    shape = model.attention_shape
    of_prefixes = num_slots * (speculation.max_drafts + 1) * shape.num_heads * (shape.head_dim + 1) * 4
    return of_prefixes + 2 * num_slots * speculation.topk * model.vocab_size * loaded.network.dtype.itemsize


def _dispatch_bytes(loaded: ModelOnDevice) -> int:
    shared, model = loaded.experts, loaded.model
    if shared is None:
        return 0
    num_slots = shared.placed.slots_per_rank(model.num_experts)
    return shared.dispatch.buffer_bytes(num_slots, model.hidden_size) + moving_bytes(num_slots, model.expert_bytes())


def _check_rows(settings: DeviceSettings) -> None:
    """Rows of a step are an axis of grids of kernels, which ends there."""
    for field in ("num_slots", "max_tokens_per_step"):
        if getattr(settings, field) > _MAX_ROWS:
            raise _invalid(field, f"is {getattr(settings, field)}: a GPU takes at most {_MAX_ROWS}")


def _check_deterministic(folder: Path, settings: DeviceSettings) -> None:
    architecture = ConfigReader.open(folder).strings("architectures")[0]
    if settings.deterministic and is_chosen(architecture, settings.model_impl):
        raise MeshError(
            ErrorReason.ERROR_REASON_UNSUPPORTED,
            f"{architecture} is computed by transformers' modules, whose rows may depend on their batch: leave "
            "--deterministic out",
            {"feature": "deterministic"},
        )


def _check_tables(settings: DeviceSettings, max_total_len: int) -> None:
    """Indexes in the page tables, and the positions they stand for, are int32 on the device."""
    positions = (settings.num_slots + 1) * (max_total_len // settings.page_size + 1) * settings.page_size
    if positions >= 2**31:
        what = (
            f"x {max_total_len} tokens of a request pass 2^31 positions: set fewer slots or a shorter --max-total-len"
        )
        raise _invalid("num_slots", f"{settings.num_slots} {what}")


def _dtype(field: str, name: str, dtypes: Mapping[str, torch.dtype] = _DTYPES) -> torch.dtype | None:
    """None: auto."""
    if name != "auto" and name not in dtypes:
        raise _invalid(field, f"is {name!r}: choose one of auto, {', '.join(dtypes)}")
    return dtypes.get(name)


def _kv_scales(
    folder: Path, settings: DeviceSettings, model: LoadedModel, device: torch.device
) -> tuple[KvScales, ...] | None:
    if settings.load_format == "dummy":
        return None
    num_heads = model.attention_shape.num_kv_heads
    total, share = model.kv_heads or (num_heads, (0, num_heads))
    return read_kv_scales(
        folder, num_layers=model.num_layers, num_kv_heads=total, heads=(share[0], share[1]), device=device
    )


def _create_group(settings: DeviceSettings, ranks: RankGroup | None, device: Device) -> DeviceGroup | None:
    """Raises MeshError INVALID_ARGUMENT or UNSUPPORTED."""
    if ranks is None or ranks.size == 1:
        return None
    with device.in_order():
        return create_device_group(settings.tp_collectives, ranks, device)


def _invalid(field: str, what: str) -> MeshError:
    return MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, f"{field} {what}", {"field": field})


def create_shared_out(
    settings: DeviceSettings, placed: ExpertDispatch | None, device: Device, ranks: RankGroup | None = None
) -> SharedOut | None:
    """The way to the ranks that share the experts, if any do. ranks: those that hold the model together. Raises
    MeshError INVALID_ARGUMENT or UNSUPPORTED."""
    if placed is None or placed.size == 1:
        return None
    assert isinstance(placed, AllToAllDispatch), "ranks share experts by a group of theirs"
    # No rank decodes more rows at a time than it has slots.
    batch = WHOLE if ranks is None else RowShare(ranks.rank, ranks.size)
    room = settings.num_slots
    dispatch = create_device_dispatch(settings.ep_transport, placed.group, device, max_room=room, batch=batch)
    return SharedOut(dispatch, placed)
