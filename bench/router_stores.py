"""Two replicas behind a router, with a working set that only their stores hold: routers that know the stores, and not.

    python bench/router_stores.py --write bench/results/router-stores.json

A tiny model on CPUs, each replica's worker in a process of its own, schedulers and router in this one. Prompts of
random tokens, each asked for once; then clients that ask for any of them, one after the other each. Device and host
memory of both replicas together hold a third of the prompts. For a disk a replica, and for a Redis server that both
share, first with schedulers that remember nothing of the store (`--kv-stored-tokens 0`) and then with what they do by
default, in turns. `to_holder`: share of the requests that went to a replica that had served the prompt before.
`copies`: replicas that have served a prompt, in the mean. TTFT is at the client of the router; the hit rate of all
prompt tokens. Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "bench")]

from kv_restart import MODEL, PAGE_SIZE, WorkerProcess  # noqa: E402
from support.kv_stores import shared_store  # noqa: E402
from support.running_daemon import running  # noqa: E402

from radixmesh.client import AsyncClient  # noqa: E402
from radixmesh.daemons.detokenizer.config import DetokenizerSettings  # noqa: E402
from radixmesh.daemons.detokenizer.daemon import DetokenizerDaemon  # noqa: E402
from radixmesh.daemons.router.config import RouterSettings  # noqa: E402
from radixmesh.daemons.router.daemon import RouterDaemon  # noqa: E402
from radixmesh.daemons.router.placement.placement import Decision, PlacedRequest, Placement  # noqa: E402
from radixmesh.daemons.runtime.arrays import pack_ints  # noqa: E402
from radixmesh.daemons.scheduler.__main__ import SchedulerDaemon  # noqa: E402
from radixmesh.daemons.scheduler.config import SchedulerSettings  # noqa: E402
from radixmesh.daemons.scheduler.planning.planner import Planner  # noqa: E402

NUM_REPLICAS = 2
_START_S = 300.0
# Of the KV of a token.
_TOKEN_BYTES = 4096


class Mesh:
    """planners: of the replicas. rows: where the router has sent prompts, by prompt."""

    def __init__(self, client: AsyncClient, planners: Sequence[Planner], placement: Placement) -> None:
        self.client, self.planners = client, planners
        self.holders: dict[bytes, set[int]] = {}
        self.num_to_holder = self.num_requests = 0
        self.by_row: dict[int, int] = {}
        choose = placement.choose

        def noted(request: PlacedRequest, *args: object, **options: object) -> Decision | None:
            decision = choose(request, *args, **options)  # type: ignore[arg-type]
            if decision is not None:
                self._note(request.prompt_ids, decision.row)
            return decision

        placement.choose = noted  # type: ignore[method-assign]

    def _note(self, prompt: bytes, row: int) -> None:
        holders = self.holders.setdefault(prompt, set())
        self.num_requests += 1
        self.num_to_holder += row in holders
        self.by_row[row] = self.by_row.get(row, 0) + 1
        holders.add(row)

    async def ask(self, prompts: Sequence[list[int]], num_clients: int) -> dict[str, object]:
        """All of these, in their order; what was seen."""
        self.num_to_holder = self.num_requests = 0
        self.by_row.clear()
        cached = self._cached()
        waits: list[float] = []
        pending = iter(prompts)

        async def client() -> None:
            for prompt in pending:
                begun = time.perf_counter()
                async for _ in self.client.generate(prompt, max_tokens=1, temperature=0.0):
                    waits.append(time.perf_counter() - begun)
                    break

        begun = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(num_clients)))
        seconds = time.perf_counter() - begun
        return {
            "to_holder": round(self.num_to_holder / self.num_requests, 3),
            "hit_rate": round((self._cached() - cached) / sum(map(len, prompts)), 4),
            "ttft_mean_ms": round(1000 * float(np.mean(waits)), 1),
            "ttft_p50_ms": round(1000 * float(np.median(waits)), 1),
            "ttft_p99_ms": round(1000 * float(np.percentile(waits, 99)), 1),
            "requests_a_s": round(len(waits) / seconds, 2),
            "by_replica": sorted(self.by_row.values()),
            "copies": round(float(np.mean([len(rows) for rows in self.holders.values()])), 2),
        }

    def _cached(self) -> int:
        return sum(planner.counters.cached_tokens for planner in self.planners)


@asynccontextmanager
async def mesh(options: argparse.Namespace, urls: Sequence[str], stored_tokens: int) -> AsyncIterator[Mesh]:
    workers = [WorkerProcess(options, ("--kv-store", url)) for url in urls]
    async with contextlib.AsyncExitStack() as stack:
        for worker in workers:
            await worker.start()
            stack.push_async_callback(worker.kill)
        schedulers = [
            await stack.enter_async_context(
                running(SchedulerDaemon, SchedulerSettings(workers=(worker.address,), kv_stored_tokens=stored_tokens))
            )
            for worker in workers
        ]
        detokenizer = await stack.enter_async_context(running(DetokenizerDaemon, DetokenizerSettings(model=MODEL)))
        settings = RouterSettings(
            detokenizers=(detokenizer.address,),
            schedulers=tuple(scheduler.address for scheduler in schedulers),
            tokenizer_path=MODEL,
        )
        router = await stack.enter_async_context(running(RouterDaemon, settings))
        pool = router.daemon.router.schedulers
        async with asyncio.timeout(_START_S):
            while not all(link.is_group_serving for link in pool.links):
                assert all(worker.is_running for worker in workers), "a worker has ended"
                await asyncio.sleep(0.05)
        client = await stack.enter_async_context(AsyncClient([router.address]))
        # A worker's first steps are slower, and a new scheduler gets few requests at first.
        for _ in range(2 * NUM_REPLICAS):
            warm_up = np.random.default_rng().integers(10, 700, 600).tolist()
            await asyncio.gather(*(client.complete(warm_up, max_tokens=1) for _ in range(4)))
        await asyncio.sleep(10.0)
        yield Mesh(client, [scheduler.daemon.loop.planner for scheduler in schedulers], pool.placement.placement)


async def one_run(options: argparse.Namespace, urls: Sequence[str], stored_tokens: int, seed: int) -> dict[str, object]:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(10, 700, options.max_len - PAGE_SIZE).tolist() for _ in range(options.prompts)]
    order = [prompts[at] for at in rng.integers(options.prompts, size=options.requests).tolist()]
    async with mesh(options, urls, stored_tokens) as one:
        first = await one.ask(prompts, options.clients)
        assert {pack_ints(prompt) for prompt in prompts} == set(one.holders)
        await asyncio.sleep(options.settle_s)  # The store gets what was saved last.
        again = await one.ask(order, options.clients)
        return {"first": first, "again": again}


async def measure(options: argparse.Namespace) -> dict[str, object]:
    report: dict[str, dict[str, list[object]]] = {}
    load = os.getloadavg()[0]
    for round_number in range(options.rounds):
        for medium in options.media:
            for name, stored_tokens in (("not known", 0), ("known", 1 << 20)):
                with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as servers:
                    if medium == "disk":
                        urls = [f"disk://{folder}/{number}?budget=4GiB" for number in range(NUM_REPLICAS)]
                    else:
                        urls = [servers.enter_context(shared_store(medium, Path(folder)))] * NUM_REPLICAS
                    run = await one_run(options, urls, stored_tokens, round_number)
                report.setdefault(medium, {}).setdefault(name, []).append(run)
                print(medium, name, json.dumps(run), file=sys.stderr, flush=True)
    return {
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}",
        "load_average": round(load, 1),
        "model": MODEL.name,
        "prompt_tokens": options.max_len - PAGE_SIZE,
        "prompts": options.prompts,
        "device_prompts": options.device_prompts,
        "host_prompts": options.host_prompts,
        "clients": options.clients,
        "requests": options.requests,
        "runs": report,
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-len", type=int, default=2000)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--device-prompts", type=int, default=3, help="prompts whose KV a device has room for")
    parser.add_argument("--host-prompts", type=int, default=4, help="prompts whose KV a host tier has room for")
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2, help="of other prompts in another order")
    parser.add_argument("--media", nargs="*", default=["disk", "redis"])
    parser.add_argument("--settle-s", type=float, default=5.0, help="between the first requests and the next ones")
    parser.add_argument("--write", type=Path, help="file for the results")
    options = parser.parse_args(argv)
    options.backend, options.model = "cpu", MODEL
    options.host_mib = max(1, options.host_prompts * options.max_len * _TOKEN_BYTES >> 20)
    text = json.dumps(asyncio.run(measure(options)), indent=1)
    print(text)
    if options.write is not None:
        options.write.write_text(text + "\n")


if __name__ == "__main__":
    main()
