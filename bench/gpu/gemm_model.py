"""A dense decoder of Llama-3.2-3B's shape with random weights, as many layers as wanted, for benchmarks of GEMMs."""

from __future__ import annotations

import torch

from radixmesh.daemons.worker.models.decoder.config import DecoderConfig
from radixmesh.daemons.worker.models.decoder.weights import AttentionWeights, DecoderLayer, DecoderWeights, MlpWeights
from radixmesh.daemons.worker.models.kv_layout import KvPlanes
from radixmesh.daemons.worker.models.rope_config import RopeConfig

HIDDEN, MLP, HEADS, KV_HEADS, HEAD_DIM = 3072, 8192, 24, 8, 128
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
CONTEXT = 384
_EPS = 1e-5


class RandomKv(KvPlanes):
    def __init__(self, num_layers: int, num_tokens: int) -> None:
        shape = (num_tokens, KV_HEADS, HEAD_DIM)
        self._planes = {
            (plane, layer): random_tensor(*shape) for plane in ("keys", "values") for layer in range(num_layers)
        }

    def tokens(self, plane: str, layer: int) -> torch.Tensor:
        return self._planes[plane, layer]


def decoder_config(num_layers: int) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=512,
        hidden_size=HIDDEN,
        mlp_size=MLP,
        num_layers=num_layers,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_total_len=CONTEXT + 1,
        norm_eps=_EPS,
        rope=RopeConfig(theta=500000.0),
        windows=(None,) * num_layers,
        is_tied=True,
    )


def random_weights(num_layers: int) -> DecoderWeights:
    """[in, out] views of what lies [out, in]; the norms' are ones."""

    def random_weight(num_out: int, num_in: int) -> torch.Tensor:
        return random_tensor(num_out, num_in).mul_(num_in**-0.5).t()

    ones_D = torch.ones(HIDDEN, dtype=torch.bfloat16, device="cuda")
    layers = tuple(
        DecoderLayer(
            attention=AttentionWeights(
                norm_D=ones_D,
                w_qkv_DX=random_weight(QKV, HIDDEN),
                b_qkv_X=None,
                q_norm_d=None,
                k_norm_d=None,
                w_o_QD=random_weight(HIDDEN, HEADS * HEAD_DIM),
                b_o_D=None,
            ),
            mlp_norm_D=ones_D,
            mlp=MlpWeights(
                w_gate_up_DF2=random_weight(2 * MLP, HIDDEN),
                b_gate_up_F2=None,
                w_down_FD=random_weight(HIDDEN, MLP),
                b_down_D=None,
            ),
        )
        for _ in range(num_layers)
    )
    head_DO = random_weight(512, HIDDEN)
    return DecoderWeights(embedding_VD=head_DO.t(), layers=layers, final_norm_D=ones_D, head_DO=head_DO)


def random_tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)
