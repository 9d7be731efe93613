"""Train networks that draft for the tiny models: an EAGLE-3 head for the Llama, a layer for multi-token prediction for
the DeepSeek.

    python compose/models/train_tiny_drafters.py [--out DIR] [--epochs N]

About eight minutes of CPU time; the files have 0.6 MB each, in bfloat16. They learn the texts that the models
memorised (recitations.json of their folders) from the models' hidden states. Each is trained on chains of STEPS drafts,
as in EAGLE-3: from the second draft on a row takes the network's own output of the row before, not the model's state,
and sees the model's states of the text and the chain's own rows before it.
The head drafts the ids that occur in the texts alone (d2t, t2d), as checkpoints of large vocabularies do.

Output: drafters/tiny-llama-eagle3 (config.json and model.safetensors as SpecForge writes them), and
drafters/tiny-deepseek-mtp.safetensors, the tensors model.layers.4.* that a checkpoint with num_nextn_predict_layers 1
holds beside the others.
"""

import argparse
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Model

HERE = Path(__file__).parent
SEED, STEPS, PEAK_LR = 1, 4, 3e-3
WINDOW = 400
"""Tokens of a text that one step of training takes at most."""
HIDDEN_LAYERS = (0, 1, 2)
EAGLE_CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": 768,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(HIDDEN_LAYERS), "use_aux_hidden_state": True},
}


class RmsNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self._eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.weight, self._eps)


class EagleHead(nn.Module):
    """[B, L, D] features and ids [B, L] -> outputs [B, L, D] and logits [B, L, W]. ids: those that it may draft.
    config: of the head, as in its folder."""

    def __init__(self, embedding: torch.Tensor, ids: torch.Tensor, config: Mapping[str, object]) -> None:
        super().__init__()
        names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        size, mlp, self._heads, self._kv_heads, self._head_dim = (int(str(config[name])) for name in names)
        eps = float(str(config["rms_norm_eps"]))
        self._config = dict(config)
        width = self._heads * self._head_dim
        kv_width = self._kv_heads * self._head_dim
        self.register_buffer("_embedding", embedding, persistent=False)
        self.register_buffer("_ids", ids, persistent=False)
        self.fc = nn.Linear(3 * size, size, bias=False)
        layer = nn.ModuleDict(
            {name: RmsNorm(size, eps) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
        )
        layer["self_attn"] = nn.ModuleDict(
            {
                "q_proj": nn.Linear(2 * size, width, bias=False),
                "k_proj": nn.Linear(2 * size, kv_width, bias=False),
                "v_proj": nn.Linear(2 * size, kv_width, bias=False),
                "o_proj": nn.Linear(width, size, bias=False),
            }
        )
        layer["mlp"] = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(size, mlp, bias=False),
                "up_proj": nn.Linear(size, mlp, bias=False),
                "down_proj": nn.Linear(mlp, size, bias=False),
            }
        )
        self.midlayer, self.norm = layer, RmsNorm(size, eps)
        self.lm_head = nn.Linear(size, len(ids), bias=False)

    def start(self, states: list[torch.Tensor]) -> torch.Tensor:
        return self.fc(torch.cat(states, dim=-1))

    def step(
        self, ids_BL: torch.Tensor, features_BLD: torch.Tensor, mask_LL: torch.Tensor, positions_L: torch.Tensor
    ) -> torch.Tensor:
        layer = self.midlayer
        joined = torch.cat((layer["input_layernorm"](self._embedding[ids_BL]), layer["hidden_norm"](features_BLD)), -1)
        attention = layer["self_attn"]
        q, k, v = (
            attention[name](joined).unflatten(-1, (-1, self._head_dim)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        q, k = _turned(q, positions_L), _turned(k, positions_L)
        # Kernels that take a mask take as many heads of keys as of queries.
        k, v = (x.repeat_interleave(self._heads // self._kv_heads, dim=1) for x in (k, v))
        o = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask_LL)
        x = features_BLD + attention["o_proj"](o.transpose(1, 2).flatten(2))
        normed, mlp = layer["post_attention_layernorm"](x), layer["mlp"]
        return x + mlp["down_proj"](functional.silu(mlp["gate_proj"](normed)) * mlp["up_proj"](normed))

    def loss(self, outputs_ND: torch.Tensor, ids_N: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.lm_head(self.norm(outputs_ND)), torch.searchsorted(self._ids, ids_N))

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in self.state_dict().items()}
        ids = self._ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(len(self._embedding), dtype=torch.bool).index_fill(0, ids, True)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = {**self._config, "draft_vocab_size": len(self._ids)}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class MtpLayer(nn.Module):
    """The same seam for the layer of a DeepSeek; embedding, final norm and output projection are the model's."""

    def __init__(self, model: nn.Module, config: dict[str, object]) -> None:
        super().__init__()
        size, eps = int(str(config["hidden_size"])), float(str(config["rms_norm_eps"]))
        one_layer = {**config, "num_hidden_layers": 1, "first_k_dense_replace": 0}
        self._model = [model]
        self.enorm, self.hnorm, self.eh_proj = (
            RmsNorm(size, eps),
            RmsNorm(size, eps),
            nn.Linear(2 * size, size, bias=False),
        )
        # Its one layer is the MTP layer's block, its final norm that of the layer's head.
        self.block = DeepseekV3Model(DeepseekV3Config(**one_layer))
        del self.block.embed_tokens

    def start(self, states: list[torch.Tensor]) -> torch.Tensor:
        normed: torch.Tensor = self._model[0].model.norm(states[-1])
        return normed

    def step(
        self, ids_BL: torch.Tensor, features_BLD: torch.Tensor, mask_LL: torch.Tensor, positions_L: torch.Tensor
    ) -> torch.Tensor:
        embedded = self._model[0].model.embed_tokens(ids_BL)
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(features_BLD)), dim=-1))
        hidden = torch.zeros(mask_LL.shape).masked_fill(~mask_LL, torch.finfo(x.dtype).min)[None, None]
        output: torch.Tensor = self.block(
            inputs_embeds=x, attention_mask=hidden, position_ids=positions_L[None], use_cache=False
        ).last_hidden_state
        return output

    def loss(self, outputs_ND: torch.Tensor, ids_N: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self._model[0].lm_head(outputs_ND), ids_N)

    def save(self, file: Path) -> None:
        prefix, tensors = "model.layers.4", {}
        for name, tensor in self.state_dict().items():
            tensor = tensor.to(torch.bfloat16).contiguous()
            if name.startswith("block.layers.0.mlp.experts."):
                for expert, of in enumerate(tensor):
                    parts = (
                        (("gate_proj", "up_proj"), of.chunk(2))
                        if name.endswith("gate_up_proj")
                        else (("down_proj",), (of,))
                    )
                    for part, weight in zip(*parts, strict=True):
                        tensors[f"{prefix}.mlp.experts.{expert}.{part}.weight"] = weight.contiguous()
            elif name == "block.norm.weight":
                tensors[f"{prefix}.shared_head.norm.weight"] = tensor
            else:
                tensors[f"{prefix}.{name.removeprefix('block.layers.0.')}"] = tensor
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, file, metadata={"format": "pt"})


def _turned(x_BHLd: torch.Tensor, positions_L: torch.Tensor) -> torch.Tensor:
    """RoPE over halves of a head."""
    half = x_BHLd.shape[-1] // 2
    angles = torch.outer(positions_L, 10000.0 ** (-torch.arange(half, device=positions_L.device) / half))
    a, b = x_BHLd.chunk(2, dim=-1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1)


def _texts(folder: Path) -> list[list[int]]:
    items = json.loads((folder / "recitations.json").read_text(encoding="utf-8"))
    return [item["prompt_ids"] + item["expected_ids"] for item in items]


def _train(
    network: nn.Module, texts: list[tuple[torch.Tensor, list[torch.Tensor]]], epochs: int, report: Callable[[str], None]
) -> None:
    """AdamW with a warm-up and a cosine to zero, a text at a time; the loss of a later draft counts less."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=PEAK_LR, betas=(0.9, 0.95))
    num_steps, step = epochs * len(texts), 0
    for epoch in range(epochs):
        total = 0.0
        for number in torch.randperm(len(texts)).tolist():
            ids_L, states = texts[number]
            first = int(torch.randint(max(1, len(ids_L) - WINDOW + 1), ()))
            ids_L, states = ids_L[first : first + WINDOW], [state[:, first : first + WINDOW] for state in states]
            step += 1
            scale = min(step / (num_steps / 20), 0.5 * (1 + math.cos(math.pi * step / num_steps)))
            for group in optimizer.param_groups:
                group["lr"] = PEAK_LR * scale
            loss = chain_loss(network, ids_L[None], states, ids_L[None])
            total += loss.item()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
        if epoch % 5 == 4:
            report(f"epoch {epoch + 1}/{epochs} loss {total / len(texts):.4f}")


def chain_loss(
    network: nn.Module, ids_BL: torch.Tensor, states: list[torch.Tensor], labels_BL: torch.Tensor
) -> torch.Tensor:
    """Row j of draft s takes token j + 1 + s and predicts token j + 2 + s: that of the labels. All rows are one
    sequence: each sees the rows of the first draft up to j, which have the model's features, and those of its own
    chain. states: [B, L, D] of each layer that the network reads."""
    num_rows, device = ids_BL.shape[1] - 2, ids_BL.device
    padded_ids = functional.pad(ids_BL, (0, STEPS))
    below = torch.ones(num_rows, num_rows, dtype=torch.bool, device=device).tril()
    own = torch.eye(num_rows, dtype=torch.bool, device=device)
    tokens, features, positions = [], [network.start(states)[:, :num_rows]], []
    loss = torch.zeros((), device=device)
    for draft in range(STEPS):
        tokens.append(padded_ids[:, 1 + draft : 1 + draft + num_rows])
        positions.append(torch.arange(num_rows, device=device) + draft)
        none = torch.zeros_like(own)
        mask = torch.cat(
            [torch.cat([below, *([own] * row), *([none] * (draft - row))], dim=1) for row in range(draft + 1)]
        )
        outputs = network.step(torch.cat(tokens, dim=1), torch.cat(features, dim=1), mask, torch.cat(positions))
        features.append(outputs[:, draft * num_rows :])
        num_known = num_rows - draft
        predicted, labels = features[-1][:, :num_known].flatten(0, 1), labels_BL[:, 2 + draft :].flatten()
        loss = loss + 0.8**draft * network.loss(predicted, labels)
    return loss


@torch.no_grad()
def _with_states(
    model: nn.Module, texts: list[list[int]], layers: tuple[int, ...]
) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Each text and the outputs of those layers for it, before the final norm."""
    shown: dict[int, torch.Tensor] = {}
    hooks = [
        model.model.layers[layer].register_forward_hook(
            lambda module, inputs, output, layer=layer: shown.update({layer: output})
        )
        for layer in layers
    ]
    found = []
    for ids in texts:
        model(torch.tensor([ids]), use_cache=False)
        found.append((torch.tensor(ids), [shown[layer].clone() for layer in layers]))
    for hook in hooks:
        hook.remove()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "drafters")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--only", choices=("eagle3", "mtp"))
    args = parser.parse_args()
    for name in ("tiny-llama", "tiny-deepseek"):
        if args.only is not None and (args.only == "mtp") == (name == "tiny-llama"):
            continue
        torch.manual_seed(SEED)
        model = AutoModelForCausalLM.from_pretrained(HERE / name).requires_grad_(False).eval()
        texts = _texts(HERE / name)
        network: EagleHead | MtpLayer
        if name == "tiny-llama":
            ids = torch.tensor(sorted({token for text in texts for token in text}))
            network = EagleHead(model.model.embed_tokens.weight, ids, EAGLE_CONFIG)
            layers = HIDDEN_LAYERS
        else:
            network = MtpLayer(model, json.loads((HERE / name / "config.json").read_text()))
            layers = (model.config.num_hidden_layers - 1,)
        _train(
            network,
            _with_states(model, texts, layers),
            args.epochs,
            lambda line, name=name: print(name, line, flush=True),
        )
        network.save(args.out / ("tiny-llama-eagle3" if name == "tiny-llama" else "tiny-deepseek-mtp.safetensors"))


if __name__ == "__main__":
    main()
