"""kill -9 and SIGSTOP of ranks that are processes of their own, of their scheduler and its standby, streams open."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
from support.fault_injection import kill_in_turn
from support.jobs import simulated_jobs
from support.mesh import running_mesh

from radixmesh.daemons.runtime.rank_layout import RankLayout

NUM_STREAMS = 8
SEED = 20
_RANK = """
  {name}:
    image: radixmesh/daemons:local
    restart: unless-stopped
    command: ["radixmesh", "worker"]
    environment:
      RADIXMESH_LISTEN: 0.0.0.0:50051
      RADIXMESH_METRICS_LISTEN: 0.0.0.0:9100
      RADIXMESH_MODEL: /models/tiny-llama
      RADIXMESH_BACKEND: simulated
    volumes:
      - {models}/tiny-llama:/models/tiny-llama:ro
    healthcheck:
      test: ["CMD", "radixmesh", "health", "127.0.0.1:50051", "--timeout", "9"]
      x-local: {{interval: 1s, timeout: 1s, retries: 5, start_period: 60s, start_interval: 200ms}}
"""
_MODELS = Path(__file__).parents[2] / "compose" / "models"


def name_of(rank: int) -> str:
    return f"worker-{rank}" if rank else "worker"


async def kill_ranks(folder: Path, *, tp_size: int, dp_size: int, plan: list[tuple[str, signal.Signals]]) -> None:
    """plan: kills of "worker" (rank 0), "worker-1", ..., "scheduler" (one of two), in order."""
    num_ranks = tp_size * dp_size
    overlay = folder / "ranks.yml"
    ranks = "".join(_RANK.format(name=name_of(rank), models=_MODELS) for rank in range(1, num_ranks))
    overlay.write_text(f"services:{ranks}")
    services: dict[str, dict[str, object]] = {}
    for rank in range(num_ranks):
        layout = RankLayout.of_rank(rank, tp_size=tp_size, dp_size=dp_size, ep_size=1)
        positions = {
            f"{kind}_{what}": getattr(layout, f"{kind}_{what}") for kind in ("tp", "dp") for what in ("size", "rank")
        }
        services[name_of(rank)] = {**positions, "simulated_base_us": 6000, "num_slots": 16}
    workers = ",".join(f"{name_of(rank)}:50051" for rank in range(num_ranks))
    async with running_mesh(
        "simulated",
        overlays=(overlay,),
        services=services,
        scale={"scheduler": 2},
        scheduler={"workers": workers},
    ) as mesh:
        jobs = simulated_jobs(NUM_STREAMS, num_tokens=400)
        jobs = [job if job.answers else job.learned(await job.run(mesh.client)) for job in jobs]
        await kill_in_turn(mesh, jobs, plan, num_streams=NUM_STREAMS, seed=SEED)


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_no_stream_notices_a_kill_of_a_rank_or_its_scheduler(tmp_path: Path) -> None:
    plan = [("worker-1", signal.SIGKILL), ("scheduler", signal.SIGKILL)]
    await kill_ranks(tmp_path, tp_size=1, dp_size=2, plan=plan)


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["sigkill", "sigstop"])
@pytest.mark.parametrize(("tp_size", "dp_size"), [(2, 1), (1, 2), (2, 2), (1, 4)])
async def test_three_kills_of_every_rank_and_of_schedulers(
    tmp_path: Path, tp_size: int, dp_size: int, number: signal.Signals
) -> None:
    names = [name_of(rank) for rank in range(tp_size * dp_size)]
    plan = [(service, number) for service in (*names, "scheduler", "scheduler") for _ in range(3)]
    random.Random(SEED).shuffle(plan)
    await kill_ranks(tmp_path, tp_size=tp_size, dp_size=dp_size, plan=plan)
