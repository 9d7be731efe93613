"""A model whose experts are shared by ranks of a device backend: logits are those of one rank, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.device_settings import TINY_SETTINGS
from support.llama_folders import random_llama
from support.model_folders import random_model
from support.thread_group import ThreadGroup
from torch.utils._python_dispatch import TorchDispatchMode

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import DispatchMode
from radixmesh.daemons.worker.collectives.expert_all_to_all import AllToAllDispatch
from radixmesh.daemons.worker.config import Backend, WorkerSettings
from radixmesh.daemons.worker.cuda.device import HostDevice
from radixmesh.daemons.worker.cuda.expert_parallel.device_dispatch import RoutedRows
from radixmesh.daemons.worker.cuda.load import create_shared_out, load_device_runner
from radixmesh.daemons.worker.cuda.runner import DeviceRunner
from radixmesh.daemons.worker.ranks.group_member import CollectiveAborted
from radixmesh.daemons.worker.runner import Segment
from radixmesh.kernels.moe.route import Routes

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks of GPUs are processes: tests/gpu")

_MODELS = Path(__file__).parents[2] / "compose" / "models"
_IDS = np.array([5, 99, 3, 42, 42, 7, 130], np.int32)
_PAGES = np.array([3, 1], np.int32)
_SETTINGS = replace(TINY_SETTINGS, page_size=4, num_pages=8, num_slots=8, max_tokens_per_step=16, max_total_len=16)


@pytest.fixture
def group_of() -> Iterator[Callable[[int], ThreadGroup]]:
    groups: list[ThreadGroup] = []

    def create(size: int) -> ThreadGroup:
        groups.append(ThreadGroup(size))
        return groups[-1]

    yield create
    for group in groups:
        group.close()


def _runner(folder: Path, experts: AllToAllDispatch | None = None, **changes: object) -> DeviceRunner:
    settings, device = replace(_SETTINGS, **changes), HostDevice()  # type: ignore[arg-type]
    shared = create_shared_out(settings, experts, device)
    return load_device_runner(folder, settings, device, experts=shared)


def _logits(runner: DeviceRunner, shift: int = 0) -> np.ndarray:
    """Of all ids: some rows at once in a normal forward, then one by one at low latency."""
    parts = []
    for first, end in ((0, 5), (5, 6), (6, 7)):
        mode = DispatchMode.LOW_LATENCY if first else DispatchMode.NORMAL
        runner.set_dispatch_mode(mode, end - first)
        segment = Segment(slot=1, ids=_IDS[first:end] - shift, start=first, pages=_PAGES)
        parts.append(runner.logits([segment])[0])
    return np.concatenate(parts)


def _folder(name: str, tmp_path: Path) -> Path:
    if (_MODELS / name).is_dir():
        return _MODELS / name
    random_model(name).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("name", "size"), [("mixtral", 2), ("qwen3_moe", 3), ("tiny-deepseek", 4)])
def test_logits_are_those_of_one_rank(
    name: str, size: int, tmp_path: Path, group_of: Callable[[int], ThreadGroup]
) -> None:
    """Each rank has a prompt of its own: what others compute for it is what it would have computed."""
    folder = _folder(name, tmp_path)
    alone = _runner(folder)
    want = [_logits(alone, shift) for shift in range(size)]
    ranks = group_of(size)

    def on_rank(rank: int) -> np.ndarray:
        runner = _runner(folder, AllToAllDispatch(ranks.groups[rank]))
        runner.formed()
        return _logits(runner, shift=rank)

    for rank, got in enumerate(ranks.run(on_rank)):
        np.testing.assert_allclose(got, want[rank], rtol=0, atol=2e-5 * float(np.abs(want[rank]).max()))


def test_fp8_experts_are_quantised_where_they_are(tmp_path: Path, group_of: Callable[[int], ThreadGroup]) -> None:
    folder = _MODELS / "tiny-deepseek"
    want = _logits(_runner(folder, quantization="fp8-block"))
    ranks = group_of(2)

    def on_rank(rank: int) -> np.ndarray:
        runner = _runner(folder, AllToAllDispatch(ranks.groups[rank]), quantization="fp8-block")
        runner.formed()
        return _logits(runner)

    for got in ranks.run(on_rank):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * float(np.abs(want).max()))


def test_ranks_with_other_transports_or_rooms_do_not_compute_together(group_of: Callable[[int], ThreadGroup]) -> None:
    ranks, folder = group_of(2), _MODELS / "tiny-deepseek"
    runners = [_runner(folder, AllToAllDispatch(ranks.groups[rank]), num_slots=2 + rank) for rank in range(2)]
    with pytest.raises(CollectiveAborted, match="give all of them the same --num-slots"):
        ranks.run(lambda rank: runners[rank].formed())


class _Waits(TorchDispatchMode):
    """Counts operations whose result's size a host has to learn from its device."""

    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.num += func.overloadpacket in (torch.ops.aten.nonzero, torch.ops.aten.masked_select)
        return func(*args, **(kwargs or {}))


def test_a_normal_forward_waits_for_nothing_but_the_numbers_of_all_ranks(
    group_of: Callable[[int], ThreadGroup],
) -> None:
    ranks, gathered = group_of(3), []

    def on_rank(rank: int) -> tuple[int, torch.Tensor]:
        placed = AllToAllDispatch(ranks.groups[rank])
        shared = create_shared_out(replace(_SETTINGS, num_slots=4), placed, HostDevice())
        assert shared is not None
        dispatch = shared.dispatch
        dispatch.form()
        x_TD = torch.full((2, 8), float(rank + 1))
        # Experts of two ranks: of the next one and, of the first row alone, the own.
        ids_TA = torch.tensor(
            [[2 * rank, (2 * rank + 2) % 6], [(2 * rank + 3) % 6, (2 * rank + 2) % 6]], dtype=torch.int32
        )
        with _Waits() as waits:
            came = dispatch.start_dispatch(x_TD, Routes(ids_TA, torch.full((2, 2), 0.5)), 2)()
        assert isinstance(came.rows, RoutedRows)
        gathered.append(came.rows.x_RD[:, 0].tolist())
        sum_TD = torch.zeros_like(x_TD)
        dispatch.start_combine(came, came.rows.x_RD.clone())(sum_TD)
        return waits.num, sum_TD[:, 0]

    for rank, (num_waits, sum_T) in enumerate(ranks.run(on_rank)):
        assert num_waits == 0 and sum_T.tolist() == [2.0 * (rank + 1), 1.0 * (rank + 1)]
    # A row of its own, and two of the rank before, in the order of the ranks.
    assert sorted(gathered) == [[1.0, 1.0, 2.0], [1.0, 3.0, 3.0], [2.0, 2.0, 3.0]]


def test_more_rows_than_there_is_room_for_are_a_normal_forward(group_of: Callable[[int], ThreadGroup]) -> None:
    runner = _runner(_MODELS / "tiny-deepseek", AllToAllDispatch(group_of(2).groups[0]))
    assert runner.links.experts is not None
    rooms = []
    for mode, most in (
        (DispatchMode.LOW_LATENCY, 8),
        (DispatchMode.LOW_LATENCY, 9),
        (DispatchMode.NORMAL, 3),
        (DispatchMode.UNSPECIFIED, 3),
    ):
        runner.set_dispatch_mode(mode, most)
        rooms.append(runner.links.experts.room)
    assert rooms == [8, 0, 0, 0]


def test_steps_in_which_a_rank_may_have_chunks_are_cut_on_no_rank(group_of: Callable[[int], ThreadGroup]) -> None:
    experts = AllToAllDispatch(group_of(2).groups[0])
    runner = _runner(_MODELS / "tiny-deepseek", experts, two_batch_min_rows=4)
    assert runner.links.experts is not None
    rooms = []
    for most, may_have_chunks in ((8, False), (8, True), (3, True)):
        runner.set_dispatch_mode(DispatchMode.LOW_LATENCY, most, may_have_chunks=may_have_chunks)
        rooms.append(runner.links.experts.room)
    # Fewer rows are not cut anyhow.
    assert rooms == [8, 0, 3]


def test_models_without_experts_to_share_are_refused(tmp_path: Path, group_of: Callable[[int], ThreadGroup]) -> None:
    experts = AllToAllDispatch(group_of(2).groups[0])
    random_llama("biases").save_pretrained(tmp_path)
    with pytest.raises(MeshError, match="for a model of 0 routed experts") as refused:
        _runner(tmp_path, experts)
    assert refused.value.reason == ErrorReason.ERROR_REASON_INVALID_ARGUMENT
    with pytest.raises(MeshError, match="not divided among ranks"):
        _runner(tmp_path, experts, model_impl="transformers")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tp_size": 4, "ep_size": 2, "two_batch_min_rows": 8}, "for rows that travel"),
        ({"dp_size": 2, "ep_size": 2, "deterministic": True}, "is for --backend cpu"),
        (
            {"dp_size": 2, "ep_size": 2, "two_batch_min_rows": 8, "attention_backend": "flashinfer"},
            "one batch at a time",
        ),
        ({"dp_size": 2, "ep_size": 2, "ep_transport": "pigeon"}, "must be one of auto, nccl, nixl, deepep, host"),
        ({"backend": Backend.CPU, "dp_size": 2, "ep_size": 2, "ep_transport": "nccl"}, "is for --backend cuda"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        WorkerSettings(model=_MODELS / "tiny-deepseek", **{"backend": Backend.CUDA, **changes})  # type: ignore[arg-type]
    flags: dict[str, object] = {"dp_size": 2, "ep_size": 2, "ep_transport": "nixl", "two_batch_min_rows": 8}
    WorkerSettings(model=_MODELS / "tiny-deepseek", backend=Backend.CUDA, **flags)  # type: ignore[arg-type]
    flags |= {"tp_size": 2, "ep_size": 4}
    WorkerSettings(model=_MODELS / "tiny-deepseek", backend=Backend.CUDA, **flags)  # type: ignore[arg-type]
