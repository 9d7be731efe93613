"""The seam between the experts of a layer on a device and what carries rows to the ranks that hold them.

ALONE --form, once the ranks have met--> TOGETHER --a rank is lost, or the group was left--> LOST --form--> TOGETHER

normal: as many rows travel as there are, after the ranks have told each other how many; the host waits for that, and
such steps are launched kernel by kernel. low latency: every rank has room for the same number of rows of each other
one, nothing has to be known first, and steps may be captured. Which of the two a step is, and for how many rows, is the
same on all ranks: the plan's header says it.

Legend: T rows of this rank, A picks of a row, R rows that this rank computes, N ranks, D hidden size, E experts, S
slots of experts on all ranks, P of them on each, with room for X rows where rows lie by slot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from radixmesh.daemons.worker.collectives.rank_group import RankGroup
from radixmesh.daemons.worker.cuda.device import Device
from radixmesh.daemons.worker.cuda.expert_parallel.row_share import WHOLE, RowShare
from radixmesh.daemons.worker.cuda.experts import Experts
from radixmesh.daemons.worker.cuda.ops import BesideMlp, Ops
from radixmesh.daemons.worker.experts.expert_dispatch import ExpertDispatch
from radixmesh.kernels.moe.choose_slots import TokenRows, slot_table
from radixmesh.kernels.moe.grouped_gemm import SlotRows
from radixmesh.kernels.moe.route import Routes


class RoutedRows(NamedTuple):
    """Rows with their picks. routes: slots [0, P) of this rank, and P where a pick is not for it, whose weight is then
    0: such picks are not computed. num_expected: about how many are."""

    x_RD: torch.Tensor
    routes: Routes
    num_expected: int


class Came(NamedTuple):
    """Rows for the experts of this rank. route: what the dispatch needs to bring results back."""

    rows: RoutedRows | SlotRows
    route: object


class DeviceDispatch(ABC):
    """Rows to experts and back on the current stream, by all ranks in the same order. Until `form` a rank is alone:
    nothing comes from others, so that steps can be warmed up and captured.

    travels: rows go to ranks with other rows, so that all ranks run each forward, with the same room, also without rows
    of their own. room: rows of a step in the next forward at low latency, 0 for a normal one. can_capture: forwards at
    low latency may be recorded in graphs, each for one room. is_captured_anew: graphs hold the group's connections, so
    that each generation needs graphs of its own. mixes: a rank may replay a graph while another one launches the same
    forward kernel by kernel. is_cut: two halves of a step take turns, so that rows of both may be under way at a time.
    tokens: which rows of this rank's share of the next forward are no padding; None: all. turn: shifts the copies of
    experts that rows take. counts_picks: of the ranks that route the same rows, this one counts what they picked.
    """

    can_capture: bool = True
    is_captured_anew: bool = False
    mixes: bool = True
    travels: bool = True
    counts_picks: bool = True

    def __init__(self, ranks: RankGroup, *, max_room: int, share: RowShare = WHOLE) -> None:
        """ranks: those that share the experts, by which they meet on their hosts. max_room: more rows of a step than
        these are a normal forward. share: of a step's rows, those that this rank brings to the experts."""
        self.ranks = ranks
        self.rank, self.size = ranks.rank, ranks.size
        self.turn = ranks.rank
        self.max_room = max_room
        self.share = share
        self.room = 0
        self.is_cut = False
        self.tokens: TokenRows | None = None

    @property
    def own_room(self) -> int:
        """Rows that any rank brings to the next forward at low latency at most; 0 for a normal one."""
        return self.share.most(self.room)

    def next_rows(self, row_slots_T: torch.Tensor, dummy_slot: int) -> None:
        """Says which rows the next forward has: those of the dummy slot are padding."""
        self.tokens = TokenRows(row_slots_T[self.share.of(len(row_slots_T))], dummy_slot)

    @property
    @abstractmethod
    def kind(self) -> str:
        """Of the transport, and of how much room it has: ranks with another one form no group."""

    def bind(self, num_slots: int, hidden_size: int, dtype: torch.dtype, *, weighs_results: bool = True) -> None:
        """Told by each layer before the ranks meet: slots of this rank, what its rows are of, and whether weights of
        picks multiply what experts give. Raises MeshError UNSUPPORTED where such rows do not travel this way."""
        return

    def others_rows(self, num_rows: int) -> int:
        """Rows of other ranks that come to a forward of so many rows at most, beyond as many as the forward has."""
        return max(0, self.share.most(num_rows) * self.size - num_rows)

    def buffer_bytes(self, num_slots: int, hidden_size: int) -> int:
        """Memory that it takes on the device once the ranks have met. Default: none that is worth counting."""
        return 0

    @abstractmethod
    def form(self) -> None:
        """Connects with the others, who do so too; on the thread of the steps, of which none runs.

        Raises CollectiveAborted, or MeshError UNSUPPORTED where these ranks cannot reach each other this way.
        """

    def leave(self) -> None:
        """Drops what belongs to one generation of the group: no graph that holds it is left. Default: nothing does."""
        return

    def check(self) -> None:
        """Raises CollectiveAborted or RankLost unless the group is whole."""
        self.ranks.check()

    def launched(self, device: Device) -> Callable[[], None]:
        """Called behind the launch of a step; the result, once the step is over: it raises as check() unless all ranks
        computed it. Default: nothing but the loss of a rank ends what waits for it."""
        return self.check

    @abstractmethod
    def exchange(self, x: torch.Tensor, to_ranks: Sequence[int], from_ranks: Sequence[int]) -> torch.Tensor:
        """Rows of anything between two steps, as Communicator.all_to_all, on the current stream. The ranks have met."""

    @abstractmethod
    def start_dispatch(self, x_TD: torch.Tensor, routes: Routes, num_held: int) -> Callable[[], Came]:
        """Sends rows to the ranks of the slots that `routes` name, of num_held slots each. The result, called once, has
        the stream wait for what comes here: until then rows travel beside what the stream is given."""

    @abstractmethod
    def start_combine(self, came: Came, results: torch.Tensor) -> Callable[[torch.Tensor], None]:
        """Sends back what was made of rows that came: [R, D], the weighted sum over the picks of each, or, of rows by
        slot, [P, X, D], what its expert made of it. The result, called once, has the stream wait, and adds what the
        ranks have made of the rows of start_dispatch() to these, in the order of the ranks, in place."""


class DispatchedExperts(Experts):
    """Experts of a layer of which this rank has some: `local`, at its slots.

    slots: of all ranks. picks_E: int32 on the device, how often tokens of this rank's share of rows have picked each
    expert. The table of slots lies on the device, and is written in place: graphs that read it stay as they are when
    experts move.
    """

    def __init__(
        self,
        local: Experts,
        dispatch: DeviceDispatch,
        placed: ExpertDispatch,
        num_experts: int,
        norm_D: torch.Tensor,
        ops: Ops,
    ) -> None:
        """placed: which rank holds which experts when weights are loaded. norm_D: of the rows, for their size and
        dtype."""
        self._local, self._dispatch, self._ops = local, dispatch, ops
        self.share, self.travels = dispatch.share, dispatch.travels
        self.slots = placed.first_slots(num_experts)
        self._num_held = self.slots.per_rank
        self.table = slot_table(self.slots.experts_S, num_experts).to(norm_D.device)
        self.picks_E = torch.zeros(num_experts, dtype=torch.int32, device=norm_D.device)
        self._counted_E = self.picks_E if dispatch.counts_picks else torch.zeros_like(self.picks_E)
        dispatch.bind(self.slots.per_rank, len(norm_D), norm_D.dtype, weighs_results=local.weighs_results)

    def add_to(
        self,
        residual_TD: torch.Tensor,
        x_TD: torch.Tensor,
        routes: Routes,
        num_expected: int | None = None,
        *,
        beside: BesideMlp | None = None,
    ) -> None:
        assert beside is None, "an MLP beside experts on other ranks is launched while rows travel"
        came = self.send(x_TD, routes)()
        if self.travels:
            self.compute(came)(residual_TD)
            return
        assert isinstance(came.rows, RoutedRows)
        if len(x_TD):
            self._local.add_to(residual_TD, *came.rows)

    def send(self, x_TD: torch.Tensor, routes: Routes) -> Callable[[], Came]:
        """Begins, with this rank's share of a step's rows; as DeviceDispatch.start_dispatch."""
        dispatch = self._dispatch
        routes = self._ops.choose_slots(routes, self.table, self._counted_E, dispatch.turn, dispatch.tokens)
        return dispatch.start_dispatch(x_TD, routes, self._num_held)

    def compute(self, came: Came) -> Callable[[torch.Tensor], None]:
        """Goes on; as DeviceDispatch.start_combine."""
        rows = came.rows
        if isinstance(rows, SlotRows):
            results = self._local.of_slots(rows)
        else:
            results = self._local.sums(*rows) if len(rows.x_RD) else torch.empty_like(rows.x_RD)
        add = self._dispatch.start_combine(came, results)

        def add_to(residual_TD: torch.Tensor) -> None:
            add(residual_TD)
            self._ops.gemm.changed()

        return add_to

    @property
    def expert_bytes(self) -> int:
        return sum(part.numel() for part in self.bytes_of(0))

    def bytes_of(self, slot: int) -> list[torch.Tensor]:
        return self._local.bytes_of(slot)

    def place(self, experts_S: torch.Tensor) -> None:
        """Other experts are at the slots of all ranks, from the next step on. int64 on the host."""
        self.slots = self.slots.replaced(experts_S, self._dispatch.size)
        self.table.copy_(slot_table(experts_S, self.slots.num_experts))
