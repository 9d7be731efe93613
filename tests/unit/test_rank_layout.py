"""Ranks' positions: flags, what they may be, and what a scheduler says of workers that are at the wrong one."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from radixmesh.daemons.runtime.rank_layout import RankLayout
from radixmesh.daemons.runtime.settings import load_settings
from radixmesh.daemons.worker.config import Backend, WorkerSettings


@pytest.mark.parametrize("sizes", [(1, 1, 1), (4, 1, 4), (2, 3, 6), (2, 3, 2), (1, 8, 8)])
def test_the_positions_of_a_group_are_its_ranks(sizes: tuple[int, int, int]) -> None:
    tp, dp, ep = sizes
    layouts = [RankLayout.of_rank(rank, tp_size=tp, dp_size=dp, ep_size=ep) for rank in range(tp * dp)]
    assert [layout.rank for layout in layouts] == list(range(tp * dp))
    assert {(layout.tp_rank, layout.dp_rank) for layout in layouts} == set(itertools.product(range(tp), range(dp)))
    assert all(RankLayout.from_proto(layout.to_proto()) == layout for layout in layouts)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"tp_size": 0}, "--tp-size is 0: choose 1 to"),
        ({"dp_size": 1 << 31}, "--dp-size is 2147483648: choose 1 to"),
        ({"tp_size": 64, "dp_size": 64}, "at most 1024 ranks"),
        ({"tp_size": 2, "tp_rank": 2}, r"--tp-rank 2 is outside \[0, 2\)"),
        ({"dp_size": 3, "ep_size": 2}, "--ep-size 2 does not divide the 3 ranks"),
        ({"tp_size": 2, "tp_rank": 1, "ep_size": 2}, "--ep-rank of rank 1 .* is 1"),
    ],
)
def test_a_position_that_no_group_has_names_the_flag(fields: dict[str, int], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        RankLayout(**fields)


def test_flags_make_the_layout() -> None:
    argv = ["--backend", "simulated", "--tp-size", "2", "--tp-rank", "1", "--dp-size", "2", "--dp-rank", "1"]
    settings = load_settings(WorkerSettings, [*argv, "--ep-size", "4", "--ep-rank", "3"], "radixmesh-worker")
    layout = settings.rank_layout
    assert layout.rank == 3 and layout.flags == (
        "--tp-size 2 --tp-rank 1 --dp-size 2 --dp-rank 1 --ep-size 4 --ep-rank 3"
    )


@pytest.mark.parametrize(
    ("backend", "fields", "told"),
    [
        (Backend.CUDA, {"tp_collectives": "ring"}, "must be one of auto, peer, nccl, host"),
        (Backend.CPU, {"tp_collectives": "peer"}, "is for --backend cuda"),
        (Backend.CUDA, {"cuda_device": -1}, "must be >= 0"),
        (Backend.CUDA, {"tp_size": 2, "ep_size": 2, "two_batch_min_rows": 64}, "leave it out"),
        (Backend.CUDA, {"tp_size": 2, "ep_size": 2, "deterministic": True}, "is for --backend cpu"),
        (Backend.SIMULATED, {"tp_size": 2, "tp_rank": 2}, "--tp-rank"),
    ],
)
def test_backends_refuse_what_they_cannot_be(backend: Backend, fields: dict[str, int], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        WorkerSettings(backend=backend, model=Path("m"), **fields)  # type: ignore[arg-type]
