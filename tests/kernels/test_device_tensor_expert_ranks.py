"""Tensor parallelism beside shared experts on a device backend: logits are those of one rank, whoever computes what.

Where --ep-size divides --tp-size no row travels; otherwise each rank of a batch brings a part of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from kernels.test_device_expert_ranks import _IDS, _SETTINGS, _folder, _logits
from support.thread_ranks import ThreadRanks
from support.triton_interpreter import launch_in_turns
from unit.test_expert_moves import move_op, place_op

from radixmesh.daemons.runtime.steps.step import DispatchMode
from radixmesh.daemons.scheduler.planning.experts.expert_moves import fewest_moves
from radixmesh.daemons.worker.collectives.expert_all_to_all import AllToAllDispatch
from radixmesh.daemons.worker.cuda.device import HostDevice
from radixmesh.daemons.worker.cuda.expert_parallel.expert_moves import DeviceExpertMoves
from radixmesh.daemons.worker.cuda.expert_parallel.row_share import RowShare
from radixmesh.daemons.worker.cuda.load import create_shared_out, load_device_runner
from radixmesh.daemons.worker.cuda.ranks.device_group import HostGroup
from radixmesh.daemons.worker.cuda.runner import DeviceRunner
from radixmesh.daemons.worker.cuda.step.prompt_steps import no_rows
from radixmesh.daemons.worker.experts.expert_moves import REPORT_FORWARDS
from radixmesh.daemons.worker.runner import Segment

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks of GPUs are processes: tests/gpu")

RanksOf = Callable[[int, int, int], ThreadRanks]


@pytest.fixture
def ranks_of() -> Iterator[RanksOf]:
    made: list[ThreadRanks] = []

    def create(tp_size: int, dp_size: int, ep_size: int) -> ThreadRanks:
        made.append(ThreadRanks(tp_size=tp_size, dp_size=dp_size, ep_size=ep_size))
        return made[-1]

    yield create
    for ranks in made:
        ranks.close()


def _runner(folder: Path, ranks: ThreadRanks, rank: int, num_redundant: int = 0, **changes: object) -> DeviceRunner:
    settings, device, batch = replace(_SETTINGS, **changes), HostDevice(), ranks.batches[rank]  # type: ignore[arg-type]
    shared = create_shared_out(settings, AllToAllDispatch(ranks.experts[rank], num_redundant), device, batch)
    return load_device_runner(folder, settings, device, HostGroup(batch), shared)


def _want(folder: Path, num: int, **changes: object) -> list[np.ndarray]:
    """Logits of so many batches, by one rank."""
    alone = load_device_runner(folder, replace(_SETTINGS, **changes), HostDevice())  # type: ignore[arg-type]
    return [_logits(alone, shift) for shift in range(num)]


@pytest.mark.parametrize(
    ("name", "tp_size", "dp_size", "ep_size"),
    [
        ("tiny-deepseek", 2, 1, 2),
        ("tiny-deepseek", 2, 2, 4),
        ("tiny-deepseek", 2, 2, 2),
        ("tiny-deepseek", 4, 1, 2),
        ("mixtral", 2, 1, 2),
        ("mixtral", 2, 2, 4),
        pytest.param("qwen3_moe", 2, 3, 3, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 2, 2, 4, marks=pytest.mark.slow),
    ],
)
def test_logits_are_those_of_one_rank(
    name: str, tp_size: int, dp_size: int, ep_size: int, tmp_path: Path, ranks_of: RanksOf
) -> None:
    """Of each batch; all its ranks have them, to the bit. Steps of one row too: some ranks bring none."""
    folder = _folder(name, tmp_path)
    want, ranks = _want(folder, dp_size), ranks_of(tp_size, dp_size, ep_size)

    def on_rank(rank: int) -> np.ndarray:
        runner = _runner(folder, ranks, rank)
        assert (runner.links.travels is not None) == (tp_size % ep_size > 0)
        runner.formed()
        return _logits(runner, shift=ranks.layouts[rank].dp_rank)

    got = ranks.run(on_rank)
    for layout in ranks.layouts:
        of_batch = want[layout.dp_rank]
        np.testing.assert_array_equal(got[layout.rank], got[layout.dp_rank * tp_size])
        np.testing.assert_allclose(got[layout.rank], of_batch, rtol=0, atol=2e-5 * float(np.abs(of_batch).max()))


@pytest.mark.parametrize(("dp_size", "ep_size"), [(1, 2), (2, 4)])
def test_fp8_experts_are_whole_beside_shares_of_projections(dp_size: int, ep_size: int, ranks_of: RanksOf) -> None:
    """As far from the weights' own logits as those of one rank: scales of shares are not those of whole matrices."""
    folder = _folder("tiny-deepseek", Path())
    exact, want = _want(folder, dp_size), _want(folder, dp_size, quantization="fp8-block")
    ranks = ranks_of(2, dp_size, ep_size)

    def on_rank(rank: int) -> np.ndarray:
        runner = _runner(folder, ranks, rank, quantization="fp8-block")
        runner.formed()
        return _logits(runner, shift=ranks.layouts[rank].dp_rank)

    for layout, got in zip(ranks.layouts, ranks.run(on_rank), strict=True):
        of_batch = layout.dp_rank
        assert np.abs(got - exact[of_batch]).mean() < 2.5 * np.abs(want[of_batch] - exact[of_batch]).mean()


@pytest.mark.parametrize(("tp_size", "dp_size", "ep_size"), [(2, 1, 2), (4, 1, 2), (2, 2, 4)])
def test_logits_stay_while_experts_move(tp_size: int, dp_size: int, ep_size: int, ranks_of: RanksOf) -> None:
    """Ranks that route the same rows take the same copies of experts, and none of a row's picks twice."""
    folder, num_redundant = _folder("tiny-deepseek", Path()), 4
    want, ranks = _want(folder, dp_size), ranks_of(tp_size, dp_size, ep_size)

    def on_rank(rank: int) -> None:
        runner, of_batch = _runner(folder, ranks, rank, num_redundant), ranks.layouts[rank].dp_rank
        runner.formed()
        moves, generator = runner.expert_moves, np.random.default_rng(3)
        assert isinstance(moves, DeviceExpertMoves)
        num_slots = moves.placement.shape[1]
        for change in range(4):
            before, layer = moves.placement, change % moves.num_layers
            more = generator.integers(0, moves.num_experts, num_slots - moves.num_experts)
            new = generator.permutation(np.concatenate((np.arange(moves.num_experts), more)))
            chosen = fewest_moves(before[layer].tolist(), new.reshape(ep_size, -1).tolist())
            for op in (move_op(chosen, layer, 0, moves.expert_bytes, str(change)), place_op(str(change))):
                moves.check(op)
                moves.apply(op)
            assert not np.array_equal(moves.placement[layer], before[layer])
            tolerance = 2e-5 * float(np.abs(want[of_batch]).max())
            np.testing.assert_allclose(_logits(runner, of_batch), want[of_batch], rtol=0, atol=tolerance)

    ranks.run(on_rank)


@pytest.mark.parametrize(("tp_size", "dp_size", "ep_size"), [(2, 1, 2), (4, 1, 2), (2, 2, 4)])
def test_each_pick_is_counted_once(
    tp_size: int, dp_size: int, ep_size: int, ranks_of: RanksOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the ranks together, whose reports a scheduler adds up; padding is none."""
    launch_in_turns(monkeypatch)
    folder, ranks = _folder("tiny-deepseek", Path()), ranks_of(tp_size, dp_size, ep_size)
    pages = np.array([3, 1], np.int32)

    def on_rank(rank: int) -> np.ndarray:
        runner = _runner(folder, ranks, rank, num_redundant=4, num_slots=2)
        runner.warm_up()
        runner.formed()
        has_rows = ranks.layouts[rank].dp_rank == 0
        segments = [Segment(slot=1, ids=_IDS[:3], start=0, pages=pages)] if has_rows else []
        tables = np.zeros((2, 5), np.int32)
        tables[1, :2] = pages
        rows, told = replace(no_rows(), page_tables=tables, num_pages=np.array([0, 2], np.int32)), []
        with torch.inference_mode():
            for _ in range(REPORT_FORWARDS):
                runner.set_dispatch_mode(DispatchMode.NORMAL, 3)
                told.append(runner.launch(rows, segments, 0).result().expert_loads)
        assert told[-1] is not None, "idle ranks report too"
        assert isinstance(runner.expert_moves, DeviceExpertMoves)
        return np.asarray(told[-1]).reshape(runner.expert_moves.num_layers, -1)

    picks = np.sum(ranks.run(on_rank), axis=0).sum(axis=1)
    num_picks = 2
    assert picks.tolist() == [3 * num_picks * REPORT_FORWARDS] * len(picks)


@pytest.mark.parametrize(("num_rows", "num_parts"), [(0, 2), (1, 2), (7, 2), (8, 3), (5, 8)])
def test_shares_are_all_rows_and_nearly_of_one_size(num_rows: int, num_parts: int) -> None:
    shares = [RowShare(part, num_parts) for part in range(num_parts)]
    assert [row for share in shares for row in range(num_rows)[share.of(num_rows)]] == list(range(num_rows))
    sizes = [len(range(num_rows)[share.of(num_rows)]) for share in shares]
    assert max(sizes) == shares[0].most(num_rows) and max(sizes) - min(sizes) <= 1
