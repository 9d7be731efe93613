"""Writes to the terminal: coloured prefixes as docker compose has them, progress lines, tables.

What others said (log lines, names, errors, a model's text) is escaped before it is written: it may hold whatever a
client of the mesh chose.
"""

import os
import re
import sys
from collections.abc import Sequence
from typing import TextIO

from radixmesh.daemons.runtime.telemetry.printable import escape_controls

_PREFIX_COLOURS = ("36", "33", "32", "35", "34", "96", "93", "92", "95", "94")
_RED, _GREEN, _YELLOW, _DIM, _BOLD = "31", "32", "33", "2", "1"
_STATE_COLOURS = {
    "healthy": _GREEN,
    "serving": _GREEN,
    "starting": _YELLOW,
    "waiting": _DIM,
    "unwell": _YELLOW,
    "backoff": _RED,
    "ended": _RED,
    "stopped": _DIM,
}


_OWN_COLOUR = re.compile(r"(\x1b\[\d{1,2}m)")


class Terminal:
    """A text stream and whether it takes colours: not if it is no terminal, NO_COLOR is set or `colour` is False."""

    def __init__(self, stream: TextIO | None = None, *, colour: bool = True) -> None:
        self._stream = stream or sys.stdout
        self._has_colour = colour and self._stream.isatty() and "NO_COLOR" not in os.environ
        self._names: list[str] = []

    def name_width(self, names: Sequence[str]) -> None:
        """Tells all names that will prefix lines, so that these align from the first one on."""
        self._names = list(names)

    def line(self, text: str = "") -> None:
        """Writes a line, or several, at once. Of what could steer a terminal only our own colours come through."""
        parts = _OWN_COLOUR.split(text) if self._has_colour else [text]
        # The odd ones are what the pattern caught.
        safe = "".join(part if index % 2 else escape_controls(part) for index, part in enumerate(parts))
        self._stream.write(f"{safe}\n")
        self._stream.flush()

    def write(self, text: str) -> None:
        """Writes text without a line end, at once: for streamed output. Into a file or a pipe it goes as it is."""
        self._stream.write(escape_controls(text) if self._stream.isatty() else text)
        self._stream.flush()

    def prefixed(self, name: str, text: str) -> None:
        """Writes a process's output behind its name, which every line of it gets."""
        for line in escape_controls(text).split("\n"):
            self.line(f"{self._prefix(name)} {line}")

    def progress(self, name: str, state: str, detail: str, tally: str) -> None:
        """Writes that a process has changed its state; `tally` is how far the whole has come."""
        marker = self.colour(f"{state:<9}", _STATE_COLOURS.get(state, _BOLD))
        detail = escape_controls(detail, is_line=True)
        self.line(f"{self._prefix(name)} {marker} {detail:<48} {self.colour(tally, _DIM)}".rstrip())

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Writes left-aligned columns; a column without content is left out."""
        rows = [[escape_controls(cell, is_line=True) for cell in row] for row in rows]
        kept = [index for index in range(len(header)) if any(row[index] for row in rows)]
        widths = {index: max(len(line[index]) for line in (header, *rows)) for index in kept}
        self.line(self.colour("  ".join(header[index].ljust(widths[index]) for index in kept).rstrip(), _BOLD))
        for row in rows:
            cells = (self.colour(row[index].ljust(widths[index]), _STATE_COLOURS.get(row[index], "")) for index in kept)
            self.line("  ".join(cells).rstrip())

    def error(self, text: str) -> None:
        """Writes what went wrong."""
        self.line(self.colour(text, _RED))

    def colour(self, text: str, code: str) -> str:
        """Puts `text`, escaped, between the escape codes of a colour, if colours are on."""
        text = escape_controls(text)
        return f"\x1b[{code}m{text}\x1b[0m" if self._has_colour and code else text

    def _prefix(self, name: str) -> str:
        if name not in self._names:
            self._names.append(name)
        width = max(map(len, self._names))
        return self.colour(f"{name:<{width}} |", _PREFIX_COLOURS[self._names.index(name) % len(_PREFIX_COLOURS)])
