"""The gRPC server of the tokenizer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import grpc

from radixmesh.daemons.runtime.arrays import pack_ints, unpack_ints
from radixmesh.daemons.runtime.guided.source import grammar_source
from radixmesh.daemons.runtime.model_folder.token_bytes import token_bytes
from radixmesh.daemons.runtime.rpc.hello import identity_to_proto
from radixmesh.daemons.runtime.telemetry.metrics import Metrics
from radixmesh.daemons.runtime.telemetry.tracing import Attributes, Tracer, current_context, is_traceparent
from radixmesh.daemons.runtime.tokenize.encode_request import encode_request, is_short_text
from radixmesh.daemons.runtime.tokenize.text_codec import Steps, TextCodec
from radixmesh.daemons.tokenizer.encode_calls import EncodeCalls
from radixmesh.daemons.tokenizer.grammar.compiler import GrammarCompiler
from radixmesh.daemons.tokenizer.work_queue import WorkQueue, in_one_step
from radixmesh.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc


class TokenizerService(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """codec: what a loaded daemon encodes with; asked for per call, after the queue has refused calls while loading."""

    def __init__(
        self,
        codec: Callable[[], TextCodec],
        queue: WorkQueue,
        grammars: GrammarCompiler,
        metrics: Metrics,
        tracer: Tracer,
    ) -> None:
        self._codec = codec
        self._grammars = grammars
        self._queue = queue
        self._metrics = metrics
        self._tracer = tracer
        self._streams: set[EncodeCalls] = set()

    def close(self) -> None:
        """Ends all streams: the server would wait for them when it stops."""
        for calls in self._streams:
            calls.finish()

    async def Encode(
        self,
        request: tokenizer_pb2.EncodeRequest,
        context: grpc.aio.ServicerContext[tokenizer_pb2.EncodeRequest, tokenizer_pb2.EncodeResponse],
    ) -> tokenizer_pb2.EncodeResponse:
        return await self._encode(request, current_context())

    # A coroutine that writes itself, where the stub foresees a generator: answers come in another order than calls.
    async def EncodeEach(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[tokenizer_pb2.EncodeEachRequest],
        context: grpc.aio.ServicerContext[tokenizer_pb2.EncodeEachRequest, tokenizer_pb2.EncodeEachResponse],
    ) -> None:
        calls = EncodeCalls(self._encode_call, self._is_quick, self._metrics.count_error)
        self._streams.add(calls)
        reader = asyncio.ensure_future(calls.read_all(request_iterator))
        try:
            while (answer := await calls.next_answer()) is not None:
                await context.write(answer)
            if reader.done():
                reader.result()
        finally:
            self._streams.discard(calls)
            calls.close()
            reader.cancel()
            await asyncio.wait((reader,))

    def _is_quick(self, call: tokenizer_pb2.EncodeEachRequest) -> bool:
        return is_short_text(call.request) and self._queue.is_idle

    async def _encode_call(self, call: tokenizer_pb2.EncodeEachRequest) -> tokenizer_pb2.EncodeResponse:
        return await self._encode(call.request, call.trace_context if is_traceparent(call.trace_context) else "")

    async def _encode(
        self, request: tokenizer_pb2.EncodeRequest, context_of_caller: str
    ) -> tokenizer_pb2.EncodeResponse:
        since_s = time.monotonic()
        answer = await self._queue.run(
            encode_request(self._codec, request), tenant=request.tenant, is_short=is_short_text(request)
        )
        end_s, num_tokens = time.monotonic(), sum(len(item.ids) for item in answer.items) // 4
        self._metrics.encode_seconds.observe(end_s - since_s)
        self._metrics.encoded_tokens.inc(num_tokens)
        if context_of_caller:
            attributes: Attributes = {"radixmesh.num_items": len(answer.items), "radixmesh.prompt_len": num_tokens}
            self._tracer.record("tokenizer.encode", context_of_caller, since_s, end_s, attributes)
        return answer

    async def Decode(
        self,
        request: tokenizer_pb2.DecodeRequest,
        context: grpc.aio.ServicerContext[tokenizer_pb2.DecodeRequest, tokenizer_pb2.DecodeResponse],
    ) -> tokenizer_pb2.DecodeResponse:
        return await self._queue.run(_decode(self._codec, request), tenant=request.tenant)

    async def CompileGrammar(
        self,
        request: tokenizer_pb2.CompileGrammarRequest,
        context: grpc.aio.ServicerContext[tokenizer_pb2.CompileGrammarRequest, tokenizer_pb2.CompileGrammarResponse],
    ) -> tokenizer_pb2.CompileGrammarResponse:
        self._queue.require_serving()
        since_s = time.monotonic()
        source_of, timeout_s = grammar_source(request.grammar), request.timeout_ms / 1000
        artefact = await self._grammars.compile(source_of, timeout_s, tenant=request.tenant)
        source = "cache" if artefact.is_cached else "compiled"
        self._metrics.grammar_compile_seconds.labels(source).observe(time.monotonic() - since_s)
        return tokenizer_pb2.CompileGrammarResponse(
            hash=artefact.hash, artefact=artefact.data, grammar_format=self._grammars.format
        )

    async def GetVocabulary(
        self,
        request: tokenizer_pb2.GetVocabularyRequest,
        context: grpc.aio.ServicerContext[tokenizer_pb2.GetVocabularyRequest, tokenizer_pb2.GetVocabularyResponse],
    ) -> tokenizer_pb2.GetVocabularyResponse:
        return await self._queue.run(in_one_step(lambda: _describe(self._codec(), self._grammars.format)))


def _decode(
    codec_of: Callable[[], TextCodec], request: tokenizer_pb2.DecodeRequest
) -> Steps[tokenizer_pb2.DecodeResponse]:
    codec = codec_of()
    codec.check_num_items(len(request.ids))
    batch = [unpack_ints(ids, f"ids[{item}]") for item, ids in enumerate(request.ids)]
    skip_special_tokens = not request.HasField("skip_special_tokens") or request.skip_special_tokens
    # Bytes of memory that a text takes for each of its ids are some times those of the ids.
    yield request.ByteSize()
    return tokenizer_pb2.DecodeResponse(texts=codec.decode(batch, skip_special_tokens))


def _describe(codec: TextCodec, grammar_format: str) -> tokenizer_pb2.GetVocabularyResponse:
    vocabulary = codec.vocabulary
    return tokenizer_pb2.GetVocabularyResponse(
        model=identity_to_proto(
            vocabulary.identity, tokenizer_fingerprint=vocabulary.fingerprint, grammar_format=grammar_format
        ),
        special_ids=pack_ints(vocabulary.special_ids),
        has_chat_template=not codec.template.is_empty,
        tokens=vocabulary.tokens,
        token_bytes=token_bytes(vocabulary),
        chat_template=codec.template.source,
    )
