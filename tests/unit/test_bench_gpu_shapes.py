"""Rooflines of measured shapes: weights that a step reads, of which routed experts only those that are hit."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    from gpu import shapes

    yield shapes
    for name in [name for name in sys.modules if name.split(".")[0] == "gpu"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "billions", "active_billions"), [("deepseek-v2-lite", 15.7, 2.4), ("qwen3-30b-a3b", 30.5, 3.0)]
)
def test_weights_are_those_of_the_models_cards(
    shapes: ModuleType, name: str, billions: float, active_billions: float
) -> None:
    of = shapes.weights(name)
    total = of.layers + 2 * of.head + of.num_routed_layers * of.num_experts * of.expert
    assert total * 1e-9 == pytest.approx(billions, rel=0.01)
    assert (of.layers_of_a_row + of.head) * 1e-9 == pytest.approx(active_billions, rel=0.05)


def test_a_layer_of_deepseek_v3_is_that_of_its_card(shapes: ModuleType) -> None:
    """671 billion weights: 3 dense layers, 58 with experts, embedding and head."""
    of = shapes.weights("deepseek-v3-12-layers")
    experts = of.num_experts * of.expert
    dense = 3 * 7168 * 18432
    attention = (of.layers - 3 * dense - 9 * (256 * 7168 + of.expert)) / 12
    total = 61 * attention + 3 * dense + 58 * (experts + 256 * 7168 + of.expert) + 2 * of.head
    assert total * 1e-9 == pytest.approx(671, rel=0.01)


def test_one_row_reads_its_picks_and_many_rows_read_all_experts(shapes: ModuleType) -> None:
    of = shapes.weights("deepseek-v2-lite")
    assert of.experts_hit(1) == pytest.approx(6.0)
    assert of.experts_hit(256) == pytest.approx(64.0, rel=1e-6)
    assert shapes.weight_bytes("deepseek-v2-lite", 1) == pytest.approx(2 * (of.layers_of_a_row + of.head))
    # 512 latent numbers and 64 of RoPE in bf16, 27 layers.
    assert shapes.kv_bytes_per_token("deepseek-v2-lite") == 576 * 2 * 27
    assert shapes.sampling_temperature("deepseek-v2-lite") == 1.0
    assert shapes.sampling_temperature("llama-3.2-3b") == 0.0
    assert shapes.weights("llama-3.2-3b").experts_hit(256) == 0.0


def test_experts_that_rows_hit_are_counted(shapes: ModuleType, tmp_path: Path) -> None:
    """On the device that routes them, once for each expert and layer."""
    from gpu.count_experts import HitCounter, count_in

    from radixmesh.daemons.worker.cuda.ops import TorchOps
    from radixmesh.kernels.moe.route import RouterRule

    class CountedOps(TorchOps):
        pass

    counter, path = HitCounter(), tmp_path / "hits.json"
    counter.write(path)
    assert json.loads(path.read_text()) == [0, 0]
    count_in(CountedOps, counter)
    logits_TE = torch.full((3, 8), -9.0)
    logits_TE[:, 2] = 9.0
    logits_TE[torch.arange(3), torch.tensor([0, 0, 7])] = 5.0
    routes = CountedOps().route(logits_TE, RouterRule(num_picks=2))
    assert routes.expert_ids_TA.tolist() == [[2, 0], [2, 0], [2, 7]]
    CountedOps().route(logits_TE[:1], RouterRule(num_picks=2))
    counter.write(path)
    assert json.loads(path.read_text()) == [3 + 2, 2]
