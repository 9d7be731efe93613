"""The client: streams that go on at another router, or the same once it is back, when one dies."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import grpc

from radixmesh.client.errors import (
    OverloadedError,
    RadixMeshError,
    UnavailableError,
    error_from_proto,
    error_from_rpc,
    is_retriable,
    is_transport_error,
)
from radixmesh.client.options import Message, Options, chat_from, request_from
from radixmesh.client.results import Chunk, Completion, CompletionOutput, Encoded, Logprobs, Model
from radixmesh.client.tracker import Tracker
from radixmesh.daemons.runtime.arrays import unpack_ints
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.daemons.runtime.security.tls_files import TlsFiles
from radixmesh.router.v1 import router_pb2, router_pb2_grpc

if TYPE_CHECKING:
    from typing import Unpack

    from radixmesh.router.v1.router_pb2_grpc import RouterServiceAsyncStub

_T = TypeVar("_T")

_MIN_PAUSE_S = 0.05
_MAX_PAUSE_S = 0.25
_CALL_TIMEOUT_S = 30.0


class AsyncClient:
    """Talks to one or several routers of one mesh.

    routers: addresses, "host:port" or "unix:/path"; requests take turns. resume_timeout_s: how long a request may be
    without any router before it fails with the last error; what the router said of the request itself is never retried.
    api_key: for routers that ask for one. tls: files for routers that serve under TLS (ca_file), and ask who their
    clients are (cert_file, key_file); None = plain. Raises MeshError for files that cannot be used.
    """

    def __init__(
        self,
        routers: Sequence[str],
        *,
        resume_timeout_s: float = 120.0,
        api_key: str = "",
        tls: TlsFiles | None = None,
    ) -> None:
        if isinstance(routers, str) or not routers:
            raise ValueError("routers is a sequence of at least one address")
        self.resume_timeout_s = resume_timeout_s
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._channels = [open_channel(address, tls) for address in routers]
        self._stubs: list[RouterServiceAsyncStub] = [
            router_pb2_grpc.RouterServiceStub(channel) for channel in self._channels
        ]
        self._turn = itertools.count()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connections, and with them all streams."""
        await asyncio.gather(*(channel.close() for channel in self._channels))

    def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[Message] | None = None,
        **options: Unpack[Options],
    ) -> AsyncStream:
        """Starts a request: a text, token ids, or chat messages. Iterate over the stream for chunks.

        Raises InvalidRequestError at once for options that cannot be sent; everything else comes while iterating.
        """
        first = next(self._turn) % len(self._stubs)
        return AsyncStream(
            self._stubs[first:] + self._stubs[:first],
            request_from(prompt, messages, options),
            request_id=options.get("request_id", ""),
            deadline_s=options.get("deadline_s"),
            ttft_deadline_s=options.get("ttft_deadline_s"),
            resume_timeout_s=self.resume_timeout_s,
            metadata=self._metadata,
        )

    async def complete(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[Message] | None = None,
        **options: Unpack[Options],
    ) -> Completion:
        """Runs a request to its end."""
        stream = self.generate(prompt, messages=messages, **options)
        outputs: dict[int, CompletionOutput] = {}
        async for chunk in stream:
            outputs.setdefault(chunk.index, CompletionOutput(index=chunk.index)).add(chunk)
        return Completion(
            request_id=stream.request_id,
            model=stream.model,
            prompt_ids=stream.prompt_ids,
            outputs=[outputs[index] for index in sorted(outputs)],
            prompt_logprobs=stream.prompt_logprobs,
        )

    async def abort(self, request_id: str) -> str:
        """Ends a request, whoever runs it: "found", "finished" (shortly before) or "unknown"."""
        request = router_pb2.AbortRequest(request_id=request_id)
        answer = await self._ask(lambda stub: stub.Abort(request, timeout=_CALL_TIMEOUT_S, metadata=self._metadata))
        return router_pb2.AbortOutcome.Name(answer.outcome).removeprefix("ABORT_OUTCOME_").lower()

    async def tokenize(self, text: str | None = None, *, messages: Sequence[Message] | None = None) -> list[int]:
        """Token ids of a text, or of a chat as the model's template renders it."""
        request = router_pb2.TokenizeRequest()
        item = request.items.add()
        if messages is not None:
            item.chat.CopyFrom(chat_from(messages))
        else:
            item.text = text or ""
        return (await self._encode(request))[0].ids

    async def encode(
        self,
        inputs: Sequence[str | Sequence[Message]],
        *,
        model: str = "",
        add_special_tokens: bool | None = None,
    ) -> list[Encoded]:
        """Token ids of texts and of chats, whose rendered text is told too.

        add_special_tokens: of texts; None: as prompts are encoded. Raises the error of the first that fails.
        """
        request = router_pb2.TokenizeRequest(model=model)
        for one in inputs:
            item = request.items.add()
            if isinstance(one, str):
                item.text = one
                if add_special_tokens is not None:
                    item.add_special_tokens = add_special_tokens
            else:
                item.chat.CopyFrom(chat_from(one))
        return await self._encode(request)

    async def models(self) -> list[Model]:
        """The models that can be asked for."""
        request = router_pb2.GetModelInfoRequest()
        answer = await self._ask(
            lambda stub: stub.GetModelInfo(request, timeout=_CALL_TIMEOUT_S, metadata=self._metadata)
        )
        return [
            Model(
                name=info.model.name,
                base_model=info.base_model,
                vocab_size=info.model.vocab_size,
                max_total_len=info.model.max_total_len,
                num_schedulers=info.num_schedulers,
            )
            for info in answer.models
        ]

    async def _encode(self, request: router_pb2.TokenizeRequest) -> list[Encoded]:
        answer = await self._ask(lambda stub: stub.Tokenize(request, timeout=_CALL_TIMEOUT_S, metadata=self._metadata))
        for item in answer.items:
            if item.HasField("error"):
                raise error_from_proto(item.error)
        return [Encoded(ids=unpack_ints(item.ids, "ids").tolist(), rendered=item.rendered) for item in answer.items]

    async def _ask(self, call: Callable[[RouterServiceAsyncStub], Awaitable[_T]]) -> _T:
        """Asks routers in turn until one answers. Raises what the last one said."""
        first = next(self._turn)
        last: grpc.RpcError | None = None
        for i in range(len(self._stubs)):
            try:
                return await call(self._stubs[(first + i) % len(self._stubs)])
            except grpc.RpcError as error:
                last = error
                if not is_transport_error(error) and not is_retriable(error_from_rpc(error)):
                    break
        assert last is not None
        raise error_from_rpc(last) from last


class AsyncStream:
    """One request. Iterate once; leaving early (aclose, cancellation, or a `break` and aclose) aborts it.

    request_id, and once the first chunk has come: model, prompt_ids, seeds; prompt_logprobs if asked for.
    num_resumptions: how often the stream was continued after a loss.
    """

    def __init__(
        self,
        stubs: Sequence[RouterServiceAsyncStub],
        request: router_pb2.GenerateRequest,
        *,
        request_id: str,
        deadline_s: float | None,
        ttft_deadline_s: float | None,
        resume_timeout_s: float,
        metadata: tuple[tuple[str, str], ...],
    ) -> None:
        self._metadata = metadata
        self._stubs = itertools.cycle(stubs)
        self._num_routers = len(stubs)
        self._request = request
        self._is_id_given = bool(request_id)
        self._request.request_id = request_id or uuid.uuid4().hex
        self._deadline = None if deadline_s is None else time.monotonic() + deadline_s
        self._ttft_deadline = None if ttft_deadline_s is None else time.monotonic() + ttft_deadline_s
        self._resume_timeout_s = resume_timeout_s
        self._tracker = Tracker()
        self._chunks = self._run()
        self._num_tries = 0
        self.num_resumptions = 0

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def model(self) -> str:
        return self._tracker.resolved.model if self._tracker.resolved is not None else ""

    @property
    def prompt_ids(self) -> list[int]:
        resolved = self._tracker.resolved
        ids: list[int] = unpack_ints(resolved.prompt_ids, "prompt_ids").tolist() if resolved is not None else []
        return ids

    @property
    def seeds(self) -> list[int]:
        return list(self._tracker.resolved.seeds) if self._tracker.resolved is not None else []

    @property
    def prompt_logprobs(self) -> Logprobs | None:
        return self._tracker.prompt_logprobs

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self._chunks

    async def aclose(self) -> None:
        """Aborts the request unless it has ended."""
        await self._chunks.aclose()

    async def _run(self) -> AsyncGenerator[Chunk, None]:
        """Chunks of all attempts; raises the first error of an output after its last chunk."""
        lost_since: float | None = None
        num_lost, pause_s = 0, _MIN_PAUSE_S
        failure: RadixMeshError | None = None
        while True:
            call = next(self._stubs).Generate(self._next_request(), metadata=self._metadata)
            try:
                async for response in call:
                    self._count_resumption(is_first=response.HasField("resolved"))
                    lost_since, num_lost, pause_s = None, 0, _MIN_PAUSE_S
                    for chunk in self._tracker.take(response):
                        if chunk.finish is not None and chunk.finish.reason == "error":
                            failure = failure or chunk.finish.error
                        yield chunk
                if self._tracker.is_complete:
                    break
                error: RadixMeshError = UnavailableError("the router ended the stream too early", "NO_REPLICA")
            except grpc.RpcError as rpc_error:
                error = error_from_rpc(rpc_error)
                if not self._can_go_on(rpc_error, error, num_lost):
                    raise error from rpc_error
            finally:
                call.cancel()
            if self._tracker.is_complete:
                break
            now = time.monotonic()
            lost_since = now if lost_since is None else lost_since
            if now - lost_since > self._resume_timeout_s:
                raise error
            num_lost += 1
            if num_lost % self._num_routers == 0:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        if failure is not None:
            raise failure

    def _count_resumption(self, *, is_first: bool) -> None:
        if is_first and self._tracker.resumption:
            self.num_resumptions += 1

    def _can_go_on(self, rpc_error: grpc.RpcError, error: RadixMeshError, num_lost: int) -> bool:
        if is_transport_error(rpc_error) or is_retriable(error):
            return True
        if isinstance(error, OverloadedError) and error.retry_after_s is not None:
            # A stream that had begun is worth waiting for; a new request tries every router once.
            return self._tracker.resolved is not None or num_lost + 1 < self._num_routers
        # The router may not have noticed yet that the first connection broke.
        return error.reason == "DUPLICATE_REQUEST" and num_lost > 0 and self._tracker.resolved is None

    def _next_request(self) -> router_pb2.GenerateRequest:
        request = self._request
        if self._tracker.resolved is not None:
            request = router_pb2.GenerateRequest(resume=self._tracker.resume())
        elif self._num_tries and not self._is_id_given:
            # An earlier try may still be known somewhere: nothing of it was received, so this one is another request.
            self._request.request_id = uuid.uuid4().hex
        self._num_tries += 1
        if self._deadline is not None:
            request.deadline_ms = _ms_until(self._deadline)
        if self._ttft_deadline is not None:
            request.ttft_deadline_ms = _ms_until(self._ttft_deadline)
        return request


def _ms_until(moment: float) -> int:
    return max(0, int(1000 * (moment - time.monotonic())))
