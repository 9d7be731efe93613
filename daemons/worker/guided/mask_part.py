"""One of the processes that fill masks, with the outputs of its rows: it ends, and another one takes its place.

    STARTING --READY, outputs sent--> LIVE --end, killed--> ENDING --gone--> STARTING, or RESTING --> STARTING

What each output has so far is kept here. A process that ends is started again, and its successor goes over the tokens
of its outputs: their rows yield nothing meanwhile. A mask that is published already is not filled a second time,
because the device may be reading it. If processes keep ending, their outputs fail, and no others.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from enum import Enum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from radixmesh.common.v1 import common_pb2
from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.guided.mask_frames import HEAD, INT, Admission, Kind, frame, ints
from radixmesh.daemons.worker.guided.mask_link import MaskLink
from radixmesh.daemons.worker.guided.mask_memory import MaskSink, SharedMaskMemory

log = get_logger(__name__)

_READY_S = 120.0
"""From a process's start, which imports a library, until it is ready."""
_SILENT_S = 15.0
"""A process that is ready tells each second that it lives."""
MOST_ENDS, _ENDS_S = 3, 60.0
"""Ends of a process in so many seconds until its outputs fail."""
_REST_S = 30.0
"""Until it is tried again then."""
_MOST_GRAMMAR_BYTES = 64 << 20
"""Artefacts that a process keeps, beside those of its outputs."""
_MOST_KEPT_BYTES = 256 << 20
"""That a process has not taken yet."""


class PartState(Enum):
    STARTING = "starting"
    LIVE = "live"
    ENDING = "ending"
    RESTING = "resting"


class OutputRows:
    """Outputs by the row of their mask: what each has so far, and how far its masks are. Changed under the lock of all
    parts; published: by the I/O thread."""

    def __init__(self, num_rows: int, max_total_len: int) -> None:
        self.serials: IntArray = np.zeros(num_rows, np.int32)
        self.is_open: npt.NDArray[np.bool_] = np.zeros(num_rows, np.bool_)
        self.known: IntArray = np.zeros(num_rows, np.int32)
        """Position of the next token."""
        self.published: IntArray = np.zeros(num_rows, np.int32)
        """Position of the token whose mask is on the device."""
        # Memory of pages that nothing was written to is none yet.
        self._tokens: IntArray = np.zeros((num_rows, max_total_len + 1), np.int32)
        self._num_tokens: IntArray = np.zeros(num_rows, np.int32)
        self.errors: dict[int, MeshError] = {}

    def begin(self, row: int, position: int, output_ids: IntArray) -> int:
        """The serial of the output that has the row from now on."""
        self.serials[row] += 1
        self.known[row], self.published[row] = position, 0
        self._tokens[row, : len(output_ids)] = output_ids
        self._num_tokens[row] = len(output_ids)
        self.is_open[row] = True
        return int(self.serials[row])

    def add(self, rows: IntArray, tokens: IntArray) -> None:
        """rows: of each token; they ascend, and tokens of one row follow each other."""
        if not len(rows):
            return
        number = np.arange(len(rows), dtype=np.int32) - np.searchsorted(rows, rows).astype(np.int32)
        # The last column is for what comes behind the end of an output, which nobody reads.
        last = self._tokens.shape[1] - 1
        at = np.minimum(self._num_tokens[rows] + number, last)
        self._tokens[rows, at] = tokens
        ends = np.append(rows[1:] != rows[:-1], True)
        self._num_tokens[rows[ends]] = np.minimum(at[ends] + 1, last)
        self.known[rows[ends]] += number[ends] + 1

    def are_there(self, rows: IntArray, serials: IntArray) -> npt.NDArray[np.bool_]:
        """Of each row: whether it still has the output of this serial. Another one may have it since."""
        is_there: npt.NDArray[np.bool_] = (self.serials[rows] == serials) & self.is_open[rows]
        return is_there

    def output_of(self, row: int) -> IntArray:
        return self._tokens[row, : self._num_tokens[row]]

    def is_ready(self, row: int) -> bool:
        """The mask of the next token is there."""
        return bool(self.published[row] == self.known[row])


class Shared:
    """Of all parts. rows, memory: set before any part has an output. wake: has the I/O thread look at the parts. lock:
    of the outputs of all parts, as a step moves all of them on at once."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake
        self.lock = threading.Lock()
        self.rows = OutputRows(0, 0)
        self.memory: SharedMaskMemory | None = None
        self.changed = threading.Condition()
        self.is_closed = False

    @property
    def rows_a_part(self) -> int:
        return 1 if self.memory is None else self.memory.rows_a_part


class MaskPart:
    """A process and the outputs of its rows. folder, backend: of the vocabulary and the library."""

    def __init__(self, shared: Shared, number: int, folder: Path, backend: str) -> None:
        self.number = number
        self.state = PartState.STARTING
        self.link: MaskLink | None = None
        self.is_awaited = False
        """Tokens were on their way to it since its last masks came."""
        self.told_s = self.sent_s = 0.0
        """When the last tokens came, 0: their masks have been told of; and when they were on their way. By the clock of
        perf_counter()."""
        self._is_gone = False
        self._shared, self._folder, self._backend = shared, folder, backend
        self._lock = shared.lock
        self._outputs: dict[int, tuple[MaskSink, str, bytes]] = {}
        """By row: memory, and the hash and artefact of the grammar."""
        self._leaving: dict[int, MaskSink] = {}
        """Closed, and the process may still write to them."""
        self._sent: OrderedDict[str, tuple[int, int]] = OrderedDict()
        """Number and bytes of the artefacts that the process has, by hash."""
        self._num_grammars = 0
        self._ends: deque[float] = deque(maxlen=MOST_ENDS)
        self._rests_until_s = 0.0

    def start(self) -> None:
        """Raises nothing: a process that cannot be started is one that ended."""
        if self._shared.is_closed:
            return
        try:
            self.link = MaskLink(self._folder, self._backend, self._shared.wake)
        except OSError as error:
            log.error("mask_process_not_started", part=self.number, error=str(error))
            self.state, self._is_gone = PartState.ENDING, True
        self._shared.wake()

    def admit(self, sink: MaskSink, grammar_hash: str, blob: bytes, position: int, output_ids: IntArray) -> None:
        state = self._shared.rows
        with self._lock:
            state.begin(sink.row, position, output_ids)
            self._outputs[sink.row] = sink, grammar_hash, blob
            if self.state is PartState.RESTING:
                state.errors[sink.row] = _keep_ending()
            elif self.state is PartState.LIVE:
                self._send_output(sink.row)

    def send_tokens(self, moves: IntArray, told_s: float) -> None:
        """moves: rows of this part, their serials and tokens, int32 [tokens, 3]. Called with the lock held."""
        if self.state is PartState.LIVE and self.link is not None:
            self.link.send(frame(Kind.TOKENS, moves.tobytes()))
            self.told_s, self.sent_s = told_s, time.perf_counter()

    def close(self, row: int) -> None:
        """The output of the row has left."""
        state = self._shared.rows
        with self._lock:
            state.is_open[row] = False
            state.errors.pop(row, None)
            sink, _, _ = self._outputs.pop(row)
            if self.state is PartState.LIVE and self.link is not None:
                self._leaving[row] = sink
                self.link.send(frame(Kind.CLOSE, ints(row, int(state.serials[row]))))
                return
            if self.state is PartState.ENDING:
                self._leaving[row] = sink
                return
        sink.release()

    def fail(self, row: int, serial: int, error: MeshError) -> None:
        state = self._shared.rows
        with self._lock:
            if state.serials[row] == serial and state.is_open[row]:
                state.errors.setdefault(row, error)
        with self._shared.changed:
            self._shared.changed.notify_all()

    def take(self, published: list[IntArray]) -> None:
        """Reports that have come, and room for more to be sent. published: gets what has to be."""
        link = self.link
        if link is None:
            return
        try:
            for kind, payload in link.read():
                if kind == Kind.PUBLISHED:
                    published.append(self._checked(np.frombuffer(payload, np.int32).reshape(3, -1)))
                    self.is_awaited = False
                elif kind == Kind.FREED:
                    self._freed(*np.frombuffer(payload, np.int32).tolist())
                elif kind == Kind.FAILED:
                    row, serial = np.frombuffer(payload[: 2 * INT], np.int32).tolist()
                    self.fail(row, serial, MeshError.from_proto(common_pb2.Error.FromString(payload[2 * INT :])))
                elif kind == Kind.READY:
                    self._ready(link)
        except EOFError:
            self.ended("it is gone")
            return
        if link.num_kept_bytes:
            with self._lock:
                link.flush()

    def _checked(self, published: IntArray) -> IntArray:
        rows, size = published[0], self._shared.rows_a_part
        if len(rows) and not (size * self.number <= rows.min() and rows.max() < size * (self.number + 1)):
            raise ValueError(f"masks of rows that are not those of process {self.number}")
        return published

    def check(self, now_s: float) -> None:
        """Once a second."""
        link = self.link
        if self.state is PartState.STARTING and link is not None and now_s - link.started_s > _READY_S:
            self.ended(f"it was not ready within {_READY_S:g} s")
        elif self.state is PartState.LIVE and link is not None and now_s - link.heard_s > _SILENT_S:
            self.ended(f"it was silent for {_SILENT_S:g} s")
        elif link is not None and link.num_kept_bytes > _MOST_KEPT_BYTES:
            self.ended("it does not take what it is sent")
        elif self.state is PartState.RESTING and now_s > self._rests_until_s:
            self._start_beside()

    def ended(self, why: str) -> None:
        """The process is no use any more: another one takes its place as soon as it is gone."""
        with self._lock:
            link = self.link
            if self._shared.is_closed or link is None or self.state not in (PartState.STARTING, PartState.LIVE):
                return
            self.state = PartState.ENDING
            num_outputs = len(self._outputs)
        log.warning("mask_process_ended", part=self.number, pid=link.pid, reason=why, outputs=num_outputs)
        threading.Thread(target=self._end, args=(link,), name="masks-end", daemon=True).start()

    def end(self) -> None:
        """The worker ends."""
        with self._lock:
            link, self.link, self.state = self.link, None, PartState.ENDING
        if link is not None:
            link.end()

    def _end(self, link: MaskLink) -> None:
        link.end()
        self._is_gone = True
        self._shared.wake()

    def replace(self) -> None:
        """Starts the next process if one is gone: nothing writes to its rows any more. The I/O thread's."""
        if not self._is_gone:
            return
        now_s, self._is_gone = time.monotonic(), False
        with self._lock:
            self.link, self.state, self.is_awaited = None, PartState.STARTING, False
            leaving = list(self._leaving.values())
            self._leaving.clear()
            self._sent.clear()
            is_often = len(self._ends) == MOST_ENDS and now_s - self._ends[0] < _ENDS_S
            self._ends.append(now_s)
            if is_often:
                self.state, self._rests_until_s = PartState.RESTING, now_s + _REST_S
                self._shared.rows.errors.update(dict.fromkeys(self._outputs, _keep_ending()))
        for sink in leaving:
            sink.release()
        if is_often:
            log.error("mask_processes_keep_ending", part=self.number, rest_s=_REST_S)
            with self._shared.changed:
                self._shared.changed.notify_all()
            return
        self._start_beside()

    def _start_beside(self) -> None:
        # Others' masks do not wait for it.
        self.state = PartState.STARTING
        threading.Thread(target=self.start, name="masks-start", daemon=True).start()

    def _ready(self, link: MaskLink) -> None:
        """Sends all outputs as far as they are."""
        memory = self._shared.memory
        assert memory is not None, "nobody reads reports before"
        with self._lock:
            link.memory(memory.descriptor, memory.shape)
            for row in self._outputs:
                if row not in self._shared.rows.errors:
                    self._send_output(row)
            self.state = PartState.LIVE
        log.info("mask_process_ready", part=self.number, pid=link.pid, outputs=len(self._outputs))
        with self._shared.changed:
            self._shared.changed.notify_all()

    def _send_output(self, row: int) -> None:
        link, state = self.link, self._shared.rows
        assert link is not None
        _, grammar_hash, blob = self._outputs[row]
        known = self._sent.get(grammar_hash)
        if known is None:
            self._num_grammars += 1
            known = self._sent[grammar_hash] = self._num_grammars, len(blob)
            # Without a copy of the artefact.
            link.send(HEAD.pack(Kind.GRAMMAR, INT + len(blob)) + self._num_grammars.to_bytes(INT, "little"))
            link.send(blob)
        self._sent.move_to_end(grammar_hash)
        number = known[0]
        admission = Admission(row, int(state.serials[row]), number, int(state.known[row]), int(state.is_ready(row)))
        link.send(frame(Kind.ADMIT, ints(*admission), state.output_of(row).tobytes()))
        while sum(size for _, size in self._sent.values()) > _MOST_GRAMMAR_BYTES and len(self._sent) > 1:
            _, (dropped, _) = self._sent.popitem(last=False)
            link.send(frame(Kind.DROP, dropped.to_bytes(INT, "little")))

    def _freed(self, row: int, serial: int) -> None:
        with self._lock:
            is_known = self._shared.rows.serials[row] == serial
            sink = self._leaving.pop(row, None) if is_known else None
        if sink is not None:
            sink.release()


def _keep_ending() -> MeshError:
    message = "processes that follow grammars keep ending on this worker: retry later, or on another replica"
    return MeshError(ErrorReason.ERROR_REASON_NOT_SERVING, message, {})
