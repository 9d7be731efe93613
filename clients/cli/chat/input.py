"""Input of a chat: a terminal with line editing and history, or a pipe."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyBindings


class ChatInput(ABC):
    """A source of messages and commands."""

    is_interactive: bool
    """True if somebody sits there: greetings, hints and figures are for them."""

    @abstractmethod
    async def next_line(self) -> str:
        """The next message, which may hold line ends. Raises EOFError at the end, KeyboardInterrupt for Ctrl-C."""

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Outside of next_line keys neither show nor get lost."""
        yield


class PipeInput(ChatInput):
    """One message a line, from a file or another program."""

    is_interactive = False

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    async def next_line(self) -> str:
        # Blocks the loop on purpose: nothing else runs between two messages, and a thread would outlive Ctrl-C.
        line = self._stream.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")


class TerminalInput(ChatInput):
    """Line editing by prompt_toolkit. history_file: messages of earlier chats; None keeps none."""

    is_interactive = True

    def __init__(self, commands: Sequence[str], history_file: Path | None) -> None:
        # Imported here: it takes a quarter of a second, and a pipe needs none of it.
        from prompt_toolkit import PromptSession
        from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.history import FileHistory, InMemoryHistory

        self._session: PromptSession[str] = PromptSession(
            history=InMemoryHistory() if history_file is None else FileHistory(str(_own_file(history_file))),
            auto_suggest=AutoSuggestFromHistory(),
            completer=WordCompleter(list(commands), sentence=True),
            complete_while_typing=False,
            key_bindings=_key_bindings(),
            prompt_continuation="... ",
        )

    async def next_line(self) -> str:
        # Here Ctrl-C is a key; the signal stays the chat's.
        return await self._session.prompt_async(">>> ", handle_sigint=False)

    @contextmanager
    def muted(self) -> Iterator[None]:
        import termios

        if not sys.stdin.isatty():
            yield
            return
        before = termios.tcgetattr(sys.stdin)
        quiet = termios.tcgetattr(sys.stdin)
        # Without ICANON all that is typed waits for the next prompt, Ctrl-D too. ISIG stays: Ctrl-C interrupts, and
        # with NOFLSH it throws nothing away.
        quiet[3] = quiet[3] & ~(termios.ECHO | termios.ICANON) | termios.NOFLSH
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, quiet)
        try:
            yield
        finally:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def open_input(commands: Sequence[str], history_file: Path | None) -> ChatInput:
    """A terminal's input if somebody sits at both ends, otherwise a pipe's."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        return TerminalInput(commands, history_file)
    return PipeInput(sys.stdin)


def default_history_file() -> Path:
    """RADIXMESH_CHAT_HISTORY, or a file in the user's state folder."""
    if named := os.environ.get("RADIXMESH_CHAT_HISTORY"):
        return Path(named)
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "radixmesh" / "chat_history"


def _own_file(path: Path) -> Path:
    """Makes the file if need be, readable by its owner alone: it holds what was said."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.touch(mode=0o600)
    return path


def _key_bindings() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    bindings = KeyBindings()

    @bindings.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings
