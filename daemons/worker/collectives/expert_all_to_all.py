"""Expert dispatch by all-to-all between ranks: gloo between CPUs, whatever the communicator carries elsewhere.

normal: ranks tell each other first how many rows come, then send just these. low latency: every rank sends as many
slots to every other one as the plan's shape allows at most, most of them empty, so that nothing has to be known first.

Legend: P pairs of a row and an expert that it picked, R pairs that came here, D hidden size, N ranks, B bytes of a row
and of the slot of its expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from radixmesh.daemons.runtime.steps.step import DispatchMode
from radixmesh.daemons.worker.collectives.rank_group import RankGroup
from radixmesh.daemons.worker.experts.expert_dispatch import Dispatched, ExpertDispatch
from radixmesh.daemons.worker.experts.expert_slots import ExpertSlots

_SLOT_BYTES = 8


class _Route(NamedTuple):
    """Way back. order_P: of the pairs as they were sent, by rank. sent_P, came_R: their slots in what was exchanged.
    to_ranks, from_ranks: slots that were sent to, and came from, each rank."""

    order_P: torch.Tensor
    sent_P: torch.Tensor
    came_R: torch.Tensor
    to_ranks: Sequence[int]
    from_ranks: Sequence[int]


class AllToAllDispatch(ExpertDispatch):
    """Ranks of `group`, which share the experts. num_redundant: slots of a layer, on all ranks together, beyond one
    for each expert."""

    def __init__(self, group: RankGroup, num_redundant: int = 0) -> None:
        self._num_redundant = num_redundant
        self.rank, self.size = group.rank, group.size
        self.group = group
        self.mode = DispatchMode.NORMAL
        self._max_rows = 0
        self.between: Callable[[], None] = _nothing
        """Called while rows are under way."""

    def set_dispatch_mode(self, mode: DispatchMode, max_tokens_per_rank: int) -> None:
        # A scheduler that knows no modes leaves it open.
        is_low_latency = mode is DispatchMode.LOW_LATENCY and max_tokens_per_rank > 0
        self.mode = DispatchMode.LOW_LATENCY if is_low_latency else DispatchMode.NORMAL
        self._max_rows = max_tokens_per_rank

    def slots_per_rank(self, num_experts: int) -> int:
        return -(-(num_experts + self._num_redundant) // self.size)

    def dispatch(self, x_XD: torch.Tensor, rows_P: torch.Tensor, experts_P: torch.Tensor, slots: ExpertSlots,
                 num_picks: int) -> Dispatched:  # fmt: skip
        slots_P = slots.choose(experts_P, rows_P)
        ranks_P = slots_P // slots.per_rank
        order_P = ranks_P.argsort(stable=True)
        counts_N = ranks_P.bincount(minlength=self.size)
        packed_PB = _pack(x_XD.index_select(0, rows_P[order_P]), (slots_P % slots.per_rank)[order_P])
        if self.mode is DispatchMode.LOW_LATENCY:
            capacity = self._max_rows * min(num_picks, slots.per_rank)
            assert int(counts_N.max()) <= capacity, (counts_N, capacity)
            first_N = torch.arange(self.size) * capacity
            # Rows of the exchange without a pair keep a slot of -1.
            sent_XB = packed_PB.new_full((self.size * capacity, packed_PB.shape[1]), 0xFF)
            to_ranks = from_ranks = [capacity] * self.size
        else:
            first_N = counts_N.cumsum(0) - counts_N
            sent_XB = torch.empty_like(packed_PB)
            to_ranks = counts_N.tolist()
            from_ranks = self.group.stack(counts_N)[:, self.rank].tolist()
        ranks_in_order_P = ranks_P[order_P]
        within_P = torch.arange(len(order_P)) - (counts_N.cumsum(0) - counts_N)[ranks_in_order_P]
        sent_P = first_N[ranks_in_order_P] + within_P
        sent_XB[sent_P] = packed_PB
        came_XB = self._exchanged(sent_XB, to_ranks, from_ranks)
        # Copies: a view as another type needs an aligned beginning.
        held_X = came_XB[:, -_SLOT_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.int64).flatten()
        came_R = (held_X >= 0).nonzero().flatten()
        self.num_pairs += len(came_R)
        came_RB = came_XB[came_R]
        x_RD = came_RB[:, :-_SLOT_BYTES].clone(memory_format=torch.contiguous_format).view(x_XD.dtype)
        route = _Route(order_P, sent_P, came_R, to_ranks, from_ranks)
        return Dispatched(x_RD, torch.arange(len(came_R)), held_X[came_R], route)

    def combine(self, dispatched: Dispatched, results_RD: torch.Tensor) -> torch.Tensor:
        route = dispatched.route
        assert isinstance(route, _Route)
        back_XD = results_RD.new_zeros(sum(route.from_ranks), results_RD.shape[1])
        back_XD[route.came_R] = results_RD
        came_XD = self._exchanged(back_XD, route.from_ranks, route.to_ranks)
        results_PD = torch.empty(len(route.order_P), results_RD.shape[1], dtype=results_RD.dtype)
        results_PD[route.order_P] = came_XD[route.sent_P]
        return results_PD

    def _exchanged(self, x: torch.Tensor, to_ranks: Sequence[int], from_ranks: Sequence[int]) -> torch.Tensor:
        came = self.group.start_all_to_all(x, to_ranks, from_ranks)
        self.between()
        return came()


def _nothing() -> None:
    return


def _pack(x_PD: torch.Tensor, held_P: torch.Tensor) -> torch.Tensor:
    """uint8 [P, B]: one exchange carries both, whatever the dtype of the rows."""
    num_bytes = x_PD.shape[1] * x_PD.element_size()
    packed_PB = torch.empty(len(x_PD), num_bytes + _SLOT_BYTES, dtype=torch.uint8)
    packed_PB[:, :num_bytes] = x_PD.contiguous().view(torch.uint8)
    packed_PB[:, num_bytes:] = held_P.contiguous().view(torch.uint8).view(-1, _SLOT_BYTES)
    return packed_PB
