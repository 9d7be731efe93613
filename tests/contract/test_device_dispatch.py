"""Contract of DeviceDispatch: all transports of rows to experts, with their libraries' interfaces on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from support.fake_dispatch_libraries import FakeDeepEp, FakeNccl, FakeNixlEp

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rank_layout import RankLayout
from radixmesh.daemons.worker.collectives.expert_all_to_all import AllToAllDispatch
from radixmesh.daemons.worker.collectives.member import CollectiveMember
from radixmesh.daemons.worker.cuda.device import HostDevice
from radixmesh.daemons.worker.cuda.expert_parallel import deep_ep_buffer, nixl_buffer
from radixmesh.daemons.worker.cuda.expert_parallel.buffer_dispatch import BufferDispatch
from radixmesh.daemons.worker.cuda.expert_parallel.choice import create_device_dispatch
from radixmesh.daemons.worker.cuda.expert_parallel.device_dispatch import DeviceDispatch, DispatchedExperts
from radixmesh.daemons.worker.cuda.expert_parallel.row_share import RowShare
from radixmesh.daemons.worker.cuda.expert_parallel.wire import HostWire, NcclWire
from radixmesh.daemons.worker.cuda.expert_parallel.wire_dispatch import WireDispatch
from radixmesh.daemons.worker.cuda.experts import PlainExperts
from radixmesh.daemons.worker.cuda.model.half_batches import Stages, take_turns
from radixmesh.daemons.worker.cuda.ops import TorchOps
from radixmesh.daemons.worker.ranks.group_member import CollectiveAborted, RankLost
from radixmesh.kernels.moe.grouped_gemm import routed_experts_reference
from radixmesh.kernels.moe.route import Routes

T = TypeVar("T")
TRANSPORTS = ("host", "nccl", "nixl", "deepep")
MAX_ROOM = 8
HIDDEN, MLP, PICKS = 16, 8, 3


class Ranks:
    """Ranks as threads that have met over gloo, each with its share of one layer's experts."""

    def __init__(self, transport: str, size: int, num_experts: int, tp_size: int = 1) -> None:
        self.tp_size = tp_size
        self.members = [CollectiveMember(self._layout(r, size), "127.0.0.1")
                        for r in range(size)]  # fmt: skip
        self._threads = ThreadPoolExecutor(size)
        generator = torch.Generator().manual_seed(7)
        self.w_gate_up = torch.randn(num_experts, 2 * MLP, HIDDEN, generator=generator).bfloat16()
        self.w_down = torch.randn(num_experts, HIDDEN, MLP, generator=generator).bfloat16()
        self.dispatches = [self._dispatch(transport, member) for member in self.members]
        self.experts = [self._experts(rank, num_experts) for rank in range(size)]
        self.generation = 0

    def _layout(self, rank: int, size: int) -> RankLayout:
        return RankLayout.of_rank(rank, tp_size=self.tp_size, dp_size=size // self.tp_size, ep_size=size)

    def _dispatch(self, transport: str, member: CollectiveMember) -> DeviceDispatch:
        ranks, device = member.expert_group, HostDevice()
        batch = RowShare(member.layout.tp_rank, self.tp_size)
        if transport == "host":
            return create_device_dispatch("host", ranks, device, max_room=MAX_ROOM, batch=batch)
        wire = WireDispatch(NcclWire(ranks, device), max_room=MAX_ROOM, share=batch)
        if transport == "nccl":
            return wire
        if transport == "nixl":
            create = partial(nixl_buffer.NixlBuffer, FakeNixlEp, ranks, device=device.torch_device)
            hint = partial(nixl_buffer.nixl_bytes, FakeNixlEp)
        else:
            create = partial(deep_ep_buffer.DeepEpBuffer, FakeDeepEp, ranks, device=device.torch_device)
            hint = partial(deep_ep_buffer.deep_ep_bytes, FakeDeepEp)
        return BufferDispatch(transport, create, hint, wire, max_room=MAX_ROOM)

    def _experts(self, rank: int, num_experts: int) -> DispatchedExperts:
        placed = self.members[rank].experts
        assert isinstance(placed, AllToAllDispatch)
        share, ops = placed.share(num_experts), TorchOps()
        held = placed.slots_per_rank(num_experts)
        gate_up = torch.full((held, 2 * MLP, HIDDEN), float("nan")).bfloat16()
        down = torch.full((held, HIDDEN, MLP), float("nan")).bfloat16()
        gate_up[: share.size], down[: share.size] = (w[share.start : share.stop] for w in (self.w_gate_up, self.w_down))
        norm = torch.ones(HIDDEN).bfloat16()
        return DispatchedExperts(
            PlainExperts(ops, gate_up, down), self.dispatches[rank], placed, num_experts, norm, ops
        )

    def on_all(self, call: Callable[[int], T]) -> list[T]:
        return list(self._threads.map(call, range(len(self.members))))

    def form(self) -> None:
        self.generation += 1
        names = [f"rank-{member.layout.rank}" for member in self.members]

        def meet(rank: int) -> None:
            self.members[rank].form(self.generation, self.members[0].rendezvous, names)
            self.dispatches[rank].leave()
            self.dispatches[rank].form()

        self.on_all(meet)

    def run(self, inputs: list[tuple[torch.Tensor, Routes]], room: int) -> list[torch.Tensor]:
        def one(rank: int) -> torch.Tensor:
            self.dispatches[rank].room = room
            x, routes = inputs[rank]
            residual = x * 0.5
            self.experts[rank].add_to(residual, x, routes)
            self.dispatches[rank].launched(HostDevice())()
            return residual

        return self.on_all(one)

    def expected(self, x: torch.Tensor, routes: Routes) -> torch.Tensor:
        return routed_experts_reference(x, routes, self.w_gate_up, self.w_down, x * 0.5)

    def buffers(self) -> list[FakeNixlEp.Buffer | FakeDeepEp.Buffer]:
        """The library's ends, of transports by one."""
        dispatches = [dispatch for dispatch in self.dispatches if isinstance(dispatch, BufferDispatch)]
        return [dispatch.buffer.buffer for dispatch in dispatches]  # type: ignore[union-attr]

    def close(self) -> None:
        for member in self.members:
            member.abort()
        self._threads.shutdown()


@pytest.fixture
def ranks_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Ranks]]:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    made: list[Ranks] = []

    def create(
        transport: str, size: int = 2, num_experts: int = 6, *, is_formed: bool = True, tp_size: int = 1
    ) -> Ranks:
        made.append(Ranks(transport, size, num_experts, tp_size))
        if is_formed:
            made[-1].form()
        return made[-1]

    yield create
    for ranks in made:
        ranks.close()


def rows_of(num: int, num_experts: int, seed: int) -> tuple[torch.Tensor, Routes]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, HIDDEN, generator=generator).bfloat16()
    ids = torch.rand(num, num_experts, generator=generator).argsort(dim=1)[:, :PICKS].int().contiguous()
    return x, Routes(ids, torch.rand(num, PICKS, generator=generator))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("size", "num_experts"), [(2, 6), (3, 7)])
def test_results_are_those_of_one_rank(transport: str, size: int, num_experts: int, ranks_of) -> None:  # type: ignore[no-untyped-def]
    """In both modes, with as many rows as there is room for, fewer, and none. 7 experts on 3 ranks: a slot is empty."""
    ranks = ranks_of(transport, size, num_experts)
    for counts in ([MAX_ROOM, 3, 0], [1, 0, 5], [2, 1, 2], [0, 0, 0]):
        inputs = [rows_of(counts[rank], num_experts, seed=10 + rank) for rank in range(size)]
        for room in (MAX_ROOM, max(*counts, 1), 0):
            for rank, got in enumerate(ranks.run(inputs, room)):
                torch.testing.assert_close(got, ranks.expected(*inputs[rank]), rtol=0.03, atol=0.2)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_of_a_batch_bring_parts_of_its_rows(transport: str, ranks_of: Callable[..., Ranks]) -> None:
    """Two batches of two ranks: in room for half of a batch's rows each; of fewer rows than ranks one brings none."""
    ranks = ranks_of(transport, 4, 6, tp_size=2)
    for counts in ([MAX_ROOM, 3], [1, 0], [5, MAX_ROOM - 1]):
        batches = [rows_of(count, 6, seed=30 + count) for count in counts]
        for room in (MAX_ROOM, 0):
            rows = [ranks.dispatches[rank].share.of(counts[rank // 2]) for rank in range(4)]
            inputs = []
            for rank in range(4):
                x, routes = batches[rank // 2]
                inputs.append((x[rows[rank]], Routes(*(each[rows[rank]].contiguous() for each in routes))))
            got = ranks.run(inputs, room)
            assert [dispatch.own_room for dispatch in ranks.dispatches] == [room // 2] * 4
            for batch, (x, routes) in enumerate(batches):
                whole = torch.cat(got[2 * batch : 2 * batch + 2])
                torch.testing.assert_close(whole, ranks.expected(x, routes), rtol=0.03, atol=0.2)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_halves_of_a_step_take_turns(transport: str, ranks_of) -> None:  # type: ignore[no-untyped-def]
    """Two layers of each half; libraries receive what came of a call before they are called again."""
    ranks = ranks_of(transport, 3, 7)
    halves = [[rows_of(4, 7, seed=10 * half + rank) for half in range(2)] for rank in range(3)]

    def forward(rank: int, half: int) -> Stages:
        x, routes = halves[rank][half]
        residual, experts = x * 0.5, ranks.experts[rank]
        for _ in range(2):
            came = experts.send(x, routes)
            yield
            add_to = experts.compute(came())
            yield
            add_to(residual)
        return residual

    def one(rank: int) -> list[torch.Tensor]:
        dispatch = ranks.dispatches[rank]
        dispatch.room, dispatch.is_cut = 4, True
        results = take_turns([forward(rank, half) for half in range(2)], lambda half: None)
        dispatch.is_cut = False
        dispatch.launched(HostDevice())()
        return results

    for rank, results in enumerate(ranks.on_all(one)):
        for half, got in enumerate(results):
            x, routes = halves[rank][half]
            once = ranks.expected(x, routes)
            want = routed_experts_reference(x, routes, ranks.w_gate_up, ranks.w_down, once)
            torch.testing.assert_close(got, want, rtol=0.03, atol=0.3)
    split = [buffer.num_split for buffer in ranks.buffers()]
    assert split == ([8] * 3 if transport in ("nixl", "deepep") else []), "sent and received apart"


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("room", [MAX_ROOM, 0])
def test_a_row_depends_on_itself_alone(transport: str, room: int, ranks_of) -> None:  # type: ignore[no-untyped-def]
    ranks = ranks_of(transport)
    x, routes = rows_of(4, 6, seed=1)
    alone = ranks.run([(x[:1], Routes(*(each[:1] for each in routes))), rows_of(0, 6, seed=2)], room)[0]
    among = ranks.run([(x, routes), rows_of(7, 6, seed=3)], room)[0]
    assert torch.equal(alone[0], among[0])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_that_are_alone_warm_up_and_meet_again(transport: str, ranks_of) -> None:  # type: ignore[no-untyped-def]
    """Before there is a group a step has the shapes that it will have; generations leave nothing to each other."""
    ranks = ranks_of(transport, is_formed=False)
    inputs = [rows_of(3, 6, seed=4), rows_of(2, 6, seed=5)]
    for rank in range(2):
        for room in (MAX_ROOM, 0):
            ranks.dispatches[rank].room = room
            residual = inputs[rank][0] * 0.5
            ranks.experts[rank].add_to(residual, *inputs[rank])
            assert residual.shape == inputs[rank][0].shape and bool(residual.isfinite().all())
    for _ in range(2):
        ranks.form()
        for rank, got in enumerate(ranks.run(inputs, MAX_ROOM)):
            torch.testing.assert_close(got, ranks.expected(*inputs[rank]), rtol=0.03, atol=0.2)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_lost_rank_is_told(transport: str, ranks_of) -> None:  # type: ignore[no-untyped-def]
    ranks = ranks_of(transport)
    inputs = [rows_of(3, 6, seed=4), rows_of(2, 6, seed=5)]
    ranks.run(inputs, MAX_ROOM)
    told = ranks.dispatches[0].launched(HostDevice())
    told()
    ranks.members[0].abort()
    with pytest.raises(CollectiveAborted):
        ranks.dispatches[0].check()
    with pytest.raises(CollectiveAborted):
        told()


@pytest.mark.parametrize(("transport", "library"), [("nixl", FakeNixlEp), ("deepep", FakeDeepEp)])
def test_a_step_that_a_kernel_computed_without_a_rank_is_dropped(transport: str, library: type, ranks_of) -> None:  # type: ignore[no-untyped-def]
    ranks = ranks_of(transport)
    before = len(library.Buffer.opened)  # type: ignore[attr-defined]
    inputs = [rows_of(3, 6, seed=4), rows_of(2, 6, seed=5)]
    ranks.run(inputs, MAX_ROOM)
    own = [buffer for buffer in library.Buffer.opened[before - 2 : before] if buffer.rank == 0]  # type: ignore[attr-defined]
    assert own[0].num_dispatched == 1, "rows at low latency go through the library"
    ranks.run(inputs, 0)
    assert own[0].num_dispatched == 1, "and those of normal forwards do not"
    own[0].masked.add(1)
    with pytest.raises(RankLost, match=r"ranks \[1\] did not come in time"):
        ranks.dispatches[0].launched(HostDevice())()


class _Aborted(HostWire):
    """A wire whose collectives are aborted by the loss of a rank, as NCCL's are: they end, with any numbers."""

    def start_gather(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: torch.full((self.ranks.size, *x.shape), 1 << 30, dtype=x.dtype)

    def start_all_to_all(
        self, x: torch.Tensor, to_ranks: Sequence[int], from_ranks: Sequence[int]
    ) -> Callable[[], torch.Tensor]:
        raise AssertionError(f"nobody sends {from_ranks} rows")


@pytest.mark.parametrize("is_lost", [True, False])
@pytest.mark.parametrize("room", [0, MAX_ROOM])
def test_what_nccl_says_of_an_aborted_communicator_is_that_a_rank_was_lost(
    is_lost: bool,
    room: int,
    ranks_of: Callable[..., Ranks],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is aborted behind the check of a step, or of what came before. Other errors are a step's own."""
    ranks = ranks_of("nccl")

    def refused(self: FakeNccl, name: str) -> Callable[..., None]:
        def collective(*_: object) -> None:
            if is_lost:
                ranks.members[0].abort()
            raise RuntimeError("NCCL communicator was aborted on rank 0.")

        return collective

    monkeypatch.setattr(FakeNccl, "__getattr__", refused)
    dispatch = ranks.dispatches[0]
    dispatch.room = room
    x, routes = rows_of(3, 6, seed=5)
    with pytest.raises(CollectiveAborted if is_lost else RuntimeError):
        dispatch.start_dispatch(x, routes, 3)
    with pytest.raises(CollectiveAborted if is_lost else RuntimeError):
        dispatch.exchange(x, [3, 0], [3, 0])


def test_counts_that_an_aborted_collective_leaves_are_not_believed(ranks_of) -> None:  # type: ignore[no-untyped-def]
    ranks = ranks_of("host")
    dispatch = WireDispatch(_Aborted(ranks.members[0].expert_group), max_room=MAX_ROOM)
    dispatch.form()
    ranks.members[0].abort()
    with pytest.raises(CollectiveAborted):
        dispatch.start_dispatch(*rows_of(3, 6, seed=4), 3)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_memory_of_buffers_is_told_before_they_are_made(transport: str, ranks_of) -> None:  # type: ignore[no-untyped-def]
    told = ranks_of(transport, is_formed=False).dispatches[0].buffer_bytes(3, HIDDEN)
    has_buffer = transport in ("nixl", "deepep")
    # Rows that come, and the results of experts.
    assert told > 2 * 2 * 3 * MAX_ROOM * HIDDEN * torch.bfloat16.itemsize if has_buffer else told == 0


@pytest.mark.parametrize("transport", ["nixl", "deepep"])
def test_rows_of_other_types_are_refused(transport: str, ranks_of) -> None:  # type: ignore[no-untyped-def]
    ranks = ranks_of(transport, is_formed=False)
    with pytest.raises(MeshError, match="carries rows of bfloat16") as refused:
        ranks.dispatches[0].bind(3, HIDDEN, torch.float16)
    assert refused.value.reason == ErrorReason.ERROR_REASON_UNSUPPORTED


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_experts_that_read_weighed_rows_are_refused_by_libraries_that_weigh_results(
    transport: str, ranks_of: Callable[..., Ranks]
) -> None:
    ranks = ranks_of(transport, is_formed=False)
    if transport in ("host", "nccl"):
        ranks.dispatches[0].bind(3, HIDDEN, torch.bfloat16, weighs_results=False)
        return
    with pytest.raises(MeshError, match=r"weighs what experts give.*choose nccl") as refused:
        ranks.dispatches[0].bind(3, HIDDEN, torch.bfloat16, weighs_results=False)
    assert refused.value.reason == ErrorReason.ERROR_REASON_UNSUPPORTED


@pytest.mark.parametrize("load", [nixl_buffer.import_nixl, deep_ep_buffer.import_deep_ep])
def test_a_library_that_is_not_there_is_named(load: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"libcudart.so.13 of {name} is not there")

    monkeypatch.setattr(nixl_buffer.importlib, "import_module", missing)
    with pytest.raises(MeshError, match=r"pip install .*libcudart.so.13.*: choose nccl") as refused:
        load()
    assert refused.value.reason == ErrorReason.ERROR_REASON_UNSUPPORTED


@pytest.mark.parametrize(("name", "reason"), [("pigeon", "INVALID_ARGUMENT"), ("nccl", "UNSUPPORTED")])
def test_transports_that_a_device_does_not_have_are_refused(name: str, reason: str) -> None:
    member = CollectiveMember(RankLayout(dp_size=2, ep_size=2), "127.0.0.1")
    with pytest.raises(MeshError) as refused:
        create_device_dispatch(name, member.expert_group, HostDevice(), max_room=1)
    assert refused.value.reason == ErrorReason.Value(f"ERROR_REASON_{reason}")
