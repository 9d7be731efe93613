"""Decodes of many rows by the ranks of one model, on a GPU each: tensor parallel, data-parallel with shared experts.

    python bench/gpu/rank_load.py --shape deepseek-v2-lite --layout dp-ep --ranks 4 --decode 128x1024 512x8192
    python bench/gpu/rank_load.py --backend cpu --model compose/models/tiny-deepseek --layout dp-ep --decode 2x16

--layout tp-ep: attention tensor parallel, experts shared by the same ranks; tp-dp-ep: two ranks a batch, experts shared
by all.
--decode ROWSxCONTEXT: so many rows for each rank, or as many as their KV has room for at once, with prompts of so many
tokens of their own. They are computed first (prefill_s), then each goes on for --out tokens. steady_tok_s: between 30%
and 90% of them.
--kill RANK: that one is killed (SIGKILL) amid the last of them and started again; longest_gap_s is the longest time
without any token, and all tokens have to come. stages: when things came, in seconds after the kill: by
the logs of the scheduler, of the rank that is back (from its first line, "listening": what is before it is imports) and
of another one; the token that ended the longest gap; and the graphs that ranks captured between steps since: when,
rows, seconds. device_busy: by rank, share of the time in which its steps ran, with the first steps, in which prompts
are admitted; steady_busy: the same from 30% of the tokens on to 90%. admission_s:
until every row had its first token. scheduler_s: seconds in which the scheduler planned, and took results in.
late_compiles: kernels for which steps waited, by rank.
--router-skew K: of random weights (or of a copy of --model), the logits of expert e of E are multiplied by exp(K x (1 /
2 - e / E)), so that ranks have different shares of the work. --balance: decodes before experts move, while they do
until no more need to, and behind it, by a scheduler each: balancedness is the mean over the most of the rows that the
ranks' experts computed. --results: file of what is known so far, after each decode.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from gpu.kept import Kept
from gpu.mesh import device_steps, free_port, gpu_name, metric_sums, short_line
from gpu.shapes import SHAPES, write_shape
from hop_ladder.bulk_stream import BulkStream
from hop_ladder.processes import Processes
from safetensors.torch import load_file, save_file

from radixmesh.daemons.runtime.rank_layout import RankLayout

_START_S = 400.0
_LEAST_ID = 5
# Seconds from one look at balancedness to the next.
_LOOK_S = 1.0


class Decode(NamedTuple):
    rows: int
    context: int

    @classmethod
    def parse(cls, text: str) -> Decode:
        rows, context = text.split("x")
        return cls(int(rows), int(context))


class Ranks:
    """The workers of one group, by rank, each of which can be started again."""

    def __init__(self, processes: Processes, folder: Path, args: argparse.Namespace) -> None:
        self._processes, self._args, self._folder = processes, args, folder
        if args.model is None:
            skew = {"dummy_router_skew": args.router_skew} if args.router_skew else {}
            self._model = write_shape(args.shape, folder, **skew)
        else:
            self._model = skewed(args.model, folder, args.router_skew) if args.router_skew else args.model
        self.metrics = [f"127.0.0.1:{free_port()}" for _ in range(args.ranks)]
        self.names = [f"rank-{rank}" for rank in range(args.ranks)]

    def since(self, name: str, began: float) -> list[dict[str, object]]:
        """Lines of a daemon's log from a time on (that of time.time()), each with the seconds since then."""
        lines = []
        for text in (self._folder / f"{name}.log").read_text().splitlines():
            if text.startswith("{") and "ts" in (fields := json.loads(text)):
                at_s = datetime.fromisoformat(fields["ts"]).timestamp() - began
                if at_s >= 0:
                    lines.append({"at_s": round(at_s, 3), **short_line(fields)})
        return lines

    async def start(self, rank: int) -> None:
        (self._folder / f"{self.names[rank]}.address").unlink(missing_ok=True)
        await self._processes.start(self.names[rank], "worker", self._flags(rank))

    def log(self, rank: int) -> list[dict[str, object]]:
        text = (self._folder / f"{self.names[rank]}.log").read_text()
        return [short_line(json.loads(line)) for line in text.splitlines() if line.startswith("{")]

    def late_compiles(self, rank: int) -> list[str]:
        """Kernels that were compiled, or read from Triton's cache, behind the start, and the seconds of each."""
        late = [line for line in self.log(rank) if line["event"] == "kernel_compiled_late"]
        return [f"{line['kernel']} {line['seconds']}" for line in late]

    def num_tokens(self) -> int:
        """KV tokens of all ranks that have requests of their own."""
        sized = [line for rank in range(len(self.names)) for line in self.log(rank) if line["event"] == "memory_sized"]
        pages = [int(str(line["num_pages"])) for line in sized]
        tp_size = sizes_of(self._args)["tp_size"]
        total = sum(min(pages[first : first + tp_size]) for first in range(0, len(pages), tp_size))
        return total * int(_flags(self._args.worker).get("page_size", "1"))

    def _flags(self, rank: int) -> dict[str, object]:
        args, is_cuda = self._args, self._args.backend == "cuda"
        flags: dict[str, object] = {"backend": args.backend, "model": self._model, "metrics_listen": self.metrics[rank]}
        flags |= {"num_slots": max(decode.rows for decode in args.decode), "log-level": "info"}
        if is_cuda:
            flags |= {"load_format": "dummy", "max_tokens_per_step": 8192, "max_total_len": args.max_total_len}
            flags["cuda_device"] = (args.first_gpu + rank) % max(1, torch.cuda.device_count())
        else:
            flags["cpu_threads"] = 1
        if args.ranks > 1:
            flags["group_host"] = "127.0.0.1"
            layout = RankLayout.of_rank(rank, **sizes_of(args))
            # Rows of a batch are those of all its ranks.
            flags |= {**asdict(layout), "num_slots": int(str(flags["num_slots"])) * layout.tp_size}
        return {**flags, **_flags(args.worker)}


async def measure(args: argparse.Namespace, kept: Kept) -> None:
    kept.note(
        command=" ".join(["python", *sys.argv]),
        machine=f"{gpu_name()}, {os.cpu_count()} cores",
        versions={"python": platform.python_version(), "torch": torch.__version__},
        layout=f"{args.layout} {args.ranks}",
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with Processes(folder, "unix", start_s=_START_S) as processes:
            ranks, started = Ranks(processes, folder, args), time.monotonic()
            try:
                await asyncio.gather(*(ranks.start(rank) for rank in range(args.ranks)))
                kept.note(start_s=round(time.monotonic() - started, 2), kv_tokens=ranks.num_tokens())
                await (_balanced if args.balance else _decodes)(processes, ranks, args, kept)
            except BaseException:
                _show_logs(folder)
                raise


def _show_logs(folder: Path) -> None:
    for log in sorted(folder.glob("*.log")):
        print(log.stem, log.read_text()[-2000:], file=sys.stderr)


async def _decodes(processes: Processes, ranks: Ranks, args: argparse.Namespace, kept: Kept) -> None:
    scheduler = await Scheduler.start(processes, ranks, args, "scheduler")
    results: dict[str, object] = {}
    for index, decode in enumerate(args.decode):
        is_last = index + 1 == len(args.decode)
        row = await _run(processes, ranks, decode, args, scheduler, kill=args.kill if is_last else None)
        results[f"{decode.rows}x{decode.context}"] = row
        kept.note(decodes=results)
        print(json.dumps({str(decode): row}), file=sys.stderr, flush=True)


async def _balanced(processes: Processes, ranks: Ranks, args: argparse.Namespace, kept: Kept) -> None:
    """Results before, during and after a time in which experts move."""
    results: dict[str, object] = {}
    for phase, threshold in (("before", 0.0), ("moving", args.balance_threshold), ("after", 0.0)):
        flags = {"expert_balance_threshold": threshold, "expert_balance_interval_s": _LOOK_S}
        scheduler = await Scheduler.start(processes, ranks, args, f"scheduler-{phase}", flags)
        rows: dict[str, object] = {}
        end, num_placed = time.monotonic() + args.balance_s, -1.0
        while True:
            for decode in args.decode:
                rows[f"{decode.rows}x{decode.context}"] = await _run(processes, ranks, decode, args, scheduler)
            experts = await scheduler.experts()
            is_settled = experts["placements_total"] == num_placed > 0
            if phase != "moving" or is_settled or time.monotonic() > end:
                break
            num_placed = experts["placements_total"]
        results[phase] = {"decodes": rows, **experts}
        kept.note(decodes=results)
        print(json.dumps({phase: results[phase]}), file=sys.stderr, flush=True)
        await processes.stop(scheduler.name)


class Scheduler(NamedTuple):
    """One that runs."""

    name: str
    metrics: str

    @classmethod
    async def start(
        cls,
        processes: Processes,
        ranks: Ranks,
        args: argparse.Namespace,
        name: str,
        flags: Mapping[str, object] | None = None,
    ) -> Scheduler:
        metrics = f"127.0.0.1:{free_port()}"
        workers = ",".join(processes.address(rank) for rank in ranks.names)
        values = {"workers": workers, "chunk_tokens": 8192, "log-level": "info", "metrics_listen": metrics}
        await processes.start(name, "scheduler", {**values, **_flags(args.scheduler), **(flags or {})})
        return cls(name, metrics)

    async def busy_s(self) -> dict[str, float]:
        """Seconds so far, of its one thread, in plans and in results."""
        found = await metric_sums(self.metrics, "radixmesh_")
        return {name: found.get(f"radixmesh_{name}_seconds_sum", 0.0) for name in ("plan", "process")}

    async def experts(self) -> dict[str, float]:
        """Balancedness, as the rows of late and as the placement divides all picks; placements and the longest op."""
        found = await metric_sums(self.metrics, "radixmesh_expert_")
        return {
            name.removeprefix("radixmesh_expert_"): round(value, 4)
            for name, value in found.items()
            if not name.endswith("_created")
        }


async def _run(
    processes: Processes,
    ranks: Ranks,
    decode: Decode,
    args: argparse.Namespace,
    scheduler: Scheduler,
    kill: int | None = None,
) -> dict[str, object]:
    rng = np.random.default_rng(decode.rows * 7919 + decode.context)
    # Placement is not exact: a rank may get a few more than others.
    room = int(0.97 * ranks.num_tokens() / (decode.context + args.out)) if args.backend == "cuda" else 1 << 30
    num_rows = min(decode.rows * args.ranks, room)
    prompts = [rng.integers(_LEAST_ID, args.vocab_size, decode.context).astype(np.int32) for _ in range(num_rows)]
    salt, temperature = f"{decode.rows}x{decode.context}", 1.0
    address = processes.address(scheduler.name)
    async with BulkStream(address, f"fill-{salt}", salt, temperature=temperature) as stream:
        started = time.monotonic()
        await stream.submit(prompts, 1)
        await stream.until(num_finished=num_rows, timeout_s=args.timeout_s)
        prefill_s = time.monotonic() - started
    async with BulkStream(address, f"go-{salt}", salt, temperature=temperature, keeps_times=True) as stream:
        before = [await device_steps(metrics) for metrics in ranks.metrics]
        planned, num_late = await scheduler.busy_s(), [len(ranks.late_compiles(rank)) for rank in range(args.ranks)]
        started = time.monotonic()
        gaps = Gaps(stream)
        await stream.submit(prompts, args.out)
        restart, killed = None, 0.0
        if kill is not None:
            await stream.until(num_tokens=num_rows * args.out // 3, timeout_s=args.timeout_s)
            killed = time.time()
            restart = await _kill(processes, ranks, kill)
        steady = []
        for share in (0.3, 0.9) if kill is None else ():
            await stream.until(num_tokens=int(num_rows * args.out * share), timeout_s=args.timeout_s)
            steady.append((time.monotonic(), [(await device_steps(metrics))[0] for metrics in ranks.metrics]))
        await stream.until(num_finished=num_rows, timeout_s=args.timeout_s)
        wall = stream.last_token_at - started
        gaps.end()
        assert stream.num_tokens == num_rows * args.out, (stream.num_tokens, num_rows * args.out)
        after = [await device_steps(metrics) for metrics in ranks.metrics]
    of_ranks = [(busy - old_busy, steps - old) for (busy, steps), (old_busy, old) in zip(after, before, strict=True)]
    return {
        "rows": num_rows,
        "rows_asked": decode.rows * args.ranks,
        "prefill_s": round(prefill_s, 3),
        "out_tok_s": round(num_rows * args.out / wall, 1),
        "steady_tok_s": round(stream.steady_tok_s(), 1),
        "itl_ms_p50_p99": np.quantile(1e3 * stream.gaps_s(), (0.5, 0.99)).round(2).tolist(),
        "seconds": round(wall, 3),
        "first_token_s": round(stream.first_token_at - started, 4),
        "inter_token_ms": round((wall - (stream.first_token_at - started)) / max(1, args.out - 1) * 1e3, 3),
        "cached_tokens": stream.cached_tokens,
        "steps": int(of_ranks[0][1]),
        **({"device_busy": [round(busy / wall, 4) for busy, _ in of_ranks]} if restart is None else {}),
        **({"steady_busy": _shares(*steady)} if steady else {}),
        "admission_s": round(stream.all_begun_at() - started, 3),
        "scheduler_s": {name: round(value - planned[name], 3) for name, value in (await scheduler.busy_s()).items()},
        "late_compiles": [ranks.late_compiles(rank)[num:] for rank, num in enumerate(num_late)],
        "longest_gap_s": round(gaps.longest_s, 3),
        **({} if restart is None else {"killed_rank": kill, "rank_back_s": round(restart, 2)}),
        **({} if kill is None else {"stages": _stages(ranks, scheduler.name, kill, killed, gaps)}),
    }


def _stages(ranks: Ranks, scheduler: str, kill: int, killed: float, gaps: Gaps) -> dict[str, object]:
    """When each event came first, in seconds after the kill."""
    other = ranks.names[(kill + 1) % len(ranks.names)]
    logs = {name: ranks.since(name, killed) for name in (scheduler, ranks.names[kill], other)}
    stages: dict[str, object] = {}
    for name, lines in logs.items():
        firsts: dict[str, object] = {}
        for line in lines:
            took = {key: line[key] for key in ("seconds", "captures_s", "waited_s", "adopted_tokens") if key in line}
            firsts.setdefault(str(line["event"]), {"at_s": line["at_s"], **took} if took else line["at_s"])
        stages[name] = firsts
    captured = [line for line in logs[other] if line["event"] == "graph_captured"]
    stages["graphs"] = [[line[key] for key in ("at_s", "rows", "seconds")] for line in captured]
    stages["first_token"] = round(gaps.ended - killed, 3)
    return stages


def _shares(begin: tuple[float, list[float]], end: tuple[float, list[float]]) -> list[float]:
    """Device seconds between two times, by rank, over the time between them."""
    return [round((last - first) / (end[0] - begin[0]), 4) for first, last in zip(begin[1], end[1], strict=True)]


class Gaps:
    """The longest time without a token of a stream, from the first one on."""

    def __init__(self, stream: BulkStream) -> None:
        self.longest_s = 0.0
        self.ended = 0.0
        """When the longest one ended, as time.time()."""
        self._task = asyncio.create_task(self._follow(stream))

    async def _follow(self, stream: BulkStream) -> None:
        last, seen = 0.0, 0
        while True:
            now = time.monotonic()
            if stream.num_tokens > seen:
                if seen and now - last > self.longest_s:
                    self.longest_s, self.ended = now - last, time.time()
                seen, last = stream.num_tokens, now
            await asyncio.sleep(0.005)

    def end(self) -> None:
        self._task.cancel()


async def _kill(processes: Processes, ranks: Ranks, rank: int) -> float:
    """Seconds until the rank serves again."""
    killed = time.monotonic()
    os.kill(processes.pid(ranks.names[rank]), signal.SIGKILL)
    await ranks.start(rank)
    return time.monotonic() - killed


def skewed(model: Path, parent: Path, skew: float) -> Path:
    """A copy of a folder with one file of weights, whose routers pick the first experts more often."""
    folder = parent / model.name
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    for name, weights in tensors.items():
        if name.endswith(".gate.weight"):
            experts = torch.arange(len(weights)) / len(weights)
            tensors[name] = weights * torch.exp(skew * (0.5 - experts))[:, None].to(weights.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def sizes_of(args: argparse.Namespace) -> dict[str, int]:
    """Sizes of the layout."""
    tp_size = {"dp-ep": 1, "tp-dp-ep": 2}.get(args.layout, args.ranks)
    dp_size, has_experts = args.ranks // tp_size, args.layout.endswith("ep")
    return {"tp_size": tp_size, "dp_size": dp_size, "ep_size": args.ranks if has_experts else 1}


def _flags(texts: list[str]) -> dict[str, str]:
    return dict(text.split("=", 1) for text in texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="deepseek-v2-lite", choices=list(SHAPES))
    parser.add_argument("--model", type=Path, default=None, help="a folder, instead of a shape with random weights")
    parser.add_argument("--backend", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--layout", default="tp", choices=("tp", "dp-ep", "tp-ep", "tp-dp-ep"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--first-gpu", type=int, default=0)
    parser.add_argument("--decode", nargs="+", type=Decode.parse, default=[Decode(128, 1024)], metavar="ROWSxCONTEXT")
    parser.add_argument("--out", type=int, default=128)
    parser.add_argument("--vocab-size", type=int, default=30_000, help="ids of prompts are below it")
    parser.add_argument("--max-total-len", type=int, default=16_384)
    parser.add_argument("--kill", type=int, default=None, metavar="RANK")
    parser.add_argument("--router-skew", type=float, default=0.0, metavar="K")
    parser.add_argument("--balance", action="store_true")
    parser.add_argument("--balance-threshold", type=float, default=0.97, help="balancedness below which experts move")
    parser.add_argument("--balance-s", type=float, default=90.0, help="seconds that experts have for it")
    parser.add_argument("--timeout-s", type=float, default=300.0)
    parser.add_argument("--worker", nargs="*", default=[], metavar="FLAG=VALUE", help="flags of the workers")
    parser.add_argument("--scheduler", nargs="*", default=[], metavar="FLAG=VALUE", help="flags of the scheduler")
    parser.add_argument("--results", type=Path, default=None, metavar="FILE")
    args = parser.parse_args()
    with Kept(args.results) as kept:
        asyncio.run(measure(args, kept))


if __name__ == "__main__":
    main()
