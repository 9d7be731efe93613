"""Cost per token of one router and one detokenizer process: many text streams, tokens offered at a fixed rate.

A made-up scheduler (this file, --role scheduler) sends one TokenBatch a step for all rows; clients just
read raw messages. Router and detokenizer are the real daemons. CPU comes from /proc: neighbours on the machine change
latencies but hardly the cost per token.

    python bench/router_fanout.py --streams 256 --rate 40000 --seconds 8
    python bench/router_fanout.py --queued 10000            # streams that wait for their first token
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import numpy as np

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.arrays import pack_ints
from radixmesh.daemons.runtime.model_folder.fingerprint import tokenizer_fingerprint
from radixmesh.daemons.runtime.model_folder.vocabulary import Vocabulary
from radixmesh.daemons.runtime.rpc.channel import check_health, open_channel
from radixmesh.daemons.runtime.rpc.health.progress import Progress
from radixmesh.daemons.runtime.rpc.health.service import HealthService
from radixmesh.daemons.runtime.rpc.hello import make_hello
from radixmesh.daemons.runtime.rpc.server import MeshServer
from radixmesh.router.v1 import router_pb2
from radixmesh.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "compose" / "models" / "tiny-llama"
GENERATE = "/radixmesh.router.v1.RouterService/Generate"


class PacedScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Every row gets one token a step, steps come at a fixed rate; late ones are caught up in bigger frames."""

    def __init__(self, rate: float, text_ids: list[int], vocabulary: Vocabulary) -> None:
        self._rate = rate
        self._text = np.asarray(text_ids, np.int32)
        self._model = common_pb2.ModelIdentity(
            name="paced",
            tokenizer_fingerprint=tokenizer_fingerprint(MODEL),
            sampler_version=1,
            vocab_size=vocabulary.identity.vocab_size,
            max_total_len=1 << 20,
        )
        self._handles: list[int] = []

    async def Serve(
        self, request_iterator: AsyncIterator[scheduler_pb2.ServeRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[scheduler_pb2.ServeResponse]:
        await anext(request_iterator)
        reader = asyncio.create_task(self._read(request_iterator))
        hello = scheduler_pb2.SchedulerHello(hello=make_hello("scheduler", "paced", self._model), page_size=1)
        load = scheduler_pb2.Load(group=scheduler_pb2.GROUP_STATE_SERVING)
        yield scheduler_pb2.ServeResponse(hello=hello, load=load)
        num_done, begun = 0, 0.0
        while not reader.done():
            num = len(self._handles)
            if not num:
                yield scheduler_pb2.ServeResponse(load=load)
                await asyncio.sleep(0.2)
                begun = time.monotonic()
                continue
            num_due = int((time.monotonic() - begun) * self._rate / num)
            if num_due > num_done:
                # As a scheduler does while its router is slow: steps merge into one frame.
                yield self._frame(num_done, num_due - num_done, load if num_done % 50 == 0 else None)
                num_done = num_due
            await asyncio.sleep(max(0.0, begun + (num_done + 1) * num / self._rate - time.monotonic()))

    def _frame(self, first: int, count: int, load: scheduler_pb2.Load | None) -> scheduler_pb2.ServeResponse:
        num = len(self._handles)
        at = first + np.arange(count, dtype=np.int32)[None, :] + 7 * np.arange(num, dtype=np.int32)[:, None]
        frame = scheduler_pb2.ServeResponse(load=load)
        frame.tokens.handles = pack_ints(self._handles)
        frame.tokens.attempts = bytes(4 * num)
        frame.tokens.first_output_indexes = pack_ints(np.full(num, first, np.int32))
        frame.tokens.counts = pack_ints(np.full(num, count, np.int32))
        frame.tokens.ids = pack_ints(self._text[at % len(self._text)])
        return frame

    async def _read(self, frames: AsyncIterator[scheduler_pb2.ServeRequest]) -> None:
        waiting: list[int] = []
        async for frame in frames:
            waiting += [submit.handle for submit in frame.submits]
            if len(waiting) >= int(os.environ["FANOUT_STREAMS"]):
                self._handles = waiting  # All start at once, so that every row is at the same index.


async def serve_tokens(address: str, rate: float) -> None:
    vocabulary = Vocabulary.load(MODEL)
    text = (ROOT / "LICENSE").read_text() if (ROOT / "LICENSE").exists() else __doc__ * 20
    ids: list[int] = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
    progress = Progress()
    progress.loaded()
    server = MeshServer(HealthService(progress))
    server.add(scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server, PacedScheduler(rate, ids[:4000], vocabulary))
    await server.start([address])
    await asyncio.Event().wait()


async def hold_streams(address: str, num: int, seconds: float) -> None:
    """Opens streams that get nothing but their first message."""
    request = router_pb2.GenerateRequest(
        prompt_ids=pack_ints(list(range(1, 129))), stop=common_pb2.StopParams(max_tokens=512)
    ).SerializeToString()
    channels = [open_channel(address) for _ in range(16)]
    calls = []
    for i in range(num):
        calls.append(channels[i % 16].unary_stream(GENERATE)(request))
        if i % 200 == 199:
            await asyncio.gather(*(call.read() for call in calls[-200:]))
    await asyncio.sleep(2.0)
    print("begin", flush=True)
    await asyncio.sleep(seconds)
    print("end", flush=True)
    print("{}", flush=True)
    await asyncio.sleep(60)


async def read_streams(address: str, num: int, seconds: float) -> None:
    """Prints one JSON line: messages, tokens and gaps between messages of a stream."""
    request = router_pb2.GenerateRequest(
        prompt_ids=pack_ints([1, 2, 3, 4]), stop=common_pb2.StopParams(max_tokens=1 << 19, ignore_eos=True)
    ).SerializeToString()
    gaps: list[float] = []
    counts = {"messages": 0, "bytes": 0}
    until = [float("inf"), float("inf")]
    started = asyncio.Event()
    num_started = 0

    async def one(channel: grpc.aio.Channel) -> None:
        nonlocal num_started
        last = 0.0
        call = channel.unary_stream(GENERATE)(request)
        num_messages = 0
        async for raw in call:
            now = time.monotonic()
            num_messages += 1
            if num_messages == 3:
                num_started += 1
                if num_started == num:
                    until[0], until[1] = now + 1.0, now + 1.0 + seconds
                    started.set()
            if now > until[1]:
                break
            if now > until[0]:
                counts["messages"] += 1
                counts["bytes"] += len(raw)
                if last:
                    gaps.append(now - last)
                last = now
        call.cancel()

    channels = [open_channel(address) for _ in range(8)]
    reading = [asyncio.create_task(one(channels[i % 8])) for i in range(num)]
    await started.wait()
    await asyncio.sleep(1.0)
    print("begin", flush=True)
    await asyncio.sleep(seconds)
    print("end", flush=True)
    await asyncio.gather(*reading)
    gaps.sort()
    result = {
        **counts,
        "gap_p50_ms": round(1000 * gaps[len(gaps) // 2], 1),
        "gap_p99_ms": round(1000 * gaps[int(len(gaps) * 0.99)], 1),
    }
    print(json.dumps(result), flush=True)


async def until_serving(address: str) -> None:
    while await check_health(address) != "SERVING":  # noqa: ASYNC110 - another process.
        await asyncio.sleep(0.1)


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def output_tokens(address: str) -> float:
    text = urllib.request.urlopen(f"http://{address}/metrics", timeout=5).read().decode()
    (value,) = [line.split()[1] for line in text.splitlines() if line.startswith("radixmesh_output_tokens_total ")]
    return float(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--role", choices=["all", "scheduler", "clients", "queue"], default="all")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rate", type=float, default=40_000.0, help="tokens per second offered, all streams together")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--queued", type=int, default=0, help="measure this many waiting streams instead")
    parser.add_argument("--address", default="")
    options = parser.parse_args()
    if options.role == "scheduler":
        asyncio.run(serve_tokens(options.address, options.rate))
    elif options.role == "clients":
        asyncio.run(read_streams(options.address, options.streams, options.seconds))
    elif options.role == "queue":
        asyncio.run(hold_streams(options.address, options.streams, options.seconds))
    else:
        streams = options.queued or options.streams
        print(json.dumps(measure(streams, options.rate, options.seconds, is_queue=bool(options.queued)), indent=2))
    return 0


def rss_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def measure(streams: int, rate: float, seconds: float, *, is_queue: bool) -> dict[str, object]:
    # A queue is one stream short of what the scheduler waits for.
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "FANOUT_STREAMS": str(streams + is_queue)}
    with tempfile.TemporaryDirectory(prefix="rm") as folder:
        at = {name: f"unix:{folder}/{name}" for name in ("scheduler", "detokenizer", "router")}
        me, python = str(Path(__file__).resolve()), sys.executable
        metrics = "127.0.0.1:19753"
        router = [python, "-m", "radixmesh.daemons.router", "--listen", at["router"], "--metrics-listen", metrics]
        router += ["--schedulers", at["scheduler"], "--detokenizers", at["detokenizer"], "--log-level", "error"]
        detokenizer = [python, "-m", "radixmesh.daemons.detokenizer", "--listen", at["detokenizer"]]
        detokenizer += ["--model", str(MODEL), "--log-level", "error"]
        role = [python, me, "--rate", str(rate), "--streams", str(streams), "--seconds", str(seconds), "--role"]
        running: list[subprocess.Popen[str]] = []
        try:
            commands = ([*role, "scheduler", "--address", at["scheduler"]], detokenizer, router)
            running.extend(subprocess.Popen(command, env=environment, text=True) for command in commands)
            for address in at.values():
                asyncio.run(until_serving(address))
            time.sleep(1.5)
            empty_mb = rss_mb(running[2].pid)
            clients = subprocess.Popen(
                [*role, "queue" if is_queue else "clients", "--address", at["router"]],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            running.append(clients)
            assert clients.stdout is not None
            assert clients.stdout.readline() == "begin\n"
            before = [cpu_s(process.pid) for process in running]
            tokens, start = output_tokens(metrics), time.monotonic()
            assert clients.stdout.readline() == "end\n"
            used = [cpu_s(process.pid) - then for process, then in zip(running, before, strict=True)]
            tokens, wall = output_tokens(metrics) - tokens, time.monotonic() - start
            seen = json.loads(clients.stdout.readline())
            router_mb = rss_mb(running[2].pid)
        finally:
            for process in running:
                process.kill()
                process.wait()
    cores = dict(zip(("scheduler", "detokenizer", "router", "clients"), (u / wall for u in used), strict=True))
    if is_queue:
        return {
            "queued_streams": streams,
            "router_rss_mb": round(router_mb),
            "router_rss_mb_before": round(empty_mb),
            "cores": {name: round(value, 3) for name, value in cores.items()},
            "cpus": os.cpu_count(),
        }
    return {
        "streams": streams,
        "router_rss_mb": round(router_mb),
        "offered_tok_s": rate,
        "delivered_tok_s": round(tokens / wall),
        "cores": {name: round(value, 2) for name, value in cores.items()},
        "router_us_per_token": round(1e6 * used[2] / tokens, 1),
        "detokenizer_us_per_token": round(1e6 * used[1] / tokens, 1),
        "router_tok_s_per_core": round(tokens / used[2]),
        "detokenizer_tok_s_per_core": round(tokens / used[1]),
        "coalescing": round(tokens / seen["messages"], 2),
        **seen,
        "cpus": os.cpu_count(),
    }


if __name__ == "__main__":
    sys.exit(main())
