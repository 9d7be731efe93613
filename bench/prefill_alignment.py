"""Prompts of ranks that share experts wait for each other: steps out of low latency, and times of tokens.

    python bench/prefill_alignment.py --ranks 8 --rate 40 --steps 0 2 4 8 16

Virtual time, no workers: a step takes --low-ms where experts are reached at low latency, --normal-ms and --us-a-token
for each token of the fullest rank where not. Requests come at random (Poisson) with prompts of 200 to 600 tokens and
answers of 200; the same ones for each choice of --prefill-align-steps. Reported: share of steps at low latency,
milliseconds to the first token (mean, p99), milliseconds a token of the answers, requests admitted a step that admits.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field

import numpy as np
from scheduler_ranks import Load

from radixmesh.daemons.runtime.steps.step import DispatchMode, StepPlan
from radixmesh.daemons.scheduler.results.outputs import Outputs

OUTPUT_TOKENS = 200
SHORTEST, LONGEST = 200, 600
"""Tokens of a prompt."""


@dataclass(frozen=True)
class Costs:
    """Milliseconds of a step."""

    low_ms: float
    normal_ms: float
    us_a_token: float

    def of(self, plan: StepPlan) -> float:
        if plan.dispatch is DispatchMode.LOW_LATENCY:
            return self.low_ms
        return self.normal_ms + self.us_a_token * plan.max_tokens_per_rank / 1000


@dataclass
class Run:
    """Times and counts of one choice."""

    arrival_ms: list[float] = field(default_factory=list)
    first_ms: dict[int, float] = field(default_factory=dict)
    end_ms: dict[int, float] = field(default_factory=dict)
    num_low: int = 0
    num_steps: int = 0
    admits: list[int] = field(default_factory=list)

    def stepped(self, plan: StepPlan, outputs: Outputs, now: float) -> None:
        """A step ended at that time, in milliseconds."""
        self.num_steps += 1
        self.num_low += plan.dispatch is DispatchMode.LOW_LATENCY
        if plan.admits:
            self.admits.append(len(plan.admits))
        for rows in outputs.rows:
            for handle in rows.handles.tolist():
                self.first_ms.setdefault(handle, now)
        for finished in outputs.finished:
            self.end_ms[finished.handle] = now

    def report(self, align_steps: int) -> dict[str, object]:
        waits = np.array([self.first_ms[i] - self.arrival_ms[i] for i in self.end_ms])
        rows = np.array([(self.end_ms[i] - self.first_ms[i]) / (OUTPUT_TOKENS - 1) for i in self.end_ms])
        return {
            "align_steps": align_steps,
            "low_latency_share": round(self.num_low / self.num_steps, 3),
            "ttft_ms": {"mean": round(float(waits.mean()), 1), "p99": round(float(np.percentile(waits, 99)), 1)},
            "itl_ms": round(float(rows.mean()), 2),
            "admits_a_step": round(float(np.mean(self.admits)), 2),
            "requests": len(self.end_ms),
        }


def run(num_ranks: int, rate: float, num_requests: int, align_steps: int, costs: Costs) -> Run:
    """rate: requests a second."""
    load = Load(num_ranks, 64, ep_size=num_ranks, align_steps=align_steps)
    rng = np.random.default_rng(3)
    arrivals = np.cumsum(rng.exponential(1000 / rate, num_requests)).tolist()
    prompts = [rng.integers(5, 32_000, int(n)).astype(np.int32) for n in rng.integers(SHORTEST, LONGEST, num_requests)]
    result, now, num_sent = Run(arrivals), 0.0, 0
    while len(result.end_ms) < num_requests:
        while num_sent < num_requests and arrivals[num_sent] <= now:
            load.submit_prompt(num_sent, prompts[num_sent], OUTPUT_TOKENS)
            num_sent += 1
        plan = load.planner.plan(now / 1000)
        if plan is None:
            now = arrivals[num_sent]
            continue
        now += costs.of(plan)
        result.stepped(plan, load.planner.process(load.planner.joined(load.results())), now)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rate", type=float, default=40, help="requests a second")
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 2, 4, 8, 16])
    parser.add_argument("--low-ms", type=float, default=15)
    parser.add_argument("--normal-ms", type=float, default=25)
    parser.add_argument("--us-a-token", type=float, default=40)
    args = parser.parse_args()
    costs = Costs(args.low_ms, args.normal_ms, args.us_a_token)
    runs = [run(args.ranks, args.rate, args.requests, steps, costs).report(steps) for steps in args.steps]
    print(json.dumps({"command": vars(args), "runs": runs}, indent=1))


if __name__ == "__main__":
    main()
