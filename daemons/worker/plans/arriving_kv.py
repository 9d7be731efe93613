"""KV from elsewhere that is copied to pages beside the steps, and that plans name before it is known to be sound.

launched() --ahead_of() a plan that names its pages--> named --its step is over--> settled --stamps match--> forgotten
                                                                                     |
failed() ----------------------------------------------------------------------------+--> error: the epoch ends

A step that reads the pages waits for the copy on the device. Its result leaves once the stamps were looked at, which is
behind the copy: unsound KV is in no result. It ends the epoch, since whoever holds it may have it in other slots and in
its cache by then. That takes a writer that writes to memory which is another's: as good as never.

Lives on the step thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import StepPlan
from radixmesh.daemons.worker.step_handle import StepHandle


@dataclass(slots=True, eq=False)
class Arriving:
    """pages, int32, have their records already. copying: its result says what came of them, and calls over(). hold:
    what is launched next waits for the copy."""

    pages: IntArray
    copying: StepHandle[object]
    hold: Callable[[], None]
    is_named: bool = False


class ArrivingKv:
    """Of one executor."""

    def __init__(self) -> None:
        self._arriving: list[Arriving] = []
        self.error: MeshError | None = None
        """KV that was named turned out to be unsound: no plan is run, and no result leaves, until the next epoch."""

    @property
    def is_empty(self) -> bool:
        """True if no copy is under way."""
        return not self._arriving

    def begin_epoch(self) -> None:
        """All that arrived in the epoch before was finished, and records of what was unsound are empty."""
        assert not self._arriving
        self.error = None

    def launched(self, arriving: Arriving) -> None:
        """Plans may name its pages from now on."""
        self._arriving.append(arriving)

    def over(self, arriving: Arriving, *, is_sound: bool) -> None:
        """The copy has run, and its stamps were looked at."""
        self._arriving.remove(arriving)
        if not is_sound:
            self._fail("KV that came from another worker is not what it sent")

    def failed(self) -> None:
        """A copy whose pages plans may name by now could not be launched."""
        self._fail("KV that came from another worker could not be copied to its pages")

    def _fail(self, what: str) -> None:
        message = f"{what}: claim the worker anew, and prefill again"
        self.error = MeshError(ErrorReason.ERROR_REASON_TRANSFER_FAILED, message)

    def ahead_of(self, plan: StepPlan, *, is_asynchronous: bool) -> None:
        """Orders copies ahead of a plan that uses their pages. Raises TRANSFER_FAILED where there is an error.

        is_asynchronous: its step may still run behind the launch; if not, it would be over before it could wait.
        """
        if self._arriving:
            taken = _pages([grant.pages for grant in plan.grants] + [move.device_pages for move in plan.loads])
            read = _pages([admit.cached_pages for admit in plan.admits])
            copied = np.array([copy.source_page for copy in plan.page_copies], np.int32)
            for arriving in tuple(self._arriving):
                if not is_asynchronous or plan.barrier_ops or _meet(arriving.pages, taken):
                    # Pages that were let go of meanwhile, and are another's with this plan.
                    arriving.copying.result()
                elif _meet(arriving.pages, read) or _meet(arriving.pages, copied):
                    arriving.hold()
                    arriving.is_named = True
        if self.error is not None:
            raise self.error

    def granted(self, pages: IntArray) -> None:
        """Pages are about to be granted by no plan: waits for copies to them, which would find them another's."""
        for arriving in tuple(self._arriving):
            if _meet(arriving.pages, pages):
                arriving.copying.result()

    def settle(self) -> None:
        """A step is over that may have read what was named before its launch."""
        for arriving in [one for one in self._arriving if one.is_named]:
            arriving.copying.result()

    def finish_all(self) -> None:
        """Waits for all copies."""
        while self._arriving:
            self._arriving[0].copying.result()


def _pages(parts: Sequence[IntArray]) -> IntArray:
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def _meet(pages: IntArray, others: IntArray) -> bool:
    return bool(len(others)) and bool(np.isin(pages, others).any())
