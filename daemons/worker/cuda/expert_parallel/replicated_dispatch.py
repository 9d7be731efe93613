"""Experts divided among ranks of one batch, which all have its rows: each computes the picks that are its own.

Nothing travels: what the ranks made of the rows is summed with all else that they have a part of, by the collective
that a layer's MLP ends with under tensor parallelism anyhow. So forwards need no room, and are captured as those of
other models. A wire carries experts alone, when they move between two steps.

Legend: T rows, A picks of a row, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from radixmesh.daemons.worker.cuda.expert_parallel.device_dispatch import Came, DeviceDispatch, RoutedRows
from radixmesh.daemons.worker.cuda.expert_parallel.row_share import RowShare
from radixmesh.daemons.worker.cuda.expert_parallel.wire import Wire
from radixmesh.kernels.moe.exchange_rows import own_picks, own_picks_reference
from radixmesh.kernels.moe.route import Routes


class ReplicatedDispatch(DeviceDispatch):
    """share: rows of the batch that these ranks compute; ranks that hold the same experts divide them."""

    travels = False

    def __init__(self, wire: Wire, *, max_room: int, share: RowShare) -> None:
        super().__init__(wire.ranks, max_room=max_room, share=share)
        self._wire = wire
        # Equal on all of these ranks, which have to choose the same copies; one of them counts the picks.
        self.turn = share.part
        self.counts_picks = wire.ranks.rank == 0

    @property
    def kind(self) -> str:
        return f"replicated {type(self._wire).__name__}"

    def others_rows(self, num_rows: int) -> int:
        return 0

    def form(self) -> None:
        self._wire.form()

    def leave(self) -> None:
        self._wire.leave()

    def exchange(self, x: torch.Tensor, to_ranks: Sequence[int], from_ranks: Sequence[int]) -> torch.Tensor:
        return self._wire.all_to_all(x, to_ranks, from_ranks)

    def start_dispatch(self, x_TD: torch.Tensor, routes: Routes, num_held: int) -> Callable[[], Came]:
        own = (own_picks if x_TD.is_cuda else own_picks_reference)(routes, self.rank, num_held)
        num_expected = max(1, routes.expert_ids_TA.numel() // self.size)
        return lambda: Came(RoutedRows(x_TD, own, num_expected), None)

    def start_combine(self, came: Came, results: torch.Tensor) -> Callable[[torch.Tensor], None]:
        def add_to(residual_TD: torch.Tensor) -> None:
            residual_TD += results

        return add_to
