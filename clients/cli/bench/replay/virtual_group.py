"""A simulated worker at the end of two sockets, in virtual time."""

from __future__ import annotations

from typing import NamedTuple

from radixmesh.cli.bench.replay.step_costs import StepCosts
from radixmesh.cli.bench.replay.step_socket import StepSocket
from radixmesh.cli.bench.workloads import VOCAB_SIZE
from radixmesh.daemons.runtime.steps.result_codec import result_from_proto, result_to_proto
from radixmesh.daemons.runtime.steps.step import StepPlan, StepResult
from radixmesh.daemons.runtime.steps.step_codec import encode_plan, plan_from_proto
from radixmesh.daemons.scheduler.group.group_info import GroupInfo
from radixmesh.daemons.worker.plans.executor import StepExecutor
from radixmesh.daemons.worker.simulated.clock import VirtualClock
from radixmesh.daemons.worker.simulated.latency import LatencyModel
from radixmesh.daemons.worker.simulated.runner import SimulatedRunner
from radixmesh.daemons.worker.simulated.token_source import Alphabet
from radixmesh.worker.v1 import worker_pb2

_PLANS_IN_FLIGHT = 4
_SPECIAL_IDS = range(10)


class Pending(NamedTuple):
    """A result on its way: when it arrives, and when its step ran, in seconds of virtual time."""

    arrives_s: float
    step_id: int


class VirtualGroup:
    """Takes plans as a worker does and says when their results arrive. A context manager.

    Plan and result travel as encoded messages over real sockets, each for gap_us / 2 of virtual time. The scheduler's
    share of that work is counted in `costs`, the worker's is not.
    """

    def __init__(
        self, *, num_pages: int, page_size: int, num_slots: int, max_total_len: int, step_tokens: int, gap_us: float
    ) -> None:
        self.info = GroupInfo(
            page_size=page_size,
            num_pages=num_pages,
            num_slots=num_slots,
            max_tokens_per_step=max(step_tokens, num_slots),
            max_plans_in_flight=_PLANS_IN_FLIGHT,
            vocab_size=VOCAB_SIZE,
            max_total_len=max_total_len,
            model_name="simulated",
        )
        runner = SimulatedRunner(
            page_size=page_size,
            num_pages=num_pages,
            vocab_size=VOCAB_SIZE,
            max_total_len=max_total_len,
            alphabet=Alphabet.of(VOCAB_SIZE, special_ids=_SPECIAL_IDS),
            latency=LatencyModel(),
            clock=VirtualClock(),
        )
        self._executor = StepExecutor(runner, num_slots=num_slots, max_tokens_per_step=self.info.max_tokens_per_step)
        self._executor.begin_epoch(1)
        self._down, self._up = StepSocket(), StepSocket()
        self._one_way_s = gap_us / 2e6
        self._results: dict[int, bytes] = {}
        self._last_arrival_s = 0.0
        self.busy_s = 0.0

    def __enter__(self) -> VirtualGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self._down.__exit__(None, None, None)
        self._up.__exit__(None, None, None)

    def send(self, plan: StepPlan, now: float, costs: StepCosts) -> Pending:
        """Sends a plan at `now`; returns when its result will be there."""
        with costs.part("encode"):
            data = encode_plan(plan)
        with costs.part("write"):
            self._down.write(data)
        received = plan_from_proto(worker_pb2.ExecuteRequest.FromString(self._down.read()).plan)
        result = self._executor.run(received, ready_ns=int((now + self._one_way_s) * 1e9))
        self._results[plan.step_id] = worker_pb2.ExecuteResponse(result=result_to_proto(result)).SerializeToString()
        self.busy_s += (result.device_end_ns - result.device_start_ns) / 1e9
        self._last_arrival_s = max(self._last_arrival_s, result.device_end_ns / 1e9 + self._one_way_s)
        return Pending(self._last_arrival_s, plan.step_id)

    def receive(self, step_id: int, costs: StepCosts) -> StepResult:
        """The result of a step, when it arrives."""
        self._up.write(self._results.pop(step_id))
        with costs.part("read"):
            return result_from_proto(worker_pb2.ExecuteResponse.FromString(self._up.read()).result)
