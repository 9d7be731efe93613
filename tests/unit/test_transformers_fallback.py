"""Models without a family run by transformers' modules with our paged attention, or are refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from support.segments import Stream, generate, scattered_pages
from transformers import PreTrainedModel

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.cpu.runner import CpuRunner

_SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
# LayerNorm and a scale of logits; experts; parallel blocks; windows; a family that exists, by force.
_MODELS = {
    "CohereForCausalLM": {"logit_scale": 0.4},
    "OlmoeForCausalLM": {"num_experts": 4, "num_experts_per_tok": 2},
    "PhiForCausalLM": {"partial_rotary_factor": 0.5},
    "Starcoder2ForCausalLM": {"sliding_window": 13},
    "LlamaForCausalLM": {},
}


def _model(architecture: str, **settings: object) -> PreTrainedModel:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model_class = getattr(transformers, architecture)
    model: PreTrainedModel = model_class(model_class.config_class(**{**_SIZES, **settings})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.2 * parameter.shape[-1] ** -0.5)
    return model


def _runner(folder: Path, **settings: object) -> CpuRunner:
    runner = load_cpu_runner(folder, threads=1, page_size=8, num_pages=64, **settings)  # type: ignore[arg-type]
    assert isinstance(runner, CpuRunner)
    return runner


@pytest.mark.parametrize("architecture", _MODELS)
def test_a_model_without_a_family_gives_the_tokens_of_transformers(architecture: str, tmp_path: Path) -> None:
    model = _model(architecture, **_MODELS[architecture])
    model.save_pretrained(tmp_path)
    runner = _runner(tmp_path, model_impl="transformers" if architecture == "LlamaForCausalLM" else "auto")
    assert not runner.is_deterministic
    prompts = [np.random.default_rng(i).integers(0, 97, length).astype(np.int32) for i, length in enumerate((40, 55))]
    prompts[1][:16] = prompts[0][:16]
    pages = scattered_pages(runner, [len(prompt) + 64 for prompt in prompts])
    pages[1][:2] = pages[0][:2]
    streams = [Stream(slot, prompt.tolist(), pages[slot]) for slot, prompt in enumerate(prompts)]
    generate(runner, streams[:1], 4, chunk=11)
    streams[1].computed = 16
    logits = runner.logits([streams[1].segment(39, 8, samples=False)])[0]
    with torch.inference_mode():
        expected = model(torch.from_numpy(prompts[1]).long()[None]).logits[0, 16:].numpy()
    assert expected.std() > 0.3 and np.abs(logits - expected).max() <= 1e-4
    generate(runner, streams, 64, chunk=11)
    for stream in streams:
        ids = torch.from_numpy(stream.prompt).long()[None]
        with torch.inference_mode():
            output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False)
        assert stream.output == output[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize(
    ("architecture", "settings", "reason"),
    [
        ("MambaForCausalLM", {"state_size": 4}, "state"),
        ("T5ForConditionalGeneration", None, "encoder-decoder"),
        ("BloomForCausalLM", None, "interface"),
        ("DistilBertForMaskedLM", None, "no causal language model"),
        ("NoSuchForCausalLM", None, "no such class"),
    ],
)
def test_models_that_cannot_run_are_refused_with_the_reason(
    architecture: str, settings: dict[str, object] | None, reason: str, tmp_path: Path
) -> None:
    if settings is None:
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    else:
        _model(architecture, **settings).save_pretrained(tmp_path)
    with pytest.raises(MeshError, match=reason) as caught:
        _runner(tmp_path)
    assert caught.value.reason_name == "UNSUPPORTED" and "LlamaForCausalLM" in caught.value.message


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"]}),
        ("Llama4ForCausalLM", {"attention_chunk_size": 16, "intermediate_size_mlp": 40, "head_dim": 8}),
    ],
)
def test_a_state_beside_keys_and_values_or_another_mask_is_found_when_loading(
    architecture: str, settings: dict[str, object], tmp_path: Path
) -> None:
    _model(architecture, **settings).save_pretrained(tmp_path)
    with pytest.raises(MeshError) as caught:
        _runner(tmp_path, model_impl="transformers")
    assert caught.value.reason_name == "UNSUPPORTED"


def test_rows_that_mix_outside_of_attention_are_found_when_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _model("CohereForCausalLM").save_pretrained(tmp_path)
    mlp = transformers.models.cohere.modeling_cohere.CohereMLP
    alone = mlp.forward
    # A short convolution, as some layers of newer models have.
    monkeypatch.setattr(mlp, "forward", lambda self, x: alone(self, x + 0.1 * x.roll(1, dims=1)))
    with pytest.raises(MeshError, match="more than keys and values") as caught:
        _runner(tmp_path)
    assert caught.value.reason_name == "UNSUPPORTED"


def test_the_flag_forbids_it(tmp_path: Path) -> None:
    _model("CohereForCausalLM").save_pretrained(tmp_path)
    with pytest.raises(MeshError, match=r"known: .*LlamaForCausalLM") as caught:
        _runner(tmp_path, model_impl="radixmesh")
    assert caught.value.reason_name == "UNSUPPORTED"
    with pytest.raises(MeshError, match="model_impl"):
        _runner(tmp_path, model_impl="vllm")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    _model("CohereForCausalLM").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MeshError, match=r"layers\.1\.mlp\.up_proj") as caught:
        _runner(tmp_path)
    assert caught.value.reason_name == "BAD_CHECKPOINT"
