"""Load with something to see in it: chats that grow, a burst with shared prefixes, texts, mistakes, and a kill."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import sys
from collections.abc import Sequence
from contextlib import suppress

from radixmesh.client import AsyncClient, RadixMeshError
from radixmesh.daemons.cluster.local_cluster import LocalCluster

_SENTENCES = (
    "I met a traveller from an antique land, who said:",
    "Two vast and trunkless legs of stone stand in the desert.",
    "Near them, on the sand, half sunk, a shattered visage lies,",
    "and wrinkled lip, and sneer of cold command,",
)
_TEXTS_PER_S = 4.0
# Four chats a second begin, of six turns each.
_CHATS = ("--dataset", "multi-turn", "--concurrency", "40")
_TURNS_PER_S = 24
_BURST = (
    *("--dataset", "shared-prefix", "--num-requests", "128", "--per-group", "32"),
    *("--prefix-len", "1024", "--question-len", "64", "--output-len", "48", "--concurrency", "96"),
)


class Load:
    """Runs for `seconds` against `routers`. After run(): texts = how many texts were answered."""

    def __init__(self, routers: Sequence[str], *, seconds: float, seed: int = 7) -> None:
        self._target = "grpc://" + ",".join(routers)
        self._routers = list(routers)
        self._seconds = seconds
        self._draw = random.Random(seed)
        self.texts = 0

    async def run(self, cluster: LocalCluster) -> None:
        """All of it; what still runs at the end is cancelled, as clients that leave do."""
        async with AsyncClient(self._routers) as client:
            tasks = [
                asyncio.create_task(self._bench(*_CHATS, "--num-requests", str(int(_TURNS_PER_S * self._seconds)))),
                asyncio.create_task(self._texts(client)),
                asyncio.create_task(self._after(0.25, self._mistakes(client))),
                asyncio.create_task(self._after(0.4, self._bench(*_BURST))),
                asyncio.create_task(self._after(0.7, _kill(cluster, "detokenizer"))),
            ]
            done, running = await asyncio.wait(tasks, timeout=self._seconds)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            for task in done:
                task.result()

    async def _bench(self, *flags: str) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "radixmesh.cli", "bench", "serve", "--target", self._target),
            *(*flags, "--no-progress", "--warmup", "0"),
            env={"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "PATH": os.environ.get("PATH", "")},
            stdout=asyncio.subprocess.DEVNULL,
        )
        try:
            code = await process.wait()
            if code != 0:
                raise RuntimeError(f"radixmesh bench serve {' '.join(flags)} ended with {code}")
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()

    async def _texts(self, client: AsyncClient) -> None:
        async with asyncio.TaskGroup() as group:
            for number in itertools.count():
                group.create_task(self._text(client, f"{number}. {' '.join(_SENTENCES[: 1 + number % 4])}"))
                await asyncio.sleep(self._draw.expovariate(_TEXTS_PER_S))

    async def _text(self, client: AsyncClient, prompt: str) -> None:
        await client.complete(prompt, max_tokens=self._draw.randint(16, 96))
        self.texts += 1

    async def _mistakes(self, client: AsyncClient) -> None:
        """Requests that cannot be served: each is refused with its reason, and counted by it."""
        for _ in range(12):
            with suppress(RadixMeshError):
                await client.complete("too cold", temperature=-1.0)
            with suppress(RadixMeshError):
                await client.complete("nobody there", model="no-such-model")
            await asyncio.sleep(self._seconds / 60)

    async def _after(self, share: float, then):  # type: ignore[no-untyped-def]  # a coroutine of any kind
        await asyncio.sleep(share * self._seconds)
        await then


async def _kill(cluster: LocalCluster, service: str) -> None:
    cluster.kill(service)
