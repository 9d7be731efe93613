"""Lifecycles of a KV transfer at its receiver and at its sender. Pure: time is an argument, memory and messages are
elsewhere.

Receiver:

  PREPARED --first write--> WRITING --last word DONE--> WRITTEN --commit--> SCATTERING --stamps match--> VALIDATED
     |                         |                           |                    |
     +-------------------------+---------------------------+--------------------+--> FAILED, with the first reason

Behind the last word and ahead of it (begin_piece()) pages are written from the region: those are nobody's to read
before VALIDATED, and a transfer that is given up has failed with them.

FAILED comes from a lease that ran out, an abort, a new epoch, a writer that is gone or gives up, and from what it
wrote. It ends the transfer, not the writer: the region's memory is free only when nobody can write there any more
and no scatter reads it. Until then it is quarantined. A writer is over by its last word, by proof that it is gone,
or never began and cannot begin any more. Where others than the one that was let in could write, its word is none for
them: their memory is free by proof alone.

Sender:

  GATHERING --gathered--> SENDING --the receiver answered--> SENT
      |                      |
      +----------------------+--> FAILED

Source pages are held while GATHERING, the send buffer until the transport has let go of it, whatever the state.
"""

from __future__ import annotations

from enum import IntEnum


class ReceiveState(IntEnum):
    """Values as in `radixmesh.worker.v1.TransferState`, where that has them."""

    PREPARED = 1
    WRITING = 2
    WRITTEN = 3
    VALIDATED = 4
    FAILED = 6
    SCATTERING = 7


class Failure(IntEnum):
    """Values as in `radixmesh.worker.v1.TransferFailure`."""

    NONE = 0
    LEASE_EXPIRED = 1
    WRITER_GONE = 2
    WRITER_ABORTED = 3
    BAD_WRITE = 4
    CHECKSUM = 5
    STAMP = 6
    EPOCH_ENDED = 7
    PAGES = 8
    ABORTED = 9


class SendState(IntEnum):
    GATHERING = 1
    SENDING = 2
    SENT = 3
    FAILED = 4


_OVER = (ReceiveState.VALIDATED, ReceiveState.FAILED)


class Reception:
    """One transfer at its receiver.

    writes_are_seen: nobody can write before begin_write(), since the receiver itself copies what arrives. Otherwise
    whoever was told of the region may write from the start, and a region that was given up is free only when the
    writer is known to be over. has_one_writer: nobody writes whom begin_write() refused.
    """

    def __init__(self, lease_until: float, *, writes_are_seen: bool, has_one_writer: bool = True) -> None:
        self.state = ReceiveState.PREPARED
        self.failure = Failure.NONE
        self.lease_until = lease_until
        self.writer = ""
        """Instance id of the process that writes; empty: none has begun."""
        self.writes_are_seen = writes_are_seen
        self.has_one_writer = has_one_writer
        self._may_write = not writes_are_seen
        self._is_read = False

    @property
    def is_over(self) -> bool:
        """True if no pages will come of it any more, or they have."""
        return self.state in _OVER

    @property
    def is_read(self) -> bool:
        """True while its memory is copied to pages, or may be."""
        return self._is_read

    @property
    def is_memory_free(self) -> bool:
        """True if the region may be given to another transfer."""
        return self.is_over and not self._may_write and not self._is_read

    @property
    def is_quarantined(self) -> bool:
        """True if it is over, and somebody may still write to its memory."""
        return self.is_over and not self.is_memory_free

    def renew(self, until: float) -> None:
        """The lease only ever grows."""
        if not self.is_over:
            self.lease_until = max(self.lease_until, until)

    def begin_write(self, writer: str) -> bool:
        """A process wants to write; False: it must not, now or ever."""
        if self.state is not ReceiveState.PREPARED:
            return False
        self.state, self.writer, self._may_write = ReceiveState.WRITING, writer, True
        return True

    def may_write(self, writer: str) -> bool:
        """True while bytes of that writer may be copied into the region."""
        return self.state is ReceiveState.WRITING and writer == self.writer

    def bad_write(self, writer: str, failure: Failure = Failure.BAD_WRITE) -> None:
        """The writer broke the contract. It is not over by that."""
        if self.may_write(writer):
            self._fail(failure)

    def last_word(self, writer: str, *, is_done: bool) -> None:
        """The writer will not write again. Repeated and late ones change nothing but that."""
        if writer != self.writer:
            return
        if self.may_write(writer):
            if is_done:
                self.state = ReceiveState.WRITTEN
            else:
                self._fail(Failure.WRITER_ABORTED)
        if self.has_one_writer:
            self._may_write = False

    def stream_over(self, writer: str) -> None:
        """The writer's stream has ended. Where writes go by that alone, it is proof that there will be none."""
        if self.writes_are_seen:
            self.writer_gone(writer)
        elif self.may_write(writer):
            self._fail(Failure.WRITER_GONE)

    def writer_gone(self, writer: str) -> None:
        """Proof that the process, or its connection, cannot write any more."""
        if writer != self.writer:
            return
        if self.may_write(writer):
            self._fail(Failure.WRITER_GONE)
        self._may_write = False

    def begin_piece(self) -> bool:
        """Bytes that have come are about to be copied to pages, ahead of the last word, and more may be while it is
        WRITING; False: it is not, or somebody else does so. scattered() follows, whatever becomes of it."""
        if self.state is not ReceiveState.WRITING or self._is_read:
            return False
        self._is_read = True
        return True

    def begin_scatter(self, *, has_pieces: bool = False) -> bool:
        """Pages are about to be written from the region; False: it is not there, or somebody else reads it.
        has_pieces: the caller began to read it by begin_piece()."""
        if self.state is not ReceiveState.WRITTEN or self._is_read != has_pieces:
            return False
        self.state, self._is_read = ReceiveState.SCATTERING, True
        return True

    def scattered(self, failure: Failure) -> None:
        """The scatter is over, and the stamps behind it were looked at. NONE: the pages hold what was sent."""
        assert self._is_read, self.state
        self._is_read = False
        if self.is_over:
            return
        if failure is Failure.NONE:
            assert self.state is ReceiveState.SCATTERING, self.state
            self.state = ReceiveState.VALIDATED
        else:
            self._fail(failure)

    def expire(self, now: float) -> bool:
        """True if the lease has just run out. What is being scattered needs none."""
        if now < self.lease_until or self.is_over or self.state is ReceiveState.SCATTERING:
            return False
        self._fail(Failure.LEASE_EXPIRED)
        return True

    def abort(self, failure: Failure = Failure.ABORTED) -> None:
        """Ends it, whatever it does. Idempotent."""
        if not self.is_over:
            self._fail(failure)

    def _fail(self, failure: Failure) -> None:
        self.state, self.failure = ReceiveState.FAILED, failure


class Emission:
    """One transfer at its sender."""

    def __init__(self) -> None:
        self.state = SendState.GATHERING
        self._has_buffer = False
        self._is_sent_from = False

    @property
    def holds_pages(self) -> bool:
        """True while the source pages are read."""
        return self.state is SendState.GATHERING

    @property
    def is_buffer_free(self) -> bool:
        """True if the transport reads nothing of the send buffer any more."""
        return not self._has_buffer or (self.state in (SendState.SENT, SendState.FAILED) and not self._is_sent_from)

    def gathered(self) -> bool:
        """The buffer holds a copy of the pages; False: nobody wants it any more."""
        if self.state is not SendState.GATHERING:
            return False
        self.state, self._has_buffer, self._is_sent_from = SendState.SENDING, True, True
        return True

    def handle_over(self, *, is_sent: bool) -> None:
        """The transport's local handle is terminal: it reads the buffer no more."""
        self._is_sent_from = False
        if self.state is SendState.SENDING:
            self.state = SendState.SENT if is_sent else SendState.FAILED

    def abort(self) -> None:
        """Ends it. Idempotent."""
        if self.state in (SendState.GATHERING, SendState.SENDING):
            self.state = SendState.FAILED
