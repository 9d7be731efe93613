"""Routing of rows to experts: softmax, sigmoid with a bias for the choice, and choices limited to the best groups.

Sources: Shazeer et al. (2017); DeepSeek-V2 (2024), sections 2.1 and 2.2; DeepSeek-V3 (2024), section 2.1.2.
Legend: T rows, E experts, G groups of experts, A experts a row picks, P parts of logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

_MAX_PICKS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterRule:
    """num_picks: experts of a row. is_sigmoid: scores are sigmoids of the logits, else their softmax.

    Of num_groups groups, which lie side by side, the num_picked_groups with the highest sum of their group_best (1 or
    2) best experts are open. is_normalised: the weights of a row are divided by their sum; then by weight_scale
    multiplied.
    """

    num_picks: int
    is_sigmoid: bool = False
    is_normalised: bool = False
    weight_scale: float = 1.0
    num_groups: int = 1
    num_picked_groups: int = 1
    group_best: int = 1


class Routes(NamedTuple):
    """expert_ids_TA int32, different ones in a row, best first; weights_TA float32."""

    expert_ids_TA: torch.Tensor
    weights_TA: torch.Tensor


@triton.jit
def _first_of(values, value, indexes, last):
    """The first index at which values has this value; `last` if there is none, as among NaN."""
    return tl.min(tl.where(values == value, indexes, last), axis=0)


@triton.jit
def _open_experts(
    ranked, experts, E: tl.constexpr, G: tl.constexpr, PICKED: tl.constexpr, BEST: tl.constexpr, BLOCK_G: tl.constexpr
):
    group_of = experts // (E // G)
    groups = tl.arange(0, BLOCK_G)
    totals = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    for group in tl.static_range(G):
        own = tl.where(group_of == group, ranked, float("-inf"))
        total = tl.max(own, axis=0)
        if BEST == 2:
            first = _first_of(own, total, experts, E - 1)
            total += tl.max(tl.where(experts == first, float("-inf"), own), axis=0)
        totals = tl.where(groups == group, total, totals)
    is_open = experts < 0
    for _ in tl.static_range(PICKED):
        group = _first_of(totals, tl.max(totals, axis=0), groups, G - 1)
        is_open = is_open | (group_of == group)
        totals = tl.where(groups == group, float("-inf"), totals)
    return is_open


@triton.jit
def _route_kernel(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, stride, part_stride, weight_scale, P: tl.constexpr, E: tl.constexpr,
    A: tl.constexpr, G: tl.constexpr, PICKED: tl.constexpr, BEST: tl.constexpr, IS_SIGMOID: tl.constexpr,
    IS_NORMALISED: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_A: tl.constexpr,
    BLOCK_G: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK_E)
    mask = experts < E
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    logits_at = logits_ptr + row * stride + experts
    logits = tl.load(logits_at, mask=mask, other=float("-inf")).to(tl.float32)
    for part in tl.static_range(1, P):
        logits += tl.load(logits_at + part * part_stride, mask=mask, other=0.0)
    if IS_SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        powers = tl.exp(logits - tl.max(logits, axis=0))
        scores = powers / tl.sum(powers, axis=0)
    ranked = scores
    if IS_SIGMOID and not HAS_BIAS and PICKED == G:
        # In the same order, where sigmoids of large logits are all 1.
        ranked = logits
    if HAS_BIAS:
        ranked = scores + tl.load(bias_ptr + experts, mask=mask, other=0.0)
    ranked = tl.where(mask, ranked, float("-inf"))
    if PICKED < G:
        is_open = _open_experts(ranked, experts, E, G, PICKED, BEST, BLOCK_G)
        ranked = tl.where(is_open, ranked, float("-inf"))
    picks = tl.arange(0, BLOCK_A)
    ids = tl.zeros((BLOCK_A,), tl.int32)
    weights = tl.zeros((BLOCK_A,), tl.float32)
    for pick in tl.static_range(A):
        # NaN is picked as the last expert: an id out of range would read foreign memory.
        expert = _first_of(ranked, tl.max(ranked, axis=0), experts, E - 1)
        ids = tl.where(picks == pick, expert, ids)
        weights = tl.where(picks == pick, tl.sum(tl.where(experts == expert, scores, 0.0), axis=0), weights)
        ranked = tl.where(experts == expert, float("-inf"), ranked)
    if IS_NORMALISED:
        # Sigmoid scores may all be 0.
        weights = weights / (tl.sum(weights, axis=0) + 1e-20)
    tl.store(ids_ptr + row * A + picks, ids, mask=picks < A)
    tl.store(weights_ptr + row * A + picks, weights * weight_scale, mask=picks < A)


def route(
    logits_TE: torch.Tensor, rule: RouterRule, bias_E: torch.Tensor | None = None, *, use_pdl: bool = False
) -> Routes:
    """Experts of each row and their weights. logits: experts contiguous; float32 inside, whatever their dtype. Or parts
    of them [P, T, E], which are added in their order.

    bias float32 [E]: added to the scores for the choice alone; weights stay without it. Equal scores: the lower id.
    `use_pdl` as in `rms_norm`.
    """
    logits_PTE = logits_TE if logits_TE.dim() == 3 else logits_TE[None]
    num_parts, num_rows, num_experts = logits_PTE.shape
    assert logits_PTE.stride(2) == 1 and 1 <= rule.num_picks <= min(num_experts, _MAX_PICKS), (logits_TE.shape, rule)
    assert num_experts % rule.num_groups == 0 and rule.num_picked_groups <= rule.num_groups, (num_experts, rule)
    assert rule.num_picks <= num_experts // rule.num_groups * rule.num_picked_groups, (num_experts, rule)
    assert bias_E is None or (bias_E.shape == (num_experts,) and bias_E.dtype == torch.float32), bias_E.shape
    routes = Routes(
        torch.empty(num_rows, rule.num_picks, dtype=torch.int32, device=logits_TE.device),
        torch.empty(num_rows, rule.num_picks, dtype=torch.float32, device=logits_TE.device),
    )
    if num_rows:
        _route_kernel[(num_rows,)](
            logits_PTE, logits_PTE if bias_E is None else bias_E, *routes, logits_PTE.stride(1), logits_PTE.stride(0),
            rule.weight_scale, P=num_parts, E=num_experts, A=rule.num_picks, G=rule.num_groups,
            PICKED=rule.num_picked_groups, BEST=rule.group_best, IS_SIGMOID=rule.is_sigmoid,
            IS_NORMALISED=rule.is_normalised, HAS_BIAS=bias_E is not None, BLOCK_E=triton.next_power_of_2(num_experts),
            BLOCK_A=triton.next_power_of_2(rule.num_picks), BLOCK_G=triton.next_power_of_2(rule.num_groups),
            PDL=use_pdl, num_warps=1 if num_experts <= 128 else 2, launch_pdl=use_pdl,
        )  # fmt: skip
    return routes


def route_reference(logits_TE: torch.Tensor, rule: RouterRule, bias_E: torch.Tensor | None = None) -> Routes:
    """The same as `route`, in torch."""
    logits_TE = logits_TE.float() if logits_TE.dim() == 2 else logits_TE.float().sum(dim=0)
    scores_TE = logits_TE.sigmoid() if rule.is_sigmoid else logits_TE.softmax(dim=-1)
    ranked_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if rule.is_sigmoid and bias_E is None and rule.num_picked_groups == rule.num_groups:
        ranked_TE = logits_TE
    if rule.num_picked_groups < rule.num_groups:
        ranked_TGM = ranked_TE.unflatten(1, (rule.num_groups, -1))
        totals_TG = ranked_TGM.topk(rule.group_best, dim=-1).values.sum(dim=-1)
        picked_TP = totals_TG.topk(rule.num_picked_groups, dim=-1).indices
        is_closed_TG = torch.ones_like(totals_TG, dtype=torch.bool).scatter_(1, picked_TP, False)
        ranked_TE = ranked_TGM.masked_fill(is_closed_TG[..., None], float("-inf")).flatten(1)
    # Stable: equal scores in the order of their ids.
    ids_TA = ranked_TE.sort(dim=-1, descending=True, stable=True).indices[:, : rule.num_picks]
    weights_TA = scores_TE.gather(1, ids_TA)
    if rule.is_normalised:
        weights_TA = weights_TA / (weights_TA.sum(dim=-1, keepdim=True) + 1e-20)
    return Routes(ids_TA.int(), weights_TA * rule.weight_scale)
