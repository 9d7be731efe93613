"""From settings to a network that drafts on a device, for a model that is loaded there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import Task
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader
from radixmesh.daemons.worker.checkpoint.loader import load_tensors
from radixmesh.daemons.worker.checkpoint.tensor_index import index_tensors
from radixmesh.daemons.worker.cpu.load_drafter import check_vocabulary, no_drafter, shows_nothing
from radixmesh.daemons.worker.cuda.attention.choice import AttentionChoice
from radixmesh.daemons.worker.cuda.drafting.device_network import DeviceNetwork, NetworkCreator
from radixmesh.daemons.worker.cuda.drafting.eagle3 import LoadedEagle3
from radixmesh.daemons.worker.cuda.drafting.mtp import LoadedMtp
from radixmesh.daemons.worker.cuda.drafting.network import LoadedNetwork
from radixmesh.daemons.worker.cuda.drafting.network_trees import scratch_tokens
from radixmesh.daemons.worker.cuda.drafting.standalone import LoadedStandalone
from radixmesh.daemons.worker.cuda.kernel_choice import create_kernels
from radixmesh.daemons.worker.cuda.model.deepseek import LoadedDeepseek
from radixmesh.daemons.worker.cuda.model.device_model import LoadedModel
from radixmesh.daemons.worker.cuda.step.slot_state import SlotState
from radixmesh.daemons.worker.cuda.step.step_graphs import tuned_rows
from radixmesh.daemons.worker.cuda.weights.loading import load_model
from radixmesh.daemons.worker.cuda.weights.source import fill_randomly
from radixmesh.daemons.worker.kv_pool import KvPool
from radixmesh.daemons.worker.models.model import Placement
from radixmesh.daemons.worker.speculation.models.eagle3 import TargetSizes, build_eagle3
from radixmesh.daemons.worker.speculation.models.mtp import no_mtp_layer
from radixmesh.daemons.worker.speculation.settings import NETWORKS, Speculation, SpeculativeAlgorithm

if TYPE_CHECKING:
    from radixmesh.daemons.worker.cuda.load import DeviceSettings, ModelOnDevice
    from radixmesh.daemons.worker.cuda.model.device_model import DeviceModel

_log = get_logger(__name__)


def load_network(
    speculation: Speculation | None,
    folder: Path,
    target: LoadedModel,
    placement: Placement,
    settings: DeviceSettings,
    graph_rows: tuple[int, ...],
) -> LoadedNetwork | None:
    """The network that drafts for a model, whose folder is `folder`; None where none does.

    Raises MeshError BAD_CHECKPOINT, UNSUPPORTED, or INVALID_ARGUMENT for a network that is not for this model.
    """
    if speculation is None or speculation.algorithm not in NETWORKS:
        return None
    if Task.GENERATE not in target.tasks:
        # The caller that asks for drafts refuses the model.
        return None
    with torch.inference_mode():
        if speculation.algorithm is SpeculativeAlgorithm.MTP:
            return _mtp(target)
        draft_folder = speculation.draft_model
        assert draft_folder is not None, "settings see to it"
        if speculation.algorithm is SpeculativeAlgorithm.EAGLE3:
            return _eagle3(draft_folder, target, placement, settings)
        return _standalone(draft_folder, folder, placement, settings, graph_rows)


def token_bytes(network: LoadedNetwork | None) -> int:
    """Of KV, features and what is noted of a token."""
    if network is None:
        return 0
    return network.kv_layout.bytes_per_token(network.dtype) + network.num_features * network.dtype.itemsize + 1


def network_work_bytes(network: LoadedNetwork | None, settings: DeviceSettings, max_total_len: int) -> int:
    """Memory beside weights, KV and features: a step's activations, logits, tables by slot and by position."""
    if network is None or settings.speculation is None:
        return 0
    rows = max(settings.max_tokens_per_step, settings.num_slots * (settings.speculation.max_drafts + 1))
    tables = 4 * (settings.num_slots + 1) * (max_total_len + 1)
    scratch = scratch_tokens(settings.speculation.tree, settings.num_slots) * token_bytes(network)
    return rows * network.row_bytes() + tables + scratch + 4 * max_total_len * network.attention_shape.head_dim


def network_creator(loaded: ModelOnDevice, num_pages: int, model: DeviceModel) -> NetworkCreator | None:
    """Makes the drafter over the slots of the target's runner; None where no network drafts. num_pages: of the target's
    pool."""
    network, settings, limits = loaded.network, loaded.settings, loaded.limits
    if network is None:
        return None
    assert settings.speculation is not None, "a network that nobody asked for"
    max_chain, tree = settings.speculation.max_drafts, settings.speculation.tree
    by_token = replace(settings, page_size=1, deterministic=False)
    dtype = loaded.attention.query_dtype
    attention = AttentionChoice(
        name=loaded.attention.name,
        dtype=network.dtype,
        query_dtype=dtype,
        kv_dtype=dtype,
        latent_rank=network.latent_rank,
    )
    # One page more than the target's has the rows of padding, and the last token is what is read where nothing is.
    num_tokens = (num_pages + 1) * settings.page_size + scratch_tokens(tree, limits.num_slots)
    where = loaded.device.torch_device

    def create(slots: SlotState) -> DeviceNetwork:
        pool = KvPool(
            attention.layout(network.kv_layout), num_pages=num_tokens - 1, page_size=1, dtype=dtype, device=where
        )
        max_total_len = min(limits.max_total_len, network.max_total_len)
        tables_SL = torch.zeros(limits.num_slots + 1, limits.max_total_len + 1, dtype=torch.int32, device=where)
        create_attention = attention.creator(
            by_token, network.attention_shape, network.windows, network.attention_chunks, has_sinks=network.has_sinks
        )
        _log.info("drafter_loaded", kv_bytes=token_bytes(network) * num_tokens)
        return DeviceNetwork(
            loaded.device,
            network.create(loaded.kernels, pool, model, limits.max_total_len),
            pool,
            create_attention(tables_SL),
            slots,
            tables_SL,
            hidden_layers=network.hidden_layers,
            num_features=network.num_features,
            dtype=network.dtype,
            page_size=settings.page_size,
            max_total_len=max_total_len,
            max_rows=limits.max_tokens_per_step,
            max_chain=max_chain,
            tree=tree,
        )

    return create


def _eagle3(folder: Path, target: LoadedModel, placement: Placement, settings: DeviceSettings) -> LoadedNetwork:
    if not target.shows_hidden:
        raise shows_nothing()
    is_dummy = settings.load_format == "dummy"
    sizes = TargetSizes(target.hidden_size, target.vocab_size, target.num_layers)
    built = build_eagle3(ConfigReader.open(folder), () if is_dummy else index_tensors(folder), sizes, placement)
    if is_dummy:
        fill_randomly(built.targets)
    else:
        load_tensors(folder, built.targets)
    built.check(folder)
    return LoadedEagle3(built, _max_logits(settings))


def _mtp(target: LoadedModel) -> LoadedNetwork:
    if not isinstance(target, LoadedDeepseek) or not target.mtp_layers:
        raise no_mtp_layer()
    if target.quantization != "none":
        raise MeshError(
            common_pb2.ERROR_REASON_UNSUPPORTED,
            "--speculative-algorithm mtp drafts with weights that are not quantised on the cuda backend so far: use "
            "--quantization none where they fit, or draft with ngram or standalone",
            {"feature": "speculative_algorithm"},
        )
    return LoadedMtp(target)


def _standalone(
    folder: Path, target_folder: Path, placement: Placement, settings: DeviceSettings, graph_rows: tuple[int, ...]
) -> LoadedNetwork:
    check_vocabulary(folder, target_folder)
    where = placement.device
    attention = AttentionChoice(
        name="torch" if where.type != "cuda" else "triton",
        dtype=placement.dtype,
        query_dtype=placement.dtype,
        kv_dtype=placement.dtype,
    )
    model = load_model(folder, placement, load_format=settings.load_format, quantization="none", attention=attention)
    if Task.GENERATE not in model.tasks:
        raise no_drafter(folder, "generates no text")
    if not model.can_capture:
        raise no_drafter(folder, "is computed by modules of transformers, which no step of the cuda backend can hold")
    # Beside its rows for tokens that it lacks: one of each sequence for a draft of a chain, `topk` for a tree's level.
    assert settings.speculation is not None
    of_levels = (size * settings.speculation.topk for size in graph_rows)
    sizes = tuple(sorted({*tuned_rows(graph_rows, settings.max_drafts), *of_levels}))
    kernels = create_kernels(settings, model, sizes, where)
    return LoadedStandalone(model, kernels, _max_logits(settings))


def _max_logits(settings: DeviceSettings) -> int:
    """Rows whose logits a network computes at once: a draft of each row, or the frontier of its tree."""
    assert settings.speculation is not None
    return settings.num_slots * settings.speculation.topk
