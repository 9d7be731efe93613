"""Tables of tokens: loaded once for all who wait, and no longer waited for than a request has time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from radixmesh.daemons.router.chat.parts import ToolUse
from radixmesh.daemons.router.http.answers.chat_plans import ChatPlans
from radixmesh.daemons.router.http.answers.tokens import TokenTables
from radixmesh.daemons.router.router import Router
from radixmesh.daemons.router.served_identity import ServedIdentity
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.router.v1 import router_pb2
from radixmesh.tokenizer.v1 import tokenizer_pb2

IDENTITY = ServedIdentity(tokenizer_fingerprint="f")


class SlowRouter:
    """Its tokenizer answers, or fails, when it is told to."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.answer: asyncio.Future[tokenizer_pb2.GetVocabularyResponse] = asyncio.get_running_loop().create_future()
        self.schedulers = SimpleNamespace(served=lambda name: SimpleNamespace(identity=IDENTITY))

    async def vocabulary(self) -> tokenizer_pb2.GetVocabularyResponse:
        self.num_calls += 1
        return await asyncio.shield(self.answer)


@pytest.mark.asyncio
async def test_all_who_wait_share_one_attempt() -> None:
    """One after the other, each would wait as long again for a tokenizer that is gone."""
    router = SlowRouter()
    tables = TokenTables(cast("Router", router))
    waiting = [asyncio.create_task(tables.of(IDENTITY)) for _ in range(20)]
    await asyncio.sleep(0)
    waiting.pop(0).cancel()  # The first of them leaves.
    router.answer.set_exception(MeshError(ErrorReason.ERROR_REASON_NO_REPLICA, "no tokenizer"))
    failed = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(error, MeshError) and error.reason_name == "NO_REPLICA" for error in failed)
    assert router.num_calls == 1

    router.answer = asyncio.get_running_loop().create_future()
    router.answer.set_result(tokenizer_pb2.GetVocabularyResponse(token_bytes=[b"a"], tokens=["a"]))
    found = await asyncio.gather(*(tables.of(IDENTITY) for _ in range(20)))
    assert found[0].data(0) == b"a" and len(set(map(id, [*found, await tables.of(IDENTITY)]))) == 1
    assert router.num_calls == 2


@pytest.mark.asyncio
async def test_a_chat_waits_for_a_table_until_its_deadline() -> None:
    router = cast("Router", SlowRouter())
    plans = ChatPlans(router, TokenTables(router), "auto", "auto")
    async with asyncio.timeout(30):
        with pytest.raises(MeshError) as error:
            await plans.plan(router_pb2.GenerateRequest(deadline_ms=20), ToolUse())
    assert error.value.reason_name == "DEADLINE_EXCEEDED"
