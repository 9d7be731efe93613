"""The routers that are connected, each with its outbox, and those that have just left."""

from __future__ import annotations

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.scheduler.results.outputs import Outputs
from radixmesh.daemons.scheduler.routers.outbox import RouterOutbox, stalled

# A router that lost its connection is back within this time, or its requests are aborted.
_GRACE_S = 2.0


class RouterStream:
    """One Serve stream. `owner` numbers streams, never used again."""

    def __init__(self, owner: int, router: str) -> None:
        self.owner = owner
        self.router = router
        self.outbox = RouterOutbox(owner)
        self.submit_sequence = 0
        self.closed_by: MeshError | None = None
        """Set when the scheduler ends the stream."""

    def close(self, error: MeshError) -> None:
        """The stream shall end with that error."""
        self.closed_by = error
        self.outbox.push_load()


class RouterStreams:
    """All streams by owner. What is for a stream that has left is dropped: its router resubmits."""

    def __init__(self) -> None:
        self._open: dict[int, RouterStream] = {}
        self._left: dict[int, float] = {}
        self._num_opened = 0

    def __len__(self) -> int:
        return len(self._open)

    def open(self, router: str) -> RouterStream:
        self._num_opened += 1
        stream = RouterStream(self._num_opened, router)
        self._open[stream.owner] = stream
        return stream

    def left(self, stream: RouterStream, now: float) -> None:
        """The stream ended; its requests live on for a moment."""
        del self._open[stream.owner]
        self._left[stream.owner] = now + _GRACE_S

    def expired(self, now: float) -> list[int]:
        """Owners whose requests are to be aborted now; each is told once for every reason.

        Streams that left a while ago, and those whose router reads nothing: they are closed, as far as can be told to
        one that does not read.
        """
        stalled_owners = []
        for stream in self._open.values():
            if stream.outbox.is_overfull and stream.closed_by is None:
                stream.close(stalled())
                stalled_owners.append(stream.owner)
        owners = [owner for owner, deadline in self._left.items() if deadline <= now]
        for owner in owners:
            del self._left[owner]
        return owners + stalled_owners

    def deliver(self, outputs: Outputs) -> None:
        """Puts outputs into the outboxes of those they are for."""
        for owner in outputs.owners():
            stream = self._open.get(owner)
            if stream is not None:
                stream.outbox.add(outputs)

    def push_loads(self, *, is_urgent: bool = True) -> None:
        """Loads for all routers, now or with the next frame of each. A router to which no frame went since the call
        before has no tokens due: it gets a frame now, since one that hears nothing takes this scheduler for dead."""
        for stream in self._open.values():
            if is_urgent or stream.outbox.wants_load:
                stream.outbox.push_load()
            else:
                stream.outbox.wants_load = True

    def close_all(self, error: MeshError) -> None:
        for stream in self._open.values():
            stream.close(error)
