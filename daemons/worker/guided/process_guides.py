"""Outputs on their way through their grammars in processes beside the worker, whose interpreters share no lock with it.

    launched(step)   step follower: tokens known ---> TOKENS ---> a process: matchers go on, masks into shared memory
                     I/O thread: copies the masks to the device, then their positions <--- PUBLISHED

    STARTING --READY, outputs sent--> LIVE --end, killed--> ENDING --gone--> STARTING, or RESTING --> STARTING

The rows of the masks' memory are divided among the processes, each has those of every so many slots. What each output
has so far is kept here, so that a process that ends is started again, and its successor goes over the tokens of its
outputs: their rows yield nothing meanwhile. A mask that is published already is not filled a second time, because the
device may be reading it. If processes keep ending, their outputs fail, and no others.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from radixmesh.common.v1 import common_pb2
from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.guided.source import invalid_grammar
from radixmesh.daemons.runtime.steps.step import Admit
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.guided.grammar_store import GrammarStore
from radixmesh.daemons.worker.guided.guides import Guides
from radixmesh.daemons.worker.guided.mask_filler import hand_over_quickly
from radixmesh.daemons.worker.guided.mask_frames import INT, Admission, Kind, frame, ints
from radixmesh.daemons.worker.guided.mask_link import MaskLink
from radixmesh.daemons.worker.guided.mask_memory import MaskSink, SharedMaskMemory
from radixmesh.daemons.worker.guided.step_follower import StepFollower, StepRows

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
_CHECK_S = 1.0


class _State(Enum):
    STARTING = "starting"
    LIVE = "live"
    ENDING = "ending"
    RESTING = "resting"


class ProcessGuides(Guides):
    """folder, backend: of the vocabulary and the library. `attach` comes before the first output."""

    def __init__(self, num_processes: int, folder: Path, backend: str) -> None:
        super().__init__()
        self._follower = StepFollower()
        self._wakes, self._wake = socket.socketpair()
        for end in (self._wakes, self._wake):
            end.setblocking(False)
        self._changed = threading.Condition()
        self._is_closed = False
        self._rows_a_part = 0
        self._row_of_slot: IntArray = np.zeros(0, np.int32)
        self._slot_of_row: dict[int, int] = {}
        self._slow_slots: set[int] = set()
        self._state = OutputRows(0, 0)
        self._parts = [_Part(self, number, folder, backend) for number in range(num_processes)]
        for part in self._parts:
            part.start()

    def attach(self, memory: SharedMaskMemory, *, num_slots: int, max_total_len: int) -> None:
        """memory: of all masks, with a part for each process. max_total_len: of an output with its prompt, tokens."""
        assert len(memory.words) == memory.rows_a_part * len(self._parts), (len(memory.words), memory.rows_a_part)
        self._rows_a_part = memory.rows_a_part
        self._row_of_slot = np.full(num_slots, -1, np.int32)
        self._state = OutputRows(len(memory.words), max_total_len)
        self._memory = memory
        hand_over_quickly()
        # Not joined at exit: a wedged device must not keep the process alive.
        threading.Thread(target=self._serve, name="masks-io", daemon=True).start()

    def wait_ready(self, seconds: float) -> bool:
        """Waits at most so long until all processes are there, or keep ending; True if they are there."""
        settled = (_State.LIVE, _State.RESTING)
        with self._changed:
            self._changed.wait_for(lambda: all(part.state in settled for part in self._parts), seconds)
        return all(part.state is _State.LIVE for part in self._parts)

    @property
    def pids(self) -> Sequence[int]:
        """Of the processes that are there."""
        return [part.link.pid for part in self._parts if part.link is not None]

    def __len__(self) -> int:
        return len(self._slot_of_row)

    def admitted(self, admit: Admit, blob: bytes, store: GrammarStore, sink: MaskSink | None) -> None:
        assert sink is not None, "its masks are in the memory that the processes share"
        self._row_of_slot[admit.slot] = sink.row
        self._slot_of_row[sink.row] = admit.slot
        position = len(admit.prompt_ids) + len(admit.output_ids)
        self._part_of(sink.row).admit(sink, admit.grammar_hash, blob, position, admit.output_ids)

    def is_late(self, slot: int) -> bool:
        row = int(self._row_of_slot[slot])
        return row >= 0 and (row in self._state.errors or not self._state.is_ready(row))

    def released(self, slot: int) -> None:
        row = int(self._row_of_slot[slot])
        if row < 0:
            return
        self._row_of_slot[slot] = -1
        self._slow_slots.discard(slot)
        del self._slot_of_row[row]
        self._part_of(row).close(row)

    def clear(self) -> None:
        for slot in np.flatnonzero(self._row_of_slot >= 0).tolist():
            self.released(slot)

    @property
    def has_errors(self) -> bool:
        return bool(self._slot_of_row) and bool(self._state.errors)

    def errors(self) -> Iterator[tuple[int, MeshError]]:
        if self.has_errors:
            for row, error in list(self._state.errors.items()):
                slot = self._slot_of_row.get(row)
                if slot is not None:
                    yield slot, error

    def follow(self, tokens: Iterable[tuple[int, Sequence[int]]]) -> None:
        if not self._slot_of_row:
            return
        moves = [(int(self._row_of_slot[slot]), of_slot) for slot, of_slot in tokens]
        while moves := [(row, of_slot) for row, of_slot in moves if row >= 0 and len(of_slot)]:
            rows = np.array([row for row, _ in moves], np.int32)
            self.move(rows, self._state.serials[rows], np.array([of_slot[0] for _, of_slot in moves], np.int32))
            moves = [(row, of_slot[1:]) for row, of_slot in moves]

    def launched(self, slots: IntArray, tokens: Callable[[], IntArray]) -> threading.Lock:
        rows = self._row_of_slot[slots]
        return self._follower.launched(_Rows(self, rows, self._state.serials[rows]), tokens)

    def wait(self, slots: Iterable[int], seconds: float | None) -> None:
        awaited = [slot for slot in slots if self.is_late(slot) and not (seconds and slot in self._slow_slots)]
        if not awaited:
            return

        def is_there() -> bool:
            return not any(self.is_late(slot) and not self._has_failed(slot) for slot in awaited)

        with self._changed:
            if seconds is None:
                while not self._changed.wait_for(is_there, 60.0):
                    pass
            elif not self._changed.wait_for(is_there, seconds):
                # Once is enough: nobody waits for these outputs again.
                self._slow_slots.update(slot for slot in awaited if self.is_late(slot))

    def close(self) -> None:
        self._is_closed = True
        self._wake_up()
        for part in self._parts:
            part.end()

    def move(self, rows: IntArray, serials: IntArray, tokens: IntArray) -> None:
        """Outputs that had these rows, which differ, go on by a token each. Any thread."""
        of_part = rows // self._rows_a_part
        for part in self._parts:
            mine = np.flatnonzero(of_part == part.number)
            if len(mine):
                part.follow(rows[mine], serials[mine], tokens[mine])

    def fail(self, rows: IntArray, serials: IntArray, error: Exception) -> None:
        """Outputs that had these rows end."""
        found = error if isinstance(error, MeshError) else _cannot_follow(error)
        for row, serial in zip(rows.tolist(), serials.tolist(), strict=True):
            if row >= 0:
                self._part_of(row).fail(row, serial, found)

    def _has_failed(self, slot: int) -> bool:
        return int(self._row_of_slot[slot]) in self._state.errors

    def _part_of(self, row: int) -> _Part:
        return self._parts[row // self._rows_a_part]

    def _wake_up(self) -> None:
        with suppress(BlockingIOError):  # It is awake, or about to be.
            self._wake.send(b"\0")

    def _serve(self) -> None:
        """Reads what the processes report, sends what they did not take at once, and looks after them."""
        checked_s = 0.0
        while not self._is_closed:
            try:
                published: list[IntArray] = []
                parts = self._wait_for_reports()
                since_s = time.perf_counter()
                for part in parts:
                    try:
                        part.take(published)
                    except Exception:
                        log.exception("mask_reports_failed", part=part.number)
                        part.ended("its reports cannot be read")
                if published:
                    self._publish(np.concatenate(published, axis=1))
                    _log_times(parts, since_s)
                # Behind the reports of a process that has ended: rows that it had may be another output's then.
                for part in self._parts:
                    part.replace()
                if time.monotonic() - checked_s > _CHECK_S:
                    checked_s = time.monotonic()
                    for part in self._parts:
                        part.check(checked_s)
            except Exception:
                log.exception("masks_failed")
                time.sleep(_CHECK_S)

    def _wait_for_reports(self) -> Sequence[_Part]:
        poll, parts = select.poll(), {}
        poll.register(self._wakes.fileno(), select.POLLIN)
        for part in self._parts:
            link = part.link
            if link is None or part.state not in (_State.STARTING, _State.LIVE):
                continue
            number = link.socket.fileno()
            if number >= 0:
                poll.register(number, select.POLLIN | (select.POLLOUT if link.num_kept_bytes else 0))
                parts[number] = part
        ready = [number for number, _ in poll.poll(_CHECK_S * 1e3)]
        if self._wakes.fileno() in ready:
            with suppress(BlockingIOError):
                self._wakes.recv(4096)
        return [parts[number] for number in ready if number in parts]

    def _publish(self, published: IntArray) -> None:
        """published: rows, serials and positions, int32 [3, outputs]."""
        state = self._state
        rows, serials, positions = published
        mine = (state.serials[rows] == serials) & state.is_open[rows]
        if not mine.all():
            rows, positions = rows[mine], positions[mine]
        if not len(rows):
            return
        try:
            self._memory.publish(rows, positions)
        except RuntimeError as error:
            # The device failed: whoever collects the step says so.
            log.warning("masks_not_sent", error=str(error))
            return
        with self._changed:
            state.published[rows] = positions
            self._changed.notify_all()


class _Rows(StepRows):
    """rows: of the memory, of a step's first rows, -1 of those that follow no grammar; and their serials."""

    def __init__(self, guides: ProcessGuides, rows: IntArray, serials: IntArray) -> None:
        self._guides, self._rows, self._serials = guides, rows, serials

    def follow(self, tokens: IntArray) -> None:
        ids = np.asarray(tokens[: len(self._rows)], np.int32)
        mine = np.flatnonzero((self._rows | ids) >= 0)
        if len(mine):
            self._guides.move(self._rows[mine], self._serials[mine], ids[mine])

    def fail(self, error: Exception) -> None:
        self._guides.fail(self._rows, self._serials, error)


class OutputRows:
    """Outputs by the row of their mask: what each has so far, and how far its masks are. Changed under the lock of the
    row's part; published: by the I/O thread."""

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
        """A token each; the rows differ."""
        at = self._num_tokens[rows]
        # The last column is for what comes behind the end of an output, which nobody reads.
        self._tokens[rows, at] = tokens
        self._num_tokens[rows] = np.minimum(at + 1, self._tokens.shape[1] - 1)
        self.known[rows] += 1

    def output_of(self, row: int) -> IntArray:
        return self._tokens[row, : self._num_tokens[row]]

    def is_ready(self, row: int) -> bool:
        """The mask of the next token is there."""
        return bool(self.published[row] == self.known[row])


class _Part:
    """A process and the outputs of its rows."""

    def __init__(self, guides: ProcessGuides, number: int, folder: Path, backend: str) -> None:
        self.number = number
        self.state = _State.STARTING
        self.link: MaskLink | None = None
        self.told_s = self.sent_s = 0.0
        """When the last tokens came, and when they were on their way, by the clock of perf_counter()."""
        self._is_gone = False
        self._guides, self._folder, self._backend = guides, folder, backend
        self._lock = threading.Lock()
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
        if self._guides._is_closed:
            return
        try:
            self.link = MaskLink(self._folder, self._backend, self._guides._wake_up)
        except OSError as error:
            log.error("mask_process_not_started", part=self.number, error=str(error))
            self.state, self._is_gone = _State.ENDING, True
        self._guides._wake_up()

    def admit(self, sink: MaskSink, grammar_hash: str, blob: bytes, position: int, output_ids: IntArray) -> None:
        state = self._guides._state
        with self._lock:
            state.begin(sink.row, position, output_ids)
            self._outputs[sink.row] = sink, grammar_hash, blob
            if self.state is _State.RESTING:
                state.errors[sink.row] = _keep_ending()
            elif self.state is _State.LIVE:
                self._send_output(sink.row)

    def follow(self, rows: IntArray, serials: IntArray, tokens: IntArray) -> None:
        state = self._guides._state
        told_s = time.perf_counter()
        with self._lock:
            # An output may have left since the step was launched, and another one have its row.
            mine = (state.serials[rows] == serials) & state.is_open[rows]
            if not mine.all():
                rows, serials, tokens = rows[mine], serials[mine], tokens[mine]
            if not len(rows):
                return
            state.add(rows, tokens)
            if self.state is _State.LIVE and self.link is not None:
                self.link.send(frame(Kind.TOKENS, np.concatenate((rows, serials, tokens)).tobytes()))
                self.told_s, self.sent_s = told_s, time.perf_counter()

    def close(self, row: int) -> None:
        """The output of the row has left."""
        state = self._guides._state
        with self._lock:
            state.is_open[row] = False
            state.errors.pop(row, None)
            sink, _, _ = self._outputs.pop(row)
            if self.state is _State.LIVE and self.link is not None:
                self._leaving[row] = sink
                self.link.send(frame(Kind.CLOSE, ints(row, int(state.serials[row]))))
                return
            if self.state is _State.ENDING:
                self._leaving[row] = sink
                return
        sink.release()

    def fail(self, row: int, serial: int, error: MeshError) -> None:
        state = self._guides._state
        with self._lock:
            if state.serials[row] == serial and state.is_open[row]:
                state.errors.setdefault(row, error)
        with self._guides._changed:
            self._guides._changed.notify_all()

    def take(self, published: list[IntArray]) -> None:
        """Reports that have come, and room for more to be sent. published: gets what has to be."""
        link = self.link
        if link is None:
            return
        try:
            for kind, payload in link.read():
                if kind == Kind.PUBLISHED:
                    published.append(self._checked(np.frombuffer(payload, np.int32).reshape(3, -1)))
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
        rows, size = published[0], self._guides._rows_a_part
        if len(rows) and not (size * self.number <= rows.min() and rows.max() < size * (self.number + 1)):
            raise ValueError(f"masks of rows that are not those of process {self.number}")
        return published

    def check(self, now_s: float) -> None:
        """Once a second."""
        link = self.link
        if self.state is _State.STARTING and link is not None and now_s - link.started_s > _READY_S:
            self.ended(f"it was not ready within {_READY_S:g} s")
        elif self.state is _State.LIVE and link is not None and now_s - link.heard_s > _SILENT_S:
            self.ended(f"it was silent for {_SILENT_S:g} s")
        elif link is not None and link.num_kept_bytes > _MOST_KEPT_BYTES:
            self.ended("it does not take what it is sent")
        elif self.state is _State.RESTING and now_s > self._rests_until_s:
            self._start_beside()

    def ended(self, why: str) -> None:
        """The process is no use any more: another one takes its place as soon as it is gone."""
        with self._lock:
            link = self.link
            if self._guides._is_closed or link is None or self.state not in (_State.STARTING, _State.LIVE):
                return
            self.state = _State.ENDING
            num_outputs = len(self._outputs)
        log.warning("mask_process_ended", part=self.number, pid=link.pid, reason=why, outputs=num_outputs)
        threading.Thread(target=self._end, args=(link,), name="masks-end", daemon=True).start()

    def end(self) -> None:
        """The worker ends."""
        with self._lock:
            link, self.link, self.state = self.link, None, _State.ENDING
        if link is not None:
            link.end()

    def _end(self, link: MaskLink) -> None:
        link.end()
        self._is_gone = True
        self._guides._wake_up()

    def replace(self) -> None:
        """Starts the next process if one is gone: nothing writes to its rows any more. The I/O thread's."""
        if not self._is_gone:
            return
        now_s, self._is_gone = time.monotonic(), False
        with self._lock:
            self.link, self.state = None, _State.STARTING
            leaving = list(self._leaving.values())
            self._leaving.clear()
            self._sent.clear()
            is_often = len(self._ends) == MOST_ENDS and now_s - self._ends[0] < _ENDS_S
            self._ends.append(now_s)
            if is_often:
                self.state, self._rests_until_s = _State.RESTING, now_s + _REST_S
                self._guides._state.errors.update(dict.fromkeys(self._outputs, _keep_ending()))
        for sink in leaving:
            sink.release()
        if is_often:
            log.error("mask_processes_keep_ending", part=self.number, rest_s=_REST_S)
            with self._guides._changed:
                self._guides._changed.notify_all()
            return
        self._start_beside()

    def _start_beside(self) -> None:
        # Others' masks do not wait for it.
        self.state = _State.STARTING
        threading.Thread(target=self.start, name="masks-start", daemon=True).start()

    def _ready(self, link: MaskLink) -> None:
        """Sends all outputs as far as they are."""
        memory = self._guides._memory
        with self._lock:
            link.memory(memory.descriptor, *memory.words.shape)
            for row in self._outputs:
                if row not in self._guides._state.errors:
                    self._send_output(row)
            self.state = _State.LIVE
        log.info("mask_process_ready", part=self.number, pid=link.pid, outputs=len(self._outputs))
        with self._guides._changed:
            self._guides._changed.notify_all()

    def _send_output(self, row: int) -> None:
        link, state = self.link, self._guides._state
        assert link is not None
        _, grammar_hash, blob = self._outputs[row]
        known = self._sent.get(grammar_hash)
        if known is None:
            self._num_grammars += 1
            known = self._sent[grammar_hash] = self._num_grammars, len(blob)
            link.send(frame(Kind.GRAMMAR, self._num_grammars.to_bytes(INT, "little"), blob))
        self._sent.move_to_end(grammar_hash)
        number = known[0]
        admission = Admission(row, int(state.serials[row]), number, int(state.known[row]), int(state.is_ready(row)))
        link.send(frame(Kind.ADMIT, ints(*admission), state.output_of(row).tobytes()))
        while sum(size for _, size in self._sent.values()) > _MOST_GRAMMAR_BYTES and len(self._sent) > 1:
            _, (dropped, _) = self._sent.popitem(last=False)
            link.send(frame(Kind.DROP, dropped.to_bytes(INT, "little")))

    def _freed(self, row: int, serial: int) -> None:
        with self._lock:
            is_known = self._guides._state.serials[row] == serial
            sink = self._leaving.pop(row, None) if is_known else None
        if sink is not None:
            sink.release()


def _log_times(parts: Sequence[_Part], since_s: float) -> None:
    """Of the last tokens of each part, until they were sent, masks were reported, and these were on the device."""
    now_s = time.perf_counter()
    for part in parts:
        times_s = part.sent_s, since_s, now_s
        log.debug("masks_published", until_ms=[round((at_s - part.told_s) * 1e3, 3) for at_s in times_s])


def _cannot_follow(error: Exception) -> MeshError:
    return invalid_grammar(f"the grammar cannot be followed any further: {error}", "")


def _keep_ending() -> MeshError:
    message = "processes that follow grammars keep ending on this worker: retry later, or on another replica"
    return MeshError(ErrorReason.ERROR_REASON_NOT_SERVING, message, {})
