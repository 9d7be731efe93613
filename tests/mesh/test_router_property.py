"""The promise as a property: concatenated deltas equal the oracle, whatever dies after however many frames."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.fake_scheduler import FakeScheduler
from support.in_process_peers import dial_dying, new_detokenizer
from support.router_mesh import MODEL, oracle_ids, oracle_text
from support.router_mesh import PROMPT_OF_TESTS as PROMPT

from radixmesh.client.tracker import Tracker
from radixmesh.daemons.router.composition import Peers, make_router
from radixmesh.daemons.router.config import RouterSettings
from radixmesh.daemons.router.peers import peer_link
from radixmesh.daemons.router.peers.grpc_peers import GrpcTokenizer
from radixmesh.daemons.router.responses import response_of
from radixmesh.daemons.router.router import Router
from radixmesh.daemons.runtime.arrays import pack_ints
from radixmesh.daemons.runtime.rpc.health.progress import Progress
from radixmesh.daemons.runtime.telemetry.metrics import Metrics
from radixmesh.router.v1 import router_pb2

LIFETIMES = st.lists(st.integers(1, 12), max_size=4)


def new_router(fake: FakeScheduler, scheduler_lives: list[int], detokenizer_lives: list[int]) -> Router:
    peers = Peers(
        dial_scheduler=dial_dying(fake.Serve, iter(scheduler_lives)),
        dial_detokenizer=dial_dying(new_detokenizer().Detokenize, iter(detokenizer_lives)),
        open_tokenizer=GrpcTokenizer,
    )
    progress = Progress()
    progress.loaded()
    addresses = RouterSettings(schedulers=("s:1",), detokenizers=("d0:1", "d1:1"))
    return make_router(addresses, peers, "router", progress, Metrics())


async def generate(
    routers: list[Router], request: router_pb2.GenerateRequest, cuts: list[int]
) -> dict[int, tuple[list[int], str, str]]:
    """Ids, text and stop string of each output. After each of `cuts` messages the client leaves for the next router."""
    tracker = Tracker()
    got: dict[int, tuple[list[int], str, str]] = {}
    for turn in range(len(cuts) + 1):
        if tracker.resolved is not None:
            request = router_pb2.GenerateRequest(resume=tracker.resume())
        stream = routers[turn % len(routers)].open(request)
        num_messages = 0
        try:
            while turn == len(cuts) or num_messages < cuts[turn]:
                update = await stream.take()
                if update is None:
                    return got
                num_messages += 1
                for chunk in tracker.take(response_of(update)):
                    ids, text, stop = got.get(chunk.index, ([], "", ""))
                    found = chunk.finish.stop if chunk.finish is not None else stop
                    got[chunk.index] = (ids + chunk.ids, text + chunk.text, found)
        finally:
            stream.close()
        if tracker.is_complete:
            return got
    raise AssertionError("the last turn ends by itself")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    scheduler_lives=LIFETIMES,
    detokenizer_lives=LIFETIMES,
    cuts=st.lists(st.integers(0, 9), max_size=3),
    seed=st.integers(0, 500),
    n=st.integers(1, 3),
    max_tokens=st.integers(1, 30),
    stop_at=st.one_of(st.none(), st.integers(0, 40)),
    per_step=st.integers(1, 3),
)
def test_concatenated_deltas_equal_the_oracle_whatever_dies_when(
    monkeypatch: pytest.MonkeyPatch,
    scheduler_lives: list[int],
    detokenizer_lives: list[int],
    cuts: list[int],
    seed: int,
    n: int,
    max_tokens: int,
    stop_at: int | None,
    per_step: int,
) -> None:
    monkeypatch.setattr(peer_link, "REDIAL_S", 0.001)
    monkeypatch.setattr(peer_link, "MAX_REDIAL_S", 0.01)
    plain = oracle_text(oracle_ids(PROMPT, seed, max_tokens), PROMPT)[0]
    stops = [plain[stop_at : stop_at + 2]] if stop_at is not None and len(plain) > stop_at + 2 else []
    request = router_pb2.GenerateRequest(prompt_ids=pack_ints(PROMPT), n=n, request_id="r")
    request.sampling.seed = seed
    request.stop.max_tokens = max_tokens
    request.stop.stop.extend(stops)

    async def run() -> dict[int, tuple[list[int], str, str]]:
        fake = FakeScheduler(MODEL, per_step=per_step)
        routers = [new_router(fake, scheduler_lives, detokenizer_lives), new_router(fake, [], [])]
        clocks = []
        for router in routers:
            router.connect()
            clocks.append(asyncio.create_task(router.keep_time()))
        try:
            async with asyncio.timeout(20):
                got = await generate(routers, request, cuts)
            assert [(len(router.journal), router.journal.num_bytes) for router in routers] == [(0, 0), (0, 0)]
            return got
        finally:
            for clock in clocks:
                clock.cancel()
            for router in routers:
                await router.close()

    got = asyncio.run(run())
    for index in range(n):
        text, ids, stop = oracle_text(oracle_ids(PROMPT, seed, max_tokens, index=index), PROMPT, stops)
        assert got[index] == (ids, text, stop)
