"""Recorded plans sent to a worker again with no scheduler and no wire: what the GPU and the worker's own code take.

    python bench/gpu/mesh.py --workloads decode-256 --runs 1 --worker record_plans=/tmp/plans.bin
    python bench/gpu/replay.py /tmp/plans.bin

The plans have to be those of one epoch, from its first step on, of a worker of the same shape that began with no KV.
With --runs the best counts, as it does through the mesh: the first one of a process is slower than those after it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu.shapes import write_shape

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import StepResult
from radixmesh.daemons.runtime.steps.step_codec import plan_from_proto
from radixmesh.daemons.worker.cuda.load import DeviceSettings, load_cuda_runner
from radixmesh.daemons.worker.cuda.runner import DeviceRunner
from radixmesh.daemons.worker.plans.executor import StepExecutor
from radixmesh.daemons.worker.plans.files.plan_recorder import read_plans
from radixmesh.daemons.worker.step_handle import StepHandle
from radixmesh.worker.v1 import worker_pb2

_IN_FLIGHT = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", type=Path)
    parser.add_argument("--shape", default="llama-3.2-3b")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--runs", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = DeviceSettings(
            dtype="auto",
            attention_backend=args.attention,
            load_format="dummy",
            page_size=1,
            num_pages=None,
            num_slots=512,
            max_tokens_per_step=8192,
            max_total_len=8192,
            mem_fraction=0.88,
            cuda_graphs=True,
            use_pdl=True,
            deterministic=False,
        )
        runner = load_cuda_runner(write_shape(args.shape, Path(folder)), settings)
    plans = list(read_plans(args.plans))
    runs = [replay(runner, plans) for _ in range(args.runs)]
    best = max(runs, key=lambda run: run["tok_s"])
    print(json.dumps({"plans": len(plans), **best, "runs": [run["tok_s"] for run in runs]}))


def replay(runner: DeviceRunner, plans: Sequence[worker_pb2.StepPlan]) -> dict[str, float]:
    """All plans, from no KV on."""
    runner.clear()
    executor = StepExecutor(runner, num_slots=512, max_tokens_per_step=8192)
    executor.begin_epoch(plans[0].header.epoch, plans[0].header.group_generation)
    pending: deque[StepHandle[StepResult]] = deque()
    settled: list[StepResult] = []
    start = time.perf_counter()
    for message in plans:
        plan = plan_from_proto(message)
        while True:
            try:
                pending.append(executor.launch(plan, ready_ns=runner.now_ns()))
                break
            except MeshError:
                # It shares pages that a step under way fills: the scheduler had that step's result when it planned.
                if not pending:
                    raise
            settled.append(pending.popleft().result())
        while len(pending) >= _IN_FLIGHT or (pending and pending[0].is_done):
            settled.append(pending.popleft().result())
    settled += [step.result() for step in pending]
    seconds = time.perf_counter() - start
    num_tokens = sum(len(result.ids) for result in settled)
    busy_ns = sum(result.device_end_ns - result.device_start_ns for result in settled)
    return {
        "tokens": num_tokens,
        "seconds": round(seconds, 4),
        "tok_s": round(num_tokens / seconds, 1),
        "device_busy": round(busy_ns * 1e-9 / seconds, 4),
    }


if __name__ == "__main__":
    main()
