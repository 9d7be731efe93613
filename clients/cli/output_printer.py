"""Shows the outputs of one request as they grow: one after the other, each streamed as soon as it is its turn."""

from radixmesh.cli.terminal import Terminal


class OutputPrinter:
    """Outputs 0..n-1 in order. The first unfinished one is streamed, what the later ones say is kept until their turn.

    With n > 1 every output gets a heading.
    """

    def __init__(self, terminal: Terminal, n: int) -> None:
        self._terminal = terminal
        self._n = n
        self._current = 0
        self._kept = [""] * n
        self._endings: list[str | None] = [None] * n
        self._is_heading_due = n > 1

    def text(self, index: int, text: str) -> None:
        """Takes the next text of an output."""
        self._kept[index] += text
        self._show()

    def finished(self, index: int, ending: str) -> None:
        """Takes an output's end; `ending` is written behind it where it is not empty."""
        self._endings[index] = ending
        self._show()

    def _show(self) -> None:
        while self._current < self._n:
            text, self._kept[self._current] = self._kept[self._current], ""
            ending = self._endings[self._current]
            if self._is_heading_due and (text or ending is not None):
                self._terminal.line(self._terminal.colour(f"--- output {self._current} ---", "2"))
                self._is_heading_due = False
            if text:
                self._terminal.write(text)
            if ending is None:
                return
            self._terminal.line(self._terminal.colour(f" [{ending}]", "2") if ending else "")
            self._current += 1
            self._is_heading_due = self._n > 1
