"""Streams that one router and one detokenizer process sustain over HTTP, and over gRPC: a whole mesh on the simulated
worker, many streaming clients in one process of their own, tokens offered at a fixed rate.

Clients do as little as clients can: they count bytes and events as they arrive. CPU comes from /proc, tokens from the
router's own counter. Neighbours on the machine change latencies; ratios (us per token, HTTP against gRPC) hardly.

    python bench/http_streams.py --api http --streams 256 --rate 40000 --seconds 8
    python bench/http_streams.py --api grpc --streams 256 --rate 40000 --seconds 8
    python bench/http_streams.py --api http --queued 10000      # streams that wait for their first token
    python bench/http_streams.py --all                          # all of these, one JSON
    --profile FILE: a sampled profile of the router (py-spy, "raw" format) while it is measured
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import cast

import uvloop

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.cluster.local_cluster import LocalCluster
from radixmesh.daemons.runtime.arrays import pack_ints
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.router.v1 import router_pb2

ME = Path(__file__).resolve()
ROOT = ME.parents[1]
COMPOSE = ROOT / "compose" / "simulated.yml"
GENERATE = "/radixmesh.router.v1.RouterService/Generate"
HTTP_PORT, METRICS_PORT = 8000, 9100
DAEMONS = ("router", "detokenizer", "scheduler", "worker")
PROMPT_LEN = 32
MAX_TOKENS = 7000


@dataclass(slots=True)
class Arrivals:
    """Events that reached the clients between `begin` and `end` (monotonic)."""

    begin: float = float("inf")
    end: float = float("inf")
    num_events: int = 0
    num_bytes: int = 0
    gaps: list[float] = field(default_factory=list)
    num_told: int = 0  # Streams that have been told that they are served.
    num_open: int = 0  # Streams that have output.
    readers: list[asyncio.Task[None]] = field(default_factory=list)

    def add(self, last: float, num_events: int, num_bytes: int) -> float:
        """One arrival of a stream whose one before was at `last` (0 = none); the moment of this one."""
        now = time.monotonic()
        if not last:
            self.num_open += 1
        if self.begin <= now < self.end:
            self.num_events += num_events
            self.num_bytes += num_bytes
            if last:
                self.gaps.append(now - last)
        return now


class HttpStream(asyncio.Protocol):
    """One request on one connection."""

    def __init__(self, request: bytes, arrivals: Arrivals) -> None:
        self._request = request
        self._arrivals = arrivals
        self._last = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        self._arrivals.num_told += data.startswith(b"HTTP/1.1 200 ")
        num_events = data.count(b"\ndata: ")
        if num_events:
            self._last = self._arrivals.add(self._last, num_events, len(data))


def prompt_of(number: int) -> list[int]:
    """Each its own, so that no stream shares another's tokens."""
    return [300 + number % 300, 300 + number // 300, *range(300, 300 + PROMPT_LEN - 2)]


async def open_http(address: str, num: int, arrivals: Arrivals) -> None:
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    for number in range(num):
        body = {"prompt": prompt_of(number), "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": True}
        data = json.dumps({**body, "seed": number}).encode()
        kind = "Content-Type: application/json"
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{kind}\r\nContent-Length: {len(data)}\r\n\r\n".encode()
        await loop.create_connection(lambda request=head + data: HttpStream(request, arrivals), host, int(port))
        if number % 50 == 49:
            await asyncio.sleep(0.05)


async def open_grpc(address: str, num: int, arrivals: Arrivals) -> None:
    channels = [open_channel(address) for _ in range(16)]

    async def read(number: int) -> None:
        stop = common_pb2.StopParams(max_tokens=MAX_TOKENS, ignore_eos=True)
        request = router_pb2.GenerateRequest(
            prompt_ids=pack_ints(prompt_of(number)),
            stop=stop,
            sampling=common_pb2.SamplingParams(seed=number),
        )
        last, is_first = 0.0, True
        async for raw in channels[number % 16].unary_stream(GENERATE)(request.SerializeToString()):
            arrivals.num_told += is_first
            if not is_first:
                last = arrivals.add(last, 1, len(raw))
            is_first = False  # The resolved request.

    tasks = []
    for number in range(num):
        tasks.append(asyncio.create_task(read(number)))
        if number % 50 == 49:
            await asyncio.sleep(0.05)
    arrivals.readers = tasks


async def run_clients(api: str, address: str, num: int, seconds: float, *, is_queue: bool) -> None:
    """Prints "begin" and "end" around the measured time, then one line of JSON."""
    arrivals = Arrivals()
    await (open_http if api == "http" else open_grpc)(address, num, arrivals)
    deadline = time.monotonic() + 90
    while (arrivals.num_told if is_queue else arrivals.num_open) < num:
        assert time.monotonic() < deadline, (
            f"of {num} streams {arrivals.num_told} are served, {arrivals.num_open} begun"
        )
        await asyncio.sleep(0.05)
    await asyncio.sleep(2.0)
    arrivals.begin = time.monotonic()
    arrivals.end = arrivals.begin + seconds
    print("begin", flush=True)
    await asyncio.sleep(seconds)
    print("end", flush=True)
    gaps = sorted(arrivals.gaps)
    seen: dict[str, float] = {"events": arrivals.num_events, "bytes": arrivals.num_bytes}
    if gaps:
        seen["itl_p50_ms"] = round(1000 * gaps[len(gaps) // 2], 1)
        seen["itl_p99_ms"] = round(1000 * gaps[int(0.99 * len(gaps))], 1)
    print(json.dumps(seen), flush=True)
    sys.stdout.flush()
    os._exit(0)


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def output_tokens(address: str) -> float:
    text = urllib.request.urlopen(f"http://{address}/metrics", timeout=10).read().decode()
    (value,) = [line.split()[1] for line in text.splitlines() if line.startswith("radixmesh_output_tokens_total ")]
    return float(value)


def settings_of(streams: int, rate: float, *, is_queue: bool) -> dict[str, dict[str, str]]:
    """A worker whose step of all rows takes streams / rate seconds, or next to none of them where they are to wait."""
    step_us = 1e6 if is_queue else 1e6 * streams / rate
    worker = {
        "SIMULATED_BASE_US": step_us,
        "SIMULATED_DECODE_ROW_US": 0,
        "SIMULATED_DECODE_CONTEXT_US": 0,
        "SIMULATED_PREFILL_TOKEN_US": 0,
        "SIMULATED_PREFILL_CONTEXT_US": 0,
        "NUM_PAGES": 1_500_000,
        "MAX_TOTAL_LEN": 8192,
        "LOG_LEVEL": "error",
    }
    scheduler = {"LOG_LEVEL": "error", "MAX_QUEUE": 20_000, **({"MAX_RUNNING": 1} if is_queue else {})}
    router = {"METRICS_LISTEN": f"0.0.0.0:{METRICS_PORT}", "LOG_LEVEL": "error", "CLIENT_STALL_S": 120}
    all_of = {"worker": worker, "scheduler": scheduler, "router": router, "detokenizer": {"LOG_LEVEL": "error"}}
    return {name: {f"RADIXMESH_{key}": str(value) for key, value in values.items()} for name, values in all_of.items()}


async def measure(
    api: str, streams: int, rate: float, seconds: float, *, is_queue: bool, profile: str
) -> dict[str, object]:
    cluster = LocalCluster(
        COMPOSE, environment=settings_of(streams, rate, is_queue=is_queue), publish=False, hang_window_s=60.0
    )
    async with cluster:
        await cluster.wait_healthy(90)
        pids = {name: cluster.pids[f"{name}-1"] for name in DAEMONS}
        empty_mb = rss_mb(pids["router"])
        metrics = cluster.address("router", 1, METRICS_PORT)
        address = cluster.address("router", 1, HTTP_PORT) if api == "http" else cluster.address("router")
        arguments = ["--role", "clients", "--api", api, "--address", address, "--seconds", str(seconds)]
        arguments += ["--queued" if is_queue else "--streams", str(streams)]
        clients = await asyncio.create_subprocess_exec(sys.executable, str(ME), *arguments, stdout=subprocess.PIPE)
        try:
            assert clients.stdout is not None
            assert (await clients.stdout.readline()) == b"begin\n"
            pids["clients"] = clients.pid
            spy = profile_of(pids["router"], profile, seconds)
            before = {name: cpu_s(pid) for name, pid in pids.items()}
            tokens, start = output_tokens(metrics), time.monotonic()
            assert (await clients.stdout.readline()) == b"end\n"
            used = {name: cpu_s(pid) - before[name] for name, pid in pids.items()}
            tokens, wall = output_tokens(metrics) - tokens, time.monotonic() - start
            seen = json.loads(await clients.stdout.readline())
            full_mb = rss_mb(pids["router"])
            if spy is not None:
                spy.wait()
        finally:
            if clients.returncode is None:
                clients.kill()
            await clients.wait()
    cores = {name: round(value / wall, 3) for name, value in used.items()}
    result: dict[str, object] = {"api": api, "load_average": os.getloadavg()[0], "cores": cores}
    result |= {"router_rss_mb": round(full_mb), "router_rss_mb_before": round(empty_mb)}
    if is_queue:
        return {**result, "queued_streams": streams}
    return {
        **result,
        "streams": streams,
        "offered_tok_s": rate,
        "delivered_tok_s": round(tokens / wall),
        "router_us_per_token": round(1e6 * used["router"] / tokens, 1),
        "detokenizer_us_per_token": round(1e6 * used["detokenizer"] / tokens, 1),
        "router_us_per_event": round(1e6 * used["router"] * seconds / wall / max(1, seen["events"]), 1),
        "router_tok_s_per_core": round(tokens / used["router"]),
        "detokenizer_tok_s_per_core": round(tokens / used["detokenizer"]),
        "coalescing": round(tokens * seconds / wall / max(1, seen["events"]), 2),
        **seen,
    }


def profile_of(pid: int, path: str, seconds: float) -> subprocess.Popen[bytes] | None:
    if not path:
        return None
    command = ["py-spy", "record", "-p", str(pid), "-d", str(int(seconds)), "-r", "250", "-f", "raw", "-o", path]
    folder = Path(sys.executable).parent
    return subprocess.Popen([str(folder / command[0]), *command[1:]], stdout=subprocess.DEVNULL)


def machine() -> dict[str, object]:
    packages = ("grpcio", "protobuf", "uvloop", "uvicorn", "httptools", "starlette")
    return {
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


async def measure_all(seconds: float) -> list[dict[str, object]]:
    runs = []
    for api in ("grpc", "http"):
        cases = ((256, 10_000.0, False), (256, 40_000.0, False), (10_000, 0.0, True))
        for streams, rate, is_queue in cases:
            run = await measure(api, streams, rate, seconds, is_queue=is_queue, profile="")
            print(json.dumps(run), file=sys.stderr, flush=True)
            runs.append(run)
    return runs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--role", choices=["all", "clients"], default="all")
    parser.add_argument("--api", choices=["http", "grpc"], default="http")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rate", type=float, default=40_000.0, help="tokens per second offered, all streams together")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--queued", type=int, default=0, help="measure this many waiting streams instead")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--profile", default="")
    parser.add_argument("--address", default="")
    o = parser.parse_args()
    streams, is_queue = o.queued or o.streams, bool(o.queued)
    if o.role == "clients":
        uvloop.run(run_clients(o.api, o.address, streams, o.seconds, is_queue=is_queue))
        return 0
    if o.all:
        runs = asyncio.run(measure_all(o.seconds))
    else:
        runs = [asyncio.run(measure(o.api, streams, o.rate, o.seconds, is_queue=is_queue, profile=o.profile))]
    print(json.dumps({"machine": machine(), "runs": runs}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
