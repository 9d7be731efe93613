"""Model folders with a config.json, and hardly ever weights: shapes to be measured with random ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

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
    "llama-3.1-70b": {
        **_LLAMA,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
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
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "vocab_size": 102400,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "hidden_act": "silu",
        "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 100000,
        "eos_token_id": 100001,
    },
    # DeepSeek-V3 with as many of its 61 layers as two GPUs hold in FP8.
    "deepseek-v3-12-layers": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "n_group": 8,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "hidden_act": "silu",
        "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
}


class Weights(NamedTuple):
    """Numbers of weights that steps read: of the layers without routed experts, of the output projection, and of one
    routed expert, of which each of `num_routed_layers` has `num_experts` and a row picks `num_picks`."""

    layers: int
    head: int
    expert: int
    num_experts: int
    num_picks: int
    num_routed_layers: int

    def experts_hit(self, rows: int) -> float:
        """Of a layer, on average, by rows that pick at random."""
        return self.num_experts * (1.0 - (1.0 - self.num_picks / max(1, self.num_experts)) ** rows)

    @property
    def layers_of_a_row(self) -> int:
        """Of the layers, with the experts that a row picks."""
        return self.layers + self.num_routed_layers * self.num_picks * self.expert


def write_shape(name: str, folder: Path, **changes: object) -> Path:
    """A model folder for `--load-format dummy`. changes: further keys of its config, e.g. dummy_router_skew."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**SHAPES[name], **changes}, indent=1))
    return path


def write_random_weights(folder: Path, *, device: str) -> None:
    """Weights for the config.json of a dense Llama, in bf16, a file for each layer: for what needs bytes of weights, as
    digests do. The same ones each time on one device."""
    import torch
    from safetensors.torch import save_file

    of = json.loads((folder / "config.json").read_text())
    hidden, inner, head = of["hidden_size"], of["intermediate_size"], of["head_dim"]
    q, kv = head * of["num_attention_heads"], head * of["num_key_value_heads"]
    ends = {"model.embed_tokens": (of["vocab_size"], hidden), "model.norm": (hidden,)}
    if not of["tie_word_embeddings"]:
        ends["lm_head"] = (of["vocab_size"], hidden)
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    generator = torch.Generator(device).manual_seed(0)

    def made(sizes: tuple[int, ...]) -> torch.Tensor:
        if len(sizes) == 1:
            return torch.ones(sizes, dtype=torch.bfloat16)
        values = torch.randn(sizes, generator=generator, device=device, dtype=torch.float32)
        return (0.02 * values).bfloat16().cpu()

    files: dict[str, str] = {}
    parts = [(f"model.layers.{at}.", layer) for at in range(of["num_hidden_layers"])]
    for number, (prefix, shapes) in enumerate([("", ends), *parts]):
        tensors = {f"{prefix}{name}.weight": made(sizes) for name, sizes in shapes.items()}
        file = f"model-{number:05d}-of-{len(parts) + 1:05d}.safetensors"
        save_file(tensors, folder / file)
        files |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def weight_bytes(name: str, rows: int, quantization: str = "none") -> float:
    """Bytes that a step reads of the weights: projections, FP8 where quantised, the experts that so many rows hit, and
    the output projection."""
    of = weights(name)
    layers = of.layers + of.num_routed_layers * of.experts_hit(rows) * of.expert
    return (2 if quantization == "none" else 1) * layers + 2 * of.head


def kv_bytes_per_token(name: str) -> int:
    """bf16 bytes of keys and values, or of latents, of one token, all layers."""
    s = _sizes(name)
    if "kv_lora_rank" in s:
        return 2 * s["num_hidden_layers"] * (s["kv_lora_rank"] + s["qk_rope_head_dim"])
    return 4 * s["num_hidden_layers"] * s["num_key_value_heads"] * s["head_dim"]


def sampling_temperature(name: str) -> float:
    """Of measured requests. Greedy decoding of random weights repeats few tokens, which hit few experts."""
    return 1.0 if weights(name).num_experts else 0.0


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
    return max(weight_bytes(name, rows, quantization) / _BYTES_S, _gemm_s_a_row(name, quantization) * rows)


def _gemm_s_a_row(name: str, quantization: str) -> float:
    """2 FLOP a weight."""
    of = weights(name)
    return 2 * of.layers_of_a_row / (_FLOPS if quantization == "none" else _FP8_FLOPS) + 2 * of.head / _FLOPS


def weights(name: str) -> Weights:
    """Projections alone: norms and biases are small."""
    s = _sizes(name)
    hidden, num_layers, num_heads = s["hidden_size"], s["num_hidden_layers"], s["num_attention_heads"]
    if "kv_lora_rank" in s:
        rank, nope, rope, value = (
            s[key] for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        queries = num_heads * (nope + rope)
        into = s.get("q_lora_rank", 0)
        query = hidden * into + into * queries if into else hidden * queries
        attention = query + hidden * (num_heads * value + rank + rope) + num_heads * rank * (nope + value)
    else:
        attention = hidden * 2 * (num_heads + s["num_key_value_heads"]) * s["head_dim"]
    num_experts = s.get("n_routed_experts", s.get("num_experts", 0))
    num_dense = s.get("first_k_dense_replace", 0) if num_experts else num_layers
    expert = 3 * hidden * s.get("moe_intermediate_size", 0)
    beside_experts = num_experts * hidden + s.get("n_shared_experts", 0) * expert
    layers = num_layers * attention + num_dense * 3 * hidden * s["intermediate_size"]
    layers += (num_layers - num_dense) * beside_experts
    return Weights(
        layers=layers,
        head=s["vocab_size"] * hidden,
        expert=expert,
        num_experts=num_experts,
        num_picks=s.get("num_experts_per_tok", 0),
        num_routed_layers=num_layers - num_dense,
    )


def _sizes(name: str) -> dict[str, int]:
    return {key: value for key, value in SHAPES[name].items() if isinstance(value, int)}


def _shared_len(prompts: Sequence[IntArray]) -> int:
    """Tokens that all of a group begin with; none of a group of one."""
    if len(prompts) < 2:
        return 0
    size = min(len(prompt) for prompt in prompts)
    differs = np.any(np.stack([prompt[:size] for prompt in prompts]) != prompts[0][:size], axis=0)
    return int(differs.argmax()) if differs.any() else size
