"""Weights of norms folded into the GEMMs behind them.

norm(x) @ W = (x s w) @ W = s (x @ (diag(w) W))        w the norm's weight, s = 1 / sqrt(mean(x^2) + eps)
"""

from __future__ import annotations

from radixmesh.daemons.worker.models.decoder.weights import DecoderWeights, MlpWeights


def fold_norms(weights: DecoderWeights) -> None:
    """Multiplies the norms of all layers into the projections that read them, in place, and leaves ones in the norms:
    the model stays what it was, each weight rounded once. The final norm stays: the output projection behind it may be
    the embedding too.
    """
    for layer in weights.layers:
        mlp = layer.mlp
        assert isinstance(mlp, MlpWeights), type(mlp)
        attention = layer.attention
        for norm_D, w_DN in ((attention.norm_D, attention.w_qkv_DX), (layer.mlp_norm_D, mlp.w_gate_up_DF2)):
            w_DN.mul_(norm_D[:, None])
            norm_D.fill_(1.0)
