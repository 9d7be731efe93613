"""One answer of a chat: streamed to the terminal, measured, and stopped without harm."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from radixmesh.cli.terminal import Terminal
from radixmesh.client import AsyncClient, AsyncStream, Finish, RadixMeshError

if TYPE_CHECKING:
    from radixmesh.client.options import Message, Options

_DIM = "2"


class Answer:
    """Streams the answer to `messages`; afterwards text, error and figures() tell how it went.

    is_stopped: the user stopped it. error: it failed; text is what came before.
    """

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._num_tokens = 0
        self._num_resumptions = 0
        self._started = self._first_s = self._last_s = 0.0
        self._finish: Finish | None = None
        self.text = ""
        self.is_stopped = False
        self.error: RadixMeshError | None = None

    async def stream(self, client: AsyncClient, messages: Sequence[Message], options: Options) -> None:
        """Shows the answer as it comes. Cancelling the task stops the answer, aborts the request, and returns."""
        self._started = time.monotonic()
        stream: AsyncStream | None = None
        try:
            stream = client.generate(messages=messages, **options)
            async for chunk in stream:
                if chunk.ids:
                    self._last_s = time.monotonic()
                    self._first_s = self._first_s or self._last_s
                    self._num_tokens += len(chunk.ids)
                if chunk.text:
                    self.text += chunk.text
                    self._terminal.write(chunk.text)
                self._finish = chunk.finish or self._finish
        except asyncio.CancelledError:
            self.is_stopped = True
        except RadixMeshError as error:
            self.error = error
        finally:
            if stream is not None:
                self._num_resumptions = stream.num_resumptions
                await stream.aclose()
        if self.text and not self.text.endswith("\n"):
            self._terminal.line()

    def show_figures(self) -> None:
        """One dim line: tokens, pace, time to the first token, what the cache saved, and what happened on the way."""
        self._terminal.line(self._terminal.colour(f"[{self.figures()}]", _DIM))

    def figures(self) -> str:
        """The same without colour and brackets."""
        parts = ["stopped"] if self.is_stopped else []
        if self._finish is not None and self._finish.reason != "stop":
            parts.append({"length": "cut: no more tokens allowed"}.get(self._finish.reason, self._finish.reason))
        parts.append(f"{self._num_tokens} {'token' if self._num_tokens == 1 else 'tokens'}")
        if self._num_tokens > 1 and self._last_s > self._first_s:
            parts.append(f"{(self._num_tokens - 1) / (self._last_s - self._first_s):.0f} tokens/s")
        if self._num_tokens:
            parts.append(f"first after {1000 * (self._first_s - self._started):.0f} ms")
        if self._finish is not None:
            usage = self._finish.usage
            parts.append(f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached")
        if self._num_resumptions:
            parts.append(f"resumed {self._num_resumptions}x")
        return ", ".join(parts)
