"""Ranks of a tiny model on CPUs behind one scheduler, over gRPC, in this process; their collectives go over gloo."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from safetensors.torch import load_file, save_file

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.rank_layout import RankLayout
from radixmesh.daemons.scheduler.__main__ import SchedulerDaemon
from radixmesh.daemons.scheduler.config import SchedulerSettings
from radixmesh.daemons.worker.__main__ import WorkerDaemon
from radixmesh.daemons.worker.config import Backend, WorkerSettings
from support.running_daemon import Running, running
from support.serve_client import Seen, ServeClient

MODELS = Path(__file__).parents[2] / "compose" / "models"
TIMEOUT_S = 200.0
# Tokens of KV memory: what the texts below need together is twice as much, so that some are retracted.
NUM_TOKENS = 160


class Text(NamedTuple):
    prompt: list[int]
    expected: list[int]


def texts(model: str, num: int) -> list[Text]:
    """Short ones of those that the model was taught."""
    items = json.loads((MODELS / model / "recitations.json").read_text())
    items.sort(key=lambda item: len(item["expected_ids"]))
    found = [Text(item["prompt_ids"], item["expected_ids"]) for item in items if len(item["expected_ids"]) >= 30]
    # One that fits the KV memory twice.
    return [text for text in found if 2 * sum(map(len, text)) <= NUM_TOKENS][:num]


def skewed_deepseek(parent: Path) -> Path:
    """tiny-deepseek whose routers pick the first half of the experts alone: those of the first ranks."""
    folder = parent / "tiny-deepseek"
    shutil.copytree(MODELS / "tiny-deepseek", folder)
    tensors = load_file(folder / "model.safetensors")
    biases = [name for name in tensors if name.endswith("e_score_correction_bias")]
    assert biases
    for name in biases:
        half = len(tensors[name]) // 2
        tensors[name][:half] += 100.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    assert config["n_routed_experts"] == 8
    return folder


class Ranks:
    """Workers by rank; any can be started again at its address."""

    def __init__(self, model: str | Path, tp_size: int, dp_size: int, changes: dict[str, object]) -> None:
        self._model = model
        self._ep_size = changes.pop("ep_size", 1)
        self._tp_size, self._dp_size = tp_size, dp_size
        self._changes = changes
        self._stacks: dict[int, AsyncExitStack] = {}
        self._num_starts = 0
        self.workers: dict[int, Running[WorkerDaemon]] = {}

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(self.workers[rank].address for rank in range(self._tp_size * self._dp_size))

    async def start(self, rank: int, address: str = "127.0.0.1:0") -> None:
        self._num_starts += 1
        layout = RankLayout.of_rank(rank, tp_size=self._tp_size, dp_size=self._dp_size, ep_size=self._ep_size)
        values: dict[str, object] = {
            "backend": Backend.CPU,
            "model": MODELS / self._model,
            "cpu_threads": 1,
            "num_slots": 8,
            "tp_size": layout.tp_size,
            "tp_rank": layout.tp_rank,
            "dp_size": layout.dp_size,
            "dp_rank": layout.dp_rank,
            "ep_size": layout.ep_size,
            "ep_rank": layout.ep_rank,
            **self._changes,
        }
        stack = self._stacks[rank] = AsyncExitStack()
        settings = WorkerSettings(**values)  # type: ignore[arg-type]
        name = f"rank-{rank}-{self._num_starts}"
        self.workers[rank] = await stack.enter_async_context(
            running(WorkerDaemon, settings, instance_id=name, address=address)
        )

    async def stop(self, rank: int) -> None:
        """Its collectives end for the others as if the process had died."""
        self.workers[rank].daemon.core.member.abort()
        await self._stacks.pop(rank).aclose()

    async def restart(self, rank: int) -> None:
        address = self.workers[rank].address
        await self.stop(rank)
        await self.start(rank, address)


@asynccontextmanager
async def ranks_of(model: str, tp_size: int, dp_size: int = 1, **changes: object) -> AsyncIterator[Ranks]:
    ranks = Ranks(model, tp_size, dp_size, changes)
    try:
        await asyncio.gather(*(ranks.start(rank) for rank in range(tp_size * dp_size)))
        yield ranks
    finally:
        await asyncio.gather(*(ranks.stop(rank) for rank in list(ranks.workers)))


@asynccontextmanager
async def scheduler_on(ranks: Ranks, name: str = "s", **changes: object) -> AsyncIterator[Running[SchedulerDaemon]]:
    # Hardly any pages are kept free for those that run: some of them must give way.
    values: dict[str, object] = {"chunk_tokens": 7, "decode_reserve_tokens": 1, "grant_ahead_tokens": 1, **changes}
    settings = SchedulerSettings(workers=ranks.addresses, check_invariants=True, **values)  # type: ignore[arg-type]
    async with running(SchedulerDaemon, settings, instance_id=name) as daemon:
        yield daemon


async def recited(client: ServeClient, chosen: Sequence[Text], num_logprobs: int | None = 2) -> list[Seen]:
    """All texts at once, whose tokens are checked. num_logprobs: alternatives told of each token; None: no logprobs."""
    sampling = common_pb2.SamplingParams(temperature=0.0, num_top_logprobs=num_logprobs)
    handles = [await client.submit(text.prompt, max_tokens=len(text.expected), sampling=sampling) for text in chosen]
    outputs = await client.over(*handles, timeout_s=TIMEOUT_S)
    for text, seen in zip(chosen, outputs, strict=True):
        assert seen.tokens == text.expected
    return outputs
