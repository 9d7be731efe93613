"""Routed experts: the definition, and rows whose bits do not depend on who else is there or picks the same expert."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.rounding import sum_tolerance
from torch.nn import functional

from radixmesh.daemons.worker.cpu.determinism import verified_tiles
from radixmesh.daemons.worker.models.expert_checkpoint import ExpertNames, expert_targets
from radixmesh.daemons.worker.models.experts import ExpertWeights, RoutedExperts, Routing
from radixmesh.daemons.worker.models.model import Placement
from radixmesh.daemons.worker.models.softmax_router import route_by_softmax
from radixmesh.daemons.worker.ranks.group import LocalGroup
from radixmesh.daemons.worker.tiles import RowTiles

_NUM_EXPERTS, _HIDDEN, _MLP, _PICKS = 6, 37, 19, 3
_ROWS = 60


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


_WEIGHTS = _weights()
_EXPERTS = RoutedExperts(_WEIGHTS, _route, _placement())


@pytest.fixture(scope="module")
def tiles() -> RowTiles:
    """Those that the worker would take here: on some CPUs a router of so odd a size has none, and runs row by row."""
    return verified_tiles(_EXPERTS.row_probes(), torch.device("cpu"))


def _compute(x: torch.Tensor, tiles: RowTiles) -> torch.Tensor:
    padded = torch.full((tiles.padded(len(x)), _HIDDEN), 7.0)
    padded[: len(x)] = x
    out = _EXPERTS.compute(padded, len(x), tiles)
    assert out.shape == padded.shape and not out[len(x) :].any(), "padding rows are zero"
    return out[: len(x)]


def _expert_by_definition(x_D: torch.Tensor, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 [hidden] of one expert, and how far float32 may be off, to the first order."""
    w_gate_up, w_down = (w[expert].double() for w in (_WEIGHTS.w_gate_up_EDF2, _WEIGHTS.w_down_EFD))
    gate, up = (x_D @ w_gate_up).chunk(2)
    gate_terms, up_terms = (x_D.abs() @ w_gate_up.abs()).chunk(2)
    gated = functional.silu(gate) * up
    # The slope of silu is at most 1.1.
    from_gate_up = 1.1 * up.abs() * gate_terms + functional.silu(gate).abs() * up_terms
    error = sum_tolerance(_HIDDEN, from_gate_up @ w_down.abs()) + sum_tolerance(_MLP, gated.abs() @ w_down.abs())
    return gated @ w_down, error


def test_the_definition(tiles: RowTiles) -> None:
    expected = torch.zeros(_ROWS, _HIDDEN, dtype=torch.float64)
    tolerance = torch.zeros_like(expected)
    x_TD, w_router = _X.double(), _ROUTER.double()
    probabilities = (x_TD @ w_router).softmax(-1)
    # A probability is relatively off by what its logit and the others are absolutely.
    of_weights = 2 * sum_tolerance(_HIDDEN, (x_TD.abs() @ w_router.abs()).amax(-1))
    for row in range(_ROWS):
        for expert in probabilities[row].argsort(descending=True)[:_PICKS].tolist():
            result, error = _expert_by_definition(x_TD[row], expert)
            expected[row] += probabilities[row, expert] * result
            error += of_weights[row] * result.abs() + sum_tolerance(_PICKS, result.abs())
            tolerance[row] += probabilities[row, expert] * error
    assert expected.std() > 0.3 and tolerance.max() < expected.std() / 100
    for some in (tiles, RowTiles(None), RowTiles((1,))):
        assert ((_compute(_X, some) - expected).abs() <= tolerance).all()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, _ROWS - 1), min_size=1, max_size=80))
def test_a_row_has_the_same_bits_in_any_company(tiles: RowTiles, rows: list[int]) -> None:
    """Rows may come more than once: all of an expert's slots are then taken by equals."""
    whole = _compute(_X, tiles)
    assert torch.equal(_compute(_X[rows], tiles).view(torch.int32), whole[rows].view(torch.int32))


def test_normalised_weights_are_a_softmax_over_the_picked() -> None:
    ids, weights = route_by_softmax(_X, w_router_DE=_ROUTER, num_picks=2, is_normalised=True)
    logits = (_X @ _ROUTER).gather(1, ids)
    # Two softmaxes over other numbers of terms, each at most 1.
    assert (weights - logits.softmax(-1)).abs().max() <= 2 * sum_tolerance(_NUM_EXPERTS, 1.0)
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
