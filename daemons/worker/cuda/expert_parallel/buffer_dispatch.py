"""Rows to experts by a library's own kernels at low latency; normal forwards go over a wire of collectives.

A library lays out what comes as [experts of this rank, rows of all ranks, D], of which the first rows of each expert
are there; it multiplies by the picks' weights and adds them where the rows came from. Its kernels may be recorded in
graphs: nothing depends on how many rows come. Rows are bfloat16. There is memory for all rows of a full step at each
expert, of which a step fills little: experts read and write no more than the rows that are there.

Legend: T rows of this rank, A picks of a row, P slots of this rank, X rows that one of them has memory for, D hidden
size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.cuda.device import Device
from radixmesh.daemons.worker.cuda.expert_parallel.device_dispatch import Came, DeviceDispatch
from radixmesh.daemons.worker.cuda.expert_parallel.wire_dispatch import WireDispatch
from radixmesh.daemons.worker.ranks.group_member import RankLost
from radixmesh.kernels.moe.grouped_gemm import SlotRows
from radixmesh.kernels.moe.route import Routes


class BufferShape(NamedTuple):
    """max_rows: of a rank at a time; hidden_size: of a row; slots_per_rank: experts that a rank has memory for."""

    max_rows: int
    hidden_size: int
    slots_per_rank: int
    num_ranks: int

    @property
    def num_slots(self) -> int:
        return self.slots_per_rank * self.num_ranks


Receive = Callable[[], None]
"""Launches the kernel that waits for what others send."""


class LowLatencyBuffer(Protocol):
    """Registered memory of one generation of a group, and the kernels over it. Two dispatches may be under way.

    id_dtype: of slots, as its kernels were compiled.
    """

    id_dtype: torch.dtype

    def dispatch(
        self, x_TD: torch.Tensor, slots_TA: torch.Tensor, *, is_split: bool
    ) -> tuple[torch.Tensor, torch.Tensor, object, Receive]:
        """bf16 [P, X, D], int32 [P] rows that are there, and what combine() needs. slots: on all ranks. is_split:
        all is there when the last of the results was called alone, which is to be before the next call of either kind;
        otherwise that does nothing."""
        ...

    def combine(
        self,
        results_PXD: torch.Tensor,
        slots_TA: torch.Tensor,
        weights_TA: torch.Tensor,
        handle: object,
        *,
        is_split: bool,
    ) -> tuple[torch.Tensor, Receive]:
        """bf16 [T, D]: weighted sums of the picks of the rows that were dispatched."""
        ...

    def masked(self) -> torch.Tensor | None:
        """int32 [ranks] on the device, 1: kernels gave up waiting for that rank. None: they never do."""
        ...

    def destroy(self) -> None: ...


# Of the size of all rows that can come: rows and results, of two halves of a step.
_TENSORS = 4

OpenBuffer = Callable[[BufferShape], LowLatencyBuffer]
"""Connects with the other ranks, who do so too. Raises RankLost."""


class _Sent(NamedTuple):
    """Way back. slots, weights: of this rank's own rows, as they were sent."""

    slots_TA: torch.Tensor
    weights_TA: torch.Tensor
    handle: object


class BufferDispatch(DeviceDispatch):
    is_captured_anew = True

    def __init__(
        self,
        name: str,
        open_buffer: OpenBuffer,
        size_hint: Callable[[BufferShape], int],
        normal: WireDispatch,
        *,
        max_room: int,
    ) -> None:
        """normal: carries normal forwards, and those of ranks that are alone. name: of the transport, for errors.
        size_hint: bytes of a buffer, as the library tells."""
        super().__init__(normal.ranks, max_room=max_room, share=normal.share)
        self._name, self._open, self._size_hint, self._normal = name, open_buffer, size_hint, normal
        self._shape: BufferShape | None = None
        self.buffer: LowLatencyBuffer | None = None
        self._receive: Receive | None = None
        """Of the call before, which has not received yet."""

    @property
    def kind(self) -> str:
        return f"{self._name} {self._normal.kind}"

    def bind(self, num_slots: int, hidden_size: int, dtype: torch.dtype, *, weighs_results: bool = True) -> None:
        if not weighs_results:
            raise MeshError(
                ErrorReason.ERROR_REASON_UNSUPPORTED,
                f"--ep-transport {self._name} weighs what experts give, and those of this model are to read weighed "
                "rows: choose nccl",
                {"feature": "ep_transport"},
            )
        if dtype != torch.bfloat16:
            raise MeshError(
                ErrorReason.ERROR_REASON_UNSUPPORTED,
                f"--ep-transport {self._name} carries rows of bfloat16, not {dtype}: set --dtype bfloat16, or choose "
                "nccl",
                {"feature": "ep_transport"},
            )
        shape = BufferShape(self.share.most(self.max_room), hidden_size, num_slots, self.size)
        assert self._shape in (None, shape), "layers of one model have as many experts"
        self._shape = shape

    def buffer_bytes(self, num_slots: int, hidden_size: int) -> int:
        shape = BufferShape(self.share.most(self.max_room), hidden_size, num_slots, self.size)
        # Rows that come, what experts make of them on the way, and their results: for as many as there is room for.
        rows = num_slots * shape.max_rows * self.size
        return self._size_hint(shape) + _TENSORS * rows * hidden_size * torch.bfloat16.itemsize

    def form(self) -> None:
        self._normal.form()
        assert self._shape is not None, "no layer has experts"
        self._receive = None
        self.buffer = self._open(self._shape)

    def leave(self) -> None:
        buffer, self.buffer = self.buffer, None
        if buffer is not None:
            buffer.destroy()
        self._normal.leave()

    def launched(self, device: Device) -> Callable[[], None]:
        masked_N = self.buffer.masked() if self.buffer is not None else None
        if masked_N is None:
            return self.check
        # A copy behind the step: asking now would wait for all that was launched.
        told_N, told = device.fetch(masked_N), device.record_event()

        def check() -> None:
            self.check()
            told.wait()
            if bool(told_N.any()):
                # The kernels went on without them: whatever the step computed is dropped.
                raise RankLost(f"rows of ranks {told_N.nonzero().flatten().tolist()} did not come in time")

        return check

    def exchange(self, x: torch.Tensor, to_ranks: Sequence[int], from_ranks: Sequence[int]) -> torch.Tensor:
        return self._normal.exchange(x, to_ranks, from_ranks)

    def start_dispatch(self, x_TD: torch.Tensor, routes: Routes, num_held: int) -> Callable[[], Came]:
        buffer = self.buffer
        if buffer is None or not self.room:
            self._normal.room = self.room
            return self._normal.start_dispatch(x_TD, routes, num_held)
        slots_TA, x_TD = routes.expert_ids_TA.to(buffer.id_dtype), x_TD.contiguous()
        self._received()
        x_PXD, counts_P, handle, receive = buffer.dispatch(x_TD, slots_TA, is_split=self.is_cut)
        received = self._under_way(receive)
        num_picks = slots_TA.shape[1]
        most = self.own_room * self.size * min(num_picks, len(x_PXD))

        def came() -> Came:
            received()
            rows = SlotRows(x_PXD, counts_P, min(most, x_PXD.shape[0] * x_PXD.shape[1]), self.own_room * num_picks)
            return Came(rows, _Sent(slots_TA, routes.weights_TA, handle))

        return came

    def start_combine(self, came: Came, results: torch.Tensor) -> Callable[[torch.Tensor], None]:
        sent = came.route
        if not isinstance(sent, _Sent):
            return self._normal.start_combine(came, results)
        assert self.buffer is not None
        self._received()
        combined_TD, receive = self.buffer.combine(
            results, sent.slots_TA, sent.weights_TA, sent.handle, is_split=self.is_cut
        )
        received = self._under_way(receive)

        def add_to(residual_TD: torch.Tensor) -> None:
            received()
            residual_TD += combined_TD

        return add_to

    def _under_way(self, receive: Receive) -> Receive:
        """The same, for whoever comes first: the next call, or who needs what comes."""
        self._receive = receive

        def received() -> None:
            if self._receive is receive:
                self._received()

        return received

    def _received(self) -> None:
        """The library has two regions, and each call cleans the one of the call before, which so has to be over."""
        receive, self._receive = self._receive, None
        if receive is not None:
            receive()


def receiver(hook: Receive | None, *kept: torch.Tensor) -> Receive:
    """A library's hook, or, of a call that has received already, nothing. kept: tensors of the call, which the kernel
    that receives may read again: nobody else gets their memory before."""
    waiting = [(hook, kept)]

    def receive() -> None:
        call, _ = waiting.pop()
        if call is not None:
            call()

    return receive
