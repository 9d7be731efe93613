"""Models without a family run by transformers' modules with our paged attention, or are refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from support.fallback_models import FALLBACK_MODELS, fallback_model
from support.segments import Stream, generate, scattered_pages

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.cpu.runner import CpuRunner


def _runner(folder: Path, **settings: object) -> CpuRunner:
    runner = load_cpu_runner(folder, threads=1, page_size=8, num_pages=64, **settings)  # type: ignore[arg-type]
    assert isinstance(runner, CpuRunner)
    return runner


@pytest.mark.parametrize("architecture", FALLBACK_MODELS)
def test_a_model_without_a_family_gives_the_tokens_of_transformers(architecture: str, tmp_path: Path) -> None:
    model = fallback_model(architecture, **FALLBACK_MODELS[architecture])
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
        fallback_model(architecture, **settings).save_pretrained(tmp_path)
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
    fallback_model(architecture, **settings).save_pretrained(tmp_path)
    with pytest.raises(MeshError) as caught:
        _runner(tmp_path, model_impl="transformers")
    assert caught.value.reason_name == "UNSUPPORTED"


@pytest.mark.parametrize(("name", "argument"), [("block_indices", torch.zeros(1)), ("logit_cap", 30.0)])
def test_an_argument_of_attention_that_ours_ignores_is_named_when_loading(
    name: str, argument: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MiniMax M3 passes the blocks of keys that its index picks: all of them where a text is short."""
    fallback_model("CohereForCausalLM").save_pretrained(tmp_path)
    attention = transformers.models.cohere.modeling_cohere.CohereAttention
    forward = attention.forward
    monkeypatch.setattr(
        attention, "forward", lambda self, *args, **more: forward(self, *args, **more, **{name: argument})
    )
    with pytest.raises(MeshError, match=f"attends by {name}") as caught:
        _runner(tmp_path)
    assert caught.value.reason_name == "UNSUPPORTED"


def test_longrope_runs_where_no_sequence_is_longer_than_the_original(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    model = fallback_model("Phi3ForCausalLM", original_max_position_embeddings=64, rope_parameters=rope)
    model.save_pretrained(tmp_path)
    with pytest.raises(MeshError, match="--max-total-len"):
        _runner(tmp_path, model_impl="transformers")
    assert _runner(tmp_path, model_impl="transformers", max_total_len=64).max_total_len == 64


def test_rows_that_mix_outside_of_attention_are_found_when_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fallback_model("CohereForCausalLM").save_pretrained(tmp_path)
    mlp = transformers.models.cohere.modeling_cohere.CohereMLP
    alone = mlp.forward
    # A short convolution, as some layers of newer models have.
    monkeypatch.setattr(mlp, "forward", lambda self, x: alone(self, x + 0.1 * x.roll(1, dims=1)))
    with pytest.raises(MeshError, match="more than keys and values") as caught:
        _runner(tmp_path)
    assert caught.value.reason_name == "UNSUPPORTED"


def test_the_flag_forbids_it(tmp_path: Path) -> None:
    fallback_model("CohereForCausalLM").save_pretrained(tmp_path)
    with pytest.raises(MeshError, match=r"known: .*LlamaForCausalLM") as caught:
        _runner(tmp_path, model_impl="radixmesh")
    assert caught.value.reason_name == "UNSUPPORTED"
    with pytest.raises(MeshError, match="model_impl"):
        _runner(tmp_path, model_impl="vllm")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    fallback_model("CohereForCausalLM").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MeshError, match=r"layers\.1\.mlp\.up_proj") as caught:
        _runner(tmp_path)
    assert caught.value.reason_name == "BAD_CHECKPOINT"
