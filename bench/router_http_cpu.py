"""CPU that a router needs per output token of HTTP text streams, in one tree or in several, a round of each in turn.

Four pairs of scheduler and simulated worker (a step = 35 ms + 0.25 ms a decode row + 0.2 ms an uncached token), one
tokenizer, detokenizer and router, all of one tree; clients in this process. The CPU is that of the router's process
while the requests run, from /proc: neighbours on the machine change it by a few percent, and rounds of the trees in
turn meet the same neighbours.

    python bench/router_http_cpu.py                            # this tree
    python bench/router_http_cpu.py --trees ../before . --rounds 3
    --workload groups: 384 prompts of 24 groups, 24 tokens each; long: 64 streams of 400 tokens behind short prompts;
        groups_one, short: a token each behind long and short prompts; brief: 24 tokens each behind short ones
    --at-once 1 16 64: so many streams at a time, in place of the workload's own number
    --profile FILE: cProfile of the router (its figures then count for nothing)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ME = Path(__file__).resolve()
ROOT = ME.parents[1]
MODEL = ROOT / "compose" / "models" / "tiny-llama"
NUM_REPLICAS = 4
# name -> (prompts, tokens of each answer, streams at once)
WORKLOADS: dict[str, tuple[Callable[[], list[str]], int, int]] = {
    "groups": (lambda: group_prompts(384, 24, 3600), 24, 48),
    "groups_one": (lambda: group_prompts(384, 24, 3600), 1, 48),
    "brief": (lambda: group_prompts(384, 24, 600), 24, 48),
    "short": (lambda: group_prompts(1500, 24, 600), 1, 48),
    "long": (lambda: group_prompts(64, 64, 60), 400, 64),
}


def group_prompts(count: int, groups: int, prefix_chars: int) -> list[str]:
    """Texts that share one of `groups` prefixes each, and end in words of their own."""
    words = (ROOT / "LICENSE").read_text().split()
    chance = random.Random(1)

    def text(chars: int) -> str:
        return " ".join(chance.choices(words, k=chars // 6))

    prefixes = [text(prefix_chars) for _ in range(groups)]
    return [f"{chance.choice(prefixes)} {text(200)}" for _ in range(count)]


async def ask(port: int, prompt: str, max_tokens: int) -> int:
    """Streams one answer as HTTP clients do; its tokens as the usage tells them."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True, "seed": 1}
    data = json.dumps({**body, "stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    writer.write(f"{head}\r\n\r\n".encode() + data)
    tokens, line = 0, b""
    seen: list[bytes] = []
    while (line := await reader.readline()) not in (b"data: [DONE]\n", b"", b"0\r\n"):
        seen = [*seen[-2:], line]
        if line.startswith(b"data: ") and b'"usage":{' in line:
            tokens = json.loads(line[6:])["usage"]["completion_tokens"]
    writer.close()
    assert tokens == max_tokens, f"{tokens} tokens where {max_tokens} were asked for: {seen}"
    return tokens


async def run_clients(port: int, prompts: Sequence[str], max_tokens: int, at_once: int) -> int:
    slots = asyncio.Semaphore(at_once)

    async def one(prompt: str) -> int:
        async with slots:
            return await ask(port, prompt, max_tokens)

    return sum(await asyncio.gather(*map(one, prompts)))


def daemons_of(folder: str, port: int, local_outputs: int) -> dict[str, list[str]]:
    """Name -> command line after `python -m radixmesh.daemons.`. local_outputs: 0 = no text in the router."""

    def at(name: str) -> str:
        return f"unix:{folder}/{name}"

    simulated = {"base": 35_000, "decode-row": 250, "decode-context": 0, "prefill-token": 200, "prefill-context": 0}
    costs = [word for name, us in simulated.items() for word in (f"--simulated-{name}-us", str(us))]
    numbers = range(NUM_REPLICAS)
    text = ["--model", str(MODEL)]
    daemons = {
        f"worker{i}": [
            "worker",
            "--listen",
            at(f"w{i}"),
            "--backend",
            "simulated",
            "--num-pages",
            "40000",
            "--max-total-len",
            "8192",
            *text,
            *costs,
        ]
        for i in numbers
    }
    daemons |= {f"scheduler{i}": ["scheduler", "--listen", at(f"s{i}"), "--workers", at(f"w{i}")] for i in numbers}
    daemons |= {name: [name, "--listen", at(name), *text] for name in ("tokenizer", "detokenizer")}
    schedulers = ",".join(at(f"s{i}") for i in numbers)
    peers = ["--tokenizers", at("tokenizer"), "--detokenizers", at("detokenizer"), "--schedulers", schedulers]
    local = ["--tokenizer-path", str(MODEL), "--local-outputs", str(local_outputs)] if local_outputs else []
    daemons["router"] = ["router", "--listen", at("router"), "--http-listen", f"127.0.0.1:{port}", *peers, *local]
    return {name: [*words, "--log-level", "error"] for name, words in daemons.items()}


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def until_ready(port: int, prompt: str) -> None:
    """Every replica has answered once: none of the first requests waits for a connection."""
    deadline = time.monotonic() + 90
    while True:
        try:
            await asyncio.gather(*(ask(port, f"{i} {prompt}", 4) for i in range(4 * NUM_REPLICAS)))
            return
        except (OSError, AssertionError):
            assert time.monotonic() < deadline, "the mesh does not come up"
            await asyncio.sleep(0.5)


async def measure(
    tree: Path, workload: str, port: int, profile: str, local_outputs: int, at_once: int
) -> dict[str, float]:
    """at_once: streams, 0 = as many as the workload has."""
    make_prompts, max_tokens, most = WORKLOADS[workload]
    prompts = make_prompts()
    if at_once:
        # One stream takes minutes for all.
        prompts = prompts[: max(40, 24 * at_once)]
    at_once = at_once or most
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    with tempfile.TemporaryDirectory(prefix="rm") as folder:
        running: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for name, words in daemons_of(folder, port, local_outputs).items():
                spy = ["-m", "cProfile", "-o", profile] if profile and name == "router" else []
                command = [sys.executable, *spy, "-m", f"radixmesh.daemons.{words[0]}", *words[1:]]
                running[name] = await asyncio.to_thread(subprocess.Popen, command, env=environment)
            await until_ready(port, prompts[0][:200])
            # A router with text reads its vocabulary some seconds after its start.
            await asyncio.sleep(8.0 if local_outputs else 2.0)
            router = running["router"].pid
            start, idle = time.monotonic(), cpu_s(router)
            await asyncio.sleep(3.0)
            idle = (cpu_s(router) - idle) / (time.monotonic() - start)
            start, before = time.monotonic(), cpu_s(router)
            tokens = await run_clients(port, prompts, max_tokens, at_once)
            used, wall = cpu_s(router) - before, time.monotonic() - start
        finally:
            for process in running.values():
                process.terminate()
            for process in running.values():
                process.wait()
    return {
        "router_us_per_token": round(1e6 * used / tokens, 1),
        "router_ms_per_request": round(1e3 * used / len(prompts), 2),
        "router_idle_cores": round(idle, 4),
        "tokens_per_s": round(tokens / wall, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", nargs="+", type=Path, default=[ROOT], help="roots of trees, each with src/")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--workload", nargs="+", choices=sorted(WORKLOADS), default=["groups", "long"])
    parser.add_argument("--port", type=int, default=18_431)
    parser.add_argument("--profile", default="")
    parser.add_argument("--local-outputs", type=int, default=0, help="text in the router, for so many outputs at once")
    parser.add_argument("--at-once", type=int, nargs="+", default=[0], help="streams, in place of the workload's own")
    options = parser.parse_args()
    trees = [tree.resolve() for tree in options.trees]
    rows: list[dict[str, object]] = []
    cases = {
        f"{workload}, {at_once} at once" if at_once else workload: (workload, at_once)
        for workload in options.workload
        for at_once in options.at_once
    }
    for number in range(options.rounds):
        for name, (workload, at_once) in cases.items():
            for index, tree in enumerate(trees):
                seen = asyncio.run(
                    measure(tree, workload, options.port, options.profile, options.local_outputs, at_once)
                )
                rows.append({"round": number, "workload": name, "tree": index, **seen})
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    medians = {
        name: [
            statistics.median(
                float(str(row["router_us_per_token"]))
                for row in rows
                if row["workload"] == name and row["tree"] == index
            )
            for index in range(len(trees))
        ]
        for name in cases
    }
    machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "load_average": os.getloadavg()[0]}
    print(json.dumps({"machine": machine, "median_router_us_per_token": medians, "rounds": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
