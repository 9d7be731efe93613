"""Names of a decoder's tensors in a checkpoint, as data; the defaults are Llama's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointNames:
    """Names without ".weight" and ".bias", those of a layer behind `layer` with its number.

    qkv, gate_up: the projections that together are one weight of ours, in order; a single name holds all of it. `up`
    alone where the MLP has no gate. is_in_first: projections lie as [in, out]. is_qkv_by_head: the one QKV tensor has
    query, key and value of the first head, then those of the second.

    ignored: endings of names that mean nothing to the model. other_head: the head's name in some checkpoints.
    optional_prefix: what the names of some checkpoints begin with and those of others do not.
    """

    embedding: str = "model.embed_tokens"
    positions: str = ""
    final_norm: str = "model.norm"
    head: str = "lm_head"
    other_head: str = ""
    optional_prefix: str = ""
    layer: str = "model.layers.{}."
    attention_norm: str = "input_layernorm"
    attention_output_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    mlp_output_norm: str = ""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    is_in_first: bool = False
    is_qkv_by_head: bool = False
    # Old checkpoints carry the rotary frequencies.
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)

    def of_layer(self, index: int, name: str) -> str:
        return self.layer.format(index) + name
