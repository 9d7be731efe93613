"""Chats of several turns whose KV is many times the GPU's: with the device alone, and with host memory behind it.

    python bench/gpu/tiers.py                                          # 8 GB on the GPU, 64 chats of 8k tokens, 80 GB
    python bench/gpu/tiers.py --kv-gb 4 --chat-tokens 4096 --host-gb 36

Each chat's next turn comes after those of all others, so that the device alone has evicted it by then. Scheduler and
worker run in one process, random weights. TTFT is from submit to the first token, with --clients requests at a time;
the hit rate is of tokens of earlier turns, all of which a cache without end would have.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu.shapes import write_shape

from radixmesh.daemons.runtime.sampling import Sampling, Stop
from radixmesh.daemons.runtime.steps.step import StepResult
from radixmesh.daemons.scheduler.group.group_info import GroupInfo
from radixmesh.daemons.scheduler.planning.planner import Planner
from radixmesh.daemons.scheduler.planning.settings import PlannerSettings
from radixmesh.daemons.scheduler.sequence import SequenceKey, Submission
from radixmesh.daemons.scheduler.tiers.host_cache import TierSettings, WritePolicy
from radixmesh.daemons.worker.cuda.load import DeviceSettings, load_cuda_runner
from radixmesh.daemons.worker.plans.executor import StepExecutor
from radixmesh.daemons.worker.runner import ModelRunner
from radixmesh.daemons.worker.step_handle import StepHandle

_IN_FLIGHT = 3
_STEP_TOKENS = 4096


class Chats:
    """Chats against one planner and executor. turn(): the next one of each chat; its figures."""

    def __init__(self, runner: ModelRunner, args: argparse.Namespace, policy: str) -> None:
        runner.clear()
        self.executor = StepExecutor(runner, num_slots=args.slots, max_tokens_per_step=_STEP_TOKENS)
        self.executor.begin_epoch(1)
        group = GroupInfo(
            page_size=runner.page_size,
            num_pages=runner.num_pages,
            num_host_pages=0 if policy == "device" or runner.host_pool is None else runner.host_pool.num_pages,
            num_slots=args.slots,
            max_tokens_per_step=_STEP_TOKENS,
            max_plans_in_flight=_IN_FLIGHT,
            vocab_size=runner.vocab_size,
            max_total_len=runner.max_total_len,
        )
        tiers = TierSettings(policy=WritePolicy("write_through" if policy == "device" else policy), load_timeout_s=10.0)
        self.planner = Planner(PlannerSettings(chunk_tokens=2048, tiers=tiers))
        self.planner.begin_epoch(1, group, None)
        self.pending: deque[StepHandle[StepResult]] = deque()
        random = np.random.default_rng(1)
        first = args.chat_tokens - args.turns * (args.message_tokens + args.output_tokens)
        self.histories = [random.integers(10, 30_000, first).astype(np.int32) for _ in range(args.chats)]
        self.args = args
        self.random = random
        self._handles = 0

    def turn(self) -> dict[str, float]:
        args, planner = self.args, self.planner
        cached, submitted = planner.counters.cached_tokens, {}
        old = sum(len(history) for history in self.histories) if self._handles else 0
        waiting = deque(range(len(self.histories)))
        live: dict[int, int] = {}
        ttft: list[float] = []
        start, num_output = time.perf_counter(), 0
        while waiting or live:
            while waiting and len(live) < args.clients:
                chat = waiting.popleft()
                message = self.random.integers(10, 30_000, args.message_tokens).astype(np.int32)
                self.histories[chat] = np.concatenate([self.histories[chat], message])
                self._handles += 1
                live[self._handles] = chat
                submitted[self._handles] = time.perf_counter()
                planner.submit(self._submission(self._handles, self.histories[chat]))
            while len(self.pending) < _IN_FLIGHT and (plan := planner.plan(time.perf_counter())) is not None:
                self.pending.append(self.executor.launch(plan, ready_ns=self.executor.runner.now_ns()))
            if not self.pending:
                raise RuntimeError(f"nothing to do for {len(live)} chats")
            outputs = planner.process(self.pending.popleft().result())
            assert not outputs.rejected, outputs.rejected
            for rows in outputs.rows:
                ends = np.cumsum(rows.counts)
                for handle, count, end in zip(rows.handles.tolist(), rows.counts.tolist(), ends.tolist(), strict=True):
                    if handle in submitted:
                        ttft.append(time.perf_counter() - submitted.pop(handle))
                    ids = rows.ids[end - count : end]
                    self.histories[live[handle]] = np.concatenate([self.histories[live[handle]], ids])
                    num_output += count
            for finished in outputs.finished:
                del live[finished.handle]
        seconds = time.perf_counter() - start
        return {
            "seconds": round(seconds, 3),
            "tok_s": round(num_output / seconds, 1),
            "ttft_mean_ms": round(1000 * float(np.mean(ttft)), 1),
            "ttft_p99_ms": round(1000 * float(np.quantile(ttft, 0.99)), 1),
            "hit_rate": round((planner.counters.cached_tokens - cached) / old, 4) if old else 0.0,
        }

    def _submission(self, handle: int, ids: np.ndarray) -> Submission:
        return Submission(
            key=SequenceKey(f"r{handle}", 0, ""),
            owner=1,
            handle=handle,
            prompt_ids=ids,
            sampling=Sampling(temperature=0.0),
            stop=Stop(max_tokens=self.args.output_tokens, ignore_eos=True),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--kv-gb", type=float, default=8.0)
    parser.add_argument("--host-gb", type=float, default=80.0)
    parser.add_argument("--chats", type=int, default=64)
    parser.add_argument("--chat-tokens", type=int, default=8192, help="of a chat after its last turn")
    parser.add_argument("--turns", type=int, default=3, help="the first one fills the caches and is told apart")
    parser.add_argument("--message-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--policies", nargs="+", default=["device", "write_through"])
    args = parser.parse_args()
    token_bytes = 128 << 10
    with tempfile.TemporaryDirectory() as folder:
        settings = DeviceSettings(
            dtype="auto",
            attention_backend="auto",
            load_format="dummy",
            page_size=args.page_size,
            num_pages=int(args.kv_gb * 1e9) // token_bytes // args.page_size,
            num_slots=args.slots,
            max_tokens_per_step=_STEP_TOKENS,
            max_total_len=args.chat_tokens + args.page_size,
            mem_fraction=0.88,
            cuda_graphs=True,
            use_pdl=True,
            deterministic=False,
        )
        runner = load_cuda_runner(write_shape(args.shape, Path(folder)), settings)
    start = time.perf_counter()
    runner.add_host_pool(int(args.host_gb * 1e9))
    report: dict[str, object] = {"host_pool_s": round(time.perf_counter() - start, 2), **vars(args)}
    report |= {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    for policy in args.policies:
        chats = Chats(runner, args, policy)
        turns = [chats.turn() for _ in range(args.turns)]
        host = chats.planner.state.hosts if chats.planner.state is not None else ()
        moved = {name: getattr(each.counters, name) for each in host for name in ("saved", "loaded", "evicted")}
        loads = chats.planner.loads
        wait = {"loads": loads.num_loads, "late": loads.num_late, "load_s": round(loads.wait_s, 3)}
        report[policy] = {"first": turns[0], "later": turns[1:], "pages": moved, **wait}
        chats.executor.finish_all()
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
