"""A causal model of transformers on a device: its modules compute, our kernels attend over the paged pool.

Legend: T rows, D hidden size, V vocabulary, H heads, K kv heads, d head_dim, S tokens of the pool.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.cuda.attention.backend import StepAttention
from radixmesh.daemons.worker.cuda.attention.choice import AttentionChoice
from radixmesh.daemons.worker.cuda.model.attention import PoolScales
from radixmesh.daemons.worker.cuda.model.device_model import (
    DeviceModel,
    Kernels,
    LoadedModel,
    TunableMatrices,
    ids_as_embedding,
)
from radixmesh.daemons.worker.models.kv_layout import KvPlanes
from radixmesh.daemons.worker.models.model import HiddenStates, Placement
from radixmesh.daemons.worker.models.transformers_fallback.attention import AttentionLayer, Rows
from radixmesh.daemons.worker.models.transformers_fallback.loading import load_transformers_model
from radixmesh.daemons.worker.models.transformers_fallback.model import TransformersModel
from radixmesh.kernels.kv_fp8 import put_rows
from radixmesh.kernels.rope_kv import HeadShape, KvTarget

_log = get_logger(__name__)

# Rows of the forward that shows what a row takes and whether the modules wait for the device.
_PROBE_ROWS = 256
# Of a row, in hidden states, where nothing can be measured.
_ROW_STATES = 16


class LoadedFallback(LoadedModel):
    """The modules choose their own GEMMs: nothing of them is tuned, and a row's bits may depend on its batch."""

    quantization, num_plain = "none", None

    def __init__(self, model: TransformersModel, dtype: torch.dtype, device: torch.device) -> None:
        self.model, self.device = model, device
        self.vocab_size, self.hidden_size = model.vocab_size, model.hidden_size
        self.num_layers, self.max_total_len = model.kv_layout.num_layers, model.max_total_len
        self.dtype, self.tasks = dtype, model.tasks
        self.kv_layout, self.attention_shape, self.windows = model.kv_layout, model.attention_shape, model.windows
        self.has_sinks = model.has_sinks
        self._row_bytes, self.can_capture = _ROW_STATES * model.hidden_size * dtype.itemsize, True
        if device.type == "cuda":
            self._row_bytes, self.can_capture = _probed(model, device)

    def tunable_matrices(self) -> tuple[TunableMatrices, ...]:
        return ()

    def row_bytes(self) -> int:
        return self._row_bytes

    def position_bytes(self) -> int:
        return 0

    def create(self, kernels: Kernels, kv: KvPlanes, max_total_len: int) -> DeviceFallback:
        return DeviceFallback(self, kv)


class DeviceFallback(DeviceModel):
    """Rows come to `layers` as their ids, [T, 1] int32: the modules embed them, each in its own way."""

    def __init__(self, loaded: LoadedFallback, kv: KvPlanes) -> None:
        self.vocab_size, self.hidden_size = loaded.vocab_size, loaded.hidden_size
        self.num_layers, self.dtype, self.tasks = loaded.num_layers, loaded.dtype, loaded.tasks
        self.embedding_VD = ids_as_embedding(loaded.vocab_size, loaded.device)
        self._model = loaded.model
        shape = loaded.attention_shape
        heads = HeadShape(shape.num_heads, shape.num_kv_heads, shape.head_dim)
        self._layers = [
            _LayerCache(kv, index, PoolScales.create(kv.scales(index), heads)) for index in range(self.num_layers)
        ]

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        return ids_T.clone()[:, None]

    def layers(
        self, x_TD: torch.Tensor, target: KvTarget, attention: StepAttention, hidden: HiddenStates | None = None
    ) -> torch.Tensor:
        assert hidden is None, "modules of transformers show no hidden states"
        positions_T = target.positions_T.long()
        places_T = target.indices()
        return self._model.hidden(x_TD[:, 0].long(), positions_T, partial(self._attend, places_T, attention))

    def logits(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        return self._model.head(hidden_TD).to(self.dtype)

    def final_hidden(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        return hidden_TD.float()

    def _attend(
        self, places_T: torch.Tensor, attention: StepAttention, index: int, layer: AttentionLayer, rows: Rows
    ) -> torch.Tensor:
        return self._layers[index].attend(places_T, attention, layer.window, rows)


class _LayerCache:
    """A layer's keys and values in the pool, and their scales where it is FP8."""

    def __init__(self, kv: KvPlanes, index: int, scales: PoolScales) -> None:
        self._keys_SKd, self._values_SKd = kv.tokens("keys", index), kv.tokens("values", index)
        self._scales = scales

    def attend(self, places_T: torch.Tensor, attention: StepAttention, window: int | None, rows: Rows) -> torch.Tensor:
        q_THd, k_TKd, v_TKd, sinks_H = rows
        dtype, factors_X = q_THd.dtype, self._scales.factors_X
        if factors_X is not None:
            num_heads, num_kv_heads = q_THd.shape[1], k_TKd.shape[1]
            q_H1, k_K1, v_K1 = torch.split(factors_X[:, None], [num_heads, num_kv_heads, num_kv_heads])
            q_THd, k_TKd, v_TKd = (q_THd * q_H1).to(dtype), k_TKd * k_K1, v_TKd * v_K1
        put_rows(self._keys_SKd, places_T, k_TKd)
        put_rows(self._values_SKd, places_T, v_TKd)
        o_THd = attention.attend(q_THd, self._keys_SKd, self._values_SKd, window, sinks_H=sinks_H)
        return self._scales.of_values(o_THd)


def load_fallback(
    folder: Path, placement: Placement, *, load_format: str, quantization: str, attention: AttentionChoice | None
) -> LoadedFallback:
    """Raises MeshError UNSUPPORTED or BAD_CHECKPOINT, as `load_transformers_model`, and for what a device lacks."""
    for is_asked, flag in (
        (load_format == "dummy", "--load-format dummy"),
        (quantization not in ("auto", "none"), f"--quantization {quantization}"),
    ):
        if is_asked:
            raise _unsupported(f"transformers' modules take no {flag}", flag)
    model = load_transformers_model(folder, placement)
    if attention is not None:
        attention.check_masks("the model", has_sinks=model.has_sinks, attention_chunks=())
        if model.attention_shape.softcap is not None:
            attention.check_softcap("the model")
    with torch.inference_mode():
        loaded = LoadedFallback(model, placement.dtype, placement.device)
    if not loaded.can_capture:
        _log.warning(
            "steps_not_captured",
            reason="the modules wait for the device within a forward",
            effect="every kernel is launched by itself, as with --no-cuda-graphs: slower",
        )
    return loaded


def _probed(model: TransformersModel, device: torch.device) -> tuple[int, bool]:
    """Bytes that a row takes on its way through the modules, and whether a forward never waits for the device, which
    no graph could hold."""
    ids_T = torch.zeros(_PROBE_ROWS, dtype=torch.int64, device=device)
    positions_T = torch.zeros_like(ids_T)

    def forward() -> None:
        model.head(model.hidden(ids_T, positions_T, lambda index, layer, rows: torch.zeros_like(rows.q_THd))[:1])

    # Libraries take their memory at the first one.
    forward()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before, can_capture = torch.cuda.memory_allocated(device), True
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward()
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        can_capture = False
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if not can_capture:
        forward()
    num_bytes = torch.cuda.max_memory_allocated(device) - before
    return -(-num_bytes // _PROBE_ROWS), can_capture


def _unsupported(message: str, feature: str) -> MeshError:
    return MeshError(ErrorReason.ERROR_REASON_UNSUPPORTED, message, {"feature": feature})
