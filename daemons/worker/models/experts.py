"""Routed experts: every row is computed by the few experts that a router picks for it (Shazeer et al. 2017).

A row's bits depend on the row alone: the router and each expert run on tiles of the verified sizes, an expert's rows
padded to whole tiles, so that it does not matter which other rows picked it; and a row's results are added in the order
of its own picks.

Legend: T rows with padding, N rows without, D hidden size, E experts, A experts a row picks, F mlp size of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from radixmesh.daemons.worker.models.model import Placement, RowInput, RowProbe
from radixmesh.daemons.worker.models.row_maths import linear, silu_gated
from radixmesh.daemons.worker.tiles import RowTiles, Tensors

# Alignment in bytes of torch's own allocations: a GEMM may choose another path for weights that are aligned less.
_ALIGNMENT = 64


class Routing(NamedTuple):
    """expert_ids_TA int64, different ones in a row; weights_TA float32, what each one's result is multiplied by."""

    expert_ids_TA: torch.Tensor
    weights_TA: torch.Tensor


Router = Callable[[torch.Tensor], Routing]
"""From normed rows [T, D] to their experts; row i of the result is to depend on row i alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """Gated MLPs, [in, out] as all projections; the gate is the first half of gate_up. Biases are None where there are
    none.

    The experts lie at aligned addresses, so `w[e]` is contiguous, and the whole is a strided view; where the placement
    puts features out first, `w[e].t()` is.
    """

    w_gate_up_EDF2: torch.Tensor
    w_down_EFD: torch.Tensor
    b_gate_up_EF2: torch.Tensor | None = None
    b_down_ED: torch.Tensor | None = None

    @classmethod
    def empty(
        cls, *, num_experts: int, hidden_size: int, mlp_size: int, placement: Placement, has_bias: bool = False
    ) -> ExpertWeights:
        """Memory for the weights, not filled."""
        bias = torch.empty(num_experts, 2 * mlp_size + hidden_size, dtype=placement.dtype, device=placement.device)
        return cls(
            w_gate_up_EDF2=_aligned_stack(num_experts, hidden_size, 2 * mlp_size, placement),
            w_down_EFD=_aligned_stack(num_experts, mlp_size, hidden_size, placement),
            b_gate_up_EF2=bias[:, : 2 * mlp_size] if has_bias else None,
            b_down_ED=bias[:, 2 * mlp_size :] if has_bias else None,
        )


class RoutedExperts:
    """The experts of one layer and their router.

    gated: from gate and up side by side, [T, 2F], to [T, F]. scales_input: the weights of a row's picks multiply what
    the experts read, in place of what they make of it.
    """

    def __init__(
        self,
        weights: ExpertWeights,
        router: Router,
        placement: Placement,
        *,
        gated: Callable[[torch.Tensor], torch.Tensor] = silu_gated,
        scales_input: bool = False,
    ) -> None:
        self._weights = weights
        self._router = router
        self._gated = gated
        self._scales_input = scales_input
        self._group = placement.group
        num_experts = weights.w_down_EFD.shape[0]
        # Made once: `RowTiles` knows a function again by equality, which a new partial does not have.
        self._experts = tuple(partial(self._expert, index) for index in range(num_experts))

    def compute(self, x_TD: torch.Tensor, num_rows: int, tiles: RowTiles) -> torch.Tensor:
        """Sum over each row's experts of weight x MLP(row), [T, D] in the dtype of x; zeros in padding rows.

        x_TD: normed rows, a number of them that `tiles` can cover, of which the first `num_rows` are tokens.
        """
        expert_ids_TA, weights_TA = tiles.map(self._route, (x_TD,))
        results_NAD = self._run_experts(x_TD, expert_ids_TA[:num_rows], weights_TA, tiles)
        if self._scales_input:
            weights_TA = torch.ones_like(weights_TA)
        out_TD = torch.zeros_like(x_TD)
        # Pick by pick, elementwise: a reduction over A could add in an order that depends on N.
        sum_ND = results_NAD[:, 0] * weights_TA[:num_rows, 0, None]
        for pick in range(1, results_NAD.shape[1]):
            sum_ND = sum_ND + results_NAD[:, pick] * weights_TA[:num_rows, pick, None]
        out_TD[:num_rows] = self._group.all_reduce(sum_ND)
        return out_TD

    def row_probes(self) -> tuple[RowProbe, ...]:
        """Probes of all that `compute` gives to `RowTiles.map`, for `Model.row_probes`."""
        weight = self._weights.w_down_EFD
        hidden = RowInput((weight.shape[2],), weight.dtype)
        return (
            RowProbe("route", self._route, (hidden,)),
            *(RowProbe("expert", expert, (hidden,)) for expert in self._experts),
        )

    def _route(self, inputs: Tensors) -> Tensors:
        return self._router(inputs[0])

    def _expert(self, index: int, inputs: Tensors) -> Tensors:
        weights = self._weights
        b_gate_up_F2 = None if weights.b_gate_up_EF2 is None else weights.b_gate_up_EF2[index]
        b_down_D = None if weights.b_down_ED is None else weights.b_down_ED[index]
        gate_up_TF2 = linear(inputs[0], weights.w_gate_up_EDF2[index], b_gate_up_F2)
        return (linear(self._gated(gate_up_TF2), weights.w_down_EFD[index], b_down_D),)

    def _run_experts(
        self, x_TD: torch.Tensor, expert_ids_NA: torch.Tensor, weights_TA: torch.Tensor, tiles: RowTiles
    ) -> torch.Tensor:
        """float32 [N, A, D]: what each picked expert makes of the row."""
        num_rows, num_picks = expert_ids_NA.shape
        results_PD = x_TD.new_empty(num_rows * num_picks, x_TD.shape[1], dtype=torch.float32)
        picked_P = expert_ids_NA.flatten()
        pairs_by_expert_P = picked_P.argsort(stable=True)
        ends = picked_P.bincount(minlength=self._weights.w_down_EFD.shape[0]).cumsum(0).tolist()
        for index, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            if start == end:
                continue
            pairs = pairs_by_expert_P[start:end]
            # Padding places compute row 0 once more; nobody reads them.
            rows = pairs.new_zeros(tiles.padded(len(pairs)))
            rows[: len(pairs)] = pairs // num_picks
            rows_RD = x_TD.index_select(0, rows)
            if self._scales_input:
                rows_RD[: len(pairs)] *= weights_TA.flatten()[pairs, None].to(x_TD.dtype)
            (result_RD,) = tiles.map(self._experts[index], (rows_RD,))
            results_PD[pairs] = result_RD[: len(pairs)].float()
        return results_PD.view(num_rows, num_picks, -1)


def _aligned_stack(num: int, num_in: int, num_out: int, placement: Placement) -> torch.Tensor:
    """[num, in, out] not filled, each [in, out], or what it is a transposed view of, contiguous and aligned."""
    if placement.is_out_first:
        num_in, num_out = num_out, num_in
    step = _ALIGNMENT // placement.dtype.itemsize
    size = -(-num_in * num_out // step) * step
    memory = torch.empty(num, size, dtype=placement.dtype, device=placement.device)
    stack = memory[:, : num_in * num_out].view(num, num_in, num_out)
    return stack.transpose(1, 2) if placement.is_out_first else stack
