"""From a folder to a model that runs by the modules of transformers, with a check that our cache is all it needs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader, bad_checkpoint
from radixmesh.daemons.worker.models.model import Model, ModelBatch, Placement

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from radixmesh.daemons.worker.models.transformers_fallback.attention import AttentionLayer
    from radixmesh.daemons.worker.models.transformers_fallback.model import TransformersModel

_log = get_logger(__name__)

_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
# Tokens of the check at the end of loading, and how it cuts them.
_CHECKED = 12
_CHUNKS = (5, 4, 3)
# Largest difference of two computations of it, in standard deviations of the logits.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}


def load_transformers_model(folder: Path, placement: Placement) -> TransformersModel:
    """Raises MeshError UNSUPPORTED for a model that cannot run so, or where transformers is not installed, and
    BAD_CHECKPOINT for a folder that it cannot load. Never runs code of the folder."""
    from radixmesh.daemons.worker.models.registry import model_families

    try:
        return _load(folder, placement)
    except MeshError as error:
        if error.reason != common_pb2.ERROR_REASON_UNSUPPORTED:
            raise
        families = f"{error.message}; families of this engine: {', '.join(model_families().names)}"
        raise MeshError(error.reason, families, dict(error.metadata)) from error


def _load(folder: Path, placement: Placement) -> TransformersModel:
    reader = ConfigReader.open(folder)
    architecture = reader.strings("architectures")[0]
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise _unsupported(architecture, "transformers is not installed: pip install transformers") from error
    if reader.has("quantization_config"):
        raise _unsupported(architecture, "it takes no quantised weights (quantization_config)")
    model_class = getattr(transformers, architecture, None)
    reason = _unfit_class(model_class, reader)
    if reason:
        raise _unsupported(architecture, reason)
    assert model_class is not None
    max_total_len = _max_total_len(reader, placement, architecture)
    try:
        model, report = model_class.from_pretrained(
            folder,
            dtype=placement.dtype,
            attn_implementation="eager",
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:
        raise bad_checkpoint(folder, f"cannot be loaded by transformers: {type(error).__name__}: {error}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise bad_checkpoint(folder, f"lacks tensor {missing[0]!r} and {len(missing) - 1} more", missing[0])
    _check_rope(model.config, architecture, min(max_total_len, placement.max_total_len or max_total_len))
    try:
        loaded = _adopt(model.eval().to(placement.device), placement, max_total_len)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # Modules of any kind may fail in any way under an attention that they do not know.
        raise _unsupported(architecture, str(error) or type(error).__name__) from error
    _log.warning(
        "model_runs_by_transformers",
        architecture=architecture,
        version=transformers.__version__,
        effect="slower than a family of this engine, and a row's last bits may depend on its batch",
    )
    return loaded


def _unfit_class(model_class: type[PreTrainedModel] | None, reader: ConfigReader) -> str:
    """The reason why no model of this class can run; empty if it may."""
    if model_class is None:
        return "transformers has no such class, and no code of the folder is run"
    if reader.boolean("is_encoder_decoder", False) or getattr(model_class.config_class, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    if not model_class.can_generate() or not hasattr(model_class, "base_model_prefix"):
        return "it is no causal language model"
    if getattr(model_class, "_is_stateful", False):
        return "it keeps a state that is not keys and values (a state-space or linear-attention model)"
    if not getattr(model_class, "_supports_attention_backend", False):
        return "its attention does not go through transformers' attention interface"
    return ""


def _max_total_len(reader: ConfigReader, placement: Placement, architecture: str) -> int:
    for key in _LENGTH_KEYS:
        if reader.has(key):
            return reader.integer(key)
    if placement.max_total_len is None:
        raise _unsupported(architecture, f"its config has none of {', '.join(_LENGTH_KEYS)}: set --max-total-len")
    return placement.max_total_len


def _check_rope(config: PreTrainedConfig, architecture: str, max_total_len: int) -> None:
    """longrope takes all angles of a forward from the longest position in it, whoever else is in the batch."""
    text = str(getattr(config, "rope_parameters", None))
    original = getattr(config, "original_max_position_embeddings", None) or 0
    if "longrope" in text and max_total_len > original:
        raise _unsupported(architecture, "longrope depends on the batch: set --max-total-len to the original length")


def _adopt(model: PreTrainedModel, placement: Placement, max_total_len: int) -> TransformersModel:
    """The model with our attention. Raises any error, and ValueError where its results are not those it had before."""
    from radixmesh.daemons.worker.models.transformers_fallback.attention import PAGED, RECORDING, AttentionStep, install
    from radixmesh.daemons.worker.models.transformers_fallback.model import TransformersModel

    if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        raise ValueError("its layers take no position_ids")
    ids = torch.arange(_CHECKED, device=placement.device) % next(model.get_input_embeddings().parameters()).shape[0]
    with torch.inference_mode():
        expected = model(input_ids=ids[None], use_cache=False).logits[0].float()
        step = AttentionStep()
        install(model, step)
        model.set_attn_implementation(RECORDING)
        positions = torch.arange(_CHECKED, device=placement.device)[None]
        hidden = model.base_model(input_ids=ids[None], position_ids=positions, use_cache=False).last_hidden_state
        model.set_attn_implementation(PAGED)
        _check_layers(step.layers)
        loaded = TransformersModel(
            model,
            step,
            vocab_size=expected.shape[-1],
            hidden_size=hidden.shape[-1],
            max_total_len=max_total_len,
        )
        actual = _logits_in_chunks(loaded, ids, placement)
    difference = float((actual - expected).abs().max() / expected.std())
    if not difference <= _TOLERANCE[placement.dtype]:
        raise ValueError(
            "in chunks with our cache it computes something else than at once by itself "
            f"(logits differ by {difference:.2g} standard deviations): it keeps more than keys and values"
        )
    return loaded


def _check_layers(layers: Mapping[int, AttentionLayer]) -> None:
    if sorted(layers) != list(range(len(layers))) or not layers:
        raise ValueError(f"of its layers {sorted(layers)} attend through the interface, which is not all of them")
    shapes = {(layer.shape, layer.value_dim) for layer in layers.values()}
    if len(shapes) > 1:
        raise ValueError(f"its layers have keys and values of {len(shapes)} different shapes")


def _logits_in_chunks(model: Model, ids: torch.Tensor, placement: Placement) -> torch.Tensor:
    """float32 [tokens, vocabulary], of two sequences side by side in a small pool: the second one's."""
    from radixmesh.daemons.worker.cpu.attention.backend import AttentionBatch, AttentionPlacement, AttentionSegment
    from radixmesh.daemons.worker.cpu.attention.naive import NaiveAttention
    from radixmesh.daemons.worker.kv_pool import KvPool
    from radixmesh.daemons.worker.tiles import RowTiles

    pool = KvPool(model.kv_layout, num_pages=2 * _CHECKED, page_size=1, dtype=placement.dtype, device=placement.device)
    attention = NaiveAttention(
        model.attention_shape,
        AttentionPlacement(device=placement.device, dtype=placement.dtype, is_deterministic=False),
    )
    tiles, start, parts = RowTiles(None), 0, []
    slots = torch.randperm(2 * _CHECKED, generator=torch.Generator().manual_seed(0)).view(2, _CHECKED)
    for length in _CHUNKS:
        end = start + length
        segments = [AttentionSegment(start=start, length=length, kv_slots=slots[i, :end].numpy()) for i in (0, 1)]
        batch = AttentionBatch(segments=segments, num_rows=2 * length, zero_slot=pool.zero_slot)
        hidden = model.forward(
            ModelBatch(
                ids_T=torch.cat((ids.flip(0)[start:end], ids[start:end])),
                positions_T=torch.arange(start, end, device=placement.device).repeat(2),
                num_rows=2 * length,
                kv_slots_N=slots[:, start:end].flatten().to(placement.device),
                kv=pool,
                attention=attention.begin(batch),
                tiles=tiles,
            )
        )
        parts.append(model.logits(hidden[length:], tiles))
        start = end
    return torch.cat(parts)


def _unsupported(architecture: str, reason: str) -> MeshError:
    return MeshError(
        common_pb2.ERROR_REASON_UNSUPPORTED,
        f"{architecture} cannot run by transformers' modules: {reason}",
        {"feature": architecture},
    )
