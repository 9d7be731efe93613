"""Grammars that routers and schedulers keep for later requests: bounded in bytes and in number."""

from __future__ import annotations

import asyncio
import gc
import hashlib

import pytest

from radixmesh.daemons.router.requests.intake.grammars import Grammars
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.daemons.runtime.guided.source import GrammarForm, GrammarSource
from radixmesh.daemons.scheduler.queue.grammars import GrammarShelf
from radixmesh.tokenizer.v1 import tokenizer_pb2

NUM = 5000


def test_a_scheduler_keeps_so_many_that_no_request_follows() -> None:
    shelf = GrammarShelf()
    for number in range(NUM):
        data = b"%d" % number
        shelf.add(hashlib.sha256(data).hexdigest(), data)
    gc.collect()
    assert shelf.num_live_bytes == sum(len(str(number)) for number in range(NUM - 4096, NUM))


async def test_a_router_keeps_so_many_that_no_request_follows() -> None:
    num_compiled = 0

    async def compile_grammar(
        request: tokenizer_pb2.CompileGrammarRequest,
    ) -> tokenizer_pb2.CompileGrammarResponse:
        nonlocal num_compiled
        num_compiled += 1
        return tokenizer_pb2.CompileGrammarResponse(hash=request.grammar.regex, artefact=b"x")

    grammars = Grammars(compile_grammar)
    for number in (*range(NUM), NUM - 1, 0):
        await grammars.compiled(GrammarSource(GrammarForm.REGEX, f"a{number}"))
    assert num_compiled == NUM + 1, "the last one was kept, the first one was not"


class _Tokenizer:
    """Makes an artefact of `size` bytes of each grammar, when it is let go."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.asked: list[str] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.error: Exception | None = None

    async def compile(self, request: tokenizer_pb2.CompileGrammarRequest) -> tokenizer_pb2.CompileGrammarResponse:
        self.asked.append(request.grammar.regex)
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return tokenizer_pb2.CompileGrammarResponse(hash=request.grammar.regex, artefact=b"x" * self.size)


def _source(name: str) -> GrammarSource:
    return GrammarSource(GrammarForm.REGEX, name)


async def test_requests_that_come_together_share_one_compilation_which_outlives_a_client() -> None:
    tokenizer = _Tokenizer(10)
    tokenizer.may_answer.clear()
    grammars = Grammars(tokenizer.compile)
    leaving, staying = (asyncio.create_task(grammars.compiled(_source("a"))) for _ in range(2))
    async with asyncio.timeout(60):
        while not tokenizer.asked:
            await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait((leaving,))
    tokenizer.may_answer.set()
    compiled = await staying
    assert (compiled.hash, compiled.data, tokenizer.asked) == ("a", b"x" * 10, ["a"])
    assert await grammars.compiled(_source("a")) is compiled


async def test_an_error_is_told_to_all_who_wait_and_not_kept() -> None:
    tokenizer = _Tokenizer(10)
    tokenizer.error = MeshError(ErrorReason.ERROR_REASON_INVALID_GRAMMAR, "no")
    grammars = Grammars(tokenizer.compile)
    asked = await asyncio.gather(*(grammars.compiled(_source("a")) for _ in range(2)), return_exceptions=True)
    assert asked == [tokenizer.error] * 2 and tokenizer.asked == ["a"]
    tokenizer.error = None
    assert (await grammars.compiled(_source("a"))).hash == "a"


async def test_grammars_that_are_followed_have_a_bound_and_kept_ones_make_room() -> None:
    tokenizer = _Tokenizer(10)
    grammars = Grammars(tokenizer.compile, max_live_bytes=20)
    followed = await grammars.compiled(_source("a"))
    await grammars.compiled(_source("b"))  # Nobody follows it, but it is kept.
    second = await grammars.compiled(_source("c"))  # Exactly the bound, once b has gone.
    assert tokenizer.asked == ["a", "b", "c"]
    with pytest.raises(MeshError, match="take 20 bytes") as caught:
        await grammars.compiled(_source("d"))
    assert caught.value.reason == ErrorReason.ERROR_REASON_OVERLOADED
    assert caught.value.metadata == {"retry_after_ms": "1000"}
    assert await grammars.compiled(_source("a")) is followed, "what is followed is found though nothing is kept"
    del second, followed
    gc.collect()
    assert (await grammars.compiled(_source("d"))).hash == "d"


async def test_kept_grammars_have_a_bound_in_bytes_the_least_recently_used_go_first() -> None:
    tokenizer = _Tokenizer(12 << 20)
    grammars = Grammars(tokenizer.compile)
    for name in ("a", "b", "a", "c"):  # 32 MiB hold two of them: b goes.
        await grammars.compiled(_source(name))
    gc.collect()
    assert tokenizer.asked == ["a", "b", "c"]
    for name in ("a", "c"):
        await grammars.compiled(_source(name))
    assert tokenizer.asked == ["a", "b", "c"]
    await grammars.compiled(_source("b"))
    assert tokenizer.asked == ["a", "b", "c", "b"]


async def test_a_kept_grammar_that_is_asked_for_again_counts_once() -> None:
    tokenizer = _Tokenizer(12 << 20)
    grammars = Grammars(tokenizer.compile)
    for name in ("a", "b", "b", "b", "a"):  # 24 of 32 MiB, whatever is asked for how often.
        await grammars.compiled(_source(name))
    gc.collect()
    assert tokenizer.asked == ["a", "b"]


def test_a_scheduler_counts_a_kept_grammar_once() -> None:
    shelf = GrammarShelf(max_kept_bytes=32)
    names = [hashlib.sha256(data).hexdigest() for data in (b"a" * 12, b"b" * 12)]
    for name, data in zip(names, (b"a" * 12, b"b" * 12), strict=True):
        shelf.add(name, data)
    for name in (names[1], names[1], names[0]):
        shelf.find(name)
    gc.collect()
    assert shelf.num_live_bytes == 24
