"""Replays a workload against the planner with a simulated worker, in virtual time.

Virtual time is the device's and the network's: a step lasts as long as the latency model says, a plan is at the worker
gap / 2 after it was sent, its result back gap / 2 after the step ended. What the planner costs is real, measured as CPU
time of this thread, and part of no latency here. With equal arguments all but those costs comes out equal.
"""

from __future__ import annotations

import gc
import heapq
from collections.abc import Sequence
from itertools import count

import numpy as np

from radixmesh.cli.bench.oracle import Oracle, oracle_of, prompt_of
from radixmesh.cli.bench.replay.replay_config import ReplayConfig
from radixmesh.cli.bench.replay.step_costs import StepCosts
from radixmesh.cli.bench.replay.tree_preload import LONGEST, TreePreload
from radixmesh.cli.bench.replay.turn_times import TurnTimes
from radixmesh.cli.bench.replay.virtual_group import Pending, VirtualGroup
from radixmesh.cli.bench.workloads import IntArray, Turn, make_workload
from radixmesh.daemons.runtime.finish_reason import FinishReason
from radixmesh.daemons.runtime.sampling import Sampling, Stop
from radixmesh.daemons.scheduler.planning.planner import Planner
from radixmesh.daemons.scheduler.planning.timing.lookahead import Lookahead
from radixmesh.daemons.scheduler.results.outputs import Finished, Outputs
from radixmesh.daemons.scheduler.routers.router_streams import RouterStreams
from radixmesh.daemons.scheduler.sequence import SequenceKey, Submission

_BUSY_SHARE = 0.9
"""A step counts as a full one with so much of the running limit in slots."""


class Replay:
    """One run. Raises ValueError for settings that do not exist."""

    def __init__(self, config: ReplayConfig) -> None:
        self._config = config
        self._turns: Sequence[Turn] = make_workload(config.workload, config.seed, config.num_requests)
        self._oracle = oracle_of(self._turns)
        self._planner = Planner(config.planner_settings())
        self._group = _group_of(config, self._oracle)
        self._times = TurnTimes(self._turns)
        self._costs = StepCosts()
        self._streams = RouterStreams()
        self._streams.open("preload")
        self._outbox = self._streams.open("replay").outbox
        self._children = _children_of(self._turns)
        self._sequences: list[IntArray] = [turn.new_ids for turn in self._turns]
        self._events: list[tuple[float, int, int, Pending | int]] = []
        self._ready: list[int] = []
        self._order = count()
        self._num_under_way = 0
        self._num_dropped = 0
        self._lookahead = Lookahead(depth=config.depth, max_in_flight=self._group.info.max_plans_in_flight)
        self._idle_send: tuple[int, float] = (0, 0.0)
        self._depths: dict[int, int] = {}
        self._saturated_s, self._saturated_tokens, self._last_result_s = 0.0, 0, 0.0

    def run(self) -> dict[str, object]:
        """Everything that was measured, as JSON takes it."""
        gc.collect()
        gc.freeze()  # As daemons do before they serve.
        with self._group:
            self._planner.begin_epoch(1, self._group.info, None)
            start = TreePreload(self._planner, self._group, self._config.seed or 0).fill(self._config.tree_tokens)
            before = self._totals()
            self._last_result_s = start
            self._group.busy_s = 0.0
            for index, turn in enumerate(self._turns):
                if turn.parent is None:
                    self._later(start, index)
            while self._events:
                self._turn_to(self._events[0][0])
            assert not self._planner.num_live, f"{self._planner.num_live} requests are stuck"
            after = self._totals()
        gc.unfreeze()
        return self._report({name: after[name] - before[name] for name in after})

    def _turn_to(self, now: float) -> None:
        """Everything that happens at one moment, then what follows from it."""
        while self._events and self._events[0][0] <= now:
            _, _, _, event = heapq.heappop(self._events)
            if isinstance(event, Pending):
                self._take_result(event, now)
            else:
                self._ready.append(event)
        limit = self._config.running if self._config.is_closed else len(self._turns)
        while self._ready and self._num_under_way < limit:
            self._submit(self._ready.pop(0), now)
        self._send_plans(now)

    def _later(self, now: float, index: int) -> None:
        delay_s = 0.0 if self._config.is_closed else self._turns[index].delay_s / self._config.speed
        # A chat under way goes before one that has not begun, where both are ready.
        heapq.heappush(self._events, (now + delay_s, next(self._order), 0, index))

    def _submit(self, index: int, now: float) -> None:
        prompt = prompt_of(self._turns[index], self._sequences)
        self._sequences[index] = prompt
        self._times.sent_s[index] = now
        self._times.prompt_tokens[index] = len(prompt)
        self._num_under_way += 1
        self._planner.submit(
            Submission(
                key=SequenceKey(f"turn-{index}", 0),
                owner=self._outbox.owner,
                handle=index + 1,
                router="bench",
                prompt_ids=prompt,
                sampling=Sampling(seed=index),
                stop=Stop(max_tokens=self._turns[index].out_len, ignore_eos=True),
            )
        )
        self._take_outputs(self._planner.take_outputs(), now)

    def _send_plans(self, now: float) -> None:
        """As much as the lookahead wants, as the daemon's loop does."""
        state = self._planner.state
        assert state is not None
        while True:
            steps = state.in_flight.steps()
            queued_us = sum(step.plan.expected_us for step in steps[1:])
            if not self._lookahead.wants_more(len(steps), queued_us):
                return
            with self._costs.part("plan"):
                plan = self._planner.plan(now)
            if plan is None:
                return
            if not steps and plan.has_forward:
                self._idle_send = (plan.step_id, now)
            self._depths[len(steps)] = self._depths.get(len(steps), 0) + 1
            pending = self._group.send(plan, now, self._costs)
            self._costs.charge(plan.step_id, self._planner.num_running)
            heapq.heappush(self._events, (pending.arrives_s, next(self._order), 1, pending))

    def _take_result(self, pending: Pending, now: float) -> None:
        result = self._group.receive(pending.step_id, self._costs)
        if self._idle_send[0] == result.step_id:
            device_us = (result.device_end_ns - result.device_start_ns) / 1000
            self._lookahead.observe_round_trip((now - self._idle_send[1]) * 1e6, device_us)
        with self._costs.part("process"):
            outputs = self._planner.process(result)
        with self._costs.part("token_batch"):
            self._streams.deliver(outputs)
            self._outbox.take(1).SerializeToString()
        self._costs.charge(result.step_id)
        if self._planner.num_waiting:
            self._saturated_s += now - self._last_result_s
            self._saturated_tokens += len(result.ids)
        self._last_result_s = now
        self._take_outputs(outputs, now)

    def _take_outputs(self, outputs: Outputs, now: float) -> None:
        for rows in outputs.rows:
            self._times.take(rows, now)
        for finished in outputs.finished:
            self._take_finished(finished, now)
        for rejected in outputs.rejected:
            raise ValueError(f"turn {rejected.handle - 1} cannot run: {rejected.error.message}")

    def _take_finished(self, finished: Finished, now: float) -> None:
        assert finished.reason is FinishReason.LENGTH, finished
        index = finished.handle - 1
        self._num_under_way -= 1
        self._times.cached_tokens[index] = finished.cached_tokens
        output = self._times.output_of(index)
        assert len(output) == self._turns[index].out_len == finished.num_output, (index, len(output))
        self._sequences[index] = np.concatenate([self._sequences[index], output])
        for child in self._children.get(index, ()):
            self._later(now, child)

    def _totals(self) -> dict[str, int]:
        counters, state = self._planner.counters, self._planner.state
        assert state is not None
        return {
            "num_steps": counters.num_steps,
            "retractions": counters.num_retracted,
            "evicted_tokens": state.pages.num_evicted * state.group.page_size,
            "prefilled_tokens": counters.prefilled_tokens,
            "invariant_violations": counters.num_page_violations,
        }

    def _saturated(self) -> dict[str, float]:
        """The time in which somebody waited for a slot or memory: throughput there has no tail in it."""
        tok_s = self._saturated_tokens / self._saturated_s if self._saturated_s else 0.0
        return {"seconds": round(self._saturated_s, 3), "out_tok_s": round(tok_s, 1)}

    def _report(self, totals: dict[str, int]) -> dict[str, object]:
        config, full = self._config, self._costs.report(int(_BUSY_SHARE * self._config.running))
        costs, times = self._costs.report(), self._times.report()
        plans = sum(self._depths.values())
        makespan_s = times["makespan_s"]
        assert isinstance(makespan_s, float)
        return {
            "workload": config.workload,
            "policy": config.policy,
            "oracle_hit_rate": round(self._oracle.hit_rate, 6),
            **times,
            "step_ms": costs["ms"],
            "step_parts_us": costs["parts_us"],
            "full_steps": full,
            **totals,
            "num_requests": len(self._turns),
            "working_set_tokens": self._oracle.working_set_tokens,
            "cache_tokens": self._group.info.num_pages * config.page_size,
            "device_busy": round(self._group.busy_s / makespan_s, 4) if makespan_s else 0.0,
            "saturated": self._saturated(),
            "mean_depth": round(sum(d * n for d, n in self._depths.items()) / max(1, plans), 3),
            "config": config.as_json(),
        }


def _group_of(config: ReplayConfig, oracle: Oracle) -> VirtualGroup:
    longest = max(oracle.longest, LONGEST if config.tree_tokens else 0)
    tokens = config.cache_tokens
    if tokens is None:
        # A request owns up to its own length once more while others compute what it shares with them.
        tokens = config.tree_tokens + oracle.working_set_tokens + config.running * longest
    return VirtualGroup(
        num_pages=-(-tokens // config.page_size),
        page_size=config.page_size,
        num_slots=config.running,
        max_total_len=longest + 1,
        step_tokens=config.step_tokens,
        gap_us=config.gap_us,
    )


def _children_of(turns: Sequence[Turn]) -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for index, turn in enumerate(turns):
        if turn.parent is not None:
            children.setdefault(turn.parent, []).append(index)
    return children
