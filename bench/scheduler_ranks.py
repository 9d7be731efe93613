"""The scheduler's time a step with many data-parallel ranks: planning, encoding, joining and processing, no workers.

    python bench/scheduler_ranks.py --ranks 64 --rows 128

Results are made up: one ordinary token a row. Prompts share prefixes in groups; as many requests come as end.
"""

from __future__ import annotations

import argparse
import gc
import json
import time

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.sampling import Sampling, Stop
from radixmesh.daemons.runtime.steps.step import StepResult
from radixmesh.daemons.runtime.steps.step_codec import encode_plan
from radixmesh.daemons.scheduler.group.group_info import GroupInfo
from radixmesh.daemons.scheduler.planning.planner import Planner
from radixmesh.daemons.scheduler.planning.settings import PlannerSettings
from radixmesh.daemons.scheduler.sequence import SequenceKey, Submission

PROMPT_TOKENS, SHARED_TOKENS, OUTPUT_TOKENS = 256, 128, 400
NUM_STEMS = 64


class Load:
    """Submits requests, and answers plans with made-up tokens."""

    def __init__(self, num_ranks: int, num_rows: int, *, ep_size: int = 1, align_steps: int = 0) -> None:
        self.rng = np.random.default_rng(0)
        self.group = GroupInfo(
            page_size=16,
            num_pages=num_rows * 64 * 2,
            num_slots=num_rows,
            dp_size=num_ranks,
            ep_size=ep_size,
            max_tokens_per_step=8192,
            max_plans_in_flight=4,
            vocab_size=32_000,
            max_total_len=4096,
        )
        self.planner = Planner(PlannerSettings(max_queue=1 << 20, prefill_align_steps=align_steps))
        self.planner.begin_epoch(1, self.group, None)
        self.stems = self.rng.integers(5, 32_000, (NUM_STEMS, SHARED_TOKENS)).astype(np.int32)
        self.num_submitted = 0

    def submit(self, num: int) -> None:
        for _ in range(num):
            self.num_submitted += 1
            stem = self.stems[self.num_submitted % NUM_STEMS]
            rest = self.rng.integers(5, 32_000, PROMPT_TOKENS - SHARED_TOKENS).astype(np.int32)
            # Ends come one by one, not all at once.
            num_out = int(self.rng.integers(OUTPUT_TOKENS // 2, 3 * OUTPUT_TOKENS // 2))
            self.submit_prompt(self.num_submitted, np.concatenate([stem, rest]), num_out)

    def submit_prompt(self, handle: int, prompt_ids: IntArray, num_out: int) -> None:
        """One request for so many tokens."""
        self.planner.submit(
            Submission(
                key=SequenceKey(f"r{handle}", 0, ""),
                owner=1,
                handle=handle,
                prompt_ids=prompt_ids,
                sampling=Sampling(temperature=0.0),
                stop=Stop(max_tokens=num_out),
            )
        )

    def results(self) -> list[StepResult]:
        state = self.planner.state
        assert state is not None and state.in_flight.oldest is not None
        step = state.in_flight.oldest
        counts = np.bincount(step.rows.slots // state.table.slots_per_rank, minlength=self.group.dp_size).tolist()
        return [
            StepResult(
                epoch=1,
                step_id=step.plan.step_id,
                counts=np.ones(num, np.int32),
                ids=self.rng.integers(5, 32_000, num).astype(np.int32),
                device_end_ns=10_000_000,
            )
            for num in counts
        ]


def measure(num_ranks: int, num_rows: int, num_steps: int) -> dict[str, object]:
    """CPU milliseconds a step, once all slots are taken."""
    load = Load(num_ranks, num_rows)
    planner, group = load.planner, load.group
    load.submit(num_ranks * num_rows)
    spent: dict[str, list[float]] = {"plan": [], "encode": [], "join": [], "process": []}
    warm = 0
    gc.freeze()
    while len(spent["plan"]) < num_steps:
        load.submit(num_ranks * num_rows - planner.num_live)
        start = time.thread_time()
        plan = planner.plan(0.0)
        planned = time.thread_time()
        assert plan is not None
        encode_plan(plan, 1, num_ranks, group.num_slots)
        encoded = time.thread_time()
        results = load.results()
        before = time.thread_time()
        result = planner.joined(results)
        joined = time.thread_time()
        planner.process(result)
        done = time.thread_time()
        # All slots are taken, and the first ones have ended.
        warm += planner.num_running > 0.95 * num_ranks * num_rows
        if warm > 50:
            for name, took in zip(
                spent, (planned - start, encoded - planned, joined - before, done - joined), strict=True
            ):
                spent[name].append(1000 * took)
    total = np.sum([spent[name] for name in spent], axis=0)
    return {
        "ranks": num_ranks,
        "rows": num_rows,
        "admitted_a_step": round(load.num_submitted / (planner.counters.num_steps + 1), 2),
        "hit_rate": round(planner.counters.hit_rate, 3),
        "num_retracted": planner.counters.num_retracted,
        **{f"{name}_ms": round(float(np.mean(spent[name])), 3) for name in spent},
        "step_ms": round(float(total.mean()), 3),
        "step_p99_ms": round(float(np.quantile(total, 0.99)), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    print(json.dumps(measure(args.ranks, args.rows, args.steps)))


if __name__ == "__main__":
    main()
