"""Compiled grammars of the requests that live here: tokenizers make them, schedulers get them, equal requests share."""

from __future__ import annotations

import asyncio
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.router.chat.thoughts import ThoughtTags
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.daemons.runtime.guided.source import GrammarSource, grammar_to_proto
from radixmesh.tokenizer.v1 import tokenizer_pb2

# Of grammars that live requests follow, each once; one is some 100 KB.
MAX_LIVE_BYTES = 256 << 20
# Grammars of ended requests, kept for the next ones that bring the same.
_MAX_KEPT_BYTES = 32 << 20
# Small ones take more memory than their bytes.
_MAX_KEPT = 4096

Compile = Callable[[tokenizer_pb2.CompileGrammarRequest], Awaitable[tokenizer_pb2.CompileGrammarResponse]]


def settle_thought(grammar: common_pb2.Grammar, prompt: str) -> None:
    """Decides by the prompt's end whether a thought comes first: `is_open`, or none where the prompt closed it."""
    thought = grammar.thought
    tags = ThoughtTags(thought.begin, thought.end, is_always=thought.is_always)
    if tags.is_open_after(prompt):
        thought.is_open = True
    elif not tags.may_open_after(prompt):
        grammar.ClearField("thought")


class CompiledGrammar:
    """hash: SHA-256 (hex) of data, the artefact that workers follow."""

    __slots__ = ("__weakref__", "data", "hash")

    def __init__(self, blob_hash: str, data: bytes) -> None:
        self.hash = blob_hash
        self.data = data


class Grammars:
    """Asks a tokenizer once for each source that live requests have."""

    def __init__(self, compile_grammar: Compile, *, max_live_bytes: int = MAX_LIVE_BYTES) -> None:
        self._compile_grammar = compile_grammar
        self._max_live_bytes = max_live_bytes
        self._num_live_bytes = 0
        self._live: weakref.WeakValueDictionary[str, CompiledGrammar] = weakref.WeakValueDictionary()
        self._kept: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._num_kept_bytes = 0
        self._compiling: dict[str, asyncio.Task[CompiledGrammar]] = {}

    async def compiled(self, source: GrammarSource, tenant: str = "") -> CompiledGrammar:
        """tenant: of whom the call is, where a tokenizer has to be asked.

        Raises INVALID_GRAMMAR, UNSUPPORTED, what a call to a tokenizer raises, or OVERLOADED beyond the bound.
        """
        digest = source.digest
        found = self._live.get(digest)
        if found is None:
            task = self._compiling.get(digest)
            if task is None:
                task = self._compiling[digest] = asyncio.create_task(self._compile(digest, source, tenant))
                task.add_done_callback(lambda done: self._ended(digest, done))
            # A client that leaves does not take the compilation of others with it.
            found = await asyncio.shield(task)
        self._keep(digest, found)
        return found

    def _ended(self, digest: str, task: asyncio.Task[CompiledGrammar]) -> None:
        del self._compiling[digest]
        if not task.cancelled():
            task.exception()  # Read, though all who waited may have left.

    async def _compile(self, digest: str, source: GrammarSource, tenant: str) -> CompiledGrammar:
        request = tokenizer_pb2.CompileGrammarRequest(grammar=grammar_to_proto(source), tenant=tenant)
        answer = await self._compile_grammar(request)
        size = len(answer.artefact)
        while self._kept and self._num_live_bytes + size > self._max_live_bytes:
            self._drop_oldest()
        if self._num_live_bytes + size > self._max_live_bytes:
            text = f"grammars of running requests take {self._num_live_bytes} bytes here: retry later or elsewhere"
            raise MeshError(ErrorReason.ERROR_REASON_OVERLOADED, text, {"retry_after_ms": "1000"})
        grammar = CompiledGrammar(answer.hash, answer.artefact)
        self._num_live_bytes += size
        weakref.finalize(grammar, self._gone, size)
        self._live[digest] = grammar
        return grammar

    def _gone(self, size: int) -> None:
        self._num_live_bytes -= size

    def _keep(self, digest: str, grammar: CompiledGrammar) -> None:
        if digest not in self._kept:
            self._num_kept_bytes += len(grammar.data)
        self._kept[digest] = grammar
        self._kept.move_to_end(digest)
        while self._num_kept_bytes > _MAX_KEPT_BYTES or len(self._kept) > _MAX_KEPT:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, dropped = self._kept.popitem(last=False)
        self._num_kept_bytes -= len(dropped.data)
