"""Forks of a program against separate requests: hit rate of the prefix cache, and the time of all branches.

One mesh of processes on the tiny model (compose/local.yml). A program writes a prefix, forks, and generates in each
fork; the same branches then run as separate requests: at once, each with a cache of its own (no sharing), and one
after the other with the common cache. Every round has a prefix of its own, and the three take turns.

    python bench/language.py --forks 16 --prefix-words 300 --tokens 16 --rounds 5
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
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from radixmesh.client import AsyncClient
from radixmesh.client.lang import AsyncState, function, gen
from radixmesh.client.results import Completion
from radixmesh.daemons.cluster.local_cluster import LocalCluster

ROOT = Path(__file__).resolve().parents[1]
WORDS = ("burning", "bright", "forest", "night", "hand", "eye", "frame", "river", "stone", "shadow")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One way of asking for all branches. texts: of the branches, which have to be equal for all ways."""

    seconds: float
    prompt_tokens: int
    cached_tokens: int
    texts: list[str]


@function
async def fork_program(s: AsyncState, prefix: str, forks: int, tokens: int) -> None:
    s += prefix
    branches = await s.fork(forks)
    for number, branch in enumerate(branches):
        branch += f" Branch {number}:" + gen("text", max_tokens=tokens, temperature=0.0, ignore_eos=True)
    await s.join(branches)


async def as_forks(client: AsyncClient, prefix: str, forks: int, tokens: int) -> Run:
    begun = time.perf_counter()
    state = await fork_program.arun(prefix, forks, tokens, client=client)
    seconds = time.perf_counter() - begun
    texts = await state.get("text")
    assert isinstance(texts, list)
    usage = state.usage
    return Run(seconds=seconds, prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens, texts=texts)


def _request(client: AsyncClient, prefix: str, number: int, tokens: int, salt: str) -> Awaitable[Completion]:
    prompt = f"{prefix} Branch {number}:"
    return client.complete(prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True, cache_salt=salt)


async def as_isolated(client: AsyncClient, prefix: str, forks: int, tokens: int) -> Run:
    begun = time.perf_counter()
    salts = [f"own-{random.random()}" for _ in range(forks)]
    done = await asyncio.gather(*(_request(client, prefix, i, tokens, salt) for i, salt in enumerate(salts)))
    return _run_of(time.perf_counter() - begun, done)


async def one_by_one(client: AsyncClient, prefix: str, forks: int, tokens: int) -> Run:
    begun = time.perf_counter()
    salt = f"round-{random.random()}"
    done = [await _request(client, prefix, number, tokens, salt) for number in range(forks)]
    return _run_of(time.perf_counter() - begun, done)


def _run_of(seconds: float, done: Sequence[Completion]) -> Run:
    usages = [output.finish.usage for one in done for output in one.outputs if output.finish is not None]
    return Run(
        seconds=seconds,
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        texts=[one.text for one in done],
    )


WAYS: dict[str, Callable[[AsyncClient, str, int, int], Awaitable[Run]]] = {
    "fork": as_forks,
    "separate, no shared cache": as_isolated,
    "separate, one after the other": one_by_one,
}


async def measure(args: argparse.Namespace) -> dict[str, object]:
    runs: dict[str, list[Run]] = {name: [] for name in WAYS}
    async with LocalCluster((ROOT / "compose" / "local.yml",), publish=False) as cluster:
        await cluster.wait_healthy(150)
        async with AsyncClient([cluster.address("router")]) as client:
            pick = random.Random(1)
            for number in range(args.rounds + 1):
                prefix = f"{number}. " + " ".join(pick.choices(WORDS, k=args.prefix_words))
                order = pick.sample(list(WAYS), len(WAYS))
                got = {name: await WAYS[name](client, prefix, args.forks, args.tokens) for name in order}
                assert len({tuple(run.texts) for run in got.values()}) == 1, "the ways answer differently"
                if number:  # The first round warms up.
                    for name, run in got.items():
                        runs[name].append(run)
    slowest = statistics.median(run.seconds for run in runs["separate, no shared cache"])
    return {
        name: {
            "hit_rate": round(sum(r.cached_tokens for r in of) / sum(r.prompt_tokens for r in of), 3),
            "median_s": round(statistics.median(r.seconds for r in of), 3),
            "speed_up": round(slowest / statistics.median(r.seconds for r in of), 2),
        }
        for name, of in runs.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--forks", type=int, default=16)
    parser.add_argument("--prefix-words", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where the result is written too")
    args = parser.parse_args()
    ways = asyncio.run(measure(args))
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    result = {
        "command": " ".join(["python", "bench/language.py", *sys.argv[1:]]),
        "commit": commit,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, python {platform.python_version()}",
        "ways": ways,
    }
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
