"""A connection to one peer that is kept up: dialled again whenever it breaks or falls silent.

CONNECTING --hellos exchanged--> CONNECTED --broken, silent, refused--> CONNECTING (after a backoff)
    |                                |
    +-------------close--------------+---> CLOSED
"""

from __future__ import annotations

import asyncio
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum, auto
from typing import Generic

from radixmesh.daemons.router.peers.frame_stream import Dial, FrameStream, Req, Resp
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.daemons.runtime.telemetry.logs import get_logger

log = get_logger(__name__)

# Seconds between two dials: after a loss, and at most. Doubled in between.
REDIAL_S, MAX_REDIAL_S = 0.05, 1.0
# A peer that loads is there: requests wait for it from the moment in which it is ready.
_LOADING_REDIAL_S = 0.2
# Ends of a stream by which one side breaks the contract: it will again, and is dialled later each time, until a
# conversation has lasted for so long.
_VIOLATIONS = frozenset(
    (
        ErrorReason.ERROR_REASON_INVALID_ARGUMENT,
        ErrorReason.ERROR_REASON_MALFORMED_MESSAGE,
        ErrorReason.ERROR_REASON_MISSING_FIELD,
        ErrorReason.ERROR_REASON_PROTOCOL_VIOLATION,
        ErrorReason.ERROR_REASON_TOKEN_OUT_OF_VOCABULARY,
        ErrorReason.ERROR_REASON_TOO_LARGE,
    )
)
_SOUND_AFTER_S = 10.0
# Losses for one reason are told once in so many seconds.
_SAME_LOSS_S = 60.0


class LinkState(Enum):
    CONNECTING = auto()
    CONNECTED = auto()
    CLOSED = auto()


class PeerLink(ABC, Generic[Req, Resp]):
    """Dials, exchanges hellos, writes frames as the transport takes them, hands incoming frames on.

    Subclasses call wake() when there is something to say; frames are made when the transport is ready for one, so that
    whatever came up meanwhile is in one frame. peer_timeout_s: how long the peer may owe an answer.
    clock: monotonic seconds.
    """

    def __init__(
        self,
        address: str,
        dial: Dial[Req, Resp],
        peer_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self.address = address
        self.state = LinkState.CONNECTING
        self.instance_id = ""
        self.num_connects = 0
        self._dial = dial
        self._peer_timeout_s = peer_timeout_s
        self._has_news = asyncio.Event()
        self._connected_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._last_heard = 0.0
        self._last_refusal = ""
        self._refused_s = 0.0

    @property
    def is_connected(self) -> bool:
        return self.state is LinkState.CONNECTED

    @property
    def has_ever_connected(self) -> bool:
        return self.num_connects > 0

    def start(self) -> None:
        """Starts dialling, in the background."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"link {self.address}")

    async def close(self) -> None:
        """Ends the link; what it carried is reported lost. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))
        self._enter(LinkState.CLOSED)

    def wake(self) -> None:
        """There is something to say."""
        self._has_news.set()

    @abstractmethod
    def _hello_frame(self) -> Req:
        """The first frame."""

    @abstractmethod
    def _welcome(self, frame: Resp) -> str:
        """Checks the peer's hello and takes what else is in its first frame; its instance id. Raises MeshError."""

    @abstractmethod
    def next_frame(self) -> Req | None:
        """Everything there is to say, None if that is nothing."""

    @abstractmethod
    def _on_frame(self, frame: Resp) -> None:
        """Takes a frame. Raises MeshError to drop the stream."""

    @abstractmethod
    def _on_connected(self) -> None:
        """The link can carry things now."""

    @abstractmethod
    def _on_lost(self) -> None:
        """The link has been lost: what it carried has to go elsewhere."""

    @abstractmethod
    def _is_answer_owed(self) -> bool:
        """True if the peer ought to have something to say."""

    def _on_state(self) -> None:
        """The link has entered another state; _on_lost() comes later, when what is under way has ended."""

    def _enter(self, state: LinkState) -> None:
        self.state = state
        self._on_state()

    async def _run(self) -> None:
        backoff = REDIAL_S
        while True:
            num_connects, is_violation, longest_s = self.num_connects, False, MAX_REDIAL_S
            try:
                await self._converse()
            except MeshError as error:
                is_violation = error.reason in _VIOLATIONS
                if error.metadata.get("state") == "loading":
                    longest_s = min(_LOADING_REDIAL_S, MAX_REDIAL_S)
                self._log_loss(error, was_connected=self.num_connects > num_connects)
            except Exception:
                # A bug: one request's, as a rule. The link must not end with it, or every request waits for ever.
                log.exception("link_failed", address=self.address)
            if self.num_connects > num_connects:
                lasted_s = self._clock() - self._connected_s
                if not is_violation or lasted_s > _SOUND_AFTER_S:
                    backoff = REDIAL_S
            # Jitter: many routers must not come back to a restarted peer in lockstep.
            await asyncio.sleep(min(backoff, longest_s) * random.uniform(0.75, 1.25))
            backoff = min(2 * backoff, longest_s)

    async def _converse(self) -> None:
        """One stream from dialling to its end. Raises what ended it."""
        stream = self._dial(self.address)
        tasks: list[asyncio.Task[None]] = []
        try:
            try:
                async with asyncio.timeout(self._peer_timeout_s):
                    await stream.send(self._hello_frame())
                    first = await stream.receive()
            except TimeoutError as error:
                raise _silent(self.address, self._peer_timeout_s) from error
            if first is None:
                raise _ended(self.address)
            self.instance_id = self._welcome(first)
            self._last_heard = self._connected_s = self._clock()
            self.num_connects += 1
            self._enter(LinkState.CONNECTED)
            log.info("peer_connected", address=self.address, peer=self.instance_id)
            tasks = [asyncio.create_task(work) for work in (self._write(stream), self._read(stream), self._watch())]
            self._on_connected()
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            was_connected = self.is_connected
            self._enter(LinkState.CONNECTING)
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            if was_connected:
                self._on_lost()
            await stream.close()
        errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        raise errors[0] if errors else _ended(self.address)

    async def _write(self, stream: FrameStream[Req, Resp]) -> None:
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            frame = self.next_frame()
            if frame is not None:
                await stream.send(frame)

    async def _read(self, stream: FrameStream[Req, Resp]) -> None:
        while (frame := await stream.receive()) is not None:
            self._last_heard = self._clock()
            self._on_frame(frame)

    async def _watch(self) -> None:
        owed_since = self._clock()
        while True:
            before = self._clock()
            await asyncio.sleep(self._peer_timeout_s / 10)
            now = self._clock()
            # A pause of our own (SIGSTOP, an overloaded host) is no silence of the peer: what it said is still unread.
            paused_s = max(0.0, now - before - self._peer_timeout_s / 10)
            owed_since = now if not self._is_answer_owed() else max(owed_since + paused_s, self._last_heard)
            if now - owed_since > self._peer_timeout_s:
                raise _silent(self.address, self._peer_timeout_s)

    def _log_loss(self, error: MeshError, was_connected: bool) -> None:
        now = self._clock()
        is_told = str(error) == self._last_refusal and now - self._refused_s < _SAME_LOSS_S
        if not is_told and (was_connected or str(error) != self._last_refusal):
            # A peer that loads is there, and says so: that is how a mesh starts.
            is_loading = not was_connected and error.reason == ErrorReason.ERROR_REASON_NOT_SERVING
            say = log.info if is_loading else log.warning
            say("peer_lost" if was_connected else "peer_not_reached", address=self.address, error=str(error))
            self._refused_s = now
        self._last_refusal = str(error)


def _silent(address: str, peer_timeout_s: float) -> MeshError:
    message = f"{address} has said nothing for {peer_timeout_s:g} s: it counts as dead"
    return MeshError(ErrorReason.ERROR_REASON_NO_REPLICA, message, {"daemon": address})


def _ended(address: str) -> MeshError:
    return MeshError(ErrorReason.ERROR_REASON_NO_REPLICA, f"{address} ended the stream", {"daemon": address})
