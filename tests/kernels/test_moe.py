"""Routed experts: routing, rows grouped by expert and grouped GEMMs, against plain torch and the CPU's own routers."""

from __future__ import annotations

import pytest
import torch
from support.rounding import kernel_tolerance, random_gemm_tolerance, typical_chain_error

from radixmesh.daemons.worker.models.deepseek.config import RouterConfig, TopkMethod
from radixmesh.daemons.worker.models.deepseek.routing import pick_biased, pick_highest
from radixmesh.daemons.worker.models.softmax_router import route_by_softmax
from radixmesh.kernels.moe.choose_slots import TokenRows, choose_slots, choose_slots_reference, slot_table
from radixmesh.kernels.moe.exchange_rows import (
    add_parts,
    add_parts_reference,
    own_picks,
    own_picks_reference,
    own_routes,
    own_routes_reference,
    pack_rows,
    pack_rows_reference,
    packed_rows,
)
from radixmesh.kernels.moe.experts_config import ExpertsConfig, GroupedConfig, default_config
from radixmesh.kernels.moe.group_rows import group_places, group_rows, num_tiles_at_most
from radixmesh.kernels.moe.grouped_gemm import (
    ExpertVariant,
    SlotRows,
    combine,
    one_expert,
    routed_experts,
    routed_experts_reference,
    slot_experts,
    slot_experts_reference,
)
from radixmesh.kernels.moe.route import RouterRule, Routes, route, route_reference
from radixmesh.kernels.moe.row_experts import (
    RowExpertsConfig,
    RowNorm,
    SharedWeights,
    row_experts,
    row_experts_reference,
)
from radixmesh.kernels.moe.shared_mlp import shared_config, shared_mlp, shared_mlp_reference

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_moe.py is for the GPU")

_RULES = {
    "mixtral": (8, RouterRule(num_picks=2, is_normalised=True)),
    "qwen3": (128, RouterRule(num_picks=8, is_normalised=True)),
    "v2_lite": (64, RouterRule(num_picks=6)),
    "v2": (160, RouterRule(num_picks=6, num_groups=8, num_picked_groups=3, weight_scale=16.0)),
    "v3": (
        256,
        RouterRule(
            num_picks=8,
            is_sigmoid=True,
            is_normalised=True,
            weight_scale=2.5,
            num_groups=8,
            num_picked_groups=4,
            group_best=2,
        ),
    ),
    "llama4": (16, RouterRule(num_picks=1, is_sigmoid=True)),
}


@pytest.mark.parametrize("name", _RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_routed_as_in_torch(name: str, dtype: torch.dtype) -> None:
    num_experts, rule = _RULES[name]
    # As logits of a router lie: in a wider matrix.
    logits_TE = (3 * torch.randn(5, num_experts + 4)).to(dtype)[:, :num_experts]
    bias_E = torch.randn(num_experts) if name == "v3" else None
    _check_same(route(logits_TE, rule, bias_E), route_reference(logits_TE, rule, bias_E))


def test_parts_of_logits_are_added() -> None:
    num_experts, rule = _RULES["v3"]
    parts_PTE, bias_E = torch.randn(3, 5, num_experts), torch.randn(num_experts)
    wanted = route_reference(parts_PTE[0] + parts_PTE[1] + parts_PTE[2], rule, bias_E)
    _check_same(route(parts_PTE, rule, bias_E), wanted)
    _check_same(route_reference(parts_PTE, rule, bias_E), wanted)


def test_rows_are_routed_as_on_the_cpu() -> None:
    x_TD, w_DE, bias_E = torch.randn(6, 32), torch.randn(32, 64), torch.randn(64)
    logits_TE = x_TD @ w_DE
    for is_normalised in (False, True):
        want = route_by_softmax(x_TD, w_router_DE=w_DE, num_picks=4, is_normalised=is_normalised)
        _check_same(route(logits_TE, RouterRule(num_picks=4, is_normalised=is_normalised)), Routes(*want))
    sizes = {"num_experts": 64, "num_picks": 4, "num_groups": 8, "num_picked_groups": 3}
    config = RouterConfig(method=TopkMethod.GROUP_LIMITED, is_normed=False, weight_scale=2.0, **sizes)
    rule = RouterRule(num_picks=4, num_groups=8, num_picked_groups=3, weight_scale=2.0)
    _check_same(route(logits_TE, rule), Routes(*pick_highest(logits_TE.softmax(dim=-1), config)))
    config = RouterConfig(method=TopkMethod.BIASED, is_normed=True, weight_scale=2.5, **sizes)
    rule = RouterRule(
        num_picks=4,
        is_sigmoid=True,
        is_normalised=True,
        weight_scale=2.5,
        num_groups=8,
        num_picked_groups=3,
        group_best=2,
    )
    _check_same(route(logits_TE, rule, bias_E), Routes(*pick_biased(logits_TE.sigmoid(), bias_E, config)))


def test_equal_scores_and_bad_numbers_name_experts_that_there_are() -> None:
    ids_TA, _ = route(torch.zeros(2, 12), RouterRule(num_picks=3))
    assert ids_TA.tolist() == [[0, 1, 2]] * 2
    ids_TA, _ = route(torch.full((2, 12), float("nan")), RouterRule(num_picks=3))
    assert bool(((ids_TA >= 0) & (ids_TA < 12)).all())


@pytest.mark.parametrize(
    ("num_rows", "num_experts", "num_picks"), [(1, 8, 2), (7, 5, 3), (200, 9, 8), (33, 128, 1), (700, 20, 6)]
)
@pytest.mark.parametrize("tile_rows", [16, 64])
def test_every_pair_has_one_slot_in_a_tile_of_its_expert(
    num_rows: int, num_experts: int, num_picks: int, tile_rows: int
) -> None:
    ids_TA = _distinct_experts(num_rows, num_experts, num_picks)
    pairs_NR, tile_experts_N, _ = group_rows(ids_TA, num_experts, tile_rows)
    num_pairs, flat_P = num_rows * num_picks, ids_TA.flatten()
    is_used_N = tile_experts_N >= 0
    num_used = int(is_used_N.sum())
    counts = flat_P.bincount(minlength=num_experts)
    assert num_used == int(((counts + tile_rows - 1) // tile_rows).sum()) and bool(is_used_N[:num_used].all())
    slots = pairs_NR[:num_used]
    real = slots[slots < num_pairs]
    assert sorted(real.tolist()) == list(range(num_pairs)) and int(slots.max()) <= num_pairs
    owners = tile_experts_N[:num_used, None].expand_as(slots)[slots < num_pairs]
    assert torch.equal(owners, flat_P[real.long()])
    for expert in range(num_experts):
        own = slots[tile_experts_N[:num_used] == expert].flatten().tolist()
        assert own == sorted(own)


def test_the_worst_choice_fits_the_tiles() -> None:
    """All pairs on one expert but for one on each other; grids hold as many tiles for any choice."""
    for num_rows, num_experts, tile_rows in ((40, 6, 16), (3, 8, 16), (65, 3, 32)):
        ids_TA = torch.zeros(num_rows, 1, dtype=torch.int32)
        ids_TA[: num_experts - 1, 0] = torch.arange(1, num_experts, dtype=torch.int32)[:num_rows]
        _, tile_experts_N, _ = group_rows(ids_TA, num_experts, tile_rows)
        counts = ids_TA.flatten().bincount(minlength=num_experts)
        num_used = int((tile_experts_N >= 0).sum())
        assert num_used == int(((counts + tile_rows - 1) // tile_rows).sum()) <= len(tile_experts_N)
        assert len(tile_experts_N) == num_tiles_at_most(num_rows, num_experts, tile_rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_rows", "hidden", "mlp"), [(1, 64, 32), (9, 80, 48), (40, 64, 96)])
@pytest.mark.parametrize("has_residual", [False, True])
def test_experts_compute_what_torch_does(
    num_rows: int, hidden: int, mlp: int, dtype: torch.dtype, has_residual: bool
) -> None:
    x_TD, routes, w_gate_up, w_down = _operands(num_rows, 6, 2, hidden, mlp, dtype)
    residual_TD = torch.randn(num_rows, hidden).to(dtype) if has_residual else None
    want = routed_experts_reference(x_TD, routes, w_gate_up, w_down, residual_TD)
    got = routed_experts(x_TD, routes, w_gate_up, w_down, residual_TD=residual_TD, out=residual_TD)
    assert residual_TD is None or got.data_ptr() == residual_TD.data_ptr()
    # Sums in float32; rounded behind the gate, behind down and at the end, as is the reference.
    error = 2 * (typical_chain_error(4, dtype) + typical_chain_error(hidden + mlp, torch.float32))
    assert float((got.float() - want.float()).norm() / want.float().norm()) < error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_rows", "hidden", "mlp"), [(1, 64, 32), (20, 80, 48), (40, 64, 96), (130, 80, 48)])
def test_an_mlp_of_all_rows_is_computed_beside_the_experts(
    num_rows: int, hidden: int, mlp: int, dtype: torch.dtype
) -> None:
    x_TD, routes, w_gate_up, w_down = _operands(num_rows, 3, 2, hidden, mlp, dtype)
    w_shared = torch.randn(4 * mlp, hidden) * hidden**-0.5, torch.randn(hidden, 2 * mlp) * mlp**-0.5
    shared = SharedWeights(*(w.to(dtype) for w in w_shared))
    got, want = shared_mlp(x_TD, shared), shared_mlp_reference(x_TD, shared)
    error = 2 * (typical_chain_error(4, dtype) + typical_chain_error(hidden + 2 * mlp, torch.float32))
    assert float((got.float() - want.float()).norm() / want.float().norm()) < error
    alone = shared_mlp(x_TD[-1:], shared, shared_config(num_rows, x_TD.element_size()))
    torch.testing.assert_close(alone, got[-1:], rtol=0, atol=2 * error)
    residual_TD = torch.randn(num_rows, hidden).to(dtype)
    sums_TD = routed_experts(x_TD, routes, w_gate_up, w_down, residual_TD=residual_TD, beside=lambda: got)
    want = routed_experts_reference(x_TD, routes, w_gate_up, w_down, residual_TD).float() + want.float()
    assert float((sums_TD.float() - want).norm() / want.norm()) < error


def test_no_rows_go_through_the_mlp() -> None:
    shared = SharedWeights(torch.zeros(32, 8), torch.zeros(8, 16))
    assert shared_mlp(torch.zeros(0, 8), shared).shape == (0, 8)


def test_picks_of_other_ranks_count_for_nothing() -> None:
    """They have the id behind the last expert, and a weight of 0; what is where their results would be is not used."""
    x_TD, routes, w_gate_up, w_down = _operands(9, 6, 3, 80, 48, torch.float32)
    ids, weights = routes.expert_ids_TA.clone(), routes.weights_TA.clone()
    ids[2:, 1], weights[2:, 1] = 6, 0.0
    ids[7], weights[7] = 6, 0.0
    want = routed_experts_reference(x_TD, Routes(ids, weights), w_gate_up, w_down, x_TD.clone())
    got = routed_experts(x_TD, Routes(ids, weights), w_gate_up, w_down, residual_TD=x_TD)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert torch.equal(got[7], x_TD[7])
    results_PD = torch.randn(27, 80)
    results_PD[weights.flatten() == 0] = float("nan")
    out_TD = torch.empty(9, 80)
    combine(results_PD, weights, None, out_TD)
    want = (weights[:, :, None] * results_PD.nan_to_num().view(9, 3, 80)).sum(dim=1)
    torch.testing.assert_close(out_TD, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_rows", "hidden", "mlp"), [(1, 64, 32), (2, 580, 48), (1, 64, 300)])
@pytest.mark.parametrize("num_parts", [0, 1, 2])
def test_experts_of_few_rows_compute_what_torch_does(
    num_rows: int, hidden: int, mlp: int, num_parts: int, dtype: torch.dtype
) -> None:
    """Widths that fill no block; behind a norm; with an MLP beside the experts, or none."""
    x_TD, routes, w_gate_up, w_down = _operands(num_rows, 5, 3, hidden, mlp, dtype)
    norm, shared, wide = RowNorm(torch.rand(hidden).to(dtype), 1e-6), None, num_parts * mlp
    if num_parts:
        w_shared = torch.randn(2 * wide, hidden) * hidden**-0.5, torch.randn(hidden, wide) * mlp**-0.5
        shared = SharedWeights(*(w.to(dtype) for w in w_shared))
    error = 2 * (typical_chain_error(4, dtype) + typical_chain_error(hidden + mlp, torch.float32))
    experts = (x_TD, routes, w_gate_up, w_down)
    # Few programs, the last of which has columns to spare: the interpreter takes milliseconds for each.
    config = RowExpertsConfig(gate_up_columns=32, gate_up_warps=2, down_columns=32, down_warps=1)
    config = config if hidden * mlp > 64 * 32 else None
    want = row_experts_reference(*experts)
    assert float((row_experts(*experts, config=config).float() - want.float()).norm() / want.float().norm()) < error
    # All at once, and in place.
    want = row_experts_reference(*experts, norm=norm, shared=shared, residual_TD=x_TD.clone())
    got = row_experts(*experts, norm=norm, shared=shared, residual_TD=x_TD, out=x_TD, config=config)
    assert got.data_ptr() == x_TD.data_ptr()
    assert float((got.float() - want.float()).norm() / want.float().norm()) < error


def test_a_rows_bits_do_not_depend_on_the_others() -> None:
    """All rows on one expert, and each row alone; in bfloat16, where another order of sums would show."""
    x_TD, _, w_gate_up, w_down = _operands(20, 4, 2, 64, 32, torch.bfloat16)
    ids_TA = torch.tensor([[1, 3]] * 20, dtype=torch.int32)
    routes = Routes(ids_TA, torch.rand(20, 2))
    together = routed_experts(x_TD, routes, w_gate_up, w_down)
    for row in (0, 7, 19):
        own = slice(row, row + 1)
        alone = routed_experts(x_TD[own], Routes(ids_TA[own], routes.weights_TA[own]), w_gate_up, w_down)
        assert torch.equal(together[own], alone)


@pytest.mark.parametrize("by_tma", [False, True])
@pytest.mark.parametrize(("hidden", "mlp"), [(96, 64), (72, 88)])
def test_a_configuration_changes_nothing_but_time(hidden: int, mlp: int, by_tma: bool) -> None:
    """Of the other sizes blocks of gate reach into up, and those of the last expert beyond the weights."""
    x_TD, routes, w_gate_up, w_down = _operands(23, 5, 3, hidden, mlp, torch.float32)
    want = routed_experts_reference(x_TD, routes, w_gate_up, w_down)
    for tile_rows, columns, depth in ((16, 32, 32), (32, 64, 16), (64, 16, 128)):
        block = GroupedConfig(columns=columns, depth=depth, num_warps=4, num_stages=2, by_tma=by_tma)
        config = ExpertsConfig(tile_rows=tile_rows, gate_up=block, down=block)
        got = routed_experts(x_TD, routes, w_gate_up, w_down, config=config)
        torch.testing.assert_close(got, want, **kernel_tolerance(torch.float32, hidden + mlp, float(want.abs().max())))


def test_weights_that_tma_cannot_read_are_loaded_by_pointers() -> None:
    """Rows of 6 numbers, and experts that lie 2 numbers further apart than their rows take."""
    x_TD, routes, w_gate_up, w_down = _operands(9, 4, 2, 6, 8, torch.float32)
    apart = torch.zeros(4, 6 * 8 + 2).as_strided((4, 6, 8), (50, 8, 1))
    apart.copy_(w_down)
    block = GroupedConfig(columns=16, depth=16, num_warps=4, num_stages=2, by_tma=True)
    config = ExpertsConfig(tile_rows=16, gate_up=block, down=block)
    want = routed_experts_reference(x_TD, routes, w_gate_up, w_down)
    got = routed_experts(x_TD, routes, w_gate_up, apart, config=config)
    torch.testing.assert_close(got, want, **kernel_tolerance(torch.float32, 6 + 8, float(want.abs().max())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scales_input", [False, True])
@pytest.mark.parametrize("limit", [None, 0.7])
def test_biases_clamps_and_scaled_input(limit: float | None, scales_input: bool, dtype: torch.dtype) -> None:
    """Biases lie in wider rows, as those of the weights do."""
    x_TD, routes, w_gate_up, w_down = _operands(21, 5, 3, 96, 48, dtype)
    biases = torch.randn(5, 2 * 48 + 96).to(dtype)
    variant = ExpertVariant(
        b_gate_up_E2F=biases[:, : 2 * 48],
        b_down_ED=biases[:, 2 * 48 :],
        swiglu_limit=limit,
        swiglu_alpha=1.702,
        scales_input=scales_input,
    )
    want = routed_experts_reference(x_TD, routes, w_gate_up, w_down, variant=variant)
    got = routed_experts(x_TD, routes, w_gate_up, w_down, variant=variant)
    error = 2 * (typical_chain_error(4, dtype) + typical_chain_error(96 + 48, torch.float32))
    assert float((got.float() - want.float()).norm() / want.float().norm()) < error
    plain = routed_experts_reference(x_TD, routes, w_gate_up, w_down)
    assert float((plain.float() - want.float()).norm() / want.float().norm()) > 0.3


def test_sigmoid_routing_tells_large_logits_apart() -> None:
    """Their sigmoids are all 1 in float32."""
    rule = RouterRule(num_picks=2, is_sigmoid=True)
    routes = route(torch.tensor([[20.0, 40.0, 30.0, -5.0]]), rule)
    assert routes.expert_ids_TA.tolist() == [[1, 2]]


def test_no_rows_are_no_work() -> None:
    x_TD, routes, w_gate_up, w_down = _operands(3, 4, 2, 32, 16, torch.float32)
    none = routed_experts(x_TD[:0], Routes(routes.expert_ids_TA[:0], routes.weights_TA[:0]), w_gate_up, w_down)
    assert none.shape == (0, 32)
    assert route(torch.zeros(0, 8), RouterRule(num_picks=2)).expert_ids_TA.shape == (0, 2)


def _operands(
    num_rows: int, num_experts: int, num_picks: int, hidden: int, mlp: int, dtype: torch.dtype
) -> tuple[torch.Tensor, Routes, torch.Tensor, torch.Tensor]:
    routes = Routes(_distinct_experts(num_rows, num_experts, num_picks), torch.rand(num_rows, num_picks))
    w_gate_up = (torch.randn(num_experts, 2 * mlp, hidden) * hidden**-0.5).to(dtype)
    w_down = (torch.randn(num_experts, hidden, mlp) * mlp**-0.5).to(dtype)
    return torch.randn(num_rows, hidden).to(dtype), routes, w_gate_up, w_down


def _distinct_experts(num_rows: int, num_experts: int, num_picks: int) -> torch.Tensor:
    if num_picks > num_experts:
        return torch.randint(num_experts, (num_rows, num_picks), dtype=torch.int32)
    return torch.rand(num_rows, num_experts).argsort(dim=1)[:, :num_picks].int().contiguous()


def _check_same(got: Routes, want: Routes) -> None:
    assert torch.equal(got.expert_ids_TA, want.expert_ids_TA.int())
    torch.testing.assert_close(got.weights_TA, want.weights_TA, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("has_padding", [False, True])
def test_picks_find_a_copy_of_their_expert_and_are_counted(has_padding: bool) -> None:
    """Rows take the copies in turn; rows of padding go somewhere too, but do not count."""
    num_experts, num_rows, num_picks, rank = 7, 130, 3, 1
    experts_S = torch.tensor([3, 0, 1, -1, 2, 3, 4, 5, -1, 6, 3, 1])
    table = slot_table(experts_S, num_experts)
    ids_TA = torch.rand(num_rows, num_experts).argsort(dim=1)[:, :num_picks].int().contiguous()
    row_slots_T = torch.arange(num_rows, dtype=torch.int32) % 9
    tokens = TokenRows(row_slots_T, 8) if has_padding else None
    got, want = (torch.full((num_experts,), 5, dtype=torch.int32) for _ in range(2))
    slots_TA = choose_slots(ids_TA, table, got, rank, tokens)
    assert torch.equal(slots_TA, choose_slots_reference(ids_TA, table, want, rank, tokens)) and torch.equal(got, want)
    assert torch.equal(experts_S[slots_TA.long()], ids_TA.long())
    counted = ids_TA[row_slots_T != 8] if has_padding else ids_TA
    assert torch.equal(got - 5, counted.flatten().bincount(minlength=num_experts).int())
    of_three = slots_TA[ids_TA == 3]
    assert set(of_three.tolist()) == {0, 5, 10}


def test_ids_of_no_expert_read_and_count_nothing_foreign() -> None:
    table, picks_E = slot_table(torch.tensor([1, 0]), 2), torch.zeros(4, dtype=torch.int32)
    slots_TA = choose_slots(torch.tensor([[2**30], [-5]], dtype=torch.int32), table, picks_E[1:3], 0)
    assert slots_TA.flatten().tolist() == [0, 1] and picks_E.tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize(("dtype", "hidden", "num_picks"), [(torch.bfloat16, 34, 3), (torch.float32, 1030, 6)], ids=str)
@pytest.mark.parametrize(("num_rows", "room"), [(5, 5), (3, 8), (0, 2)])
def test_rows_are_packed_with_their_picks_and_found_again(
    dtype: torch.dtype, hidden: int, num_picks: int, num_rows: int, room: int
) -> None:
    """From a slice of wider rows; a rank sees its own picks alone, and rows of padding have none."""
    x_TD = torch.randn(num_rows, hidden + 2).to(dtype)[:, :hidden]
    ids_TA = torch.randint(0, 12, (num_rows, num_picks), dtype=torch.int32)
    routes = Routes(ids_TA, torch.rand(num_rows, num_picks))
    packed, want = pack_rows(x_TD, routes, room), pack_rows_reference(x_TD, routes, room)
    assert packed.shape == want.shape and packed.shape[1] % 8 == 0, "rows stay aligned"
    num_features = hidden * dtype.itemsize // 4
    assert torch.equal(packed[:, : num_features + 2 * num_picks], want[:, : num_features + 2 * num_picks])
    rows = packed_rows(packed, hidden, dtype)
    assert torch.equal(rows[:num_rows], x_TD) and rows.data_ptr() == packed.data_ptr()
    for rank in range(3):
        got, same = (of(packed, num_features, num_picks, rank, 4) for of in (own_routes, own_routes_reference))
        assert torch.equal(got.expert_ids_TA, same.expert_ids_TA) and torch.equal(got.weights_TA, same.weights_TA)
        is_own = (ids_TA // 4) == rank
        assert torch.equal(got.expert_ids_TA[:num_rows], torch.where(is_own, ids_TA - 4 * rank, 4))
        assert torch.equal(got.weights_TA[:num_rows], torch.where(is_own, routes.weights_TA, 0.0))
        assert (got.expert_ids_TA[num_rows:] == 4).all() and (got.weights_TA[num_rows:] == 0).all()
        for of in (own_picks, own_picks_reference):
            unpacked = of(routes, rank, 4)
            assert torch.equal(unpacked.expert_ids_TA, got.expert_ids_TA[:num_rows]), of
            assert torch.equal(unpacked.weights_TA, got.weights_TA[:num_rows]), of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parts_of_ranks_are_added_in_their_order(dtype: torch.dtype) -> None:
    parts_NCD = (100 * torch.randn(3, 4, 1100)).to(dtype)
    residual_TD = torch.randn(3, 1200).to(dtype)[:, :1100]
    want_TD = residual_TD.clone()
    add_parts_reference(parts_NCD, want_TD)
    add_parts(parts_NCD, residual_TD)
    assert torch.equal(residual_TD, want_TD)


@pytest.mark.parametrize("tile_rows", [4, 16])
@pytest.mark.parametrize("counts", [[3, 0, 5, 8], [0, 0, 0], [8], [0, 7, 0, 0, 1]])
def test_places_of_rows_that_are_there_fill_tiles_of_their_slots(counts: list[int], tile_rows: int) -> None:
    num_rows, most = 8, 24
    num_places = len(counts) * num_rows
    tiles = group_places(torch.tensor(counts, dtype=torch.int32), num_rows, most, tile_rows)
    assert tiles.num_picks == 1 and len(tiles.pairs_NR) == num_tiles_at_most(most, len(counts), tile_rows)
    want = []
    for slot, count in enumerate(counts):
        for first in range(0, count, tile_rows):
            places = [slot * num_rows + row for row in range(first, min(count, first + tile_rows))]
            want.append((slot, places + [num_places] * (tile_rows - len(places))))
    want += [(-1, [num_places] * tile_rows)] * (len(tiles.pairs_NR) - len(want))
    assert list(zip(tiles.tile_experts_N.tolist(), tiles.pairs_NR.tolist(), strict=True)) == want


def test_counts_out_of_range_write_no_foreign_memory() -> None:
    """As many tiles as most rows need, of places of the slot alone."""
    tiles = group_places(torch.tensor([1 << 30, -7, 5], dtype=torch.int32), 8, 6, 4)
    places = tiles.pairs_NR.flatten()
    assert len(tiles.tile_experts_N) == 3 and places.min() >= 0 and places.max() <= 24
    assert tiles.tile_experts_N.tolist() == [0, 0, 2], "no more than there is memory for"


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_computed_where_they_lie_by_slot(dtype: torch.dtype, has_bias: bool) -> None:
    """Whatever lies where no row is, which nobody reads."""
    counts, num_rows, hidden, mlp = [3, 0, 20, 1], 20, 48, 40
    x_PXD = torch.full((len(counts), num_rows, hidden), float("nan"), dtype=dtype)
    for slot, count in enumerate(counts):
        x_PXD[slot, :count] = torch.randn(count, hidden)
    w_gate_up = (torch.randn(len(counts), 2 * mlp, hidden) / hidden**0.5).to(dtype)
    w_down = (torch.randn(len(counts), hidden, mlp) / mlp**0.5).to(dtype)
    biases = torch.randn(len(counts), 2 * mlp).to(dtype), torch.randn(len(counts), hidden).to(dtype)
    variant = ExpertVariant(*biases) if has_bias else ExpertVariant()
    rows = SlotRows(x_PXD, torch.tensor(counts, dtype=torch.int32), 30, 12)
    got, want = (of(rows, w_gate_up, w_down, variant=variant) for of in (slot_experts, slot_experts_reference))
    for slot, count in enumerate(counts):
        tolerance = random_gemm_tolerance(dtype, mlp, want[slot, :count]) if count else {"rtol": 0.0, "atol": 0.0}
        torch.testing.assert_close(got[slot, :count], want[slot, :count], **tolerance)
        routes = one_expert(slot, count, x_PXD.device)
        config = default_config(12, len(counts), dtype.itemsize)
        once = routed_experts(x_PXD[slot, :count], routes, w_gate_up, w_down, variant=variant, config=config)
        assert torch.equal(got[slot, :count], once), "bit for bit what routes to one expert give"
