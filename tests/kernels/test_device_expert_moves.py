"""Experts that move between ranks of a device backend: logits stay, memory stays as graphs know it, picks are told."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from kernels.test_device_expert_ranks import _SETTINGS, _folder, _logits, _runner
from support.model_folders import random_model, save_model
from support.thread_group import ThreadGroup
from support.triton_interpreter import launch_in_turns
from unit.test_expert_moves import move_op, place_op

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import pack_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import DispatchMode
from radixmesh.daemons.scheduler.planning.experts.expert_moves import ExpertMove, fewest_moves
from radixmesh.daemons.worker.collectives.expert_all_to_all import AllToAllDispatch
from radixmesh.daemons.worker.cuda.device import HostDevice
from radixmesh.daemons.worker.cuda.expert_parallel.expert_moves import DeviceExpertMoves
from radixmesh.daemons.worker.cuda.load import create_shared_out, load_device_runner
from radixmesh.daemons.worker.cuda.runner import DeviceRunner
from radixmesh.daemons.worker.cuda.step.prompt_steps import no_rows
from radixmesh.daemons.worker.experts.expert_moves import REPORT_FORWARDS
from radixmesh.daemons.worker.ranks.group_member import CollectiveAborted
from radixmesh.daemons.worker.runner import Segment
from radixmesh.worker.v1 import worker_pb2

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks of GPUs are processes: tests/gpu")

_NUM_REDUNDANT = 4


def _moves(runner: DeviceRunner) -> DeviceExpertMoves:
    assert isinstance(runner.expert_moves, DeviceExpertMoves)
    return runner.expert_moves


def _memory(runner: DeviceRunner) -> list[int]:
    """Addresses of all that graphs read."""
    layers = runner.model.shared_experts()
    weights = [part.data_ptr() for layer in layers for slot in range(2) for part in layer.bytes_of(slot)]
    return [*weights, *(layer.table.data_ptr() for layer in layers), *(layer.picks_E.data_ptr() for layer in layers)]


def _run(moves: DeviceExpertMoves, op: worker_pb2.BarrierOp) -> None:
    moves.check(op)
    moves.apply(op)


@pytest.mark.parametrize(
    ("name", "size", "changes"),
    [
        ("tiny-deepseek", 2, {}),
        ("tiny-deepseek", 2, {"quantization": "fp8-block"}),
        ("mixtral", 2, {}),
        pytest.param("qwen3_moe", 3, {}, marks=pytest.mark.slow),
    ],
)
def test_logits_stay_while_experts_move(name: str, size: int, changes: dict[str, object], tmp_path: Path) -> None:
    """Nothing takes effect before it is placed, on all ranks at once; copies come, and experts change their slots."""
    folder = _folder(name, tmp_path)
    want = _logits(_runner(folder, **changes))
    tolerance = 2e-5 * float(np.abs(want).max())

    def rank(number: int) -> None:
        runner = _runner(folder, AllToAllDispatch(group.groups[number], _NUM_REDUNDANT), **changes)
        runner.formed()
        moves, generator, memory = _moves(runner), np.random.default_rng(3), _memory(runner)
        num_slots = moves.placement.shape[1]
        for change in range(4):
            np.testing.assert_allclose(_logits(runner), want, rtol=0, atol=tolerance)
            before, layer = moves.placement, change % moves.num_layers
            more = generator.integers(0, moves.num_experts, num_slots - moves.num_experts)
            new = generator.permutation(np.concatenate((np.arange(moves.num_experts), more)))
            chosen = fewest_moves(before[layer].tolist(), new.reshape(size, -1).tolist())
            first = 0
            while chosen and first < moves.expert_bytes:
                num = min(moves.expert_bytes - first, int(generator.integers(1, moves.expert_bytes + 1)))
                _run(moves, move_op(chosen, layer, first, num, str(change)))
                first += num
                np.testing.assert_allclose(_logits(runner), want, rtol=0, atol=tolerance)
            if chosen:
                _run(moves, place_op(str(change)))
                assert not np.array_equal(moves.placement[layer], before[layer])
        np.testing.assert_allclose(_logits(runner), want, rtol=0, atol=tolerance)
        assert moves.version >= 3 and _memory(runner) == memory, "graphs would read what was there before"

    with closing(ThreadGroup(size)) as group:
        group.run(rank)


@pytest.mark.parametrize(
    ("name", "is_fused", "changes"),
    [
        ("mixtral", False, {}),
        pytest.param("mixtral", True, {}, marks=pytest.mark.slow),
        ("tiny-deepseek", False, {}),
        ("tiny-deepseek", False, {"quantization": "fp8-block"}),
    ],
)
def test_a_rank_that_starts_again_reads_what_it_lacks(
    name: str, is_fused: bool, changes: dict[str, object], tmp_path: Path
) -> None:
    """From the checkpoint, in the form that its experts have; and back to those that it loaded at first."""
    if name == "mixtral":
        folder = save_model(random_model("mixtral"), tmp_path, is_fused=is_fused)
    else:
        folder = _folder(name, tmp_path)
    want = _logits(_runner(folder, **changes))

    def rank(number: int) -> None:
        runner = _runner(folder, AllToAllDispatch(group.groups[number], _NUM_REDUNDANT), **changes)
        runner.formed()
        moves = _moves(runner)
        num_layers, num_slots = moves.placement.shape
        generator = np.random.default_rng(1)
        wanted = np.stack([generator.permutation(np.arange(num_slots) % moves.num_experts) for _ in range(num_layers)])
        for version, placement in ((9, wanted), (0, None), (12, wanted)):
            message = None
            if placement is not None:
                message = worker_pb2.ExpertPlacement(version=version, experts=pack_ints(placement.ravel()))
            moves.adopt(message)
            assert moves.version == version and (placement is None or np.array_equal(moves.placement, placement))
            np.testing.assert_allclose(_logits(runner), want, rtol=0, atol=2e-5 * float(np.abs(want).max()))

    with closing(ThreadGroup(2)) as group:
        group.run(rank)


def test_random_weights_take_any_expert() -> None:
    folder = Path(__file__).parents[2] / "compose" / "models" / "tiny-deepseek"

    def rank(number: int) -> None:
        runner = _runner(folder, AllToAllDispatch(group.groups[number], _NUM_REDUNDANT), load_format="dummy")
        moves = _moves(runner)
        wanted = np.arange(moves.placement.size).reshape(moves.placement.shape)[:, ::-1] % moves.num_experts
        moves.adopt(worker_pb2.ExpertPlacement(version=3, experts=pack_ints(wanted.astype(np.int32).ravel())))
        runner.formed()
        assert np.isfinite(_logits(runner)).all()

    with closing(ThreadGroup(2)) as group:
        group.run(rank)


@pytest.mark.parametrize("quantization", ["none", "fp8-block"])
def test_random_routers_prefer_some_experts_where_the_config_says_so(quantization: str, tmp_path: Path) -> None:
    """For measuring what moves are worth."""
    config = json.loads((Path(__file__).parents[2] / "compose/models/tiny-deepseek/config.json").read_text())
    config |= {"n_routed_experts": 64, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    shares = []
    for skew in (0.0, 3.0):
        (tmp_path / "config.json").write_text(json.dumps({**config, "dummy_router_skew": skew}))

        def rank(number: int) -> np.ndarray:
            experts = AllToAllDispatch(group.groups[number])
            runner = _runner(tmp_path, experts, load_format="dummy", quantization=quantization)
            runner.formed()
            generator = np.random.default_rng(number)
            ids = generator.integers(5, 60, 15).astype(np.int32)
            runner.set_dispatch_mode(DispatchMode.NORMAL, len(ids))
            runner.logits([Segment(slot=1, ids=ids, start=0, pages=np.array([3, 1, 2, 0], np.int32))])
            return torch.stack([layer.picks_E for layer in runner.model.shared_experts()]).sum(dim=0).numpy()

        with closing(ThreadGroup(2)) as group:
            picks = np.sum(group.run(rank), axis=0)
        shares.append(picks[: len(picks) // 2].sum() / picks.sum())
    assert shares[1] > shares[0] + 0.1, shares


def test_picks_of_tokens_are_told_every_few_dozen_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this rank's own rows, whether they were computed here or not; rows of padding and of warm-ups are none."""
    launch_in_turns(monkeypatch)
    folder = Path(__file__).parents[2] / "compose" / "models" / "tiny-deepseek"
    pages = np.array([3, 1], np.int32)

    def rank(number: int) -> np.ndarray:
        settings = replace(_SETTINGS, num_slots=2)
        experts = AllToAllDispatch(group.groups[number], _NUM_REDUNDANT)
        device = HostDevice()
        shared = create_shared_out(settings, experts, device)
        runner = load_device_runner(folder, settings, device, experts=shared)
        runner.warm_up()
        runner.formed()
        segments = [Segment(slot=1, ids=np.array([5, 99, 3], np.int32), start=0, pages=pages)] if number == 0 else []
        told, tables = [], np.zeros((2, 5), np.int32)
        tables[1, :2] = pages
        rows = replace(no_rows(), page_tables=tables, num_pages=np.array([0, 2], np.int32))
        with torch.inference_mode():
            for _ in range(2 * REPORT_FORWARDS):
                runner.set_dispatch_mode(DispatchMode.NORMAL, 3)
                told.append(runner.launch(rows, segments, 0).result().expert_loads)
        loads = [each for each in told if each is not None]
        assert len(loads) == 2 and told[REPORT_FORWARDS - 1] is not None, "every so many steps"
        np.testing.assert_array_equal(loads[0], loads[1])
        return loads[0].reshape(_moves(runner).num_layers, -1)

    with closing(ThreadGroup(2)) as group:
        mine, idle = group.run(rank)
    num_picks = mine.sum(axis=1) // (3 * REPORT_FORWARDS)
    assert (num_picks > 0).all() and (mine.sum(axis=1) == num_picks * 3 * REPORT_FORWARDS).all()
    assert not idle.any(), "its only row is of padding"


def test_a_rank_that_is_lost_amid_a_slice_ends_it() -> None:
    folder = Path(__file__).parents[2] / "compose" / "models" / "tiny-deepseek"
    with closing(ThreadGroup(2)) as group:

        def formed(number: int) -> DeviceRunner:
            runner = _runner(folder, AllToAllDispatch(group.groups[number], _NUM_REDUNDANT))
            runner.formed()
            return runner

        moves = _moves(group.run(formed)[0])
        op = move_op([ExpertMove(0, moves.per_rank)], 0, 0, 10)
        moves.check(op)
        group.groups[0].communicator = None
        with pytest.raises(CollectiveAborted):
            moves.apply(op)
        moves.drop()
        with pytest.raises(MeshError, match="nothing was moved") as refused:
            moves.check(place_op())
        assert refused.value.reason == ErrorReason.ERROR_REASON_INVALID_ARGUMENT
