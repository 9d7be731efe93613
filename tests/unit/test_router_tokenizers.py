"""The router's tokenizers: when a second one is asked, how long a working one is waited for, bytes under way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from support.reachable import num_reachable

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.router.peers.tokenizer_pool import TokenizerPool, TokenizerReplica
from radixmesh.daemons.router.peers.tokenizer_turns import TokenizerTurns
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.wire_bounds import MAX_TEXT_BYTES
from radixmesh.tokenizer.v1 import tokenizer_pb2 as pb

Answer = Callable[[], Awaitable[pb.EncodeResponse]]


class Replica(TokenizerReplica):
    """One that answers as told, and counts."""

    def __init__(self, answer: Answer, *, health: bool | None) -> None:
        self.address = "r"
        self.num_asked = self.num_looks = 0
        self._answer = answer
        self._health = health

    async def encode(self, request: pb.EncodeRequest, timeout_s: float) -> pb.EncodeResponse:
        self.num_asked += 1
        return await self._answer()

    async def decode(self, request: pb.DecodeRequest, timeout_s: float) -> pb.DecodeResponse:
        raise NotImplementedError

    async def compile_grammar(self, request: pb.CompileGrammarRequest, timeout_s: float) -> pb.CompileGrammarResponse:
        raise NotImplementedError

    async def vocabulary(self, timeout_s: float) -> pb.GetVocabularyResponse:
        raise NotImplementedError

    async def is_working(self, timeout_s: float) -> bool:
        self.num_looks += 1
        if self._health is None:
            await asyncio.sleep(timeout_s)
        return bool(self._health)

    async def close(self) -> None:
        pass


class ReadyReplica(Replica):
    """One whose answers are futures."""

    def __init__(self, answer: Answer, *, health: bool | None) -> None:
        super().__init__(answer, health=health)
        self.begun: list[asyncio.Future[pb.EncodeResponse]] = []

    def begin(self, request: pb.EncodeRequest) -> asyncio.Future[pb.EncodeResponse]:
        self.begun.append(asyncio.ensure_future(self._answer()))
        return self.begun[-1]


def pool_of(*replicas: Replica, wait_s: float = 10.0) -> TokenizerPool:
    pool = TokenizerPool(lambda address: replicas[int(address)], wait_s=wait_s, hedge_s=0.02, is_expected=True)
    for number in range(len(replicas)):
        pool.add(str(number))
    return pool


def after(seconds: float, text: str) -> Answer:
    async def answer() -> pb.EncodeResponse:
        await asyncio.sleep(seconds)
        return pb.EncodeResponse(tokenizer_fingerprint=text)

    return answer


async def test_a_working_replica_is_asked_once_and_nobody_else_is() -> None:
    first, second = Replica(after(0.4, "first"), health=True), Replica(after(0, "second"), health=True)
    answer = await pool_of(first, second).encode(pb.EncodeRequest())
    assert (answer.tokenizer_fingerprint, first.num_asked, second.num_asked) == ("first", 1, 0)
    assert first.num_looks > 1


async def test_a_replica_that_gives_a_future_is_asked_for_no_more() -> None:
    replica = ReadyReplica(after(0, "future"), health=True)
    answer = await pool_of(replica).encode(pb.EncodeRequest())
    assert (answer.tokenizer_fingerprint, len(replica.begun), replica.num_asked) == ("future", 1, 0)


async def test_a_future_that_does_not_come_is_passed_over_and_cancelled() -> None:
    first, second = ReadyReplica(after(60, "first"), health=False), Replica(after(0, "second"), health=True)
    answer = await pool_of(first, second).encode(pb.EncodeRequest())
    assert (answer.tokenizer_fingerprint, len(first.begun), second.num_asked) == ("second", 1, 1)
    await asyncio.wait(first.begun)
    assert first.begun[0].cancelled()


@pytest.mark.parametrize("health", [False, None])
async def test_a_replica_that_hangs_or_is_stalled_is_passed_over(health: bool | None) -> None:
    first, second = Replica(after(60, "first"), health=health), Replica(after(0, "second"), health=True)
    answer = await pool_of(first, second).encode(pb.EncodeRequest())
    assert (answer.tokenizer_fingerprint, first.num_asked, second.num_asked) == ("second", 1, 1)


async def test_a_working_replica_is_waited_for_beyond_the_patience_for_a_silent_one() -> None:
    assert await pool_of(Replica(after(0.6, "late"), health=True), wait_s=0.2).encode(pb.EncodeRequest())
    for health in (False, True):
        with pytest.raises(MeshError) as error:
            await pool_of(Replica(after(60, ""), health=health), wait_s=0.2).encode(pb.EncodeRequest())
        assert error.value.reason == ErrorReason.ERROR_REASON_NO_REPLICA


async def test_a_call_of_too_many_bytes_is_not_made() -> None:
    replica = Replica(after(0, ""), health=True)
    items = [pb.EncodeItem(text="x" * (4 << 20))] * 3
    with pytest.raises(MeshError) as error:
        await pool_of(replica).encode(pb.EncodeRequest(items=items))
    assert error.value.reason == ErrorReason.ERROR_REASON_TOO_LARGE and not replica.num_asked
    assert error.value.metadata["max"] == str(MAX_TEXT_BYTES)


async def test_tenants_share_the_bytes_under_way() -> None:
    turns, order = TokenizerTurns(200_000), list[str]()
    unused = num_reachable(turns)

    async def call(tenant: str) -> None:
        async with turns.turn(tenant, 100_000):
            order.append(tenant)
            await asyncio.sleep(0.01)

    greedy = [asyncio.ensure_future(call("a")) for _ in range(8)]
    await asyncio.sleep(0)
    gone = asyncio.ensure_future(call("c"))
    modest = asyncio.ensure_future(call("b"))
    await asyncio.sleep(0)
    gone.cancel()
    await modest
    assert order.count("a") <= 4 and "c" not in order
    async with turns.turn("a", 10):  # Small ones go at once.
        pass
    await asyncio.gather(*greedy)
    async with turns.turn("b", 10_000_000):  # One alone may have more.
        pass
    assert num_reachable(turns) == unused, "tenants that are done are forgotten"


async def test_a_turn_that_is_cancelled_in_the_moment_it_comes_is_given_on() -> None:
    turns = TokenizerTurns(100_000)
    release = asyncio.Event()

    async def call() -> None:
        async with turns.turn("a", 100_000):
            await release.wait()

    unused = num_reachable(turns)
    calls = [asyncio.ensure_future(call()) for _ in range(3)]
    await asyncio.sleep(0)
    release.set()
    await asyncio.sleep(0)
    calls[1].cancel()
    await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
    assert num_reachable(turns) == unused
    async with asyncio.timeout(10):  # No bytes are still counted.
        async with turns.turn("a", 100_000), turns.turn("b", 0):
            pass
