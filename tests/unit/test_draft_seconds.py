"""Time in drafts: what the runner measures becomes a counter of the worker, by what each step added."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from support.drafting import cpu_drafter, target_folder
from support.planner_world import World

from radixmesh.daemons.runtime.rpc.health.progress import Progress
from radixmesh.daemons.runtime.sampling import Sampling, Stop
from radixmesh.daemons.runtime.telemetry.metrics import Metrics
from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.cpu.runner import CpuRunner
from radixmesh.daemons.worker.plans.plans_in_flight import PlansInFlight


def test_steps_that_draft_tell_the_time_of_it_and_the_worker_counts_it() -> None:
    runner = load_cpu_runner(target_folder("eagle3", "tiny-llama"), num_pages=200, threads=1, max_total_len=64)
    assert isinstance(runner, CpuRunner)
    metrics = Metrics()
    counted = PlansInFlight(Progress(), metrics)

    def counter() -> float | None:
        return metrics.registry.get_sample_value("radixmesh_draft_seconds_total")

    def run() -> float:
        world = World(runner=runner, num_slots=2, chunk_tokens=16)
        world.submit([40, 41, 42, 43], sampling=Sampling(temperature=0.0), stop=Stop(max_tokens=8))
        while world.plan() and world.execute():
            counted.completed(replace(world.results[-1], counts=np.ones(1, np.int32)), runner.draft_seconds)
            world.process()
        return counter() or 0.0

    assert run() == runner.draft_seconds == 0.0
    runner.verify(cpu_drafter("eagle3", runner, "tiny-llama"), max_drafts=4)
    assert run() > 0.0
    assert abs((counter() or 0.0) - runner.draft_seconds) < 1e-9
