"""The sizes of an encoder, read from its config.json."""

from __future__ import annotations

from dataclasses import dataclass

from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader
from radixmesh.daemons.worker.models.decoder.config import read_activation


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """first_position: the row of the position table of a prompt's first token. pad_id: RoBERTa gives tokens of this id
    the position `first_position - 1` and does not count them; None = positions just count. prefix: what the names of
    some checkpoints begin with."""

    vocab_size: int
    hidden_size: int
    mlp_size: int
    num_layers: int
    num_heads: int
    num_positions: int
    num_token_types: int
    norm_eps: float
    activation: str
    first_position: int
    pad_id: int | None
    prefix: str

    @property
    def max_total_len(self) -> int:
        return self.num_positions - self.first_position


def read_encoder_config(reader: ConfigReader) -> EncoderConfig:
    """Raises MeshError BAD_CHECKPOINT or UNSUPPORTED."""
    if reader.string("position_embedding_type", "absolute") != "absolute":
        raise reader.unsupported("position_embedding_type", "absolute")
    for key in ("is_decoder", "add_cross_attention"):
        if reader.boolean(key, False):
            raise reader.unsupported(key, "false")
    hidden_size, num_heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    if hidden_size % num_heads:
        raise reader.error("hidden_size", f"a multiple of num_attention_heads ({num_heads})")
    is_bert = reader.strings("architectures")[0].startswith("Bert")
    pad_id = reader.integer("pad_token_id", 1, low=0)
    config = EncoderConfig(
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden_size,
        mlp_size=reader.integer("intermediate_size"),
        num_layers=reader.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_positions=reader.integer("max_position_embeddings"),
        num_token_types=reader.integer("type_vocab_size", 2),
        norm_eps=reader.number("layer_norm_eps", 1e-12),
        activation=read_activation(reader, "hidden_act", "gelu"),
        first_position=0 if is_bert else pad_id + 1,
        pad_id=None if is_bert else pad_id,
        prefix="bert." if is_bert else "roberta.",
    )
    if config.max_total_len < 1:
        raise reader.error("max_position_embeddings", f"more than pad_token_id + 1 ({config.first_position})")
    return config
