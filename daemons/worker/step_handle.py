"""A step that was launched, and the event on its device behind all of it.

A runner, the executor, the plan runner and the step thread hand the same kind of handle upwards: each adds what its
result means and keeps the event.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from radixmesh.daemons.runtime.arrays import IntArray

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class DeviceEvent(ABC):
    """An event behind all work that a device was given so far."""

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """True if all work before it has run, and also if the device has failed: wait() raises then."""

    @abstractmethod
    def wait(self) -> None:
        """Blocks until it is done, without the interpreter's lock. Any thread may wait, and again.

        Raises RuntimeError if the device failed.
        """

    def wait_beside(self, other: threading.Event, seconds: float) -> None:
        """Lets time pass until it is done, at most so much, or until `other` is set."""
        other.wait(seconds)


class _Done(DeviceEvent):
    is_done = True

    def wait(self) -> None:
        return


DONE: DeviceEvent = _Done()
"""The event of work that was over when its call returned."""


class StepHandle(Generic[T_co]):
    """Something that runs until `event`, and its outcome, which `collect` reads; it waits for the event if it must.

    Steps are collected on the thread that launched them, in the order of their launches.
    """

    def __init__(
        self, event: DeviceEvent, collect: Callable[[], T_co], tokens: Callable[[], IntArray] | None = None
    ) -> None:
        self.event = event
        self.tokens = tokens
        """Waits for the event; int32, the tokens of the step's decode rows, then those of the chunks that sample one;
        -1 where there is none. Of steps whose rows may yield several: [rows, most], the first ones of each row. Any
        thread may ask, before and after the step is collected. None: whoever wants them has to collect it."""
        self._collect: Callable[[], T_co] | None = collect
        self._result: T_co
        self._error: Exception | None = None

    @staticmethod
    def of(result: T) -> StepHandle[T]:
        """A handle of something that is over."""
        return StepHandle(DONE, lambda: result)

    @property
    def is_done(self) -> bool:
        """True if result() will not wait."""
        return self._collect is None or self.event.is_done

    def wait(self) -> None:
        """Blocks until the event is done, on any thread. Raises what the device says of a step that died."""
        self.event.wait()

    def result(self) -> T_co:
        """The outcome; the same one if asked again, and the same error of a step that died."""
        if self._collect is not None:
            # Let go of, with the arrays that it refers to.
            collect, self._collect = self._collect, None
            try:
                self._result = collect()
            except Exception as error:
                self._error = error
        if self._error is not None:
            raise self._error
        return self._result
