"""A second stream for work that depends on nothing that runs meanwhile: a branch of a captured graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """Forks from the current stream, and joins it again. At most one fork is open.

    What is allocated in the fork is given out again to later forks alone, which wait for the current stream first. What
    the fork reads must live until the join.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._is_open = False

    def start(self) -> None:
        """Work of the next fork runs behind what the current stream has been given so far, and beside what follows."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Work inside is the side stream's."""
        assert not self._is_open, "the last fork was not joined"
        self._is_open = True
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> bool:
        """The current stream waits for the fork; False if none is open."""
        if not self._is_open:
            return False
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._is_open = False
        return True
