"""Multi-token prediction: the layer behind the last one of a DeepSeek-V3 checkpoint (its report, section 2.2).

A row joins the embedding of its token with the target's state of the position before, behind the final norm; embedding
and output projection are the target's. One layer drafts a chain, its own normed output taking the target's place.

Legend: T rows, D hidden size, C cached numbers of a token, h half of the RoPE dims.
"""

from __future__ import annotations

import torch

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.models.deepseek.model import PLANE, DeepseekModel, create_block
from radixmesh.daemons.worker.models.kv_layout import KvLayout
from radixmesh.daemons.worker.models.model import Model, ModelBatch, Placement
from radixmesh.daemons.worker.models.rope import RopeTable
from radixmesh.daemons.worker.models.row_maths import rms_norm
from radixmesh.daemons.worker.speculation.models.draft_model import DraftModel


class MtpModel(DraftModel):
    """The first MTP layer of a target that has some."""

    def __init__(self, target: DeepseekModel, placement: Placement) -> None:
        config = target.config
        self.hidden_layers, self.num_features = (config.num_layers - 1,), config.hidden_size
        self.max_total_len = target.max_total_len
        self.kv_layout = KvLayout(num_layers=1, planes=target.kv_layout.planes)
        self.attention_shape = target.attention_shape
        self._target, self._layer = target, target.mtp_layers[0]
        self._block = create_block(config, self._layer.block, placement)
        self._rope = RopeTable(config.rope_dim, config.rope, placement.device)
        self._eps = config.norm_eps

    def features(self, hidden: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return rms_norm(hidden[0], self._target.weights.final_norm_D, self._eps)

    def forward(self, batch: ModelBatch, features_TF: torch.Tensor | None) -> torch.Tensor:
        assert features_TF is not None
        layer = self._layer
        embedded_TD = rms_norm(self._target.embed(batch.ids_T), layer.embedding_norm_D, self._eps)
        normed_TD = rms_norm(features_TF, layer.hidden_norm_D, self._eps)
        x_TD = torch.cat((embedded_TD, normed_TD), dim=-1) @ layer.w_join_GD
        q_THC, kv_T1C = self._block.attention.project((x_TD, *self._rope.at(batch.positions_T)))
        latents_S1C = batch.kv.tokens(PLANE, 0)
        latents_S1C.index_copy_(0, batch.kv_slots_N, kv_T1C[: batch.num_rows])
        x_TD = self._block.finish(x_TD, batch.attention.attend(q_THC, latents_S1C, latents_S1C), batch)
        return rms_norm(x_TD, layer.head_norm_D, self._eps)

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        return (output @ self._target.weights.head_DV).float()


def mtp_of(target: Model, placement: Placement) -> MtpModel:
    """Raises MeshError UNSUPPORTED for a model without such a layer."""
    if not isinstance(target, DeepseekModel) or not target.mtp_layers:
        raise no_mtp_layer()
    return MtpModel(target, placement)


def no_mtp_layer() -> MeshError:
    """Refusal of a target without such a layer."""
    return MeshError(
        common_pb2.ERROR_REASON_UNSUPPORTED,
        "--speculative-algorithm mtp needs a DeepSeek-V3 checkpoint with its layer for multi-token prediction "
        "(num_nextn_predict_layers, and the tensors behind the last layer): this one has none, draft with ngram, "
        "standalone or eagle3",
        {"feature": "speculative_algorithm"},
    )
