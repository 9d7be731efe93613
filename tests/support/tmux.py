"""A program in a terminal that a test types into and reads, by tmux."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import pytest

_WIDTH, _HEIGHT = 100, 50


class TmuxScreen:
    """One program in a tmux server of its own. Use it as an async context manager; leaving kills the server."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        if shutil.which("tmux") is None:
            pytest.skip("no tmux on this machine: install it to test what people see in their terminal")
        # Not in the test's folder: a socket's path is at most 107 bytes long. Never one used before: a killed server
        # answers for a moment longer.
        self._folder = tempfile.TemporaryDirectory(prefix="tmux")
        self._socket = Path(self._folder.name, "socket")
        self._exit_file = Path(self._folder.name, "exit-code")
        self._command = command
        self._environment = environment

    async def __aenter__(self) -> TmuxScreen:
        variables = [f"{name}={shlex.quote(value)}" for name, value in self._environment.items()]
        # A shell around the program notes its exit code: tmux misses the end of one child in 20 (3.3a, of any program).
        # Keys that are signals reach the shell too; a trap is not inherited.
        noted = f"trap : INT QUIT; env {' '.join(variables)} {shlex.join(self._command)}; echo $? > {self._exit_file}"
        line = shlex.join(["exec", "sh", "-c", noted])
        # The pane outlives the program: its last screen can be read.
        self._tmux("new-session", "-d", "-x", str(_WIDTH), "-y", str(_HEIGHT), "sh", start=True)
        self._tmux("set-option", "-g", "remain-on-exit", "on")
        self._tmux("respawn-pane", "-k", line)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        subprocess.run(["tmux", "-S", str(self._socket), "kill-server"], check=False, capture_output=True)
        self._folder.cleanup()

    def type(self, text: str) -> None:
        """Types text, key by key."""
        self._tmux("send-keys", "-l", text)

    def press(self, *keys: str) -> None:
        """Presses keys by tmux's names: Enter, C-c, C-d, Up, M-Enter."""
        self._tmux("send-keys", *keys)

    def enter(self, line: str) -> None:
        """Types a line and presses Enter."""
        self.type(line)
        self.press("Enter")

    def text(self) -> str:
        """All text that has been on the screen, scrolled lines included, wrapped lines joined, trailing blanks cut."""
        lines = self._tmux("capture-pane", "-p", "-J", "-S", "-").split("\n")
        return "\n".join(line.rstrip() for line in lines).rstrip("\n")

    def colours(self) -> str:
        """The same with the escape codes of its colours."""
        return self._tmux("capture-pane", "-p", "-e", "-S", "-")

    async def until(self, condition: Callable[[str], bool], what: str, timeout_s: float = 60.0) -> str:
        """Waits until the screen's text fulfils the condition, and gives it; fails with the screen if it never does."""
        deadline = time.monotonic() + timeout_s
        while not condition(text := self.text()):
            if time.monotonic() > deadline:
                pytest.fail(f"not within {timeout_s:g} s: {what}. The screen:\n{text}")
            await asyncio.sleep(0.05)
        return text

    async def until_shown(self, part: str, *, count: int = 1, timeout_s: float = 60.0) -> str:
        """Waits until `part` has been on the screen `count` times."""
        return await self.until(lambda text: text.count(part) >= count, f"{count} x {part!r}", timeout_s)

    async def exit_code(self, timeout_s: float = 60.0) -> int:
        """Waits for the program's end. A signal's number is added to 128, as shells do."""
        deadline = time.monotonic() + timeout_s
        while not (self._exit_file.exists() and (noted := self._exit_file.read_text()).endswith("\n")):
            if time.monotonic() > deadline:
                pytest.fail(f"the program has not ended by itself. The screen:\n{self.text()}")
            await asyncio.sleep(0.05)
        return int(noted)

    def _tmux(self, *arguments: str, start: bool = False) -> str:
        # No configuration of the user's; UTF-8 whatever the locale says.
        command = ["tmux", "-u", *(["-f", "/dev/null"] if start else []), "-S", str(self._socket), *arguments]
        environment = {"PATH": os.environ["PATH"], "TERM": "xterm-256color", "LANG": "C.UTF-8", "HOME": "/nonexistent"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"{shlex.join(command)}: {done.stderr}"
        return done.stdout
