"""Tokens of launched steps on their way to the masks behind them, without the step thread in between.

The step thread collects a step when it has time: it builds results and launches other steps, and each of them holds the
interpreter's lock. Masks of the next step are wanted as soon as the device has told the tokens.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from queue import SimpleQueue

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.telemetry.logs import get_logger

log = get_logger(__name__)


class StepRows(ABC):
    """Rows of a launched step: those of outputs that follow grammars are moved on."""

    @abstractmethod
    def follow(self, tokens: IntArray) -> None:
        """tokens: as of `StepHandle`."""

    @abstractmethod
    def fail(self, error: Exception) -> None:
        """follow() raised this: the outputs have no mask to wait for, and end."""


_Step = tuple[StepRows, Callable[[], IntArray], threading.Lock]


class StepFollower:
    """A thread that waits for steps, in the order of their launches. Starts with the first one."""

    def __init__(self) -> None:
        self._steps: SimpleQueue[_Step] = SimpleQueue()
        self._has_started = False

    def launched(self, rows: StepRows, tokens: Callable[[], IntArray]) -> threading.Lock:
        """tokens: as of `StepHandle`. Returns a lock that is held until this thread is through with the step."""
        if not self._has_started:
            self._has_started = True
            # Not joined at exit: a wedged device must not keep the process alive.
            threading.Thread(target=self._work, name="masks-steps", daemon=True).start()
        through = threading.Lock()
        through.acquire()
        self._steps.put((rows, tokens, through))
        return through

    def _work(self) -> None:
        while True:
            rows, tokens, through = self._steps.get()
            try:
                _follow(rows, tokens)
            finally:
                through.release()


def _follow(rows: StepRows, tokens: Callable[[], IntArray]) -> None:
    try:
        ids = tokens()
    except RuntimeError:
        return  # The device failed: whoever collects the step says so.
    except Exception as error:
        log.exception("masks_failed")
        rows.fail(error)
        return
    try:
        rows.follow(ids)
    except Exception as error:
        log.exception("masks_failed")
        rows.fail(error)
