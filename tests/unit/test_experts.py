"""Routed experts: the definition, and rows whose bits do not depend on who else is there or picks the same expert."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from radixmesh.daemons.worker.group import LocalGroup
from radixmesh.daemons.worker.models.expert_checkpoint import ExpertNames, expert_targets
from radixmesh.daemons.worker.models.experts import ExpertWeights, RoutedExperts, Routing
from radixmesh.daemons.worker.models.model import Placement
from radixmesh.daemons.worker.models.softmax_router import route_by_softmax
from radixmesh.daemons.worker.tiles import RowTiles

_NUM_EXPERTS, _HIDDEN, _MLP, _PICKS = 6, 37, 19, 3
_ROWS = 60
_TILES = RowTiles((2, 4, 8, 16, 32))


def _placement(dtype: torch.dtype = torch.float32) -> Placement:
    torch.set_num_threads(1)
    return Placement(device=torch.device("cpu"), dtype=dtype, group=LocalGroup())


def _weights(dtype: torch.dtype = torch.float32) -> ExpertWeights:
    weights = ExpertWeights.empty(
        num_experts=_NUM_EXPERTS, hidden_size=_HIDDEN, mlp_size=_MLP, placement=_placement(dtype)
    )
    generator = torch.Generator().manual_seed(1)
    for w in (weights.w_gate_up_EDF2, weights.w_down_EFD):
        w.copy_(torch.randn(w.shape, generator=generator) * 0.3)
    return weights


_GENERATOR = torch.Generator().manual_seed(2)
_X = torch.randn(_ROWS, _HIDDEN, generator=_GENERATOR)
_ROUTER = torch.randn(_HIDDEN, _NUM_EXPERTS, generator=_GENERATOR)


def _route(x_TD: torch.Tensor) -> Routing:
    return route_by_softmax(x_TD, w_router_DE=_ROUTER, num_picks=_PICKS, is_normalised=False)


def _compute(x: torch.Tensor, tiles: RowTiles = _TILES) -> torch.Tensor:
    padded = torch.full((tiles.padded(len(x)), _HIDDEN), 7.0)
    padded[: len(x)] = x
    out = RoutedExperts(_weights(), _route, _placement()).compute(padded, len(x), tiles)
    assert out.shape == padded.shape and not out[len(x) :].any(), "padding rows are zero"
    return out[: len(x)]


def test_the_definition() -> None:
    weights = _weights()
    expected = torch.zeros(_ROWS, _HIDDEN, dtype=torch.float64)
    probabilities = (_X.double() @ _ROUTER.double()).softmax(-1)
    for row in range(_ROWS):
        for expert in probabilities[row].argsort(descending=True)[:_PICKS].tolist():
            gate, up = (_X[row].double() @ weights.w_gate_up_EDF2[expert].double()).chunk(2)
            result = (functional.silu(gate) * up) @ weights.w_down_EFD[expert].double()
            expected[row] += probabilities[row, expert] * result
    assert expected.std() > 0.3
    for tiles in (_TILES, RowTiles(None), RowTiles((1,))):
        assert (_compute(_X, tiles) - expected).abs().max() < 1e-5


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, _ROWS - 1), min_size=1, max_size=80))
def test_a_row_has_the_same_bits_in_any_company(rows: list[int]) -> None:
    """Rows may come more than once: all of an expert's places are then taken by equals."""
    whole = _compute(_X)
    assert torch.equal(_compute(_X[rows]).view(torch.int32), whole[rows].view(torch.int32))


def test_normalised_weights_are_a_softmax_over_the_picked() -> None:
    ids, weights = route_by_softmax(_X, w_router_DE=_ROUTER, num_picks=2, is_normalised=True)
    logits = (_X @ _ROUTER).gather(1, ids)
    assert (weights - logits.softmax(-1)).abs().max() < 1e-6
    assert torch.equal(ids[:, 0], (_X @ _ROUTER).argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_expert_lies_at_an_aligned_address(dtype: torch.dtype) -> None:
    weights = _weights(dtype)
    for w in (weights.w_gate_up_EDF2, weights.w_down_EFD):
        assert all(expert.is_contiguous() and expert.data_ptr() % 64 == 0 for expert in w)


def test_both_layouts_fill_the_same_weights() -> None:
    given, expected = _weights(), _weights()
    targets = expert_targets("m.experts", given, names=ExpertNames("w1", "w3", "w2"), fused_prefix="o.experts")
    assert len(targets.tensors) == 3 * _NUM_EXPERTS
    classic = {name: tensor.clone() for name, tensor in targets.tensors.items()}
    assert torch.equal(classic["m.experts.4.w3.weight"], expected.w_gate_up_EDF2[4, :, _MLP:].t())
    fused = targets.in_layout_of(["o.experts.gate_up_proj", "o.experts.down_proj"])
    assert set(fused.tensors) == {"o.experts.gate_up_proj", "o.experts.down_proj"}
    assert fused.tensors["o.experts.gate_up_proj"].shape == (_NUM_EXPERTS, 2 * _MLP, _HIDDEN)
    for layout in (targets.in_layout_of(classic), fused):
        values = [tensor.clone() for tensor in layout.tensors.values()]
        given.w_gate_up_EDF2.zero_()
        given.w_down_EFD.zero_()
        for target, value in zip(layout.tensors.values(), values, strict=True):
            target.copy_(value)
        assert torch.equal(given.w_gate_up_EDF2, expected.w_gate_up_EDF2)
        assert torch.equal(given.w_down_EFD, expected.w_down_EFD)
    # One of the two alone stands for its own tensors only.
    mixed = targets.in_layout_of(["o.experts.down_proj"])
    assert len(mixed.tensors) == 2 * _NUM_EXPERTS + 1
