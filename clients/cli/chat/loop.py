"""A chat: reads a line, carries it out or has it answered, until the input ends."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

from radixmesh.cli.chat.answer import Answer
from radixmesh.cli.chat.commands import ChatState, run_command
from radixmesh.cli.chat.input import ChatInput
from radixmesh.cli.terminal import Terminal
from radixmesh.client import AsyncClient

if TYPE_CHECKING:
    from radixmesh.client.options import Options

_DIM = "2"


class ChatLoop:
    """Ctrl-C stops an answer or empties the line, the input's end leaves. From a pipe, the first failure leaves too."""

    def __init__(
        self, client: AsyncClient, input: ChatInput, terminal: Terminal, state: ChatState, *, model: str = ""
    ) -> None:
        self._client = client
        self._input = input
        self._terminal = terminal
        self._state = state
        self._model = model
        self._answering: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """Exit code: 0, or 1 if something failed that came through a pipe."""
        if self._input.is_interactive:
            # For the whole chat: Ctrl-C may come just after an answer, when there is nothing left to stop.
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._stop_answer)
        else:
            # asyncio's own handler would wait for the end of a blocking read.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        with self._input.muted():
            return await self._run()

    async def _run(self) -> int:
        while True:
            try:
                line = await self._input.next_line()
            except EOFError:
                return 0
            except KeyboardInterrupt:
                if not self._input.is_interactive:
                    raise
                self._say("Ctrl-D leaves")
                continue
            if not line.strip():
                continue
            is_well, is_exit = await self._take(line)
            if is_exit:
                return 0
            if not is_well and not self._input.is_interactive:
                return 1

    async def _take(self, line: str) -> tuple[bool, bool]:
        """Answers two questions: did all go well, and is the chat over."""
        if not line.startswith("/") or line.startswith("//"):
            self._state.conversation.ask(line.removeprefix("/") if line.startswith("//") else line)
            return await self._answer(), False
        reply = run_command(line, self._state)
        if reply.is_error:
            self._terminal.error(reply.text)
        elif reply.text:
            self._say(reply.text)
        if reply.is_retry:
            return await self._answer(), False
        return not reply.is_error, reply.is_exit

    async def _answer(self) -> bool:
        """Has the open question answered."""
        answer = Answer(self._terminal)
        options: Options = {
            "model": self._model,
            "temperature": self._state.temperature,
            "max_tokens": self._state.max_tokens,
        }
        task = asyncio.create_task(answer.stream(self._client, self._state.conversation.messages, options))
        self._answering = task
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
            self._answering = None
        if not task.cancelled():
            task.result()
        self._state.conversation.answer(answer.text)
        if answer.error is not None:
            self._terminal.error(str(answer.error))
        elif self._input.is_interactive:
            answer.show_figures()
        return answer.error is None

    def _stop_answer(self) -> None:
        if self._answering is not None:
            self._answering.cancel()

    def _say(self, text: str) -> None:
        self._terminal.line(self._terminal.colour(text, _DIM) if self._input.is_interactive else text)
