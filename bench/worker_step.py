"""Cost of the worker's half of a step: decode the plan, execute it on the simulated model, encode the result.

In process, virtual time, one thread: process CPU time, so neighbours on the machine hardly matter.

    PYTHONPATH=src python bench/worker_step.py --rows 256 --steps 1000
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence

import numpy as np

from radixmesh.daemons.runtime.arrays import as_ints
from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.runtime.steps.result_codec import records_to_proto, result_to_proto
from radixmesh.daemons.runtime.steps.step import Admit, Chunk, Grant, StepPlan
from radixmesh.daemons.runtime.steps.step_codec import encode_plan, plan_from_proto
from radixmesh.daemons.worker.plans.executor import StepExecutor
from radixmesh.daemons.worker.simulated.clock import VirtualClock
from radixmesh.daemons.worker.simulated.latency import LatencyModel
from radixmesh.daemons.worker.simulated.runner import SimulatedRunner
from radixmesh.daemons.worker.simulated.token_source import Alphabet
from radixmesh.worker.v1 import worker_pb2

VOCAB_SIZE = 32_000
PROMPT_LEN = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--pages", type=int, default=1 << 20)
    args = parser.parse_args()
    executor = _executor(args.rows, args.pages, PROMPT_LEN + 2 * args.steps + 8)
    granted = PROMPT_LEN + args.steps + 4
    first = _first_plan(args.rows, granted)
    _step(executor, first)
    _step(executor, StepPlan(epoch=1, step_id=2, decode_set=as_ints(np.arange(args.rows))))
    plain = [_step(executor, StepPlan(epoch=1, step_id=3 + i)) for i in range(args.steps)]
    free = args.rows * granted
    granting = [
        _step(executor, _granting_plan(args.rows, 3 + args.steps + i, free + i * args.rows))
        for i in range(min(args.steps, (args.pages - free) // args.rows))
    ]
    start = time.process_time()
    ranges, _ = executor.snapshot()
    num_bytes = sum(len(records_to_proto(part).SerializeToString()) for part in ranges)
    snapshot_s = time.process_time() - start
    report = {
        "rows": args.rows,
        "decode_step_us": _summary(plain),
        "decode_step_with_one_page_granted_to_each_row_us": _summary(granting),
        "snapshot": {"pages": args.pages, "seconds": round(snapshot_s, 3), "bytes": num_bytes},
    }
    print(json.dumps(report, indent=2))


def _executor(rows: int, pages: int, max_total_len: int) -> StepExecutor:
    runner = SimulatedRunner(
        page_size=1,
        num_pages=pages,
        vocab_size=VOCAB_SIZE,
        max_total_len=max_total_len,
        alphabet=Alphabet.of(VOCAB_SIZE),
        latency=LatencyModel(),
        clock=VirtualClock(),
    )
    executor = StepExecutor(runner, num_slots=rows, max_tokens_per_step=rows * PROMPT_LEN)
    executor.begin_epoch(1)
    return executor


def _first_plan(rows: int, granted: int) -> StepPlan:
    return StepPlan(
        epoch=1,
        step_id=1,
        admits=tuple(
            Admit(
                slot=row,
                generation=1,
                request_id=str(row),
                prompt_ids=as_ints(np.arange(PROMPT_LEN) + row),
                max_total_len=granted + granted - PROMPT_LEN,
                sampling=Sampling(temperature=0.7, seed=row),
            )
            for row in range(rows)
        ),
        grants=tuple(Grant(slot=row, pages=as_ints(np.arange(granted) + row * granted)) for row in range(rows)),
        chunks=tuple(Chunk(slot=row, length=PROMPT_LEN) for row in range(rows)),
    )


def _granting_plan(rows: int, step_id: int, first_page: int) -> StepPlan:
    grants = tuple(Grant(slot=row, pages=as_ints([first_page + row])) for row in range(rows))
    return StepPlan(epoch=1, step_id=step_id, grants=grants)


def _step(executor: StepExecutor, plan: StepPlan) -> tuple[float, float, float]:
    """Microseconds of CPU to decode, execute and encode."""
    data = encode_plan(plan)
    times = [time.process_time()]
    decoded = plan_from_proto(worker_pb2.ExecuteRequest.FromString(data).plan)
    times.append(time.process_time())
    result = executor.run(decoded)
    times.append(time.process_time())
    worker_pb2.ExecuteResponse(result=result_to_proto(result)).SerializeToString()
    times.append(time.process_time())
    assert len(result.counts) == int(result.counts.sum()), (
        "a row had no room: the bench would measure less than it says"
    )
    decode, execute, encode = np.diff(times) * 1e6
    return float(decode), float(execute), float(encode)


def _summary(steps: Sequence[tuple[float, float, float]]) -> dict[str, float]:
    table = np.array(steps)
    decode, execute, encode = np.median(table, axis=0)
    total = table.sum(axis=1)
    values = {
        "decode": decode,
        "execute": execute,
        "encode": encode,
        "total_median": np.median(total),
        "total_p99": np.percentile(total, 99),
    }
    return {name: round(float(value), 1) for name, value in values.items()}


if __name__ == "__main__":
    main()
