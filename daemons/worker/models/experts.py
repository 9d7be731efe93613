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

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.experts.expert_dispatch import Dispatched, ExpertShare
from radixmesh.daemons.worker.models.model import Placement, RowInput, RowProbe
from radixmesh.daemons.worker.models.row_maths import linear, silu_gated
from radixmesh.daemons.worker.tiles import RowTiles, Tensors

# Alignment in bytes of torch's own allocations: a GEMM may choose another path for weights that are aligned less.
_ALIGNMENT = 64
EXPERT_PROBE = "expert"
"""Name of the probes of experts."""


class Routing(NamedTuple):
    """expert_ids_TA int64, different ones in a row; weights_TA float32, what each one's result is multiplied by."""

    expert_ids_TA: torch.Tensor
    weights_TA: torch.Tensor


Router = Callable[[torch.Tensor], Routing]
"""From normed rows [T, D] to their experts; row i of the result is to depend on row i alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """Gated MLPs, [in, out] as all projections; the gate is the first half of gate_up. Biases are None where there are
    none. Of a rank that shares the experts with others, E counts the slots that it has for them: `share` says which of
    all `num_experts` are loaded into the first ones.

    The experts lie at aligned addresses, so `w[e]` is contiguous, and the whole is a strided view; where the placement
    puts features out first, `w[e].t()` is.
    """

    w_gate_up_EDF2: torch.Tensor
    w_down_EFD: torch.Tensor
    num_experts: int
    share: ExpertShare
    b_gate_up_EF2: torch.Tensor | None = None
    b_down_ED: torch.Tensor | None = None

    @classmethod
    def empty(
        cls, *, num_experts: int, hidden_size: int, mlp_size: int, placement: Placement, has_bias: bool = False
    ) -> ExpertWeights:
        """Memory for the weights, not filled; biases have it where projections have none."""
        share, slots = placement.experts.share(num_experts), placement.experts.slots_per_rank(num_experts)
        bias = torch.empty(slots, 2 * mlp_size + hidden_size, dtype=placement.dtype, device=placement.device)
        return cls(
            w_gate_up_EDF2=_aligned_stack(slots, hidden_size, 2 * mlp_size, placement.of_projections()),
            w_down_EFD=_aligned_stack(slots, mlp_size, hidden_size, placement.of_projections()),
            num_experts=num_experts,
            share=share,
            b_gate_up_EF2=bias[:, : 2 * mlp_size] if has_bias else None,
            b_down_ED=bias[:, 2 * mlp_size :] if has_bias else None,
        )

    def of(self, slot: int, num: int, share: ExpertShare) -> ExpertWeights:
        """The `num` slots from `slot` on, into which `share` is to be loaded."""
        part = slice(slot, slot + num)
        return ExpertWeights(
            w_gate_up_EDF2=self.w_gate_up_EDF2[part],
            w_down_EFD=self.w_down_EFD[part],
            num_experts=self.num_experts,
            share=share,
            b_gate_up_EF2=None if self.b_gate_up_EF2 is None else self.b_gate_up_EF2[part],
            b_down_ED=None if self.b_down_ED is None else self.b_down_ED[part],
        )

    @property
    def loaded(self) -> ExpertWeights:
        """The slots of `share`, without those that are empty at first."""
        return self.of(0, self.share.size, self.share)

    @property
    def expert_bytes(self) -> int:
        """Of one expert."""
        return sum(part.numel() for part in self.bytes_of(0))

    def bytes_of(self, slot: int) -> list[torch.Tensor]:
        """The weights at a slot as they lie in memory, uint8 views."""
        weights = [self.w_gate_up_EDF2[slot], self.w_down_EFD[slot]]
        weights += [bias[slot] for bias in (self.b_gate_up_EF2, self.b_down_ED) if bias is not None]
        return [(w if w.is_contiguous() else w.t()).view(-1).view(torch.uint8) for w in weights]


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
        self.weights = self._weights = weights
        self.slots = placement.experts.first_slots(weights.num_experts)
        """Of all ranks; replaced while no forward runs."""
        self._router = router
        self._gated = gated
        self._scales_input = scales_input
        self._group = placement.group
        self._dispatch = placement.experts
        # Made once: `RowTiles` knows a function again by equality, which a new partial does not have.
        self._experts = tuple(partial(self._expert, index) for index in range(len(weights.w_down_EFD)))

    def compute(self, x_TD: torch.Tensor, num_rows: int, tiles: RowTiles) -> torch.Tensor:
        """Sum over each row's experts of weight x MLP(row), [T, D] in the dtype of x; zeros in padding rows.

        x_TD: normed rows, a number of them that `tiles` can cover, of which the first `num_rows` are tokens.
        """
        expert_ids_TA, weights_TA = tiles.map(self._route, (x_TD,))
        first, step = 0, 1
        if self._dispatch.size > 1:
            # Ranks of one batch have the same rows: each brings its part of them to the experts.
            first, step = self._group.rank, self._group.size
        rows_N = torch.arange(num_rows, device=x_TD.device)[first::step]
        expert_ids_NA, weights_NA = expert_ids_TA[rows_N], weights_TA[rows_N]
        results_NAD = self._run_experts(x_TD, rows_N, expert_ids_NA, weights_NA, tiles)
        if self._scales_input:
            weights_NA = torch.ones_like(weights_NA)
        # Pick by pick, elementwise: a reduction over A could add in an order that depends on N.
        sum_ND = results_NAD[:, 0] * weights_NA[:, 0, None]
        for pick in range(1, results_NAD.shape[1]):
            sum_ND = sum_ND + results_NAD[:, pick] * weights_NA[:, pick, None]
        all_ND = sum_ND.new_zeros(num_rows, sum_ND.shape[1])
        all_ND[rows_N] = sum_ND
        out_TD = torch.zeros_like(x_TD)
        out_TD[:num_rows] = self._group.all_reduce(all_ND)
        return out_TD

    @property
    def expert_bytes(self) -> int:
        return self.weights.expert_bytes

    def bytes_of(self, slot: int) -> list[torch.Tensor]:
        return self.weights.bytes_of(slot)

    def place(self, experts_S: torch.Tensor) -> None:
        """Other experts are at the slots of all ranks, from the next step on. int64 on the host."""
        self.slots = self.slots.replaced(experts_S, self._dispatch.size)

    def row_probes(self) -> tuple[RowProbe, ...]:
        """Probes of all that `compute` gives to `RowTiles.map`, for `Model.row_probes`."""
        weight = self._weights.w_down_EFD
        hidden = RowInput((weight.shape[2],), weight.dtype)
        return (
            RowProbe("route", self._route, (hidden,)),
            *(RowProbe(EXPERT_PROBE, expert, (hidden,)) for expert in self._experts[: self._weights.share.size]),
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
        self,
        x_TD: torch.Tensor,
        rows_N: torch.Tensor,
        expert_ids_NA: torch.Tensor,
        weights_NA: torch.Tensor,
        tiles: RowTiles,
    ) -> torch.Tensor:
        """float32 [N, A, D]: what each picked expert makes of the row, wherever it is."""
        num_rows, num_picks = expert_ids_NA.shape
        rows_P = rows_N.repeat_interleave(num_picks)
        if self._scales_input:
            x_TD = x_TD.index_select(0, rows_P) * weights_NA.flatten()[:, None].to(x_TD.dtype)
            rows_P = torch.arange(len(rows_P), device=x_TD.device)
        dispatched = self._dispatch.dispatch(x_TD, rows_P, expert_ids_NA.flatten(), self.slots, num_picks)
        results_PD = self._dispatch.combine(dispatched, self._run_pairs(dispatched, tiles))
        return results_PD.view(num_rows, num_picks, x_TD.shape[1])

    def _run_pairs(self, dispatched: Dispatched, tiles: RowTiles) -> torch.Tensor:
        """float32 [R, D]: what the experts of this rank make of the rows that came."""
        x_XD, rows_R, held_R, _ = dispatched
        results_RD = x_XD.new_empty(len(rows_R), x_XD.shape[1], dtype=torch.float32)
        pairs_by_expert_R = held_R.argsort(stable=True)
        ends = held_R.bincount(minlength=len(self._experts)).cumsum(0).tolist()
        for index, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            if start == end:
                continue
            pairs = pairs_by_expert_R[start:end]
            # Padding slots compute the first row once more; nobody reads them.
            rows = rows_R[pairs[:1]].repeat(tiles.padded(len(pairs)))
            rows[: len(pairs)] = rows_R[pairs]
            (result_RD,) = tiles.map(self._experts[index], (x_XD.index_select(0, rows),))
            results_RD[pairs] = result_RD[: len(pairs)].float()
        return results_RD


def place_experts(placement: Placement, num_experts: int) -> ExpertShare:
    """The experts of each layer that this rank loads whole.

    Raises MeshError INVALID_ARGUMENT where there are fewer than ranks: some would hold none.
    """
    dispatch = placement.experts
    if num_experts < dispatch.size:
        message = f"--ep-size is {dispatch.size} for a model of {num_experts} routed experts: choose at most as many"
        raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "ep_size"})
    return dispatch.share(num_experts)


def _aligned_stack(num: int, num_in: int, num_out: int, placement: Placement) -> torch.Tensor:
    """[num, in, out] not filled, each [in, out], or what it is a transposed view of, contiguous and aligned."""
    if placement.is_out_first:
        num_in, num_out = num_out, num_in
    step = _ALIGNMENT // placement.dtype.itemsize
    size = -(-num_in * num_out // step) * step
    memory = torch.empty(num, size, dtype=placement.dtype, device=placement.device)
    stack = memory[:, : num_in * num_out].view(num, num_in, num_out)
    return stack.transpose(1, 2) if placement.is_out_first else stack
