"""The tokenizers: any replica answers any call, so a call that fails or hangs is asked of another.

A replica that works on a call is left to it: asking a second one would double the work when there is most of it.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from radixmesh.daemons.router.peers.tokenizer_turns import TokenizerTurns
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.daemons.runtime.rpc.name_watch import PeerPool
from radixmesh.daemons.runtime.rpc.wire_bounds import MAX_TEXT_BYTES
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.tokenizer.v1 import tokenizer_pb2

log = get_logger(__name__)

_T = TypeVar("_T")

_MIN_PAUSE_S = 0.03
_MAX_PAUSE_S = 0.25
_HEALTH_TIMEOUT_S = 0.5
# A replica that works may take longer than one that says nothing: seconds beyond wait_s, times wait_s.
_WORKING_FACTOR = 6
# Calls of a replica that leaves may still end.
_LEAVE_S = 5.0
# Bytes of large calls that a router has at its tokenizers; what they take is a multiple of it.
_MAX_BYTES_AT_ONCE = 24 << 20
# Statuses after which another replica, or the same one later, may do better.
# UNIMPLEMENTED: a daemon of another kind has got the address of a replica that left.
_RETRIED_STATUSES = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED")
_FINAL_REASONS = (ErrorReason.ERROR_REASON_TOO_LARGE,)


class TokenizerReplica(ABC):
    """One tokenizer daemon."""

    address: str

    @abstractmethod
    async def encode(self, request: tokenizer_pb2.EncodeRequest, timeout_s: float) -> tokenizer_pb2.EncodeResponse:
        """Asks it once. Raises MeshError."""

    def begin(self, request: tokenizer_pb2.EncodeRequest) -> asyncio.Future[tokenizer_pb2.EncodeResponse] | None:
        """As encode(), for calls that need no task of their own: the future of the answer, which nothing but the
        caller bounds in time. None: only encode() will do."""
        return None

    @abstractmethod
    async def decode(self, request: tokenizer_pb2.DecodeRequest, timeout_s: float) -> tokenizer_pb2.DecodeResponse:
        """Asks it once. Raises MeshError."""

    @abstractmethod
    async def compile_grammar(
        self, request: tokenizer_pb2.CompileGrammarRequest, timeout_s: float
    ) -> tokenizer_pb2.CompileGrammarResponse:
        """Asks it once. Raises MeshError."""

    @abstractmethod
    async def vocabulary(self, timeout_s: float) -> tokenizer_pb2.GetVocabularyResponse:
        """Asks it once. Raises MeshError."""

    @abstractmethod
    async def is_working(self, timeout_s: float) -> bool:
        """It answers, and says that what it has to do gets done. Raises nothing."""

    @abstractmethod
    async def close(self) -> None:
        """Ends the connection."""


# Asks one replica, with a timeout in seconds.
_Ask = Callable[[TokenizerReplica, float], Awaitable[_T]]


class TokenizerPool(PeerPool):
    """Asks replicas in turn; a second one as well if the first hangs, the next at once if one fails.

    wait_s: bound of a call while no replica says that it works on it. hedge_s: silence after which replicas are asked
    for their health, and, if that is not well, another one for the answer. is_expected: whether there will be replicas,
    if there are none yet. encode_here: answers what needs no replica, None for all else.
    """

    def __init__(
        self,
        open_replica: Callable[[str], TokenizerReplica],
        *,
        wait_s: float,
        hedge_s: float,
        is_expected: bool,
        encode_here: Callable[[tokenizer_pb2.EncodeRequest], tokenizer_pb2.EncodeResponse | None] = lambda _: None,
    ) -> None:
        self._open_replica = open_replica
        self._replicas: dict[str, TokenizerReplica] = {}
        self._wait_s = wait_s
        self._hedge_s = hedge_s
        self._is_expected = is_expected
        self._encode_here = encode_here
        self._turn = itertools.count()
        self._turns = TokenizerTurns(_MAX_BYTES_AT_ONCE)
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def num_replicas(self) -> int:
        return len(self._replicas)

    def add(self, address: str) -> None:
        if address not in self._replicas:
            self._replicas[address] = self._open_replica(address)

    async def remove(self, address: str) -> None:
        # Calls that it is answering may still end.
        leaving = asyncio.ensure_future(_close_later(self._replicas.pop(address)))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    def can_remove(self, address: str) -> bool:
        return True

    async def close(self) -> None:
        for leaving in tuple(self._leaving):
            leaving.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        for replica in self._replicas.values():
            await replica.close()

    async def encode(self, request: tokenizer_pb2.EncodeRequest) -> tokenizer_pb2.EncodeResponse:
        """Raises what a replica says of the request, or NO_REPLICA when none has answered in time, TOO_LARGE."""
        answer = self._encode_here(request)
        if answer is not None:
            return answer

        def ask(replica: TokenizerReplica, timeout_s: float) -> Awaitable[tokenizer_pb2.EncodeResponse]:
            return replica.begin(request) or replica.encode(request, timeout_s)

        return await self._call(ask, request)

    async def decode(self, request: tokenizer_pb2.DecodeRequest) -> tokenizer_pb2.DecodeResponse:
        """Raises what encode() does."""
        return await self._call(lambda replica, timeout_s: replica.decode(request, timeout_s), request)

    async def compile_grammar(
        self, request: tokenizer_pb2.CompileGrammarRequest
    ) -> tokenizer_pb2.CompileGrammarResponse:
        """Raises what encode() does."""
        return await self._call(lambda replica, timeout_s: replica.compile_grammar(request, timeout_s))

    async def vocabulary(self) -> tokenizer_pb2.GetVocabularyResponse:
        """Raises what encode() does."""
        return await self._call(lambda replica, timeout_s: replica.vocabulary(timeout_s))

    async def _call(
        self, ask: _Ask[_T], request: tokenizer_pb2.EncodeRequest | tokenizer_pb2.DecodeRequest | None = None
    ) -> _T:
        if not self._replicas and not self._is_expected:
            message = "this router knows no tokenizer: send prompt_ids, or start it with --tokenizers"
            raise MeshError(ErrorReason.ERROR_REASON_NO_REPLICA, message, {"daemon": "tokenizer"})
        if request is None:
            return await self._ask(ask)
        num_bytes = request.ByteSize()
        if num_bytes > MAX_TEXT_BYTES:
            message = (
                f"texts of {num_bytes} bytes in one call are more than the {MAX_TEXT_BYTES} that a tokenizer takes"
            )
            metadata = {"size": str(num_bytes), "max": str(MAX_TEXT_BYTES)}
            raise MeshError(ErrorReason.ERROR_REASON_TOO_LARGE, f"{message}: send less at once", metadata)
        async with self._turns.turn(request.tenant, num_bytes):
            return await self._ask(ask)

    async def _ask(self, ask: _Ask[_T]) -> _T:
        asked: dict[asyncio.Future[_T], TokenizerReplica] = {}
        begin = time.monotonic()
        try:
            return await self._ask_until_answered(
                ask, asked, begin + self._wait_s, begin + self._wait_s * _WORKING_FACTOR
            )
        finally:
            for task in asked:
                task.cancel()

    async def _ask_until_answered(
        self, ask: _Ask[_T], asked: dict[asyncio.Future[_T], TokenizerReplica], until: float, last: float
    ) -> _T:
        turn, num_failed, pause_s = next(self._turn), 0, _MIN_PAUSE_S
        is_working = False
        while (remaining := until - time.monotonic()) > 0:
            # Read anew in every round: replicas come and go.
            replicas = tuple(self._replicas.values())
            if replicas and not is_working:
                replica = replicas[turn % len(replicas)]
                turn += 1
                if replica not in asked.values():
                    asked[asyncio.ensure_future(ask(replica, last - time.monotonic()))] = replica
            if asked:
                patience = min(self._hedge_s, remaining)
                done, _ = await asyncio.wait(asked, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    replica = asked.pop(task)
                    error = task.exception()
                    if error is None:
                        return task.result()
                    if not isinstance(error, MeshError) or not _can_retry(error):
                        raise error
                    log.info("tokenizer_failed", address=replica.address, error=str(error))
                    num_failed += 1
                is_working = not done and await _is_any_working(asked)
                if is_working:
                    until = min(time.monotonic() + self._wait_s, last)
            if not asked and num_failed >= len(replicas):
                # All have failed, or there is none: the next round waits for one to come back.
                await asyncio.sleep(min(pause_s, max(0.0, until - time.monotonic())))
                num_failed, pause_s = 0, min(2 * pause_s, _MAX_PAUSE_S)
        message = f"no tokenizer answered within {self._wait_s:g} s: retry later, or send prompt_ids"
        raise MeshError(ErrorReason.ERROR_REASON_NO_REPLICA, message, {"daemon": "tokenizer"})


async def _is_any_working(asked: Mapping[asyncio.Future[_T], TokenizerReplica]) -> bool:
    """Looks until one says so, or an answer is there."""
    looks = [asyncio.ensure_future(replica.is_working(_HEALTH_TIMEOUT_S)) for replica in asked.values()]
    waiting: set[asyncio.Future[_T] | asyncio.Future[bool]] = {*looks, *asked}
    try:
        while not any(task.done() for task in asked) and not all(look.done() for look in looks):
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if any(look.done() and look.result() for look in looks):
                return True
            waiting.difference_update([look for look in looks if look.done()])
        return any(look.done() and look.result() for look in looks)
    finally:
        for look in looks:
            look.cancel()


def _can_retry(error: MeshError) -> bool:
    # The router's own message came too slowly there: that is no fault of the user's.
    is_stalled = error.reason == ErrorReason.ERROR_REASON_CLIENT_STALLED
    return (error.status in _RETRIED_STATUSES or is_stalled) and error.reason not in _FINAL_REASONS


async def _close_later(replica: TokenizerReplica) -> None:
    try:
        await asyncio.sleep(_LEAVE_S)
    finally:
        await replica.close()
