"""Frames of bounded size from a router to one scheduler."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Container

from radixmesh.daemons.router.peers.schedulers.submit import sibling_of, submit_of
from radixmesh.daemons.router.requests.journal import Output, Request
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.frames import MAX_ENTRY_BYTES, FrameBudget, too_large
from radixmesh.scheduler.v1 import scheduler_pb2

_MAX_SENT_BLOBS = 1024


class ServeFrames:
    """Submits, stops and aborts that wait for the transport.

    can_share: the scheduler understands Submit.shares_with: what the outputs of a request have in common is sent once
    a frame.
    """

    def __init__(self) -> None:
        self.can_share = False
        self._submits: deque[tuple[int, Output, int]] = deque()
        self._stops: deque[scheduler_pb2.FinishedByStop] = deque()
        self._aborts: deque[scheduler_pb2.Abort] = deque()
        self._prefills: deque[scheduler_pb2.Submit] = deque()
        self._reservations: deque[scheduler_pb2.Reservation] = deque()
        self._targets: deque[scheduler_pb2.TransferTarget] = deque()
        # Hashes of the blobs that went with submits of this stream, the least recently named first.
        self._sent_blobs: OrderedDict[str, None] = OrderedDict()

    @property
    def is_empty(self) -> bool:
        of_outputs = self._submits or self._stops or self._aborts
        return not (of_outputs or self._prefills or self._reservations or self._targets)

    def submit(self, output: Output, handle: int, sequence: int) -> None:
        """The output is submitted as it stands when its frame is made."""
        self._submits.append((handle, output, sequence))

    def stop(self, stop: scheduler_pb2.FinishedByStop) -> None:
        self._stops.append(stop)

    def add_abort(self, abort: scheduler_pb2.Abort) -> None:
        self._aborts.append(abort)

    def add_prefill(self, submit: scheduler_pb2.Submit) -> None:
        self._prefills.append(submit)

    def add_reservation(self, reservation: scheduler_pb2.Reservation) -> None:
        self._reservations.append(reservation)

    def add_target(self, target: scheduler_pb2.TransferTarget) -> None:
        """Of a prompt that was added before."""
        self._targets.append(target)

    def forget_blob(self, blob_hash: str) -> None:
        """The scheduler does not have it any more: it goes with the next submit that names it."""
        self._sent_blobs.pop(blob_hash, None)

    def clear(self) -> None:
        """The stream is lost: nothing of this has a reader any more."""
        self._sent_blobs.clear()
        self._submits.clear()
        self._stops.clear()
        self._aborts.clear()
        self._prefills.clear()
        self._reservations.clear()
        self._targets.clear()

    def next(self, running: Container[int]) -> tuple[scheduler_pb2.ServeRequest, list[tuple[Output, MeshError]]]:
        """The next frame, empty where nothing waits, and outputs that no frame can carry.

        running: handles of outputs that are still wanted.
        """
        frame, budget = scheduler_pb2.ServeRequest(), FrameBudget()
        # In a frame submits go before aborts: an abort of an id that is to be submitted (again) leaves first, alone.
        aborted = {abort.request_id for abort in self._aborts}
        while self._stops and budget.take(self._stops[0].ByteSize()):
            frame.stops.append(self._stops.popleft())
        while self._aborts and budget.take(self._aborts[0].ByteSize()):
            frame.aborts.append(self._aborts.popleft())
        # Before the submit that waits for it, or with it.
        while self._reservations and budget.take(self._reservations[0].ByteSize()):
            frame.reservations.append(self._reservations.popleft())
        refused: list[tuple[Output, MeshError]] = []
        shared: dict[Request, int] = {}
        while self._submits:
            handle, output, sequence = self._submits[0]
            if handle in running:
                if output.request.request_id in aborted:
                    break
                submit = self._submit_of(output, handle, sequence, shared)
                size = submit.ByteSize()
                if size > MAX_ENTRY_BYTES:
                    refused.append((output, too_large(f"output {output.index} of the request", size)))
                elif budget.take(size):
                    frame.submits.append(submit)
                    self._note_blobs(submit)
                    shared.setdefault(output.request, handle)
                else:
                    break
            self._submits.popleft()
        # An abort of a prefill's attempt goes before it, never with it.
        while self._prefills and not frame.aborts:
            if self._prefills[0].grammar_hash in self._sent_blobs:
                self._prefills[0].ClearField("blobs")
            if not budget.take(self._prefills[0].ByteSize()):
                break
            self._note_blobs(self._prefills[0])
            frame.submits.append(self._prefills.popleft())
        # Never ahead of the prompt that it is for.
        while self._targets and not self._prefills and budget.take(self._targets[0].ByteSize()):
            frame.kv_targets.append(self._targets.popleft())
        return frame, refused

    def _submit_of(
        self, output: Output, handle: int, sequence: int, shared: dict[Request, int]
    ) -> scheduler_pb2.Submit:
        like = shared.get(output.request) if self.can_share else None
        if like is not None:
            return sibling_of(output, handle, sequence, like)
        grammar = output.request.grammar
        with_blob = grammar is not None and grammar.hash not in self._sent_blobs
        return submit_of(output, handle, sequence, with_blob=with_blob)

    def _note_blobs(self, submit: scheduler_pb2.Submit) -> None:
        if submit.grammar_hash:
            self._sent_blobs[submit.grammar_hash] = None
            self._sent_blobs.move_to_end(submit.grammar_hash)
            if len(self._sent_blobs) > _MAX_SENT_BLOBS:
                self._sent_blobs.popitem(last=False)
