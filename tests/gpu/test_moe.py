"""Routed experts at the sizes of real models, in captured graphs."""

from __future__ import annotations

import pytest
import torch
from support.rounding import typical_chain_error

from radixmesh.kernels.moe.grouped_gemm import routed_experts, routed_experts_reference
from radixmesh.kernels.moe.route import RouterRule, Routes, route, route_reference
from radixmesh.kernels.moe.router_logits import router_logits
from radixmesh.kernels.moe.row_experts import RowNorm, SharedWeights, row_experts, row_experts_reference

pytestmark = pytest.mark.gpu

_SHAPES = {
    "qwen3-30b-a3b": (2048, 768, 128, RouterRule(num_picks=8, is_normalised=True)),
    "deepseek-v2-lite": (2048, 1408, 64, RouterRule(num_picks=6)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", _SHAPES)
def test_captured_experts_are_torchs_for_any_choice(shape: str, dtype: torch.dtype) -> None:
    """One graph serves logits that change, from one row to many tiles of each expert."""
    hidden, mlp, num_experts, rule = _SHAPES[shape]
    w_gate_up = _random(num_experts, 2 * mlp, hidden, dtype=dtype).mul_(hidden**-0.5)
    w_down = _random(num_experts, hidden, mlp, dtype=dtype).mul_(mlp**-0.5)
    for num_rows in (1, 8, 64, 256, 1024, 4096):
        x_TD, logits_TE = _random(num_rows, hidden, dtype=dtype), _random(num_rows, num_experts, dtype=dtype)
        routed_experts(x_TD, route(logits_TE, rule), w_gate_up, w_down)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            routes = route(logits_TE, rule)
            out_TD = routed_experts(x_TD, routes, w_gate_up, w_down)
        for bias in (0.0, 4.0):
            # With a bias most rows pick the same experts.
            logits_TE.copy_(_random(num_rows, num_experts, dtype=dtype))
            logits_TE[:, : rule.num_picks] += bias
            graph.replay()
            torch.cuda.synchronize()
            want = route_reference(logits_TE, rule)
            # Equal logits of bfloat16 are picked in the order of their ids by both; scores of float32 that differ by
            # the rounding of an exponential in either order.
            scores_TE = logits_TE.float().softmax(dim=-1)
            picked, best = (scores_TE.gather(1, ids.long()) for ids in (routes.expert_ids_TA, want.expert_ids_TA))
            torch.testing.assert_close(picked, best, rtol=0 if dtype == torch.bfloat16 else 1e-6, atol=0)
            torch.testing.assert_close(routes.weights_TA, want.weights_TA, rtol=1e-5, atol=1e-7)
            few = slice(-16, None)
            expected = routed_experts_reference(x_TD[few], Routes(*(part[few] for part in routes)), w_gate_up, w_down)
            error = (out_TD[few].float() - expected.float()).norm() / expected.float().norm()
            assert error < 2 * typical_chain_error(4, dtype) + 1e-5, (num_rows, bias, error)


def test_a_rows_bits_depend_on_itself_alone_in_one_configuration() -> None:
    hidden, mlp, num_experts, rule = _SHAPES["deepseek-v2-lite"]
    w_gate_up = _random(num_experts, 2 * mlp, hidden, dtype=torch.bfloat16).mul_(hidden**-0.5)
    w_down = _random(num_experts, hidden, mlp, dtype=torch.bfloat16).mul_(mlp**-0.5)
    x_TD, logits_TE = _random(64, hidden, dtype=torch.bfloat16), _random(64, num_experts, dtype=torch.bfloat16)
    together = routed_experts(x_TD, route(logits_TE, rule), w_gate_up, w_down)
    for row in (0, 33, 63):
        own = slice(row, row + 1)
        assert torch.equal(routed_experts(x_TD[own], route(logits_TE[own], rule), w_gate_up, w_down), together[own])


@pytest.mark.parametrize("use_pdl", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", _SHAPES)
def test_one_row_in_few_launches_is_torchs(shape: str, dtype: torch.dtype, use_pdl: bool) -> None:
    """From the residual to the residual, several times in a graph: no launch reads what the one ahead still writes."""
    hidden, mlp, num_experts, rule = _SHAPES[shape]
    experts = (
        _random(num_experts, 2 * mlp, hidden, dtype=dtype).mul_(hidden**-0.5),
        _random(num_experts, hidden, mlp, dtype=dtype).mul_(mlp**-0.5),
    )
    shared = SharedWeights(
        _random(4 * mlp, hidden, dtype=dtype).mul_(hidden**-0.5),
        _random(hidden, 2 * mlp, dtype=dtype).mul_(mlp**-0.5),
    )
    norm, w_router = (
        RowNorm(_random(hidden, dtype=dtype).abs_(), 1e-6),
        _random(num_experts, hidden, dtype=torch.float32),
    )
    w_router *= 4 * hidden**-0.5

    def run(residual_TD: torch.Tensor) -> Routes:
        routes = route(router_logits(residual_TD, w_router, *norm, use_pdl=use_pdl), rule, use_pdl=use_pdl)
        row_experts(
            residual_TD, routes, *experts, norm=norm, shared=shared, residual_TD=residual_TD, out=residual_TD,
            use_pdl=use_pdl,
        )  # fmt: skip
        return routes

    start_TD = _random(1, hidden, dtype=dtype)
    residual_TD, graph, stream = start_TD.clone(), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    run(residual_TD)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        residual_TD.copy_(start_TD)
        all_routes = [run(residual_TD) for _ in range(6)]
    want_TD = start_TD.clone()
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    for routes in all_routes:
        # The graph's own choices: near equal scores may be told apart otherwise behind other roundings.
        want_TD = row_experts_reference(
            want_TD, routes, *experts, norm=norm, shared=shared, residual_TD=want_TD.clone()
        )
    error = (residual_TD.float() - want_TD.float()).norm() / want_TD.float().norm()
    assert error < 6 * typical_chain_error(4, dtype) + 1e-5, error


@pytest.mark.parametrize("num_experts", [64, 128, 256])
def test_router_logits_are_those_of_float32(num_experts: int) -> None:
    w_ED = _random(num_experts, 2048, dtype=torch.float32) * 2048**-0.5
    for num_rows in (1, 9, 256, 2048):
        x_TD = _random(num_rows, 2048, dtype=torch.bfloat16)
        want = x_TD.double() @ w_ED.double().t()
        # Tensor cores cut sums off, where they do not round.
        got = router_logits(x_TD, w_ED, use_pdl=True).sum(dim=0)
        assert float((got - want).abs().max()) < 1e-4, num_rows


def _random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)
