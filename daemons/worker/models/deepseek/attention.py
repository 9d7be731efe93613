"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1) over the compressed cache.

Of a token only its latent (rank R, shared by all heads) and one RoPE key are cached. A head's key is [E_k latent,
RoPE key], its value E_v latent; so its score is q . E_k latent = (q E_k) . latent, and the weighted sum of values is
E_v applied to the weighted sum of latents. Both expansions are applied to the new rows only, and attention runs with
one KV head on what is cached. Prefill goes the same way as decode: expanding keys first is fewer operations for long
prompts, but would add in another order, and a row's bits would depend on how its prompt was cut.

Legend: T rows, D hidden size, H heads, n / r / v a head's plain, RoPE and value dims, R rank, C = R + r, h = r / 2.
"""

from __future__ import annotations

import torch

from radixmesh.daemons.worker.models.deepseek.config import DeepseekConfig
from radixmesh.daemons.worker.models.deepseek.weights import LatentAttentionWeights
from radixmesh.daemons.worker.models.model import Placement
from radixmesh.daemons.worker.models.rope import apply_rope
from radixmesh.daemons.worker.models.row_maths import linear, plus, rms_norm
from radixmesh.daemons.worker.tiles import Tensors

# Of the norms inside the attention; the config's own is for the others.
INNER_EPS = 1e-6


class LatentAttention:
    """Two functions of rows around the attention over latents."""

    def __init__(
        self, config: DeepseekConfig, norm_D: torch.Tensor, weights: LatentAttentionWeights, placement: Placement
    ) -> None:
        self._config = config
        self._norm_D = norm_D
        self._weights = weights
        self._key_HnR, self._value_HRv = (
            weights.w_expand_HER[:, : config.nope_dim],
            weights.w_expand_HER[:, config.nope_dim :].transpose(1, 2),
        )
        self._group = placement.group

    def project(self, inputs: Tensors) -> Tensors:
        """(x_TD, cos_T1h, sin_T1h) -> q_THC to attend with, and kv_T1C to cache."""
        x_TD, cos_T1h, sin_T1h = inputs
        config, weights = self._config, self._weights
        x_TD = rms_norm(x_TD, self._norm_D, config.norm_eps)
        sizes = [config.first_query_size, config.kv_lora_rank, config.rope_dim]
        q_TQ, latent_TR, key_Tr = torch.split(linear(x_TD, weights.w_in_DX, weights.b_in_X), sizes, dim=-1)
        if weights.query_norm_Q is not None and weights.w_query_QY is not None:
            q_TQ = rms_norm(q_TQ, weights.query_norm_Q, INNER_EPS) @ weights.w_query_QY
        q_THY = q_TQ.reshape(x_TD.shape[0], config.num_heads, config.query_dim)
        query_HTR = q_THY[..., : config.nope_dim].transpose(0, 1) @ self._key_HnR
        latent_T1R = rms_norm(latent_TR, weights.latent_norm_R, INNER_EPS).unsqueeze(1)
        query_THr = self._with_rope(q_THY[..., config.nope_dim :], cos_T1h, sin_T1h)
        key_T1r = self._with_rope(key_Tr.unsqueeze(1), cos_T1h, sin_T1h)
        return torch.cat((query_HTR.transpose(0, 1), query_THr), dim=-1), torch.cat((latent_T1R, key_T1r), dim=-1)

    def output(self, o_THC: torch.Tensor) -> torch.Tensor:
        """From sums of what is cached, of which RoPE keys are dropped, to what is added to the row: [T, D]."""
        latent_HTR = o_THC[..., : self._config.kv_lora_rank].transpose(0, 1)
        o_TO = (latent_HTR @ self._value_HRv).transpose(0, 1).flatten(1)
        return plus(self._group.all_reduce(o_TO @ self._weights.w_out_OD), self._weights.b_out_D)

    def _with_rope(self, x_THr: torch.Tensor, cos_T1h: torch.Tensor, sin_T1h: torch.Tensor) -> torch.Tensor:
        """Pairs are neighbours in the checkpoint and halves afterwards, for queries and keys alike."""
        if self._config.is_rope_interleaved:
            x_THr = torch.cat((x_THr[..., 0::2], x_THr[..., 1::2]), dim=-1)
        return apply_rope(x_THr, cos_T1h, sin_T1h)
