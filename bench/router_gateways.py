"""Routers and gateways beside each other, over the same real schedulers with simulated workers. Prints JSON.

python bench/router_gateways.py --smg VENV/bin/smg --sglang VENV/bin/python [--workloads groups,chats] [--requests 384]
    [--seeds 1,2,3]     # each seed's prompts to all contestants in turn, so that neighbours of the machine meet all

Four replicas: a scheduler and a simulated worker each (a step takes 35 ms, 0.25 ms a decode row and 0.2 ms an uncached
token; KV for a third of the prefixes). Ours is one router over all of them; a gateway of others stands before four
routers with one replica each. Text prompts over HTTP, the same clients; caches are empty before each run. Figures of
one call are comparable with each other, and not with those of another machine: the clients share its cores.
`later` figures leave out what all clients begin with: those prompts find empty caches, whoever routes
(router_bounds.py).
`cpu_us_per_token` is the contestant's own CPU, `http_cpu_us_per_token` with that of the routers behind a gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import grpc
from routing.http_load import Conversation, run_load

from radixmesh.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

_ROOT = Path(__file__).resolve().parents[1]
_MODEL = _ROOT / "compose" / "models" / "tiny-llama"
_TEXT = "the a tiger burning bright in forests of night what immortal hand or eye could frame thy fearful symmetry"
_WORDS = tuple(_TEXT.split())
_REPLICAS = 4
_KV_TOKENS = 24 * 1536 // 3 + 12 * 1700
_WORKER = (
    *("--backend", "simulated", "--model", str(_MODEL), "--num-pages", str(_KV_TOKENS)),
    *("--simulated-base-us", "35000", "--simulated-decode-row-us", "250", "--simulated-prefill-token-us", "200"),
    *("--simulated-decode-context-us", "0", "--simulated-prefill-context-us", "0"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smg", help="executable of smg, with --policy cache_aware")
    parser.add_argument("--sglang", help="python that has sglang_router, with --policy cache_aware")
    parser.add_argument("--ours", default="cache_aware,round_robin,least_load", help="policies of our router")
    parser.add_argument("--workloads", default="groups,zipf_groups,chats,trees,random")
    parser.add_argument("--requests", type=int, default=384)
    parser.add_argument("--seeds", default="1", help="of the prompts")
    options = parser.parse_args()
    # Its daemons have sessions of their own: they would outlive a benchmark that is told to stop.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    contestants = [f"ours {policy}" for policy in options.ours.split(",") if policy]
    contestants += [name for name, given in (("smg", options.smg), ("sglang-router", options.sglang)) if given]
    with tempfile.TemporaryDirectory(prefix="gw") as folder, Mesh(Path(folder)) as mesh:
        mesh.start_replicas()
        result: dict[str, dict[str, list[dict[str, object]]]] = {}
        for workload in options.workloads.split(","):
            for seed in map(int, options.seeds.split(",")):
                for name in contestants:
                    found = {"seed": seed, **mesh.measure(name, workload, seed, options)}
                    result.setdefault(workload, {}).setdefault(name, []).append(found)
                    print(f"{workload} {name}: {json.dumps(found)}", file=sys.stderr, flush=True)
    print(json.dumps({"machine": _machine(), "replicas": _REPLICAS, "kv_tokens": _KV_TOKENS, "runs": result}, indent=1))


class Mesh:
    """Processes of this benchmark; all end with the block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._log = (folder / "log").open("wb")

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            self._end(process)

    def start_replicas(self) -> None:
        """Tokenizer, detokenizer, schedulers, workers, and a router with HTTP before each replica."""
        self._daemon("tokenizer", "--model", str(_MODEL), "--listen", self._socket("tok"))
        self._daemon("detokenizer", "--model", str(_MODEL), "--listen", self._socket("detok"))
        for i in range(_REPLICAS):
            self._daemon("worker", *_WORKER, "--listen", self._socket(f"worker{i}"))
            self._daemon("scheduler", "--workers", self._socket(f"worker{i}"), "--listen", self._socket(f"sched{i}"))
        self._ports = [_free_port() for _ in range(_REPLICAS)]
        self._singles = [
            self._router(port, f"single{i}", [f"sched{i}"], "round_robin") for i, port in enumerate(self._ports)
        ]
        for port in self._ports:
            self._wait_http(port)

    def measure(self, name: str, workload: str, seed: int, options: argparse.Namespace) -> dict[str, object]:
        """One run of a contestant: figures of clients and schedulers."""
        asyncio.run(self._flush())
        port = _free_port()
        process = self._contestant(name, port, options)
        try:
            self._wait_http(port)
            conversations, at_once, best = workload_of(workload, options.requests, seed)
            before, cpu_before = asyncio.run(self._states()), self._cpu_s(process.pid)
            outcome = asyncio.run(run_load("127.0.0.1", port, "tiny-llama", conversations, at_once))
            after = asyncio.run(self._states())
            own_s, behind_s = (now - then for now, then in zip(self._cpu_s(process.pid), cpu_before, strict=True))
        finally:
            self._end(process)
            self._processes.remove(process)
        cached = [a.prompt_cached_tokens - b.prompt_cached_tokens for a, b in zip(after, before, strict=True)]
        computed = [a.prefilled_tokens - b.prefilled_tokens for a, b in zip(after, before, strict=True)]
        total = [c + p for c, p in zip(cached, computed, strict=True)]
        summary = outcome.summary()
        tokens = max(1.0, float(summary["tok_s"]) * float(summary["seconds"]))
        return {
            **summary,
            "cpu_us_per_token": round(1e6 * own_s / tokens),
            "http_cpu_us_per_token": round(1e6 * (own_s + behind_s * (not name.startswith("ours "))) / tokens),
            "hit_rate": round(sum(cached) / max(1, sum(total)), 3),
            "best_hit_rate": best,
            "prompt_tokens_max_to_mean": round(max(total) * len(total) / max(1, sum(total)), 2),
            "load_average": round(os.getloadavg()[0], 1),
        }

    def _cpu_s(self, leader: int) -> tuple[float, float]:
        """CPU seconds that a contestant's session of processes has taken, and the single-replica routers."""
        singles = {process.pid for process in self._singles}
        own = behind = 0.0
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = path.read_text().rsplit(")", 1)[1].split()
                seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
                own += seconds * (int(fields[3]) == leader)
                behind += seconds * (int(fields[3]) in singles)
        return own, behind

    def _contestant(self, name: str, port: int, options: argparse.Namespace) -> subprocess.Popen[bytes]:
        if name.startswith("ours "):
            return self._router(port, "ours", [f"sched{i}" for i in range(_REPLICAS)], name.removeprefix("ours "))
        urls = [f"http://127.0.0.1:{one}" for one in self._ports]
        common = ("--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware", "--worker-urls", *urls)
        common = (*common, "--prometheus-port", str(_free_port()), "--log-level", "warn")
        if name == "smg":
            return self._start([options.smg, "launch", *common])
        return self._start([options.sglang, "-m", "sglang_router.launch_router", *common])

    def _router(self, port: int, name: str, schedulers: Sequence[str], policy: str) -> subprocess.Popen[bytes]:
        return self._daemon(
            "router",
            *("--listen", self._socket(name), "--http-listen", f"127.0.0.1:{port}", "--policy", policy),
            *("--tokenizers", self._socket("tok"), "--detokenizers", self._socket("detok")),
            *("--schedulers", ",".join(map(self._socket, schedulers))),
        )

    def _daemon(self, name: str, *flags: str) -> subprocess.Popen[bytes]:
        return self._start([sys.executable, "-m", f"radixmesh.daemons.{name}", *flags])

    def _start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(command, stdout=self._log, stderr=self._log, start_new_session=True)
        self._processes.append(process)
        return process

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _socket(self, name: str) -> str:
        return f"unix:{self._folder}/{name}"

    def _wait_http(self, port: int) -> None:
        """Waits until a completion comes back: a gateway that listens may not know its workers yet."""
        until = time.monotonic() + 120
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                outcome = asyncio.run(run_load("127.0.0.1", port, "tiny-llama", [iter([[("tiger", 1)]])], 1))
                if not outcome.summary()["failed"]:
                    return
            time.sleep(0.5)
        self._log.flush()
        sys.exit((self._folder / "log").read_text(errors="replace")[-4000:] + f"\nnobody answers at port {port}")

    async def _states(self) -> list[scheduler_pb2.GetStateResponse]:
        return [await self._ask(i, "GetState", scheduler_pb2.GetStateRequest()) for i in range(_REPLICAS)]

    async def _flush(self) -> None:
        for i in range(_REPLICAS):
            await self._ask(i, "FlushCache", scheduler_pb2.FlushCacheRequest())

    async def _ask(self, replica: int, verb: str, request: object) -> scheduler_pb2.GetStateResponse:
        async with grpc.aio.insecure_channel(self._socket(f"sched{replica}")) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            answer: scheduler_pb2.GetStateResponse = await getattr(stub, verb)(request, timeout=60)
            return answer


def workload_of(name: str, num_requests: int, seed: int = 1) -> tuple[list[Conversation], int, float]:
    """Conversations, how many at once, and the hit rate of one cache without end, by characters."""
    rng = random.Random(seed)

    def text(num_tokens: int) -> str:
        return " ".join(rng.choice(_WORDS) for _ in range(int(num_tokens * 0.585)))

    if name == "chats":
        system = text(512)
        chats = [
            list(_chat(system, [(text(96), text(32)) for _ in range(6)])) for _ in range(max(1, num_requests // 6))
        ]
        # Of a chat's prompts all of the one before, of its first the system prompt.
        seen = sum(len(chat[turn - 1][0]) if turn else len(system) for chat in chats for turn in range(len(chat)))
        best = (seen - len(system)) / sum(len(prompt) for chat in chats for prompt, _ in chat)
        return [iter([[prompt] for prompt in chat]) for chat in chats], 32, round(best, 3)
    if name == "trees":
        system = text(768)
        trees = [list(_tree(system, text, rng)) for _ in range(max(1, num_requests // 24))]
        return [iter(tree) for tree in trees], 12, round(_shared(trees), 3)
    if name == "random":
        return [iter([[(text(512), 24)]]) for _ in range(num_requests)], 48, 0.0
    prefixes = [text(1536) for _ in range(24)]
    weights = [1.0 / (rank + 1) ** 1.2 if name == "zipf_groups" else 1.0 for rank in range(24)]
    chosen = rng.choices(range(24), weights, k=num_requests)
    prompts = [(f"{prefixes[group]} {text(64)}", 24) for group in chosen]
    best = 0.96 * (1 - len(set(chosen)) / num_requests)
    return [iter([[prompt]]) for prompt in prompts], 48, round(best, 3)


def _chat(system: str, turns: list[tuple[str, str]]) -> Iterator[tuple[str, int]]:
    """Each turn sends all before it; answers are made up by the client, so that all contestants get the same."""
    history = system
    for asked, answered in turns:
        history += " " + asked
        yield history, 32
        history += " " + answered


def _tree(
    system: str, text: Callable[[int], str], rng: random.Random, *, branches: int = 4, depth: int = 3
) -> Iterator[list[tuple[str, int]]]:
    """A search: on each level thoughts at once, then a score of each, and one is continued. As routing/workloads.py."""
    state = f"{system} {text(192)}"
    for _ in range(depth):
        yield [(f"{state} {text(8)}", 48) for _ in range(branches)]
        thoughts = [f"{state} {text(48)}" for _ in range(branches)]
        yield [(f"{thought} {text(16)}", 4) for thought in thoughts]
        state = rng.choice(thoughts)


def _shared(conversations: Sequence[Sequence[Sequence[tuple[str, int]]]]) -> float:
    """Of the prompts' characters those that an earlier prompt begins with too."""
    prompts = sorted(prompt for rounds in conversations for prompts in rounds for prompt, _ in prompts)
    seen = sum(len(os.path.commonprefix(pair)) for pair in itertools.pairwise(prompts))  # noqa: RUF071  characters are meant
    return seen / sum(map(len, prompts))


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _machine() -> dict[str, object]:
    return {"cpu": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}


if __name__ == "__main__":
    main()
