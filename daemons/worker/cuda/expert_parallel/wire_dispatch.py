"""Rows to experts over a wire of collectives, each row at most once to each rank.

low latency: every rank gets the rows of all ranks, and computes the picks that are its own: with at least as many picks
of a row as ranks, hardly a row has nothing to do anywhere. normal: a rank gets the rows that pick one of its experts.
Either way a rank gives back the weighted sum of a row's picks there, and the sums are added in the order of the ranks.

Legend: T rows of this rank, C of them with padding, A picks of a row, R rows that came, N ranks, D hidden size, W words
of a row with its picks and their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from radixmesh.daemons.worker.cuda.expert_parallel.device_dispatch import Came, DeviceDispatch, RoutedRows
from radixmesh.daemons.worker.cuda.expert_parallel.row_share import WHOLE, RowShare
from radixmesh.daemons.worker.cuda.expert_parallel.wire import Wire
from radixmesh.kernels.moe.exchange_rows import (
    add_parts,
    add_parts_reference,
    own_routes,
    own_routes_reference,
    pack_rows,
    pack_rows_reference,
    packed_rows,
)
from radixmesh.kernels.moe.route import Routes

_WORD_BYTES = 4


class _ToAll(NamedTuple):
    """Way back at low latency: rows of each rank."""

    room: int


class _ToSome(NamedTuple):
    """Way back of a normal forward. rows_by_rank: those that went to each rank. to_ranks, from_ranks: how many."""

    rows_by_rank: Sequence[torch.Tensor]
    to_ranks: Sequence[int]
    from_ranks: Sequence[int]


class WireDispatch(DeviceDispatch):
    # NCCL registers the memory of collectives that it captures, on all ranks, and has them write there: what is
    # launched alone goes through buffers of its own.
    mixes = False

    def __init__(self, wire: Wire, *, max_room: int, share: RowShare = WHOLE) -> None:
        super().__init__(wire.ranks, max_room=max_room, share=share)
        self._wire = wire
        self.can_capture, self.is_captured_anew = wire.can_capture, wire.is_captured_anew
        self._is_formed = False

    @property
    def kind(self) -> str:
        return f"{type(self._wire).__name__} {self.max_room}"

    def form(self) -> None:
        self._wire.form()
        self._is_formed = True

    def leave(self) -> None:
        self._is_formed = False
        self._wire.leave()

    def exchange(self, x: torch.Tensor, to_ranks: Sequence[int], from_ranks: Sequence[int]) -> torch.Tensor:
        return self._wire.all_to_all(x, to_ranks, from_ranks)

    def start_dispatch(self, x_TD: torch.Tensor, routes: Routes, num_held: int) -> Callable[[], Came]:
        return self._to_all(x_TD, routes, num_held) if self.room else self._to_some(x_TD, routes, num_held)

    def start_combine(self, came: Came, results: torch.Tensor) -> Callable[[torch.Tensor], None]:
        route = came.route
        if isinstance(route, _ToAll):
            counts = [route.room] * self.size
            back = self._wire.start_all_to_all(results, counts, counts)
            return lambda residual_TD: _add_of_all(back().view(self.size, route.room, -1), residual_TD)
        assert isinstance(route, _ToSome)
        back = self._wire.start_all_to_all(results, route.from_ranks, route.to_ranks)
        return lambda residual_TD: _add_of_some(back(), route, residual_TD)

    def _to_all(self, x_TD: torch.Tensor, routes: Routes, num_held: int) -> Callable[[], Came]:
        num_rows, room = len(x_TD), self.own_room
        assert num_rows <= room, f"{num_rows} rows in a forward at low latency with room for {room}"
        packed_CW = _pack(x_TD, routes, room)
        gathered = self._wire.start_gather(packed_CW)
        return lambda: self._came(gathered().flatten(0, 1), x_TD, routes, num_held, _ToAll(room))

    def _to_some(self, x_TD: torch.Tensor, routes: Routes, num_held: int) -> Callable[[], Came]:
        num_rows, ranks_N = len(x_TD), torch.arange(self.size, device=x_TD.device)
        goes_NT = (routes.expert_ids_TA // num_held == ranks_N[:, None, None]).any(dim=2)
        if not self._is_formed:
            # Others would tell how many rows come from them.
            goes_NT &= (ranks_N == self.rank)[:, None]
        # Own numbers come back with the others': the host waits for the device once a layer, and all else is launched.
        told = self._wire.gather(goes_NT.sum(dim=1, dtype=torch.int32)).tolist()
        if self._is_formed:
            # Collectives that were aborted leave any numbers there.
            self.ranks.check()
        to_ranks, from_ranks = told[self.rank], [of_rank[self.rank] for of_rank in told]
        # Rows that go somewhere first, by rank: nonzero() would wait for their number.
        order = goes_NT.flatten().logical_not().byte().sort(stable=True).indices
        rows_X = order[: sum(to_ranks)] % max(1, num_rows)
        rows_by_rank = torch.split(rows_X, to_ranks)
        packed_XW = _pack(x_TD, routes, num_rows)[rows_X]
        came = self._wire.start_all_to_all(packed_XW, to_ranks, from_ranks)
        return lambda: self._came(came(), x_TD, routes, num_held, _ToSome(rows_by_rank, to_ranks, from_ranks))

    def _came(
        self, came_RW: torch.Tensor, x_TD: torch.Tensor, routes: Routes, num_held: int, route: _ToAll | _ToSome
    ) -> Came:
        num_features, num_picks = x_TD.shape[1] * x_TD.element_size() // _WORD_BYTES, routes.expert_ids_TA.shape[1]
        picks_of = own_routes if came_RW.is_cuda else own_routes_reference
        own = picks_of(came_RW, num_features, num_picks, self.rank, num_held)
        # Rows stay where they came: nobody writes to them. A row that was sent for a pick has one here.
        num_expected = max(len(came_RW), len(came_RW) * num_picks // self.size)
        rows = RoutedRows(packed_rows(came_RW, x_TD.shape[1], x_TD.dtype), own, num_expected)
        return Came(rows, route)


def _add_of_all(parts_NCD: torch.Tensor, residual_TD: torch.Tensor) -> None:
    (add_parts if residual_TD.is_cuda else add_parts_reference)(parts_NCD, residual_TD)


def _add_of_some(back_XD: torch.Tensor, route: _ToSome, residual_TD: torch.Tensor) -> None:
    sum_TD, first = residual_TD.float(), 0
    for rows in route.rows_by_rank:
        # A row is there once at most: the order of additions is that of the ranks.
        sum_TD[rows] += back_XD[first : first + len(rows)].float()
        first += len(rows)
    residual_TD.copy_(sum_TD)


def _pack(x_TD: torch.Tensor, routes: Routes, num_rows: int) -> torch.Tensor:
    """One collective carries rows with their picks."""
    return (pack_rows if x_TD.is_cuda else pack_rows_reference)(x_TD, routes, num_rows)
