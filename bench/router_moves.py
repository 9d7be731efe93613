"""Evenness after a scheduler is added: streams that run on two schedulers, and a third one that comes.

Simulated workers (a step = 20 ms + 0.1 ms a decode row + 0.27 us a token that it reads + 0.09 ms an uncached token),
one router, streams of clients in this process. Told are the seconds from AddScheduler until every scheduler's outputs
are within 10% of the mean (or one), the gaps between a stream's tokens, and whether all answers are those of a run in
which nothing moves. The same without moves beside it: there only new requests go to the third.

    python bench/router_moves.py --streams 48 --tokens 1200
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from radixmesh.client import AsyncClient
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.router.v1 import router_pb2, router_pb2_grpc

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "compose" / "models" / "tiny-llama"
# Ten times what a 3B model takes on an H200: the machine of the benchmark keeps up with that.
COSTS = {"base": 20_000, "decode-row": 100, "decode-context": 0.27, "prefill-token": 90, "prefill-context": 0}
ADDED = 2


def daemons_of(folder: str, *, moves: bool) -> dict[str, list[str]]:
    """Name -> command line after `python -m radixmesh.daemons.`; the router knows all schedulers but ADDED."""

    def at(name: str) -> str:
        return f"unix:{folder}/{name}"

    costs = [word for name, us in COSTS.items() for word in (f"--simulated-{name}-us", str(us))]
    text = ["--model", str(MODEL)]
    worker = ["--backend", "simulated", "--num-pages", "100000", "--max-total-len", "4096", *text, *costs]
    daemons = {f"worker{i}": ["worker", "--listen", at(f"w{i}"), *worker] for i in range(ADDED + 1)}
    for i in range(ADDED + 1):
        daemons[f"scheduler{i}"] = ["scheduler", "--listen", at(f"s{i}"), "--workers", at(f"w{i}")]
    daemons["detokenizer"] = ["detokenizer", "--listen", at("detokenizer"), *text]
    schedulers = ",".join(at(f"s{i}") for i in range(ADDED))
    peers = [
        "--detokenizers",
        at("detokenizer"),
        "--schedulers",
        schedulers,
        *([] if moves else ["--no-move-on-overload"]),
    ]
    daemons["router"] = ["router", "--listen", at("router"), *peers]
    return {name: [*words, "--log-level", "error"] for name, words in daemons.items()}


async def stream(client: AsyncClient, number: int, prompt_len: int, tokens: int, gaps: list[float]) -> list[int]:
    prompt = [300 + (7 * number + i) % 400 for i in range(prompt_len)]
    ids: list[int] = []
    last = 0.0
    async for chunk in client.generate(prompt, max_tokens=tokens, ignore_eos=True, seed=number):
        now = time.monotonic()
        if last and chunk.ids:
            gaps.append(now - last)
        last = now if chunk.ids else last
        ids += chunk.ids
    return ids


async def counts_of(admin: router_pb2_grpc.RouterAdminServiceAsyncStub) -> list[int]:
    listed = await admin.ListSchedulers(router_pb2.ListSchedulersRequest())
    return [scheduler.num_running for scheduler in listed.schedulers]


def is_even(counts: Sequence[int]) -> bool:
    mean = sum(counts) / len(counts)
    return mean > 0 and max(abs(count - mean) for count in counts) <= max(1.0, 0.1 * mean)


async def run_once(streams: int, prompt_len: int, tokens: int, *, adds: bool, moves: bool) -> dict[str, object]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with tempfile.TemporaryDirectory(prefix="rm") as folder:
        running: list[subprocess.Popen[bytes]] = []
        try:
            for words in daemons_of(folder, moves=moves).values():
                command = [sys.executable, "-m", f"radixmesh.daemons.{words[0]}", *words[1:]]
                running.append(await asyncio.to_thread(subprocess.Popen, command, env=environment))
            address = f"unix:{folder}/router"
            async with AsyncClient([address], resume_timeout_s=90) as client, open_channel(address) as channel:
                admin = router_pb2_grpc.RouterAdminServiceStub(channel)
                await asyncio.gather(*(stream(client, 1000 + i, 8, 4, []) for i in range(8)))
                gaps: list[float] = []
                asked = [asyncio.create_task(stream(client, i, prompt_len, tokens, gaps)) for i in range(streams)]
                while sum(await counts_of(admin)) < streams:  # noqa: ASYNC110 - another process.
                    await asyncio.sleep(0.05)
                await asyncio.sleep(3.0)
                gaps.clear()
                timeline: list[tuple[float, list[int]]] = []
                even_s = None
                if adds:
                    await admin.AddScheduler(router_pb2.AddSchedulerRequest(address=f"unix:{folder}/s{ADDED}"))
                    added = time.monotonic()
                    while not all(task.done() for task in asked):
                        counts = await counts_of(admin)
                        timeline.append((round(time.monotonic() - added, 2), counts))
                        if even_s is None and sum(counts) == streams and is_even(counts):
                            even_s = timeline[-1][0]
                        await asyncio.sleep(0.1)
                answers = await asyncio.gather(*asked)
        finally:
            for process in running:
                process.terminate()
            for process in running:
                process.wait()
    gaps.sort()
    return {
        "answers": answers,
        "even_after_s": even_s,
        "counts_at_the_end": next((row for row in reversed(timeline) if sum(row[1]) == streams), None),
        "gap_p50_ms": round(1000 * gaps[len(gaps) // 2], 1),
        "gap_p99_ms": round(1000 * gaps[int(0.99 * len(gaps))], 1),
        "gap_max_ms": round(1000 * gaps[-1], 1),
    }


async def compare(streams: int, prompt_len: int, tokens: int) -> dict[str, object]:
    runs = {
        name: await run_once(streams, prompt_len, tokens, adds=adds, moves=moves)
        for name, adds, moves in (("undisturbed", False, False), ("added", True, False), ("moved", True, True))
    }
    expected = runs["undisturbed"]["answers"]
    same = {name: run["answers"] == expected for name, run in runs.items()}
    told = {name: {key: value for key, value in run.items() if key != "answers"} for name, run in runs.items()}
    machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "load_average": os.getloadavg()[0]}
    settings = {"streams": streams, "prompt_len": prompt_len, "tokens": tokens, "us": COSTS}
    return {"machine": machine, "settings": settings, "same_answers": same, "runs": told}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=48)
    parser.add_argument("--prompt-len", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=1200)
    options = parser.parse_args()
    print(json.dumps(asyncio.run(compare(options.streams, options.prompt_len, options.tokens)), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
