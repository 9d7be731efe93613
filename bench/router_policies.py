"""Placement policies beside each other, in virtual time. Prints JSON; needs no GPU and no processes.

python bench/router_policies.py [--replicas 4,16,64] [--policies cache_aware,round_robin] [--workloads groups,chats]
python bench/router_policies.py --plot policies.svg --of bench/results/router_policies.json

The router's own placement (daemons/router/placement) over replicas that are a cost model: a step takes 35 ms, 0.25 ms
a decode row and 0.2 ms an uncached token; chunks of 512 tokens, prefixes that are being computed are waited for, as a
scheduler does it; KV for about a third of the prefixes. Views of caches are reported after every step, loads once a
second. Clients are closed loops. `best_hit_rate` is that of one cache without end, `best_hit_rate_of_kv` that of one
cache with the KV of all replicas that knows the future; no policy has a p99 below `least_ttft_p99_ms`: all clients
begin at once with empty caches (routing/bounds.py). `later` figures leave out what they begin with.
"""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from routing.bounds import best_hit_rate, first_burst_s
from routing.plots import Results, plot
from routing.replica_model import BlockCache, Job, ReplicaModel, StepCost
from routing.workloads import WORKLOADS, Conversation

from radixmesh.daemons.router.placement.placement import PlacedRequest, Placement
from radixmesh.daemons.router.placement.policies import POLICIES, make_policy
from radixmesh.daemons.router.placement.prompt_keys import BLOCK

_LOAD_S = 1.0
# From a client to a scheduler. The first of several that come at once begins a step, and the others wait for its end.
_HOP_S = 0.004


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", default="4", help="numbers of replicas, comma-separated")
    parser.add_argument("--policies", default=",".join(sorted(POLICIES)))
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--seed", type=int, default=1, help="of the workloads")
    parser.add_argument("--slow", type=float, default=1.0, help="a quarter of the replicas takes so many times as long")
    parser.add_argument("--plot", type=Path, help="draw the figures into this file (.svg, .png); needs matplotlib")
    parser.add_argument("--of", type=Path, help="JSON of an earlier run to draw, instead of a run")
    options = parser.parse_args()
    result: Results = json.loads(options.of.read_text()) if options.of else _measure(options)
    if options.plot:
        plot(result, options.plot)
    if not options.of:
        print(json.dumps(result, indent=1))


def _measure(options: argparse.Namespace) -> dict[str, dict[str, dict[str, float]]]:
    return {
        f"{workload}/{count}": {
            policy: Run(policy, workload, int(count), options.seed, options.slow).result()
            for policy in options.policies.split(",")
        }
        for workload in options.workloads.split(",")
        for count in options.replicas.split(",")
    }


@dataclass(slots=True, eq=False)
class _Round:
    """Prompts that a client sent at once. num_open: not answered yet."""

    conversation: Conversation
    num_open: int


class Run:
    """One policy on one workload. Events are (time, number, what happens).

    Results of a step count at its end, and a client's next prompts are at the router _HOP_S later.
    slow: a step of the last quarter of the replicas takes so many times as long.
    """

    def __init__(self, policy: str, workload: str, num_replicas: int, seed: int = 1, slow: float = 1.0) -> None:
        self._now = 0.0
        random = np.random.default_rng(seed)
        conversations, concurrency, kv_tokens = WORKLOADS[workload](random, num_replicas)
        self._placement = Placement(make_policy(policy), now=lambda: self._now, seed=0)
        costs = [StepCost().slowed(slow if 4 * number >= 3 * num_replicas else 1.0) for number in range(num_replicas)]
        self._replicas = [ReplicaModel(cost, BlockCache(kv_tokens)) for cost in costs]
        self._rows = [self._placement.add(f"replica-{n:04}") for n in range(num_replicas)]
        for row in self._rows:
            self._placement.restart(row, kv_tokens)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._busy = [False] * num_replicas
        self._done: list[Job] = []
        self._seen: set[bytes] = set()
        self._best = self._prompt_tokens = 0
        self._prompts: list[tuple[int, list[bytes]]] = []
        self._num_first = self._num_sent = 0
        self._kv_tokens = kv_tokens
        self._imbalance: list[float] = []
        self._sequences = [0] * num_replicas
        self._new = iter(conversations) if len(conversations) > 1 else None
        shared = None if self._new is not None else conversations[0]
        for _ in range(concurrency):
            self._begin(shared if shared is not None else self._next_conversation())

    def result(self) -> dict[str, float]:
        for row in self._rows:
            self._push(_LOAD_S, partial(self._take_load, row))
        while self._events:
            self._now, _, happens = heapq.heappop(self._events)
            happens()
        seconds = max(job.done for job in self._done)
        ttft = sorted(job.first_token - job.arrived for job in self._done)
        later = sorted(job.first_token - job.arrived for job in self._done if job.arrived) or [0.0]
        cached = sum(job.hit * BLOCK for job in self._done)
        return {
            "tok_s": round(sum(job.num_output for job in self._done) / seconds, 1),
            "hit_rate": round(cached / self._prompt_tokens, 3),
            "best_hit_rate": round(self._best / self._prompt_tokens, 3),
            "best_hit_rate_of_kv": round(best_hit_rate(self._prompts, len(self._rows), self._kv_tokens), 3),
            "ttft_p50_ms": round(statistics.median(ttft) * 1e3),
            "ttft_p99_ms": round(ttft[int(0.99 * (len(ttft) - 1))] * 1e3),
            "later_ttft_p50_ms": round(statistics.median(later) * 1e3),
            "later_ttft_p99_ms": round(later[int(0.99 * (len(later) - 1))] * 1e3),
            "least_ttft_p99_ms": round(1e3 * self._least_p99_s()),
            "imbalance": round(statistics.fmean(self._imbalance), 2) if self._imbalance else 0.0,
            "requests": len(self._done),
        }

    def _least_p99_s(self) -> float:
        """Seconds: the first prompts come at once and find empty caches, whoever places them."""
        burst, replicas = self._prompts[: self._num_first], len(self._rows)
        return first_burst_s(burst, replicas=replicas, num_requests=len(self._done), cost=StepCost())

    def _begin(self, conversation: Conversation | None) -> None:
        """The conversation's next prompts; where it has no more, another conversation's first."""
        while conversation is not None:
            prompts = next(conversation, None)
            if prompts is not None:
                turn = _Round(conversation, len(prompts))
                for ids, num_output in prompts:
                    self._submit(turn, ids, num_output)
                return
            conversation = self._next_conversation()

    def _next_conversation(self) -> Conversation | None:
        return next(self._new, None) if self._new is not None else None

    def _submit(self, turn: _Round, ids: bytes, num_output: int) -> None:
        """A client sends a prompt."""
        self._num_sent += 1
        self._num_first += not self._now
        self._push(self._now + _HOP_S, partial(self._place, turn, ids, num_output, self._now))

    def _place(self, turn: _Round, ids: bytes, num_output: int, sent: float) -> None:
        step = 4 * BLOCK
        # A prefix as a key: its length and the hash of its bytes are enough here.
        blocks = [b"%d/%d" % (end, hash(ids[:end])) for end in range(step, len(ids) + 1, step)]
        self._prompt_tokens += len(ids) // 4
        self._prompts.append((len(ids) // 4, blocks))
        self._best += BLOCK * min(sum(key in self._seen for key in blocks), (len(ids) // 4 - 1) // BLOCK)
        self._seen.update(blocks)
        decision = self._placement.choose(PlacedRequest(prompt_ids=ids), self._rows)
        row = decision.row
        self._sequences[row] += 1
        self._placement.take_sent(decision, self._sequences[row])
        job = Job(ids, blocks, num_output, sequence=self._sequences[row], arrived=sent, on_done=turn)
        self._replicas[row].submit(job)
        if not self._busy[row]:
            self._busy[row] = True
            self._step(row)

    def _step(self, row: int) -> None:
        replica = self._replicas[row]
        if replica.is_idle:
            self._busy[row] = False
            return
        seconds, started, done = replica.step(self._now)
        self._push(self._now + seconds, partial(self._end_step, row, started, done))

    def _end_step(self, row: int, started: list[Job], done: list[Job]) -> None:
        for change in self._replicas[row].changes():
            self._placement.apply(row, change)
        for job in started:
            self._placement.replicas.take_first_token(row, job.sequence)
        for job in done:
            self._placement.replicas.take_left(row, job.sequence)
            self._done.append(job)
            turn = job.on_done
            assert isinstance(turn, _Round)
            turn.num_open -= 1
            if not turn.num_open:
                self._begin(turn.conversation)
        self._step(row)

    def _take_load(self, row: int) -> None:
        self._placement.take_load(row, self._replicas[row].load())
        if row == self._rows[0]:
            self._placement.tick()
            outputs = [len(replica.running) + len(replica.waiting) for replica in self._replicas]
            if sum(outputs):
                self._imbalance.append(max(outputs) / (sum(outputs) / len(outputs)))
        if len(self._done) < self._num_sent:
            self._push(self._now + _LOAD_S, partial(self._take_load, row))

    def _push(self, at: float, happens: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (at, self._number, happens))


if __name__ == "__main__":
    main()
