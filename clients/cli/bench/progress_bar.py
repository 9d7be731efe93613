"""Progress of a load: a bar in a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import asyncio
import shutil
import time
from typing import TextIO

from radixmesh.cli.bench.load_generator import LoadGenerator

_BAR = 24
_TERMINAL_PAUSE_S, _LOG_PAUSE_S = 0.2, 10.0


class ProgressBar:
    """Shows `load` on `stream` while watch() runs."""

    def __init__(self, load: LoadGenerator, stream: TextIO) -> None:
        self._load = load
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._started = time.monotonic()

    async def watch(self) -> None:
        """Runs until it is cancelled; then the bar is wiped."""
        try:
            while True:
                await asyncio.sleep(_TERMINAL_PAUSE_S if self._is_terminal else _LOG_PAUSE_S)
                self._show(self.line())
        finally:
            if self._is_terminal:
                self._show("")

    def line(self) -> str:
        """The state in one line."""
        records, total = self._load.records, self._load.num_turns
        num_ended = sum(record.ended > 0 for record in records)
        num_failed = sum(bool(record.error) for record in records)
        num_gone = num_ended + self._load.num_skipped
        seconds = time.monotonic() - self._started
        tokens = sum(record.num_delivered for record in records)
        filled = _BAR * num_gone // max(1, total)
        rest = f", {seconds / num_gone * (total - num_gone):.0f} s left" if 0 < num_gone < total else ""
        failed = f", {num_failed} failed" if num_failed else ""
        state = f"{num_gone}/{total}, {len(records) - num_ended} running{failed}"
        return f"[{'#' * filled}{'.' * (_BAR - filled)}] {state}, {tokens / max(seconds, 1e-9):.0f} tokens/s{rest}"

    def _show(self, line: str) -> None:
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(f"\r\x1b[K{line[:width]}")
        else:
            self._stream.write(f"{line}\n")
        self._stream.flush()
