"""Chats of several turns whose KV is many times the GPU's: with the device alone, and with host memory behind it.

    python bench/gpu/tiers.py                                        # 8 GB on the GPU, chats of 8k and of 16k tokens
    python bench/gpu/tiers.py --kv-gb 4 --chat-tokens 4096 --host-gb 36

The chats' KV is --working-set times the GPU's, or a little more, after their last turn. A turn has one request of each
chat, in an order of its own, --clients at a time (0: as many as the GPU's pages hold). TTFT is from submit to the first
token; the hit rate is of tokens of earlier turns, all of which a cache without end would have. The first turn fills the
caches and is told apart; of it the device alone keeps the last chats, and computes no more.

Scheduler and worker run in one process, random weights. Prints a line of JSON after each turn, with all that is known
by then: the last one is the result, whenever it is ended. `decodes`: device time of steps of decodes alone, by what the
copies beside them were; `saving_cost` is what those with saves took longer than others of as many rows, as a share of
the time of all.

`trace` says where a turn's time goes: idle_s, of the device; launch_s and launch_most_ms, of the host in launches,
which is to be small whatever is copied (`launches`: by what they were and what was under way; see launch_watch.py for
those that took long); loading_s, time with loads under way, and loads_gbps in it, no more than the
bus has; alone_s, time with loads under way and nothing else to do for the device: chats in lock step load all at once.
`copies`: what the worker has measured of its ways of copying when it started, and took.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu.launch_watch import LaunchWatch
from gpu.shapes import kv_bytes_per_token, write_shape

from radixmesh.daemons.runtime.sampling import Sampling, Stop
from radixmesh.daemons.runtime.steps.step import StepPlan, StepResult
from radixmesh.daemons.scheduler.group.group_info import GroupInfo
from radixmesh.daemons.scheduler.planning.planner import Planner
from radixmesh.daemons.scheduler.planning.settings import PlannerSettings
from radixmesh.daemons.scheduler.sequence import SequenceKey, Submission
from radixmesh.daemons.scheduler.tiers.host_cache import TierSettings, WritePolicy
from radixmesh.daemons.worker.cuda.host_tier.host_pool import CudaHostPool
from radixmesh.daemons.worker.cuda.load import DeviceSettings, load_cuda_runner
from radixmesh.daemons.worker.plans.executor import StepExecutor
from radixmesh.daemons.worker.runner import ModelRunner
from radixmesh.daemons.worker.step_handle import StepHandle

_STEP_TOKENS = 4096


class _Launched(NamedTuple):
    """copies: under way beside the step. rows: of a step of decodes alone, else 0."""

    handle: StepHandle[StepResult]
    copies: str
    rows: int
    has_forward: bool


class _Trace:
    """The time of a turn: what it went to."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._loading_s = self._alone_s = self._marked_s = 0.0
        self._is_loading = self._is_alone = False
        self.watch = LaunchWatch(clock, looks=clock is time.perf_counter)

    def mark(self, num_under_way: int, *, is_alone: bool = False) -> None:
        """Loads that are under way from now on, until the next mark. is_alone: the device does nothing else."""
        now = self._clock()
        if self._is_loading:
            self._loading_s += now - self._marked_s
            self._alone_s += (now - self._marked_s) * self._is_alone
        self._marked_s, self._is_loading, self._is_alone = now, num_under_way > 0, is_alone

    def summary(self, idle_s: float, num_bytes: int) -> dict[str, float]:
        launch_ms = [launch.ms for launch in self.watch.launches]
        return {
            "idle_s": round(idle_s, 3),
            "launch_s": round(sum(launch_ms) / 1000, 3),
            "launch_most_ms": round(max(launch_ms, default=0.0), 2),
            "loading_s": round(self._loading_s, 3),
            "loads_gbps": round(num_bytes / 1e9 / self._loading_s, 1) if self._loading_s else 0.0,
            "alone_s": round(self._alone_s, 3),
        }


class Chats:
    """Chats against one planner and executor. turn(): the next one of each chat; its figures.

    clock: seconds, as the host sees them."""

    executor_class = StepExecutor

    def __init__(
        self,
        runner: ModelRunner,
        args: argparse.Namespace,
        policy: str,
        chat_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        runner.clear()
        self.executor = self.executor_class(runner, num_slots=args.slots, max_tokens_per_step=_STEP_TOKENS)
        self.executor.begin_epoch(1)
        self.clock = clock
        pool_tokens = runner.num_pages * runner.page_size
        self.is_tiered = policy != "device"
        self._page_bytes = 0 if runner.host_pool is None else runner.host_pool.page_bytes
        group = GroupInfo(
            page_size=runner.page_size,
            num_pages=runner.num_pages,
            num_host_pages=0 if not self.is_tiered or runner.host_pool is None else runner.host_pool.num_pages,
            num_slots=args.slots,
            max_tokens_per_step=_STEP_TOKENS,
            max_plans_in_flight=args.depth + 1,
            vocab_size=runner.vocab_size,
            max_total_len=runner.max_total_len,
        )
        tiers = TierSettings(policy=WritePolicy(policy if self.is_tiered else "write_through"), load_timeout_s=10.0)
        self.planner = Planner(PlannerSettings(chunk_tokens=args.chunk_tokens, tiers=tiers))
        self.planner.begin_epoch(1, group, None)
        self.pending: deque[_Launched] = deque()
        mean_tokens = (chat_tokens + (args.least_chat_tokens or chat_tokens)) // 2
        self.clients = args.clients or max(1, pool_tokens // mean_tokens)
        # A multiple of the clients: the end of a turn, with fewer and fewer of them, is as short as it can be.
        self.num_chats = self.clients * max(2, math.ceil(args.working_set * pool_tokens / mean_tokens / self.clients))
        random = np.random.default_rng(1)
        lengths = np.linspace(args.least_chat_tokens or chat_tokens, chat_tokens, self.num_chats).astype(int)
        lengths -= args.turns * (args.message_tokens + args.output_tokens)
        self.histories = [random.integers(10, 30_000, length).astype(np.int32) for length in lengths.tolist()]
        self.args = args
        self.random = random
        self._handles = 0

    def fill(self) -> dict[str, object]:
        """The first turn. Without a host tier, chats before the last that the device has room for leave nothing in it:
        their answers are made up."""
        order = self.random.permutation(self.num_chats).tolist()
        num_skipped = 0 if self.is_tiered else max(0, self.num_chats - 2 * self.clients - 4)
        for chat in order[:num_skipped]:
            num = self.args.message_tokens + self.args.output_tokens
            self._extend(chat, self.random.integers(10, 30_000, num))
        return self._run(order[num_skipped:], num_old=0)

    def turn(self) -> dict[str, object]:
        """One request of each chat."""
        num_old = sum(len(history) for history in self.histories)
        return self._run(self.random.permutation(self.num_chats).tolist(), num_old)

    def _run(self, order: Sequence[int], num_old: int) -> dict[str, object]:
        trace = _Trace(self.clock)
        with trace.watch.running():
            return self._turn(order, num_old, trace)

    def _turn(self, order: Sequence[int], num_old: int, trace: _Trace) -> dict[str, object]:
        args, planner = self.args, self.planner
        cached, submitted = planner.counters.cached_tokens, {}
        num_loads, wait_s, num_loaded = planner.loads.num_loads, planner.loads.wait_s, self._num_loaded()
        waiting = deque(order)
        live: dict[int, int] = {}
        ttft: list[float] = []
        decodes: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        busy_ns, copies = 0, "none"
        start, num_output = self.clock(), 0
        while waiting or live:
            while waiting and len(live) < self.clients:
                chat = waiting.popleft()
                self._extend(chat, self.random.integers(10, 30_000, args.message_tokens))
                self._handles += 1
                live[self._handles] = chat
                submitted[self._handles] = self.clock()
                planner.submit(self._submission(self._handles, self.histories[chat]))
            while len(self.pending) <= args.depth and (plan := planner.plan(self.clock())) is not None:
                # A save goes on beside the step after its own, and a load until its end is told.
                copies = _copies(plan, planner.loads.num_under_way, copies)
                rows = 0 if plan.chunks else planner.num_running
                with trace.watch.launching(_described(plan, copies)):
                    handle = self.executor.launch(plan, ready_ns=self.executor.runner.now_ns())
                self.pending.append(_Launched(handle, copies, rows if plan.has_forward else 0, plan.has_forward))
            if not self.pending:
                raise RuntimeError(f"nothing to do for {len(live)} chats")
            launched = self.pending.popleft()
            is_alone = not any(step.has_forward for step in (launched, *self.pending))
            trace.mark(planner.loads.num_under_way, is_alone=is_alone)
            result = launched.handle.result()
            device_ns = result.device_end_ns - result.device_start_ns
            busy_ns += device_ns
            if launched.rows:
                decodes[launched.copies][launched.rows].append(device_ns / 1e6)
            outputs = planner.process(result)
            trace.mark(planner.loads.num_under_way)
            assert not outputs.rejected, outputs.rejected
            for token_rows in outputs.rows:
                counts = token_rows.counts
                ends = np.cumsum(counts)
                for handle, count, end in zip(token_rows.handles.tolist(), counts.tolist(), ends.tolist(), strict=True):
                    if handle in submitted:
                        ttft.append(self.clock() - submitted.pop(handle))
                    self._extend(live[handle], token_rows.ids[end - count : end])
                    num_output += count
            for finished in outputs.finished:
                del live[finished.handle]
        seconds = self.clock() - start
        num_loads = planner.loads.num_loads - num_loads
        return {
            "requests": len(order),
            "seconds": round(seconds, 3),
            "tok_s": round(num_output / seconds, 1),
            "ttft_mean_ms": round(1000 * float(np.mean(ttft)), 1),
            "ttft_p50_ms": round(1000 * float(np.quantile(ttft, 0.5)), 1),
            "ttft_p99_ms": round(1000 * float(np.quantile(ttft, 0.99)), 1),
            "hit_rate": round((planner.counters.cached_tokens - cached) / num_old, 4) if num_old else 0.0,
            "steps_s": round(busy_ns / 1e9, 3),
            "load_mean_ms": round(1000 * (planner.loads.wait_s - wait_s) / num_loads, 1) if num_loads else 0.0,
            "decodes": {name: _summary(by_rows) for name, by_rows in decodes.items()},
            "saving_cost": _saving_cost(decodes),
            "trace": trace.summary(seconds - busy_ns / 1e9, self._page_bytes * (self._num_loaded() - num_loaded)),
            "launches": trace.watch.summary(),
        }

    def _num_loaded(self) -> int:
        """Pages so far."""
        state = self.planner.state
        assert state is not None
        return sum(host.counters.loaded for host in state.hosts)

    def _extend(self, chat: int, ids: np.ndarray) -> None:
        self.histories[chat] = np.concatenate([self.histories[chat], ids.astype(np.int32)])

    def _submission(self, handle: int, ids: np.ndarray) -> Submission:
        return Submission(
            key=SequenceKey(f"r{handle}", 0, ""),
            owner=1,
            handle=handle,
            prompt_ids=ids,
            sampling=Sampling(temperature=0.0),
            stop=Stop(max_tokens=self.args.output_tokens, ignore_eos=True),
        )


def _copies_of(runner: ModelRunner) -> dict[str, object]:
    """The ways that a worker has tried, and those that it took."""
    pool = runner.host_pool
    assert isinstance(pool, CudaHostPool)
    found: dict[str, object] = {
        way: {name: {key: round(value, 4) for key, value in trial._asdict().items()} for name, trial in trials.items()}
        for way, trials in pool.trials.items()
    }
    return found | {"saves": type(pool.copies.save).__name__, "loads": type(pool.copies.load).__name__}


def _copies(plan: StepPlan, num_loading: int, before: str) -> str:
    if num_loading:
        return "loads"
    return "saves" if plan.saves else "after_saves" if before == "saves" else "none"


def _described(plan: StepPlan, copies: str) -> str:
    """A launch: kind of step, copies that it starts, and those under way or just before."""
    step = "chunks" if plan.chunks else "decodes" if plan.has_forward else "no forward"
    starts = [name for name, moves in (("saves", plan.saves), ("loads", plan.loads)) if moves]
    starting = f", starts {' and '.join(starts)}" if starts else ""
    return f"{step}{starting}, beside {copies}"


def _summary(by_rows: dict[int, list[float]]) -> dict[str, list[float]]:
    """By rows: steps, and their mean and median ms."""
    return {
        str(rows): [len(ms), round(float(np.mean(ms)), 3), round(float(np.median(ms)), 3)]
        for rows, ms in sorted(by_rows.items())
    }


def _saving_cost(decodes: dict[str, dict[int, list[float]]]) -> float | None:
    """Share of the time of decodes that saves beside them took; None: there is nothing to compare with."""
    extra = total = 0.0
    for rows, alone in decodes.get("none", {}).items():
        total += sum(alone)
        for name in ("saves", "after_saves"):
            saving = decodes.get(name, {}).get(rows, [])
            total += sum(saving)
            extra += sum(saving) - len(saving) * float(np.mean(alone))
    return round(extra / total, 4) if total else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--kv-gb", type=float, default=8.0)
    parser.add_argument("--host-gb", type=float, default=80.0)
    parser.add_argument("--working-set", type=float, default=8.0, help="times the KV of the GPU")
    parser.add_argument(
        "--chat-tokens", type=int, nargs="+", default=[8192, 16384], help="of a chat, after its last turn"
    )
    parser.add_argument("--least-chat-tokens", type=int, help="lengths are spread from here to --chat-tokens")
    parser.add_argument("--turns", type=int, default=3, help="the first one fills the caches and is told apart")
    parser.add_argument("--message-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--clients", type=int, default=0)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--depth", type=int, default=1, help="plans ahead of the one that runs")
    parser.add_argument("--chunk-tokens", type=int, default=_STEP_TOKENS)
    parser.add_argument("--policies", nargs="+", default=["device", "write_through"])
    parser.add_argument("--seconds", type=float, default=400.0, help="no turn begins later than that")
    args = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        settings = DeviceSettings(
            dtype="auto",
            attention_backend="auto",
            load_format="dummy",
            page_size=args.page_size,
            num_pages=int(args.kv_gb * 1e9) // kv_bytes_per_token(args.shape) // args.page_size,
            num_slots=args.slots,
            max_tokens_per_step=_STEP_TOKENS,
            max_total_len=max(args.chat_tokens) + args.page_size,
            mem_fraction=0.88,
            cuda_graphs=True,
            use_pdl=True,
            deterministic=False,
        )
        runner = load_cuda_runner(write_shape(args.shape, Path(folder)), settings)
    loaded = time.perf_counter()
    runner.add_host_pool(int(args.host_gb * 1e9))
    report: dict[str, object] = {
        **vars(args),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "start_s": round(loaded - began, 2),
        "host_pool_s": round(time.perf_counter() - loaded, 2),
        "copies": _copies_of(runner),
    }
    print(json.dumps(report), flush=True)
    compared: dict[str, object] = {}
    for chat_tokens in args.chat_tokens:
        found: dict[str, object] = {}
        report[f"chats of {chat_tokens}"] = found
        for policy in args.policies:
            _measure(Chats(runner, args, policy, chat_tokens), policy, found, report, began + args.seconds)
        compared[str(chat_tokens)] = _compared(found, args.policies)
    report["compared"] = compared
    print(json.dumps(report), flush=True)


def _measure(chats: Chats, policy: str, found: dict[str, object], report: dict[str, object], until: float) -> None:
    found |= {"chats": chats.num_chats, "clients": chats.clients}
    later: list[dict[str, object]] = []
    of_policy: dict[str, object] = {"first": chats.fill(), "later": later}
    found[policy] = of_policy
    # The device alone keeps next to nothing from turn to turn: its second is like its first.
    for _ in range(1, chats.args.turns if chats.is_tiered else 2):
        print(json.dumps(report), flush=True)
        if time.perf_counter() < until:
            later.append(chats.turn())
    state = chats.planner.state
    assert state is not None
    names = ("saved", "loaded", "evicted", "skipped")
    of_policy["pages"] = {name: sum(getattr(host.counters, name) for host in state.hosts) for name in names}
    of_policy["late"] = chats.planner.loads.num_late
    print(json.dumps(report), flush=True)
    chats.executor.finish_all()


def _compared(found: dict[str, object], policies: Sequence[str]) -> dict[str, object]:
    """Each policy's figures over those of the first, of the last turn of each."""
    turns = {policy: found[policy]["later"] for policy in policies if found[policy]["later"]}  # type: ignore[index]
    ratios: dict[str, object] = {}
    for policy in policies[1:]:
        if policies[0] in turns and policy in turns:
            last, first = turns[policy][-1], turns[policies[0]][-1]
            ratios[policy] = {
                "hit_rate": last["hit_rate"],
                **{name: round(last[name] / first[name], 3) for name in ("tok_s", "ttft_mean_ms", "ttft_p99_ms")},
                "saving_cost": found[policy]["first"]["saving_cost"],  # type: ignore[index]
            }
    return ratios


if __name__ == "__main__":
    main()
