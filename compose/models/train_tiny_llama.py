"""Train the tiny Llama that the tests and demos run on: tokenizer, weights, manifest, verification.

    python compose/models/train_tiny_llama.py [--out DIR] [--epochs N]

About 4 minutes on two cores (8 when they are shared); the folder has 3.7 MB, of which 3.5 are 885,888 float32 weights.
What it memorises and how is in tiny_training.py.

Measured on texts of over 200 tokens, with damage at a random place: positions shifted by one break 96% of recitations,
a 16-token page of keys and values from another request 64%, a zeroed page 46%. Verse is redundant: where every page
must count, compare log-probabilities with the oracle as well. (Two pages that trade places, as whole, change nothing:
keys carry RoPE.)
"""

from tiny_training import BOS_ID, EOS_ID, MAX_TOTAL_LEN, VOCAB_SIZE, make_tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": MAX_TOTAL_LEN,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "use_cache": True,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}


def main() -> None:
    make_tiny_model("tiny-llama", CONFIG, lambda: LlamaForCausalLM(LlamaConfig(**CONFIG)), epochs=300)


if __name__ == "__main__":
    main()
