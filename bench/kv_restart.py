"""First requests after a worker was killed, and on a second replica, with tiers of KV that outlive a worker.

    python bench/kv_restart.py --write bench/results/kv-restart.json

A tiny model on CPUs, its worker in a process of its own, killed by SIGKILL and started again; prompts of random tokens,
one at a time. For each way to keep KV: the prompts before the kill (nobody has seen them), and the same after it. Then
two replicas over one store, of each kind: the second gets the prompts that the first computed, and as many of its own.
TTFT is from submit to the first token, at the scheduler; the hit rate is of all tokens of the prompts. Prints JSON.

    python bench/kv_restart.py --shape llama-3.1-8b --max-len 8000 --ways nothing disk segment --media nixl-file

The same on a GPU, of a shape with random weights, which are written to the temporary folder. `same_first_tokens`: of
the prompts before and after, or on both replicas.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "bench")]

from gpu.shapes import write_random_weights, write_shape  # noqa: E402
from support.kv_stores import SHARED, shared_store  # noqa: E402
from support.running_daemon import running  # noqa: E402
from support.serve_client import ServeClient, serve_client  # noqa: E402

from radixmesh.common.v1 import common_pb2  # noqa: E402
from radixmesh.daemons.scheduler.__main__ import SchedulerDaemon  # noqa: E402
from radixmesh.daemons.scheduler.config import SchedulerSettings  # noqa: E402
from radixmesh.daemons.scheduler.planning.epoch_state import EpochState  # noqa: E402
from radixmesh.daemons.scheduler.planning.planner import Planner  # noqa: E402

MODEL = ROOT / "compose" / "models" / "tiny-llama"
PAGE_SIZE = 16
WARM_UP = [7] * 600
_START_S = 300.0


class WorkerProcess:
    """A worker at one address, whatever becomes of its processes."""

    def __init__(self, options: argparse.Namespace, keep: Sequence[str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        pages = str(options.device_prompts * options.max_len // PAGE_SIZE)
        sizes = ["--page-size", str(PAGE_SIZE), "--num-pages", pages, "--max-total-len", str(options.max_len)]
        backend = ["--backend", options.backend, "--model", str(options.model), "--num-slots", "8"]
        threads = ["--cpu-threads", "1"] if options.backend == "cpu" else []
        tiers = ["--host-kv-bytes", str(options.host_mib << 20), *keep] if keep else []
        self.argv = ["--listen", self.address, *backend, *threads, *sizes, *tiers]
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "radixmesh.daemons.worker",
            *self.argv,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
            stderr=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
        )

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def kill(self) -> None:
        assert self._process is not None
        if self.is_running:
            self._process.send_signal(signal.SIGKILL)
        await self._process.wait()


class Replica:
    """A worker, its scheduler, and a stream to that."""

    def __init__(self, worker: WorkerProcess, planner: Planner, client: ServeClient) -> None:
        self.worker, self.planner, self.client = worker, planner, client
        self.first_tokens: list[int] = []
        """Of the last prompts."""

    async def serving(self, former: EpochState | None = None) -> EpochState:
        """Waits for a claimed worker, of another epoch than the former one."""
        async with asyncio.timeout(_START_S):
            while (state := self.planner.state) is None or state is former:
                assert self.worker.is_running, f"the worker has ended: {' '.join(self.worker.argv)}"
                await asyncio.sleep(0.05)
        return state

    async def first_requests(self, prompts: Sequence[list[int]]) -> dict[str, float]:
        """One after the other; mean and worst TTFT, and the share of their tokens that was found."""
        cached, waits, self.first_tokens = self.planner.counters.cached_tokens, [], list[int]()
        sampling = common_pb2.SamplingParams(temperature=0.0)
        for prompt in prompts:
            begun = time.perf_counter()
            handle = await self.client.submit(prompt, max_tokens=1, sampling=sampling)
            (output,) = await self.client.over(handle, timeout_s=_START_S)
            self.first_tokens += output.tokens
            waits.append(time.perf_counter() - begun)
        found = self.planner.counters.cached_tokens - cached
        return {
            "hit_rate": round(found / sum(map(len, prompts)), 4),
            "ttft_mean_ms": round(1000 * float(np.mean(waits)), 1),
            "ttft_first_ms": round(1000 * waits[0], 1),
            "ttft_max_ms": round(1000 * max(waits), 1),
        }

    async def restart(self) -> float:
        """Kills the worker and starts it again; seconds until it is claimed."""
        former, begun = await self.serving(), time.perf_counter()
        await self.worker.kill()
        await self.worker.start()
        await self.serving(former)
        return round(time.perf_counter() - begun, 2)


@asynccontextmanager
async def replica(options: argparse.Namespace, keep: Sequence[str]) -> AsyncIterator[Replica]:
    worker = WorkerProcess(options, keep)
    await worker.start()
    try:
        settings = SchedulerSettings(workers=(worker.address,))
        async with running(SchedulerDaemon, settings) as scheduler, serve_client(scheduler.address) as client:
            found = Replica(worker, scheduler.daemon.loop.planner, client)
            await found.serving()
            # A worker's first steps are slower, of whatever prompt.
            await found.first_requests([WARM_UP])
            yield found
    finally:
        await worker.kill()


async def restarts(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    """By what is kept: requests before the kill, and the same ones after it."""
    ways = {
        "nothing": (),
        "disk": ("--kv-store", f"disk://{folder}/disk?budget=16GiB"),
        "segment": ("--host-kv-segment", str(folder / "segment")),
        "nixl-file": ("--kv-store", f"nixl-file://{folder}/nixl?budget=16GiB"),
        "mooncake": ("--kv-store", ""),
        "segment and disk": (
            "--host-kv-segment",
            str(folder / "both"),
            "--kv-store",
            f"disk://{folder}/both-disk?budget=16GiB",
        ),
    }
    prompts, report = prompts_of(1, options), {}
    for name in options.ways or ways:
        keep = ways[name]
        with contextlib.ExitStack() as servers:
            if name == "mooncake":
                keep = ("--kv-store", servers.enter_context(shared_store(name, folder)))
            report[name] = await restart(options, keep, prompts)
    return report


async def restart(options: argparse.Namespace, keep: Sequence[str], prompts: Sequence[list[int]]) -> dict[str, object]:
    async with replica(options, keep) as one:
        before = await one.first_requests(prompts)
        tokens = one.first_tokens
        await asyncio.sleep(options.settle_s)  # The store gets what was saved last.
        claimed_s = await one.restart()
        await one.first_requests([WARM_UP])
        after = await one.first_requests(prompts)
        num_same = sum(map(int.__eq__, tokens, one.first_tokens))
        return {"before_kill": before, "claimed_again_s": claimed_s, "after_kill": after, "same_first_tokens": num_same}


async def replicas(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Two replicas over one store: what the second finds of what the first has computed."""
    shared, own, report = prompts_of(2, options), prompts_of(3, options), {}
    for scheme in options.media:
        with shared_store(scheme, folder) as url:
            keep = ("--kv-store", url)
            async with replica(options, keep) as first, replica(options, keep) as second:
                computed = await first.first_requests(shared)
                await asyncio.sleep(options.settle_s)
                cold = await second.first_requests(own)
                warm = await second.first_requests(shared)
                num_same = sum(map(int.__eq__, first.first_tokens, second.first_tokens))
                report[scheme] = {
                    "first": computed, "second_own": cold, "second_shared": warm, "same_first_tokens": num_same
                }  # fmt: skip
    return report


def prompts_of(seed: int, options: argparse.Namespace) -> list[list[int]]:
    """Prompts without a common prefix, a page short of the longest context."""
    rng = np.random.default_rng(seed)
    return [rng.integers(10, 700, options.max_len - PAGE_SIZE).tolist() for _ in range(options.prompts)]


async def measure(options: argparse.Namespace) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        load = os.getloadavg()[0]
        if options.shape is not None:
            options.model = write_shape(options.shape, folder)
            write_random_weights(options.model, device=options.backend)
        return {
            "command": " ".join(["python", *sys.argv]),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}",
            "python": platform.python_version(),
            "load_average": round(load, 1),
            "model": options.model.name,
            "prompt_tokens": options.max_len - PAGE_SIZE,
            "prompts": options.prompts,
            "device_prompts": options.device_prompts,
            "restart": await restarts(options, folder),
            "replicas": await replicas(options, folder),
        }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--shape", help="of bench/gpu/shapes.py, in place of a model")
    parser.add_argument("--backend", choices=("cpu", "cuda"), help="cuda where a shape is named, otherwise cpu")
    parser.add_argument("--max-len", type=int, default=2000)
    parser.add_argument("--host-mib", type=int, help="host memory for KV; 16384 where a shape is named, otherwise 256")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--device-prompts", type=int, default=3, help="prompts whose KV the device has room for")
    parser.add_argument("--ways", nargs="*", help="what outlives the worker; all without")
    parser.add_argument("--media", nargs="*", default=SHARED, choices=SHARED, help="of two replicas")
    parser.add_argument("--settle-s", type=float, default=5.0, help="from the last request to the kill")
    parser.add_argument("--write", type=Path, help="file for the results")
    options = parser.parse_args(argv)
    options.backend = options.backend or ("cuda" if options.shape else "cpu")
    options.host_mib = options.host_mib or (16384 if options.shape else 256)
    text = json.dumps(asyncio.run(measure(options)), indent=1)
    print(text)
    if options.write is not None:
        options.write.write_text(text + "\n")


if __name__ == "__main__":
    main()
