"""A bidirectional stream of frames to a peer, whatever carries it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

Req = TypeVar("Req")
Resp = TypeVar("Resp")


class FrameStream(ABC, Generic[Req, Resp]):
    """One conversation. One reader and one writer at a time; both may run at once."""

    @abstractmethod
    async def send(self, frame: Req) -> None:
        """Returns once the transport has taken the frame, and so may take the next. Raises MeshError when broken."""

    @abstractmethod
    async def receive(self) -> Resp | None:
        """The next frame; None once the peer has ended the stream. Raises MeshError when broken or refused."""

    @abstractmethod
    async def close(self) -> None:
        """Ends the conversation at once. Idempotent."""


# Starts a conversation with the peer at an address; connects lazily.
Dial = Callable[[str], FrameStream[Req, Resp]]
