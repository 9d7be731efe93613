"""DeepSeek-V2 and V3 on the CPU runner against transformers in float32: logits, greedy ids, checkpoints, configs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.deepseek_folders import SHAPES, V3_SHAPES, random_deepseek, save_deepseek
from support.rounding import model_tolerance, typical_model_error
from support.segments import Stream, generate, scattered_pages
from transformers import PreTrainedModel

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import Task
from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader
from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.cpu.determinism import verified_tiles
from radixmesh.daemons.worker.cpu.load import load_model
from radixmesh.daemons.worker.cpu.runner import CpuRunner
from radixmesh.daemons.worker.models.deepseek.config import RouterConfig, TopkMethod, read_deepseek_config
from radixmesh.daemons.worker.models.deepseek.model import DeepseekModel
from radixmesh.daemons.worker.models.deepseek.routing import DeepseekRouter, pick_biased, pick_highest
from radixmesh.daemons.worker.models.deepseek.weights import MoeWeights
from radixmesh.daemons.worker.models.experts import ExpertWeights
from radixmesh.daemons.worker.models.model import Placement, RowInput, RowProbe
from radixmesh.daemons.worker.ranks.group import LocalGroup
from radixmesh.daemons.worker.runner import Segment
from radixmesh.daemons.worker.tiles import RowFunction, RowTiles, Tensors

_LENGTH = 150
_PLACEMENT = Placement(device=torch.device("cpu"), dtype=torch.float32, group=LocalGroup())


@pytest.fixture(scope="module", params=SHAPES)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    torch.set_num_threads(1)
    model = random_deepseek(request.param)
    return model, save_deepseek(model, tmp_path_factory.mktemp(request.param))


def _load(folder: Path, **settings: object) -> CpuRunner:
    runner = load_cpu_runner(folder, **{"num_pages": 640, "threads": 1, **settings})
    assert isinstance(runner, CpuRunner)
    runner.clear()
    return runner


def _prompt(runner: CpuRunner, length: int = _LENGTH, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, runner.vocab_size, length).astype(np.int32)


def _expected(model: PreTrainedModel, ids: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        return model(torch.from_numpy(ids).long()[None]).logits[0].numpy()


def _logits_in_chunks(runner: CpuRunner, ids: np.ndarray, chunk: int) -> np.ndarray:
    stream = Stream(0, ids.tolist(), scattered_pages(runner, [len(ids)])[0])
    parts = []
    while stream.remaining:
        length = min(chunk, stream.remaining)
        parts += runner.logits([stream.segment(length, runner.page_size, samples=False)])
        stream.computed += length
    return np.concatenate(parts)


_CHUNKS = (_LENGTH, 64, 7, 1)


@pytest.mark.parametrize(
    ("backend", "page_size", "chunks"),
    [
        ("paged_torch", 1, (_LENGTH, 7)),
        ("paged_torch", 16, (64, 1)),
        ("naive", 4, (7,)),
        *(
            pytest.param(*pages, _CHUNKS, marks=pytest.mark.full)
            for pages in (("paged_torch", 1), ("paged_torch", 16), ("naive", 4))
        ),
    ],
)
def test_logits_equal_those_of_transformers(
    oracle: tuple[PreTrainedModel, Path], backend: str, page_size: int, chunks: tuple[int, ...]
) -> None:
    """In one prefill, in chunks, and token by token, which is decode."""
    model, folder = oracle
    runner = _load(folder, attention_backend=backend, page_size=page_size)
    ids = _prompt(runner)
    expected = _expected(model, ids)
    assert expected.std() > 0.5, "a test on flat logits would show nothing"
    tolerance = model_tolerance(model.config, _LENGTH, np.abs(expected).max())
    for chunk in chunks:
        assert np.abs(_logits_in_chunks(runner, ids, chunk) - expected).max() <= tolerance, chunk


def test_greedy_ids_equal_those_of_transformers(oracle: tuple[PreTrainedModel, Path]) -> None:
    model, folder = oracle
    runner = _load(folder, page_size=16)
    prompts = [_prompt(runner, length, seed) for seed, length in enumerate((5, 1, 90))]
    pages = scattered_pages(runner, [len(prompt) + 32 for prompt in prompts])
    streams = [Stream(i, prompt.tolist(), pages[i]) for i, prompt in enumerate(prompts)]
    generate(runner, streams, 32, chunk=11)
    for stream, prompt in zip(streams, prompts, strict=True):
        ids = torch.from_numpy(prompt).long()[None]
        with torch.inference_mode():
            expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False)
        assert stream.output == expected[0, len(prompt) :].tolist()


def test_embeddings_equal_the_mean_hidden_state_of_transformers(oracle: tuple[PreTrainedModel, Path]) -> None:
    model, folder = oracle
    runner = _load(folder)
    ids = _prompt(runner)
    pages = scattered_pages(runner, [_LENGTH])[0]
    segment = Segment(slot=0, ids=ids, start=0, pages=pages, task=Task.EMBED)
    (output,) = runner.forward([segment])
    with torch.inference_mode():
        hidden = model.model(torch.from_numpy(ids).long()[None]).last_hidden_state[0].numpy()
    assert output.vector is not None and output.token is None
    tolerance = model_tolerance(model.config, _LENGTH, np.abs(hidden).max())
    assert np.abs(output.vector - hidden.mean(axis=0)).max() <= tolerance


def test_only_latents_and_rope_keys_are_cached(oracle: tuple[PreTrainedModel, Path]) -> None:
    model, folder = oracle
    (plane,) = load_model(folder, _PLACEMENT).model.kv_layout.planes
    assert plane.row_shape == (1, model.config.kv_lora_rank + model.config.qk_rope_head_dim)


def test_both_layouts_of_experts_load_to_the_same_bits(tmp_path: Path) -> None:
    model = random_deepseek("v3_groups")
    one_by_one = save_deepseek(model, tmp_path / "one_by_one")
    fused = save_deepseek(model, tmp_path / "fused", is_fused=True)
    names = [set(load_file(folder / "model.safetensors")) for folder in (one_by_one, fused)]
    assert "model.layers.1.mlp.experts.7.up_proj.weight" in names[0] - names[1]
    assert "model.layers.1.mlp.experts.gate_up_proj" in names[1] - names[0]
    runners = [_load(one_by_one), _load(fused)]
    ids = _prompt(runners[0])
    first, second = (_logits_in_chunks(runner, ids, 64) for runner in runners)
    assert np.array_equal(first, second)


def test_bfloat16_is_near_float32(tmp_path: Path) -> None:
    model = random_deepseek("v3_yarn_plain_query")
    folder = save_deepseek(model, tmp_path)
    ids = _prompt(exact := _load(folder))
    logits, expected = (_logits_in_chunks(runner, ids, 64) for runner in (_load(folder, dtype="bfloat16"), exact))
    # A row whose router almost ties may go to another expert, so most rows are compared.
    tolerance = typical_model_error(model.config, expected.std(), torch.bfloat16)
    assert np.median(np.abs(logits - expected)) < tolerance


def _with_mtp_layer(folder: Path) -> dict[str, torch.Tensor]:
    """Adds the tensors that a published checkpoint has after its last layer; returns them."""
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    last, extra = config["num_hidden_layers"] - 1, config["num_hidden_layers"]
    size, vocab = config["hidden_size"], config["vocab_size"]
    added = {
        name.replace(f"layers.{last}.", f"layers.{extra}."): torch.randn_like(tensor)
        for name, tensor in tensors.items()
        if f"layers.{last}." in name
    }
    prefix = f"model.layers.{extra}."
    added |= {f"{prefix}{name}.weight": torch.randn(size) for name in ("enorm", "hnorm", "shared_head.norm")}
    added[f"{prefix}eh_proj.weight"] = torch.randn(size, 2 * size)
    added |= {f"{prefix}{name}.weight": torch.randn(vocab, size) for name in ("embed_tokens", "shared_head.head")}
    save_file({**tensors, **added}, folder / "model.safetensors", {"format": "pt"})
    return added


def test_layers_for_further_tokens_are_loaded_kept_and_change_nothing(tmp_path: Path) -> None:
    model = random_deepseek("v3_groups")
    folder = save_deepseek(model, tmp_path)
    ids = _prompt(before := _load(folder))
    expected = _logits_in_chunks(before, ids, _LENGTH)
    added = _with_mtp_layer(folder)
    assert np.array_equal(_logits_in_chunks(_load(folder), ids, _LENGTH), expected)
    built = load_model(folder, _PLACEMENT)
    assert isinstance(built.model, DeepseekModel)
    (layer,) = built.model.mtp_layers
    assert torch.equal(layer.w_join_GD.t(), added["model.layers.3.eh_proj.weight"])
    assert torch.equal(layer.block.mlp_norm_D, added["model.layers.3.post_attention_layernorm.weight"])


def test_a_layer_for_further_tokens_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    folder = save_deepseek(random_deepseek("v3_groups"), tmp_path)
    _with_mtp_layer(folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.3.eh_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(MeshError, match=r"lacks tensor 'model\.layers\.3\.eh_proj\.weight'") as caught:
        load_model(folder, _PLACEMENT)
    assert caught.value.reason_name == "BAD_CHECKPOINT"


def _config(tmp_path: Path, shape: str, **changes: object) -> ConfigReader:
    version = "V3" if shape in V3_SHAPES else "V2"
    values = {"architectures": [f"Deepseek{version}ForCausalLM"], **SHAPES[shape], **changes}
    (tmp_path / "config.json").write_text(json.dumps(values))
    return ConfigReader.open(tmp_path)


@pytest.mark.parametrize(
    ("shape", "changes", "key", "reason"),
    [
        ("v3_groups", {"n_group": 3}, "n_group", "BAD_CHECKPOINT"),
        ("v3_groups", {"n_group": 8}, "n_group", "BAD_CHECKPOINT"),
        ("v3_groups", {"topk_group": 5}, "topk_group", "BAD_CHECKPOINT"),
        ("v3_groups", {"topk_group": 1}, "num_experts_per_tok", "BAD_CHECKPOINT"),
        ("v3_groups", {"qk_rope_head_dim": 7}, "qk_rope_head_dim", "BAD_CHECKPOINT"),
        ("v3_groups", {"num_key_value_heads": 2}, "num_key_value_heads", "BAD_CHECKPOINT"),
        ("v3_groups", {"kv_lora_rank": None}, "kv_lora_rank", "BAD_CHECKPOINT"),
        ("v3_groups", {"scoring_func": "softmax"}, "scoring_func", "UNSUPPORTED"),
        ("v3_groups", {"topk_method": "greedy"}, "topk_method", "UNSUPPORTED"),
        ("v3_groups", {"hidden_act": "gelu"}, "hidden_act", "UNSUPPORTED"),
        ("v3_groups", {"rope_scaling": {"type": "magic", "factor": 2.0}}, "rope_scaling.type", "UNSUPPORTED"),
        ("v2_greedy", {"norm_topk_prob": True}, "norm_topk_prob", "UNSUPPORTED"),
        ("v2_greedy", {"topk_method": "noaux_tc"}, "topk_method", "UNSUPPORTED"),
    ],
)
def test_bad_configs_are_refused_by_key(
    tmp_path: Path, shape: str, changes: dict[str, object], key: str, reason: str
) -> None:
    with pytest.raises(MeshError) as caught:
        read_deepseek_config(_config(tmp_path, shape, **changes))
    assert (caught.value.metadata["key"], caught.value.reason_name) == (key, reason)


def test_the_published_config_of_v3_is_read(tmp_path: Path) -> None:
    """The spelling of the keys that are easy to get wrong, with the published values."""
    yarn = {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    config = read_deepseek_config(
        _config(
            tmp_path,
            "v3_groups",
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            max_position_embeddings=163840,
            n_routed_experts=256,
            num_experts_per_tok=8,
            n_group=8,
            topk_group=4,
            topk_method="noaux_tc",
            scoring_func="sigmoid",
            norm_topk_prob=True,
            num_hidden_layers=61,
            first_k_dense_replace=3,
            moe_layer_freq=1,
            num_nextn_predict_layers=1,
            rope_theta=10000,
            rope_scaling=yarn,
        )
    )
    assert config.softmax_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert [config.is_moe(index) for index in (2, 3, 60, 61)] == [False, True, True, True]
    assert config.router is not None and config.router.num_groups == 8 and config.router.is_normed
    assert config.num_mtp_layers == 1


def test_every_second_layer_may_be_dense(tmp_path: Path) -> None:
    config = read_deepseek_config(_config(tmp_path, "v2_greedy", moe_layer_freq=2, first_k_dense_replace=1))
    assert [config.is_moe(index) for index in range(5)] == [False, False, True, False, True]


def _router(
    method: TopkMethod, *, num_groups: int = 3, is_normed: bool = False, weight_scale: float = 1.0
) -> RouterConfig:
    return RouterConfig(
        method=method,
        num_experts=6,
        num_picks=2,
        num_groups=num_groups,
        num_picked_groups=1,
        is_normed=is_normed,
        weight_scale=weight_scale,
    )


def test_groups_by_softmax_are_judged_by_their_best_expert() -> None:
    scores = torch.tensor([[0.05, 0.30, 0.20, 0.25, 0.15, 0.05]])
    routing = pick_highest(scores, _router(TopkMethod.GROUP_LIMITED))
    assert routing.expert_ids_TA.tolist() == [[1, 0]]
    routing = pick_highest(scores, _router(TopkMethod.GREEDY, num_groups=1))
    assert routing.expert_ids_TA.tolist() == [[1, 3]]
    assert routing.weights_TA.tolist() == [pytest.approx([0.30, 0.25])]


def test_groups_by_sigmoid_are_judged_by_their_two_best_and_the_bias_is_in_no_weight() -> None:
    scores = torch.tensor([[0.1, 0.9, 0.6, 0.7, 0.5, 0.5]])
    config = _router(TopkMethod.BIASED, is_normed=True, weight_scale=2.5)
    routing = pick_biased(scores, torch.zeros(6), config)
    assert routing.expert_ids_TA.tolist() == [[3, 2]]
    assert routing.weights_TA.tolist() == [pytest.approx([2.5 * 0.7 / 1.3, 2.5 * 0.6 / 1.3])]
    routing = pick_biased(scores, torch.tensor([0.0, 0.0, 0.0, 0.0, 0.3, 0.4]), config)
    assert routing.expert_ids_TA.tolist() == [[5, 4]]
    assert routing.weights_TA.tolist() == [pytest.approx([1.25, 1.25])]


def _odd_router() -> tuple[DeepseekRouter, RouterConfig, MoeWeights]:
    """Odd numbers of scores, so that rows lie in what vector instructions leave over."""
    torch.manual_seed(0)
    config = RouterConfig(
        method=TopkMethod.BIASED,
        num_experts=6,
        num_picks=3,
        num_groups=2,
        num_picked_groups=1,
        is_normed=True,
        weight_scale=2.5,
    )
    experts = ExpertWeights.empty(num_experts=6, hidden_size=30, mlp_size=8, placement=_PLACEMENT)
    weights = MoeWeights(w_router_DE=torch.randn(30, 6), b_router_E=torch.randn(6), experts=experts, shared=None)
    return DeepseekRouter(config, weights), config, weights


def _at_every_index(function: RowFunction, rows: torch.Tensor, tiles: RowTiles) -> Iterator[torch.Tensor]:
    """The weights of `rows`, in order, as they come out where each row is shifted by some indexes."""
    for shift in range(8):
        (weights_TA,) = tiles.map(function, (rows.roll(-shift, 0),))
        yield weights_TA.roll(shift, 0)


def test_a_routers_scores_do_not_depend_on_a_rows_index() -> None:
    """In the tiles that the worker takes: some libraries have none for a product of this size, which is then run
    row by row."""
    router, _, _ = _odd_router()

    def route(inputs: Tensors) -> Tensors:
        return (router(inputs[0]).weights_TA,)

    tiles = verified_tiles([RowProbe("route", route, (RowInput((30,), torch.float32),))], torch.device("cpu"))
    expected, *others = _at_every_index(route, torch.randn(1024, 30), tiles)
    assert all(torch.equal(found, expected) for found in others), tiles.sizes


def test_picks_do_not_depend_on_a_rows_index() -> None:
    """All after the GEMM is elementwise or within a row, and needs no verified tiles."""
    _, config, weights = _odd_router()
    # A product with this is exact, in whatever order it adds.
    identity = torch.eye(6)
    plain = DeepseekRouter(config, replace(weights, w_router_DE=identity))

    def pick(inputs: Tensors) -> Tensors:
        return (plain(inputs[0]).weights_TA,)

    rows = torch.randn(4096, 30) @ weights.w_router_DE
    expected, *others = _at_every_index(pick, rows, RowTiles((8,)))
    assert all(torch.equal(found, expected) for found in others)
