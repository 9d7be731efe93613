"""Peers of a router as objects in one process: the daemons' own servicers, without a transport, that die on cue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator

from radixmesh.common.v1 import common_pb2
from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.detokenizer.service import DetokenizerService
from radixmesh.daemons.router.peers.frame_stream import FrameStream, Req, Resp
from radixmesh.daemons.runtime.detokenize.decoder_table import DecoderTable, EntryBudget, Limits
from radixmesh.daemons.runtime.detokenize.text_decoder import family_of
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.health.progress import Progress
from radixmesh.daemons.runtime.rpc.hello import make_hello
from support.router_mesh import MODEL, VOCABULARY

_FAMILY = family_of(VOCABULARY)


class DyingStream(FrameStream[Req, Resp]):
    """A conversation with a servicer's handler that breaks after `lifetime` frames from it."""

    def __init__(
        self, handler: Callable[[AsyncIterator[Req], object], AsyncGenerator[Resp, None]], lifetime: int
    ) -> None:
        self._requests: asyncio.Queue[Req] = asyncio.Queue()
        self._responses = handler(self._read(), None)
        self._lifetime = lifetime
        self._is_dead = False

    async def send(self, frame: Req) -> None:
        if self._is_dead:
            raise _dead()
        self._requests.put_nowait(type(frame).FromString(frame.SerializeToString()))  # type: ignore[attr-defined]

    async def receive(self) -> Resp | None:
        if self._lifetime <= 0:
            await self.close()
            raise _dead()
        self._lifetime -= 1
        return await anext(self._responses, None)

    async def close(self) -> None:
        self._is_dead = True
        await self._responses.aclose()

    async def _read(self) -> AsyncIterator[Req]:
        while True:
            yield await self._requests.get()


def dial_dying(
    handler: Callable[[AsyncIterator[Req], object], AsyncGenerator[Resp, None]], lifetimes: Iterator[int]
) -> Callable[[str], DyingStream[Req, Resp]]:
    """Each dial gets the next lifetime, and lives for ever when there is none left."""
    return lambda address: DyingStream(handler, next(lifetimes, 1 << 30))


class TableMaker:
    """A loaded detokenizer, as its streams use it."""

    def new_table(self) -> DecoderTable:
        return DecoderTable(_FAMILY, VOCABULARY.vocab_size, Limits(), EntryBudget(1000))

    def hello(self) -> common_pb2.Hello:
        return make_hello("detokenizer", "d", MODEL)


def new_detokenizer() -> DetokenizerService:
    progress = Progress()
    progress.loaded()
    return DetokenizerService(TableMaker(), progress, 1 << 20)


def _dead() -> MeshError:
    return MeshError(ErrorReason.ERROR_REASON_NO_REPLICA, "the peer died on cue")
