"""Train a tiny model of DeepSeek-V3's shape: latent attention, a dense layer, then shared and routed experts.

    python compose/models/train_tiny_deepseek.py [--out DIR] [--epochs N]

About 5 minutes on six free cores, half an hour on two shared ones; the folder has 4.5 MB, of which 4.4 are 1,094,208
float32 weights. What it memorises and how is in tiny_training.py; texts, chats and tokenizer are those of the tiny
Llama. The router's correction bias is learned as in DeepSeek-V3, without a loss of its own: after every step an expert
that got less than its share of the tokens becomes a little more likely, one that got more a little less (Wang et al.
2024), by amounts that fade out with the learning rate.
"""

import torch
from tiny_training import BOS_ID, EOS_ID, MAX_TOTAL_LEN, VOCAB_SIZE, make_tiny_model
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedModel

BIAS_STEP = 2e-3

CONFIG: dict[str, object] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "hidden_act": "silu",
    "max_position_embeddings": MAX_TOTAL_LEN,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": MAX_TOTAL_LEN // 4,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "use_cache": True,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}


class Balancer:
    """Counts what the routers choose and corrects their biases."""

    def __init__(self) -> None:
        self._gate_to_load: dict[nn.Module, torch.Tensor] = {}

    def create(self) -> DeepseekV3ForCausalLM:
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**CONFIG))
        for layer in model.model.layers[CONFIG["first_k_dense_replace"] :]:
            layer.mlp.gate.register_forward_hook(self._count)
        return model

    def after_step(self, model: PreTrainedModel, scale: float) -> None:
        for gate, load_E in self._gate_to_load.items():
            gate.e_score_correction_bias += BIAS_STEP * scale * torch.sign(load_E.mean() - load_E)

    def _count(self, gate: nn.Module, _: object, outputs: tuple[torch.Tensor, ...]) -> None:
        chosen = outputs[2].flatten()
        self._gate_to_load[gate] = torch.bincount(chosen, minlength=gate.num_experts).float()


def main() -> None:
    balancer = Balancer()
    make_tiny_model("tiny-deepseek", CONFIG, balancer.create, epochs=300, after_step=balancer.after_step)


if __name__ == "__main__":
    main()
