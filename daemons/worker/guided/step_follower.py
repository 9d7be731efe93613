"""Tokens of launched steps on their way to the masks behind them, without the step thread in between.

The step thread collects a step when it has time: it builds results and launches other steps, and each of them holds the
interpreter's lock. Masks of the next step are wanted as soon as the device has told the tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.worker.guided.guide import Guide
from radixmesh.daemons.worker.guided.mask_filler import MaskFiller

_Step = tuple[Sequence[Guide | None], Callable[[], IntArray], threading.Lock]


class StepFollower:
    """A thread that waits for steps, in the order of their launches. Starts with the first one."""

    def __init__(self, filler: MaskFiller) -> None:
        self._filler = filler
        self._steps: SimpleQueue[_Step] = SimpleQueue()
        self._has_started = False

    def launched(self, guides: Sequence[Guide | None], tokens: Callable[[], IntArray]) -> threading.Lock:
        """guides: of the step's first rows, None of those that follow no grammar. tokens: as of `StepHandle`. Returns a
        lock that is held until this thread is through with the step."""
        if not self._has_started:
            self._has_started = True
            # Not joined at exit: a wedged device must not keep the process alive.
            threading.Thread(target=self._work, name="masks-steps", daemon=True).start()
        through = threading.Lock()
        through.acquire()
        self._steps.put((guides, tokens, through))
        return through

    def _work(self) -> None:
        while True:
            guides, tokens, through = self._steps.get()
            try:
                ids = tokens().tolist()
                rows = zip(guides, ids[: len(guides)], strict=True)
                moves = [(guide, (token,)) for guide, token in rows if guide is not None and token >= 0]
                self._filler.follow_here(moves)
            except RuntimeError:
                continue  # The device failed: whoever collects the step says so.
            finally:
                through.release()
