"""Two half batches of a step that take turns: while rows of one travel between ranks, the other computes.

    A  attention | dispatch ........ | experts | combine ........ | attention
    B              attention | dispatch ........ | experts | combine ........

A forward is a sequence of yield points, one behind the start of every exchange. One half runs at a time, each on a
thread of its own, so that all ranks start the same exchanges in the same order. Source: the two-batch overlap of
DeepSeek-V3 (2024, section 3.2.2) as SGLang has it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from radixmesh.daemons.worker.runner import Segment

T = TypeVar("T")


class OtherHalfFailedError(Exception):
    """The other half of the step raised; its exception is what the step ends with."""


class TwoBatches:
    """Runs two forwards in turns. One thread calls run(); what it runs calls pass_on() at its yield points."""

    def __init__(self) -> None:
        self._gates = (threading.Semaphore(0), threading.Semaphore(0))
        self._is_over = [True, True]
        self._errors: list[BaseException | None] = [None, None]
        self._turn = 0

    def run(self, first: Callable[[], T], second: Callable[[], T]) -> tuple[T, T]:
        """Both results. An exception of either ends both, and is raised when both are over."""
        results: list[T | None] = [None, None]
        self._is_over, self._errors, self._turn = [False, False], [None, None], 0

        def half(index: int, work: Callable[[], T]) -> None:
            try:
                if self._errors[1 - index] is None:
                    results[index] = work()
            except BaseException as error:
                self._errors[index] = error
            self._is_over[index] = True
            self._turn = 1 - index
            self._gates[1 - index].release()

        def wait_and_run() -> None:
            self._gates[1].acquire()
            half(1, second)

        thread = threading.Thread(target=wait_and_run, name="second-half", daemon=True)
        thread.start()
        half(0, first)
        thread.join()
        # Each half that ends lets the other one go on, also one that has ended before.
        for gate in self._gates:
            while gate.acquire(blocking=False):
                pass
        errors = [error for error in self._errors if error is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, OtherHalfFailedError)):
            raise error
        one, two = results
        assert one is not None and two is not None
        return one, two

    def pass_on(self) -> None:
        """A yield point: the other half runs to its next one. Outside of run() nothing happens.

        Raises OtherHalfFailedError.
        """
        own, other = self._turn, 1 - self._turn
        if self._is_over[other]:
            if self._errors[other] is not None and not self._is_over[own]:
                raise OtherHalfFailedError
            return
        self._turn = other
        self._gates[other].release()
        self._gates[own].acquire()
        if self._errors[other] is not None:
            raise OtherHalfFailedError


def halves(segments: Sequence[Segment]) -> tuple[Sequence[Segment], Sequence[Segment]]:
    """Segments in two parts of as nearly equal numbers of rows as whole segments allow, in their order."""
    total, rows, best, least = sum(len(segment.ids) for segment in segments), 0, 0, None
    for index in range(len(segments) + 1):
        difference = abs(total - 2 * rows)
        if least is None or difference < least:
            best, least = index, difference
        if index < len(segments):
            rows += len(segments[index].ids)
    return segments[:best], segments[best:]
