"""Chats with a host tier in virtual time: the figures of bench/gpu/tiers.py that a GPU and its bus allow.

    python bench/tier_model.py                       # the 8B shape in bf16 on an H100, host memory at 48 GB/s
    python bench/tier_model.py --slowdown 0.5        # steps take half as long again while a load runs
    python bench/tier_model.py --queue-ms 5          # the step thread waits while a stream has more than 5 ms of loads
    python bench/tier_model.py --launch-ms 20        # the host launches a prompt so much longer while a load runs
    python bench/tier_model.py --upload-ms 9         # a prompt's inputs come to the device so late while a load runs
    python bench/tier_model.py --ahead-ms 15         # steps wait for layers: they begin so long before a load is over

The real planner and executor run; steps and loads take what --base-us and the like say, and a call of either side takes
--host-us. A load begins when its plan is launched, one after the other, beside the steps. What the bench on a GPU loses
against this is lost to copies that steps wait for, or to the host. By default steps take what they took on an H100:
there a turn of chats of 8k without a host tier was 17.72 s, with a TTFT of 380 ms; here it is 17.71 s, with 378 ms.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from gpu.tiers import Chats

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.steps.step import StepPlan, StepResult
from radixmesh.daemons.worker.host_memory.host_segment import HostSegment
from radixmesh.daemons.worker.plans.executor import StepExecutor
from radixmesh.daemons.worker.runner import ModelRunner
from radixmesh.daemons.worker.simulated.clock import VirtualClock
from radixmesh.daemons.worker.simulated.host_pool import SimulatedHostPool
from radixmesh.daemons.worker.simulated.latency import LatencyModel
from radixmesh.daemons.worker.simulated.runner import SimulatedRunner
from radixmesh.daemons.worker.simulated.token_source import Alphabet
from radixmesh.daemons.worker.step_handle import DONE, DeviceEvent, StepHandle

_TOKEN_BYTES = 128 << 10
_PAGE_SIZE = 16
_VOCAB = 32_000


@dataclass
class Host:
    """Time of the thread that plans and launches, ns. It runs behind the device's: that one's steps are computed when
    they are launched."""

    now_ns: int = 0
    call_ns: int = 0

    def until(self, end_ns: int) -> None:
        """Waits for the device, and reads what it says."""
        self.now_ns = max(self.now_ns, end_ns) + self.call_ns

    def seconds(self) -> float:
        return self.now_ns * 1e-9


class SlowedClock(VirtualClock):
    """Steps take `slowdown` times longer while loads run. loads: their starts and ends, ns."""

    def __init__(self, slowdown: float) -> None:
        super().__init__()
        self._slowdown = slowdown
        self.loads: list[tuple[int, int]] = []
        self.not_before_ns = 0
        """No step ends sooner."""

    def run(self, duration_ns: int, ready_ns: int) -> tuple[int, int]:
        start, end = max(self._end_ns, ready_ns), max(self._end_ns, ready_ns) + duration_ns
        beside = sum(max(0, min(last, end) - max(first, start)) for first, last in self.loads[-8:])
        self._end_ns = max(end + int(self._slowdown * beside), self.not_before_ns)
        return start, self._end_ns


class BusPool(SimulatedHostPool):
    """Loads follow each other over the bus from the time on when the host asks for them. queue_ns: the host waits until
    no more of them is left. ahead_ns: they are told so long before they are over."""

    def __init__(
        self, runner: TimedRunner, num_bytes: int, load_token_us: float, queue_ns: int | None, ahead_ns: int
    ) -> None:
        super().__init__(
            num_bytes, runner.kv, runner.page_size, runner.clock, poison=np.uint64(1), load_token_us=load_token_us
        )
        self._host, self._loads, self._free_ns = runner.host, runner.loads, 0
        self._queue_ns, self.ahead_ns = queue_ns, ahead_ns
        # Of device pages: ends of what saves of them wait for.
        self._saved_ns = np.zeros(len(self.device), np.int64)

    def save(self, device_pages: IntArray, host_pages: IntArray, behind: DeviceEvent | None = None) -> None:
        super().save(device_pages, host_pages, behind)
        self._saved_ns[device_pages] = self._host.now_ns if behind is DONE else self.clock.now_ns()

    def load(self, host_pages: IntArray, device_pages: IntArray, behind: DeviceEvent | None = None) -> DeviceEvent:
        self._finish_saves(host_pages=host_pages)
        self.overwritten(device_pages)
        self.device[device_pages] = self.rows[host_pages]
        last_ns = behind.end_ns if isinstance(behind, End) else 0
        start = max(self._free_ns, self._host.now_ns, last_ns, int(self._saved_ns[device_pages].max()))
        self._free_ns = start + self._ns_a_page * len(device_pages)
        self._loads.append((start, self._free_ns))
        if self._queue_ns is not None:
            self._host.now_ns = max(self._host.now_ns, self._free_ns - self._queue_ns)
        return End(self._host, max(start, self._free_ns - self.ahead_ns))


class End(DeviceEvent):
    def __init__(self, host: Host, end_ns: int) -> None:
        self._host, self.end_ns = host, end_ns

    @property
    def is_done(self) -> bool:
        return self._host.now_ns >= self.end_ns

    def wait_beside(self, other: object, seconds: float) -> None:
        self.wait()

    def wait(self) -> None:
        self._host.until(self.end_ns)


class TimedRunner(SimulatedRunner):
    """Of a machine that `args` describe."""

    def __init__(self, args: argparse.Namespace, max_total_len: int) -> None:
        clock = SlowedClock(args.slowdown)
        super().__init__(
            page_size=_PAGE_SIZE,
            num_pages=int(args.kv_gb * 1e9) // _TOKEN_BYTES // _PAGE_SIZE,
            vocab_size=_VOCAB,
            max_total_len=max_total_len,
            alphabet=Alphabet.of(_VOCAB, eos_ids=[1], eos_rate=0.0),
            latency=LatencyModel(
                base=args.base_us,
                per_decode_row=args.row_us,
                per_decode_context=args.kv_token_us,
                per_prefill_token=args.prefill_token_us,
                per_prefill_context=args.prefill_pair_us,
            ),
            clock=clock,
        )
        self.host, self.loads = Host(call_ns=int(1000 * args.host_us)), clock.loads
        self.clock: SlowedClock = clock
        self._load_token_us = _TOKEN_BYTES / args.bus_gbps / 1000
        self._queue_ns = None if args.queue_ms is None else int(1e6 * args.queue_ms)
        self.ahead_ns = int(1e6 * args.ahead_ms)
        self.launch_ns, self.upload_ns = int(1e6 * args.launch_ms), int(1e6 * args.upload_ms)

    def add_host_pool(self, num_bytes: int, segment: HostSegment | None = None) -> None:
        self.host_pool = BusPool(self, num_bytes, self._load_token_us, self._queue_ns, self.ahead_ns)


class TimedExecutor(StepExecutor):
    def __init__(self, runner: ModelRunner, *, num_slots: int, max_tokens_per_step: int) -> None:
        super().__init__(runner, num_slots=num_slots, max_tokens_per_step=max_tokens_per_step)
        self._ends: dict[int, int] = {}

    def _event_of(self, step_id: int) -> DeviceEvent:
        runner = self.runner
        assert isinstance(runner, TimedRunner)
        return End(runner.host, self._ends.get(step_id, 0))

    def launch(self, plan: StepPlan, *, ready_ns: int = 0) -> StepHandle[StepResult]:
        runner = self.runner
        assert isinstance(runner, TimedRunner)
        runner.host.now_ns += runner.host.call_ns
        late_ns = 0
        if plan.chunks and any(end > runner.host.now_ns for _, end in runner.loads[-8:]):
            runner.host.now_ns += runner.launch_ns
            late_ns = runner.upload_ns
        # A step that has a prompt in it may need what was told and is not over.
        told = [end for _, end in runner.loads[-8:] if plan.chunks and end - runner.ahead_ns <= runner.host.now_ns]
        runner.clock.not_before_ns = max(told, default=0)
        runner.clock.run(late_ns, runner.host.now_ns)
        step = super().launch(plan, ready_ns=runner.host.now_ns)
        end_ns = self._ends[plan.step_id] = runner.clock.now_ns()

        def collect() -> StepResult:
            if plan.has_forward:
                runner.host.until(end_ns)
            return step.result()

        return StepHandle(step.event, collect)


class TimedChats(Chats):
    executor_class = TimedExecutor


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv-gb", type=float, default=8.0)
    parser.add_argument("--host-gb", type=float, default=80.0)
    parser.add_argument("--working-set", type=float, default=8.0)
    parser.add_argument("--chat-tokens", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--least-chat-tokens", type=int)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--message-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--clients", type=int, default=0)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--chunk-tokens", type=int, default=4096)
    parser.add_argument("--bus-gbps", type=float, default=48.0)
    parser.add_argument("--slowdown", type=float, default=0.0)
    parser.add_argument("--queue-ms", type=float, help="of loads, that a stream's queue holds; default: of all")
    parser.add_argument("--ahead-ms", type=float, default=0.0)
    parser.add_argument("--launch-ms", type=float, default=0.0)
    parser.add_argument("--upload-ms", type=float, default=0.0)
    parser.add_argument("--host-us", type=float, default=150.0)
    parser.add_argument("--base-us", type=float, default=5340.0, help="15 GB of weights")
    parser.add_argument("--row-us", type=float, default=15.0)
    parser.add_argument("--kv-token-us", type=float, default=0.054, help="128 KiB at 2.4 TB/s")
    parser.add_argument("--prefill-token-us", type=float, default=21.8, help="15 GFLOP at 690 TFLOP/s")
    parser.add_argument("--prefill-pair-us", type=float, default=0.00105, help="attention, a pair of tokens")
    args = parser.parse_args(arguments)
    report: dict[str, object] = dict(vars(args))
    for chat_tokens in args.chat_tokens:
        turns: dict[str, dict[str, object]] = {}
        clients = 0
        for policy in ("device", "write_through"):
            runner = TimedRunner(args, chat_tokens + _PAGE_SIZE)
            runner.add_host_pool(int(args.host_gb * 1e9) // _TOKEN_BYTES * runner.kv_token_bytes)
            chats = TimedChats(runner, args, policy, chat_tokens, runner.host.seconds)
            chats.fill()
            turns[policy] = chats.turn()
            clients = chats.clients
        device, tiered = turns["device"], turns["write_through"]
        ratios = {name: round(tiered[name] / device[name], 3) for name in ("tok_s", "ttft_mean_ms")}  # type: ignore[operator]
        for turn in turns.values():
            del turn["decodes"], turn["saving_cost"], turn["launches"]
        report[f"chats of {chat_tokens}"] = {"clients": clients, **turns, "write_through over device": ratios}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
