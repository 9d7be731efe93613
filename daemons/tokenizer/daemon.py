"""The tokenizer as a process keeps it alive."""

from __future__ import annotations

import asyncio

from radixmesh.daemons.runtime.lifecycle import Daemon, Runtime
from radixmesh.daemons.runtime.model_folder.vocabulary import Vocabulary
from radixmesh.daemons.runtime.tokenize.chat_template import ChatTemplate
from radixmesh.daemons.runtime.tokenize.text_codec import Limits, TextCodec
from radixmesh.daemons.tokenizer.config import TokenizerSettings
from radixmesh.daemons.tokenizer.grammar.compiler import GrammarCompiler, GrammarLimits
from radixmesh.daemons.tokenizer.service import TokenizerService
from radixmesh.daemons.tokenizer.work_queue import WorkQueue
from radixmesh.tokenizer.v1 import tokenizer_pb2_grpc


class TokenizerDaemon(Daemon):
    """Serves once the vocabulary is loaded; stateless beyond it."""

    def __init__(self, runtime: Runtime, settings: TokenizerSettings) -> None:
        self._settings = settings
        self._codec: TextCodec | None = None
        self._queue = WorkQueue(
            runtime.progress,
            num_threads=settings.num_threads,
            max_queued=settings.max_queued,
        )
        self._grammars = GrammarCompiler(
            settings.model,
            settings.grammar_backend,
            GrammarLimits(
                num_processes=settings.grammar_processes,
                timeout_s=settings.grammar_timeout_s,
                memory_bytes=settings.grammar_memory_bytes,
            ),
        )
        self._service = TokenizerService(
            self._loaded_codec, self._queue, self._grammars, runtime.metrics, runtime.tracer
        )
        runtime.server.add(tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server, self._service)

    async def load(self) -> None:
        self._codec = await asyncio.to_thread(self._load)

    async def drain(self) -> None:
        await self._queue.wait_until_idle()

    async def close(self) -> None:
        self._service.close()
        self._queue.close()
        self._grammars.close()

    def _load(self) -> TextCodec:
        settings = self._settings
        limits = Limits(
            max_items=settings.max_items,
            max_text_bytes=settings.max_text_bytes,
            max_messages=settings.max_messages,
        )
        return TextCodec(Vocabulary.load(settings.model), ChatTemplate.load(settings.model), limits)

    def _loaded_codec(self) -> TextCodec:
        assert self._codec is not None, "calls are refused while loading"
        return self._codec
