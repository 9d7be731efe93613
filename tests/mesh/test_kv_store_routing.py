"""A router sends prefixes to the replica whose store has them, with real daemons; every output is right to the bit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

pytest.importorskip("xxhash")
from mesh.test_kv_store_tier import Replica, replica
from mesh.test_kv_tiers import texts
from support.kv_stores import redis_server
from support.running_daemon import running

from radixmesh.client import AsyncClient
from radixmesh.daemons.detokenizer.config import DetokenizerSettings
from radixmesh.daemons.detokenizer.daemon import DetokenizerDaemon
from radixmesh.daemons.router.config import RouterSettings
from radixmesh.daemons.router.daemon import RouterDaemon
from radixmesh.daemons.router.placement.placement import PlacedRequest, Placement
from radixmesh.daemons.router.placement.replicas import Replicas
from radixmesh.daemons.runtime.arrays import pack_ints
from radixmesh.daemons.scheduler.tiers.wait_cost import WaitCost

MODEL = Path(__file__).parents[2] / "compose" / "models" / "tiny-llama"
HOST_TOKENS = 200
Texts = list[tuple[list[int], list[int]]]


class RoutedMesh:
    """Replicas behind a router."""

    def __init__(self, client: AsyncClient, placement: Placement) -> None:
        self.client, self.placement = client, placement

    async def recite(self, wanted: Texts) -> None:
        for prompt, expected in wanted:
            answer = await self.client.complete(prompt, max_tokens=len(expected), temperature=0.0)
            assert answer.outputs[0].ids == expected

    async def until_known(self, wanted: Texts, rows: Sequence[int]) -> None:
        """Until the router knows that the replica of `rows` beside each text has most of it, in whatever tier."""
        async with asyncio.timeout(60):
            for (prompt, _), row in zip(wanted, rows, strict=True):
                request = PlacedRequest(prompt_ids=pack_ints(prompt))
                while self.placement.matched_tokens(request, row) < len(prompt) // 32 * 32 - 32:
                    await asyncio.sleep(0.01)


@asynccontextmanager
async def routed(replicas: Sequence[Replica]) -> AsyncIterator[RoutedMesh]:
    async with running(DetokenizerDaemon, DetokenizerSettings(model=MODEL)) as detokenizer:
        settings = RouterSettings(
            detokenizers=(detokenizer.address,),
            schedulers=tuple(one.scheduler.address for one in replicas),
            tokenizer_path=MODEL,
        )
        async with running(RouterDaemon, settings) as router, AsyncClient([router.address]) as client:
            pool = router.daemon.router.schedulers
            async with asyncio.timeout(60):
                while not all(link.is_group_serving for link in pool.links):
                    await asyncio.sleep(0.01)
            yield RoutedMesh(client, pool.placement.placement)


def prefilled(replicas: Sequence[Replica]) -> int:
    return sum(one.planner.counters.prefilled_tokens for one in replicas)


@pytest.fixture(autouse=True)
def measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch of so few tokens of so small a model takes as long as computing them, or longer on a busy machine, where
    one replica may seem much faster than another, too."""
    monkeypatch.setattr(Replicas, "compare_speeds", lambda self: None)
    monkeypatch.setattr(WaitCost, "observe", lambda self, seconds, num_tokens: None)


async def test_each_prefix_goes_to_the_replica_whose_disk_has_it(tmp_path: Path) -> None:
    """Ten texts, five at each replica, whose device holds two and host one; then one loses its worker and memory."""
    wanted = texts("tiny-llama", 10)
    first, second = (f"disk://{tmp_path}/{name}?budget=64MiB" for name in "ab")
    async with (
        replica("tiny-llama", 4, first, host_tokens=HOST_TOKENS) as one,
        replica("tiny-llama", 4, second, host_tokens=HOST_TOKENS) as other,
    ):
        both = [one, other]
        for number, text in enumerate(wanted):
            await both[number % 2].recite([text])
        for number, at in enumerate(both):
            await at.stored(wanted[number::2])
        async with routed(both) as mesh:
            await mesh.until_known(wanted, [0, 1] * 5)
            assert mesh.placement.replicas.shared_by is None, "a disk is one worker's"
            fetched = [at.planner.fetches.num_fetched for at in both]
            before = prefilled(both)
            await mesh.recite(wanted)
            # All but the last page of each prompt is found, unless a fetch is late; a router that knows no store would
            # have half of the texts computed.
            assert prefilled(both) - before < quarter(wanted)
            assert all(at.planner.fetches.num_fetched > num for at, num in zip(both, fetched, strict=True))
            await one.restart_worker()
            await mesh.until_known(wanted, [0, 1] * 5)
            before = prefilled(both)
            await mesh.recite(wanted)
            assert prefilled(both) - before < quarter(wanted)


@pytest.mark.full
async def test_a_shared_store_serves_prefixes_at_whichever_replica(tmp_path: Path) -> None:
    """The router counts prefixes that one has saved for both."""
    wanted = texts("tiny-llama", 6)
    with redis_server(tmp_path) as url:
        async with (
            replica("tiny-llama", 4, url, host_tokens=1500) as one,
            replica("tiny-llama", 4, url, host_tokens=1500) as other,
        ):
            await one.recite(wanted)
            await one.stored(wanted)
            async with routed([one, other]) as mesh:
                await mesh.until_known(wanted, [0] * 6)
                await mesh.until_known(wanted, [1] * 6)
                assert mesh.placement.replicas.shared_by is not None
                before, ended = prefilled([one, other]), [num_ended(one), num_ended(other)]
                await asyncio.gather(*(mesh.recite([text]) for text in wanted * 4))
                assert prefilled([one, other]) - before < quarter(wanted * 4)
                assert num_ended(one) > ended[0] and num_ended(other) > ended[1], "the load is spread"


def quarter(wanted: Texts) -> int:
    """Of the tokens of prompts."""
    return sum(len(prompt) for prompt, _ in wanted) // 4


def num_ended(one: Replica) -> int:
    return sum(one.planner.counters.finished.values())
