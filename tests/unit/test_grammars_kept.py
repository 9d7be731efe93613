"""Grammars that routers and schedulers keep for later requests: bounded in bytes and in number."""

from __future__ import annotations

import gc
import hashlib

from radixmesh.daemons.router.requests.grammars import Grammars
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
