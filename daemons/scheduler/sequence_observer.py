"""Observer of a sequence's progress. The planner has no clock: an event happens when the observer is called."""

from __future__ import annotations

from radixmesh.daemons.runtime.finish_reason import FinishReason
from radixmesh.daemons.scheduler.sequence import Sequence


class SequenceObserver:
    """Does nothing; its calls may repeat after a retraction or a new epoch, but for accepted() and finished()."""

    def accepted(self, sequence: Sequence) -> str:
        """A request was queued. Returns the trace context for what happens to it further down; empty = not traced."""
        return ""

    def admitted(self, sequence: Sequence) -> None:
        """It got a slot."""

    def prefilled(self, sequence: Sequence) -> None:
        """A prefill of it was finished: it has a token more."""

    def finished(self, sequence: Sequence, reason: FinishReason) -> None:
        """It is over."""
