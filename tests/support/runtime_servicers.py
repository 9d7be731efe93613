"""Servicers that behave badly on purpose, and a server around them. Shared by the tests of the runtime."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.gates.stream_gate import StreamLimits
from radixmesh.daemons.runtime.rpc.gates.unary_gate import UnaryLimits
from radixmesh.daemons.runtime.rpc.health.progress import Progress
from radixmesh.daemons.runtime.rpc.health.service import HealthService
from radixmesh.daemons.runtime.rpc.server import MeshServer
from radixmesh.daemons.runtime.security.tls_files import TlsFiles
from radixmesh.daemons.runtime.telemetry.logs import current_request
from radixmesh.detokenizer.v1 import detokenizer_pb2, detokenizer_pb2_grpc
from radixmesh.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc

Context = grpc.aio.ServicerContext


class Tokenizer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """GetVocabulary answers, Encode refuses (quoting `quote`), Decode has a `bug`, CompileGrammar is not offered."""

    def __init__(self) -> None:
        self.request_ids: list[str] = []
        self.quote = ""
        self.bug: Exception = ZeroDivisionError("secret detail")

    async def GetVocabulary(
        self, request: tokenizer_pb2.GetVocabularyRequest, context: Context
    ) -> tokenizer_pb2.GetVocabularyResponse:
        self.request_ids.append(current_request())
        return tokenizer_pb2.GetVocabularyResponse(tokens=["a", "b"])

    async def Encode(self, request: tokenizer_pb2.EncodeRequest, context: Context) -> tokenizer_pb2.EncodeResponse:
        if self.quote:
            raise MeshError(
                ErrorReason.ERROR_REASON_TOO_MANY_STOPS, self.quote, {f"key{i}": self.quote for i in range(50)}
            )
        raise MeshError(ErrorReason.ERROR_REASON_EMPTY_PROMPT, "send at least one token: ü", {"field": "items"})

    async def Decode(self, request: tokenizer_pb2.DecodeRequest, context: Context) -> tokenizer_pb2.DecodeResponse:
        raise self.bug


class Detokenizer(detokenizer_pb2_grpc.DetokenizerServiceServicer):
    """Echoes each frame's first handle; -1 is refused, -2 is a bug, -3 is never answered."""

    def __init__(self) -> None:
        self.num_open = 0
        self.num_closed = 0
        self.closed = asyncio.Event()
        self.errors: list[BaseException] = []

    async def Detokenize(
        self, request_iterator: AsyncIterator[detokenizer_pb2.DetokenizeRequest], context: Context
    ) -> AsyncIterator[detokenizer_pb2.DetokenizeResponse]:
        self.num_open += 1
        try:
            async for request in request_iterator:
                handle = request.opens[0].handle
                if handle == -1:
                    raise MeshError(ErrorReason.ERROR_REASON_TOO_MANY_STOPS, "send fewer", {"max": "64"})
                if handle == -2:
                    raise KeyError(handle)
                if handle == -3:
                    await asyncio.sleep(3600)
                yield detokenizer_pb2.DetokenizeResponse(rows=[detokenizer_pb2.TextRow(handle=handle)])
        except BaseException as error:
            self.errors.append(error)
            raise
        finally:
            self.num_open -= 1
            self.num_closed += 1
            self.closed.set()


@dataclass(kw_only=True)
class Bench:
    """A running server and what the test looks at."""

    address: str
    addresses: tuple[str, ...]
    server: MeshServer
    progress: Progress
    health: HealthService
    tokenizer: Tokenizer
    detokenizer: Detokenizer
    errors: list[MeshError] = field(default_factory=list)


@asynccontextmanager
async def serving(
    *listen: str,
    stall_s: float = 10.0,
    tls: TlsFiles | None = None,
    unary_limits: UnaryLimits | None = None,
    stream_limits: StreamLimits | None = None,
    tokenizer: Tokenizer | None = None,
    detokenizer: Detokenizer | None = None,
) -> AsyncIterator[Bench]:
    """A server with both servicers, loaded."""
    progress = Progress(stall_s=stall_s)
    progress.loaded()
    errors: list[MeshError] = []
    health = HealthService(progress)
    server = MeshServer(health, errors.append, tls, unary_limits=unary_limits, stream_limits=stream_limits)
    tokenizer, detokenizer = tokenizer or Tokenizer(), detokenizer or Detokenizer()
    server.add(tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server, tokenizer)
    server.add(detokenizer_pb2_grpc.add_DetokenizerServiceServicer_to_server, detokenizer)
    addresses = await server.start(listen or ("127.0.0.1:0",))
    try:
        yield Bench(
            address=addresses[0],
            addresses=addresses,
            server=server,
            progress=progress,
            health=health,
            tokenizer=tokenizer,
            detokenizer=detokenizer,
            errors=errors,
        )
    finally:
        await server.stop(0)


def frame(handle: int) -> detokenizer_pb2.DetokenizeRequest:
    """A frame for Detokenizer."""
    return detokenizer_pb2.DetokenizeRequest(opens=[detokenizer_pb2.Open(handle=handle)])
