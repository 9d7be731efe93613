"""The tokenizers: any replica answers any call, so a call that fails or hangs is asked of another."""

from __future__ import annotations

import asyncio
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.logs import get_logger
from radixmesh.tokenizer.v1 import tokenizer_pb2

log = get_logger(__name__)

_T = TypeVar("_T")

_MIN_PAUSE_S = 0.03
_MAX_PAUSE_S = 0.25
_CALL_TIMEOUT_S = 5.0
# What another replica, or the same one later, may do better.
_RETRIED_STATUSES = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "RESOURCE_EXHAUSTED")
_FINAL_REASONS = (ErrorReason.ERROR_REASON_TOO_LARGE,)


class TokenizerReplica(ABC):
    """One tokenizer daemon."""

    address: str

    @abstractmethod
    async def encode(self, request: tokenizer_pb2.EncodeRequest, timeout_s: float) -> tokenizer_pb2.EncodeResponse:
        """Asks it once. Raises MeshError."""

    @abstractmethod
    async def decode(self, request: tokenizer_pb2.DecodeRequest, timeout_s: float) -> tokenizer_pb2.DecodeResponse:
        """Asks it once. Raises MeshError."""

    @abstractmethod
    async def vocabulary(self, timeout_s: float) -> tokenizer_pb2.GetVocabularyResponse:
        """Asks it once. Raises MeshError."""

    @abstractmethod
    async def close(self) -> None:
        """Ends the connection."""


# Asks one replica, with a timeout in seconds.
_Ask = Callable[[TokenizerReplica, float], Awaitable[_T]]


class TokenizerPool:
    """Asks replicas in turn; a second one as well if the first is slow, the next at once if one fails.

    wait_s: bound of a call. hedge_s: silence after which another replica is asked too.
    """

    def __init__(self, replicas: Sequence[TokenizerReplica], *, wait_s: float, hedge_s: float) -> None:
        self._replicas = tuple(replicas)
        self._wait_s = wait_s
        self._hedge_s = hedge_s
        self._turn = itertools.count()

    async def close(self) -> None:
        for replica in self._replicas:
            await replica.close()

    async def encode(self, request: tokenizer_pb2.EncodeRequest) -> tokenizer_pb2.EncodeResponse:
        """Raises what a replica says of the request, or NO_REPLICA when none has answered within wait_s."""
        return await self._call(lambda replica, timeout_s: replica.encode(request, timeout_s))

    async def decode(self, request: tokenizer_pb2.DecodeRequest) -> tokenizer_pb2.DecodeResponse:
        """Raises what encode() does."""
        return await self._call(lambda replica, timeout_s: replica.decode(request, timeout_s))

    async def vocabulary(self) -> tokenizer_pb2.GetVocabularyResponse:
        """Raises what encode() does."""
        return await self._call(lambda replica, timeout_s: replica.vocabulary(timeout_s))

    async def _call(self, ask: _Ask[_T]) -> _T:
        if not self._replicas:
            message = "this router knows no tokenizer: send prompt_ids, or start it with --tokenizers"
            raise MeshError(ErrorReason.ERROR_REASON_NO_REPLICA, message, {"daemon": "tokenizer"})
        until = time.monotonic() + self._wait_s
        first = next(self._turn)
        order = itertools.cycle(self._replicas[(first + i) % len(self._replicas)] for i in range(len(self._replicas)))
        asked: dict[asyncio.Future[_T], TokenizerReplica] = {}
        try:
            return await self._ask(ask, order, asked, until)
        finally:
            for task in asked:
                task.cancel()

    async def _ask(
        self,
        ask: _Ask[_T],
        order: itertools.cycle[TokenizerReplica],
        asked: dict[asyncio.Future[_T], TokenizerReplica],
        until: float,
    ) -> _T:
        num_failed, pause_s = 0, _MIN_PAUSE_S
        while (remaining := until - time.monotonic()) > 0:
            replica = next(order)
            if replica not in asked.values():
                timeout_s = min(remaining, _CALL_TIMEOUT_S)
                asked[asyncio.ensure_future(ask(replica, timeout_s))] = replica
            patience = remaining if len(asked) == len(self._replicas) else min(self._hedge_s, remaining)
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
            if done and not asked and num_failed >= len(self._replicas):
                # All have failed: the next round waits for one to come back.
                await asyncio.sleep(min(pause_s, max(0.0, until - time.monotonic())))
                num_failed, pause_s = 0, min(2 * pause_s, _MAX_PAUSE_S)
        message = f"no tokenizer answered within {self._wait_s:g} s: retry later, or send prompt_ids"
        raise MeshError(ErrorReason.ERROR_REASON_NO_REPLICA, message, {"daemon": "tokenizer"})


def _can_retry(error: MeshError) -> bool:
    return error.status in _RETRIED_STATUSES and error.reason not in _FINAL_REASONS
