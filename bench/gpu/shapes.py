"""Model folders with a config.json and nothing else: shapes to be measured with random weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray

# Ceilings of an H200: bytes a second of memory, FLOP a second in bf16, and with FP8 rows and weights.
_BYTES_S, _FLOPS, _FP8_FLOPS = 4.3e12, 770e12, 1540e12
# Prompts that begin with so many equal tokens are of one group.
_GROUP_TOKENS = 64

_LLAMA3_ROPE = {
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "head_dim": 128,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "attention_bias": False,
    "mlp_bias": False,
}

SHAPES: dict[str, dict[str, object]] = {
    "llama-3.2-1b": {
        **_LLAMA,
        "head_dim": 64,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
        "rope_scaling": {**_LLAMA3_ROPE, "factor": 32.0},
    },
    "llama-3.2-3b": {
        **_LLAMA,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
        "rope_scaling": {**_LLAMA3_ROPE, "factor": 32.0},
    },
    "llama-3.1-8b": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
        "rope_scaling": {**_LLAMA3_ROPE, "factor": 8.0},
    },
    "qwen3-4b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "attention_bias": False,
    },
}


def write_shape(name: str, folder: Path) -> Path:
    """A model folder for `--load-format dummy`."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(SHAPES[name], indent=1))
    return path


def weight_bytes(name: str, quantization: str = "none") -> int:
    """Bytes that a decode step reads of the weights: projections, FP8 where quantised, and the output projection."""
    layers, head = _num_weights(name)
    return (2 if quantization == "none" else 1) * layers + 2 * head


def kv_bytes_per_token(name: str) -> int:
    """bf16 bytes of keys and values of one token, all layers."""
    s = {key: value for key, value in SHAPES[name].items() if isinstance(value, int)}
    return 4 * s["num_hidden_layers"] * s["num_key_value_heads"] * s["head_dim"]


def roofline_s(name: str, *, rows: int, context: int, quantization: str = "none") -> float:
    """Least seconds of a decode step: weights or GEMMs (whichever is longer), and the KV of all rows."""
    return _gemm_s(name, rows, quantization) + rows * context * kv_bytes_per_token(name) / _BYTES_S


def workload_roofline_s(
    name: str, prompts: Sequence[IntArray], lengths: Sequence[int], quantization: str = "none"
) -> float:
    """Least seconds of requests that all come at once: each prompt token computed once per distinct prefix, every step
    with all requests that are not over, a prefix that requests share read once a step for all of them."""
    prompt_lens, out_lens = np.array([len(prompt) for prompt in prompts]), np.array(lengths)
    groups: dict[bytes, list[int]] = {}
    for index, prompt in enumerate(prompts):
        groups.setdefault(np.asarray(prompt[:_GROUP_TOKENS]).tobytes(), []).append(index)
    shared_lens = np.zeros(len(prompts), np.int64)
    for members in groups.values():
        shared_lens[members] = _shared_len([prompts[i] for i in members])
    own_lens = prompt_lens - shared_lens
    num_computed = sum(int(shared_lens[m[0]]) + int(own_lens[m].sum()) for m in groups.values())
    seconds = num_computed * _gemm_s_a_row(name, quantization)
    for step in range(int(out_lens.max())):
        runs = out_lens > step
        num_read = int((own_lens[runs] + step).sum())
        num_read += sum(int(shared_lens[m[0]]) for m in groups.values() if runs[m].any())
        seconds += _gemm_s(name, int(runs.sum()), quantization) + num_read * kv_bytes_per_token(name) / _BYTES_S
    return seconds


def _gemm_s(name: str, rows: int, quantization: str) -> float:
    return max(weight_bytes(name, quantization) / _BYTES_S, _gemm_s_a_row(name, quantization) * rows)


def _gemm_s_a_row(name: str, quantization: str) -> float:
    """2 FLOP a weight."""
    layers, head = _num_weights(name)
    return 2 * layers / (_FLOPS if quantization == "none" else _FP8_FLOPS) + 2 * head / _FLOPS


def _num_weights(name: str) -> tuple[int, int]:
    """Of the layers' projections, and of the output projection."""
    s = {key: value for key, value in SHAPES[name].items() if isinstance(value, int)}
    qkv = (s["num_attention_heads"] + 2 * s["num_key_value_heads"]) * s["head_dim"]
    layer = s["hidden_size"] * (qkv + s["num_attention_heads"] * s["head_dim"] + 3 * s["intermediate_size"])
    return s["num_hidden_layers"] * layer, s["vocab_size"] * s["hidden_size"]


def _shared_len(prompts: Sequence[IntArray]) -> int:
    """Tokens that all of a group begin with; none of a group of one."""
    if len(prompts) < 2:
        return 0
    size = min(len(prompt) for prompt in prompts)
    differs = np.any(np.stack([prompt[:size] for prompt in prompts]) != prompts[0][:size], axis=0)
    return int(differs.argmax()) if differs.any() else size
