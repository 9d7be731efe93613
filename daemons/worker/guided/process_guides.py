"""Outputs on their way through their grammars in processes beside the worker, whose interpreters share no lock with it.

    launched(step)   step follower: tokens known ---> TOKENS ---> a process: matchers go on, masks into shared memory
                     I/O thread: copies the masks to the device, then their positions <--- PUBLISHED

Chains (`chain.py`) need no copy: the device reads them where processes write them, before they are reported.

The rows of the masks' memory are divided among the processes (`mask_part.py`), each has those of every so many slots.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.guided.source import invalid_grammar
from radixmesh.daemons.runtime.steps.step import Admit
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.guided.grammar_store import GrammarStore
from radixmesh.daemons.worker.guided.guides import Guides
from radixmesh.daemons.worker.guided.mask_filler import hand_over_quickly
from radixmesh.daemons.worker.guided.mask_memory import MaskSink, SharedMaskMemory
from radixmesh.daemons.worker.guided.mask_part import MaskPart, OutputRows, PartState, Shared
from radixmesh.daemons.worker.guided.step_follower import StepFollower, StepRows

log = get_logger(__name__)

_CHECK_S = 1.0
# Parts have as much to fill, and report at nearly the same time: masks of all of them are copied at once, because each
# copy asks some ten times for the interpreter's lock. Steps with enough outputs for several parts take far longer.
_GATHER_S, _GATHER_TURNS = 0.00015, 2


class ProcessGuides(Guides):
    """folder, backend: of the vocabulary and the library. `attach` comes before the first output."""

    reads_blobs = True

    def __init__(self, num_processes: int, folder: Path, backend: str) -> None:
        super().__init__()
        self._follower = StepFollower()
        self._wakes, self._wake = socket.socketpair()
        for end in (self._wakes, self._wake):
            end.setblocking(False)
        self._shared = Shared(self._wake_up)
        self._row_of_slot: IntArray = np.zeros(0, np.int32)
        self._slot_of_row: dict[int, int] = {}
        self._slow_slots: set[int] = set()
        self._before: tuple[IntArray, _Rows] | None = None
        """Slots of the step that was launched last, and its rows, if no output has come or left since."""
        self._parts = [MaskPart(self._shared, number, folder, backend) for number in range(num_processes)]
        for part in self._parts:
            part.start()

    def attach(self, memory: SharedMaskMemory, *, num_slots: int, max_total_len: int) -> None:
        """memory: of all masks, with a part for each process. max_total_len: of an output with its prompt, tokens."""
        assert memory.num_rows == memory.rows_a_part * len(self._parts), (memory.num_rows, memory.rows_a_part)
        self._row_of_slot = np.full(num_slots, -1, np.int32)
        self._shared.rows = OutputRows(memory.num_rows, max_total_len)
        self._shared.memory = self._memory = memory
        hand_over_quickly()
        self._firsts = np.arange(len(self._parts) + 1) * memory.rows_a_part
        # Not joined at exit: a wedged device must not keep the process alive.
        threading.Thread(target=self._serve, name="masks-io", daemon=True).start()

    def wait_ready(self, seconds: float) -> bool:
        """Waits at most so long until all processes are there, or keep ending; True if they are there."""
        settled = (PartState.LIVE, PartState.RESTING)
        with self._shared.changed:
            self._shared.changed.wait_for(lambda: all(part.state in settled for part in self._parts), seconds)
        return all(part.state is PartState.LIVE for part in self._parts)

    @property
    def pids(self) -> Sequence[int]:
        """Of the processes that are there."""
        return [part.link.pid for part in self._parts if part.link is not None]

    def __len__(self) -> int:
        return len(self._slot_of_row)

    def admitted(self, admit: Admit, blob: bytes, store: GrammarStore, sink: MaskSink | None) -> None:
        assert sink is not None, "its masks are in the memory that the processes share"
        self._before = None
        self._row_of_slot[admit.slot] = sink.row
        self._slot_of_row[sink.row] = admit.slot
        position = len(admit.prompt_ids) + len(admit.output_ids)
        self._part_of(sink.row).admit(sink, admit.grammar_hash, blob, position, admit.output_ids)

    def is_late(self, slot: int) -> bool:
        row = int(self._row_of_slot[slot])
        return row >= 0 and (row in self._shared.rows.errors or not self._shared.rows.is_ready(row))

    def released(self, slot: int) -> None:
        row = int(self._row_of_slot[slot])
        if row < 0:
            return
        self._before = None
        self._row_of_slot[slot] = -1
        self._slow_slots.discard(slot)
        del self._slot_of_row[row]
        self._part_of(row).close(row)

    def clear(self) -> None:
        for slot in np.flatnonzero(self._row_of_slot >= 0).tolist():
            self.released(slot)

    @property
    def has_errors(self) -> bool:
        return bool(self._slot_of_row) and bool(self._shared.rows.errors)

    def errors(self) -> Iterator[tuple[int, MeshError]]:
        if self.has_errors:
            for row, error in list(self._shared.rows.errors.items()):
                slot = self._slot_of_row.get(row)
                if slot is not None:
                    yield slot, error

    def follow(self, tokens: Iterable[tuple[int, Sequence[int]]]) -> None:
        if not self._slot_of_row:
            return
        of_rows = [(int(self._row_of_slot[slot]), of_slot) for slot, of_slot in tokens]
        of_rows.sort(key=lambda of_row: of_row[0])
        moves = [(row, token) for row, of_row in of_rows if row >= 0 for token in of_row]
        if moves:
            rows, ids = np.array(moves, np.int32).T
            self.move(rows, self._shared.rows.serials[rows], ids)

    def launched(self, slots: IntArray, tokens: Callable[[], IntArray]) -> threading.Lock:
        before = self._before
        # Steps that only advance have the array of the one before, or an equal one where they verify drafts.
        if before is None or (before[0] is not slots and not np.array_equal(before[0], slots)):
            before = self._before = slots, self._rows_of(slots)
        return self._follower.launched(before[1], tokens)

    def _rows_of(self, slots: IntArray) -> _Rows:
        rows = self._row_of_slot[slots]
        order = np.argsort(rows, kind="stable").astype(np.int32)
        order = order[rows[order] >= 0]
        rows = rows[order]
        return _Rows(self, order, rows, self._shared.rows.serials[rows])

    def let_follow(self, through: threading.Lock) -> None:
        """Waits for nothing: of a step's masks this interpreter does no more than to send tokens."""

    def wait(self, slots: Iterable[int], seconds: float | None) -> None:
        awaited = [slot for slot in slots if self.is_late(slot) and not (seconds and slot in self._slow_slots)]
        if not awaited:
            return

        def is_there() -> bool:
            return not any(self.is_late(slot) and not self._has_failed(slot) for slot in awaited)

        with self._shared.changed:
            if seconds is None:
                while not self._shared.changed.wait_for(is_there, 60.0):
                    pass
            elif not self._shared.changed.wait_for(is_there, seconds):
                # Once is enough: nobody waits for these outputs again.
                self._slow_slots.update(slot for slot in awaited if self.is_late(slot))

    def close(self) -> None:
        self._shared.is_closed = True
        self._wake_up()
        for part in self._parts:
            part.end()

    def move(self, rows: IntArray, serials: IntArray, tokens: IntArray) -> None:
        """Outputs that had these rows go on: rows and serials of each token. Rows ascend, and tokens of one row follow
        each other. Any thread."""
        shared, told_s = self._shared, time.perf_counter()
        with shared.lock:
            # An output may have left since the step was launched, and another one have its row.
            are_there = shared.rows.are_there(rows, serials)
            if not are_there.all():
                rows, serials, tokens = rows[are_there], serials[are_there], tokens[are_there]
            shared.rows.add(rows, tokens)
            moves = np.stack((rows, serials, tokens), axis=1)
            ends = np.searchsorted(rows, self._firsts).tolist()
            of_parts = [
                (part, moves[start:end])
                for part, start, end in zip(self._parts, ends[:-1], ends[1:], strict=True)
                if start < end
            ]
            # Ahead of the first frame: a process may report before the next one has its tokens.
            for part, _ in of_parts:
                part.is_awaited = part.state is PartState.LIVE
            for part, of_part in of_parts:
                part.send_tokens(of_part, told_s)

    def fail(self, rows: IntArray, serials: IntArray, error: Exception) -> None:
        """Outputs that had these rows end."""
        found = error if isinstance(error, MeshError) else _cannot_follow(error)
        for row, serial in zip(rows.tolist(), serials.tolist(), strict=True):
            self._part_of(row).fail(row, serial, found)

    def _has_failed(self, slot: int) -> bool:
        return int(self._row_of_slot[slot]) in self._shared.rows.errors

    def _part_of(self, row: int) -> MaskPart:
        return self._parts[row // self._shared.rows_a_part]

    def _wake_up(self) -> None:
        with suppress(BlockingIOError):  # It is awake, or about to be.
            self._wake.send(b"\0")

    def _serve(self) -> None:
        """Reads what the processes report, sends what they did not take at once, and looks after them."""
        checked_s = 0.0
        while not self._shared.is_closed:
            try:
                published: list[IntArray] = []
                parts = self._wait_for_reports(_CHECK_S)
                since_s = time.perf_counter()
                self._take(parts, published)
                for _ in range(_GATHER_TURNS):
                    if not published or not any(part.is_awaited for part in self._parts):
                        break
                    time.sleep(_GATHER_S)
                    more = self._wait_for_reports(0.0)
                    self._take(more, published)
                    parts = [*parts, *(part for part in more if part not in parts)]
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

    def _take(self, parts: Sequence[MaskPart], published: list[IntArray]) -> None:
        for part in parts:
            try:
                part.take(published)
            except Exception:
                log.exception("mask_reports_failed", part=part.number)
                part.ended("its reports cannot be read")

    def _wait_for_reports(self, seconds: float) -> Sequence[MaskPart]:
        """Parts that have something to tell, or room for more to be sent."""
        poll, parts = select.poll(), {}
        poll.register(self._wakes.fileno(), select.POLLIN)
        for part in self._parts:
            link = part.link
            if link is None or part.state not in (PartState.STARTING, PartState.LIVE):
                continue
            number = link.socket.fileno()
            if number >= 0:
                poll.register(number, select.POLLIN | (select.POLLOUT if link.num_kept_bytes else 0))
                parts[number] = part
        ready = [number for number, _ in poll.poll(seconds * 1e3)]
        if self._wakes.fileno() in ready:
            with suppress(BlockingIOError):
                self._wakes.recv(4096)
        return [parts[number] for number in ready if number in parts]

    def _publish(self, published: IntArray) -> None:
        """published: rows, serials and positions, int32 [3, outputs]."""
        state = self._shared.rows
        rows, serials, positions = published
        are_there = state.are_there(rows, serials)
        if not are_there.all():
            rows, positions = rows[are_there], positions[are_there]
        if not len(rows):
            return
        try:
            self._memory.reported(rows, positions)
        except RuntimeError as error:
            # The device failed: whoever collects the step says so.
            log.warning("masks_not_sent", error=str(error))
            return
        with self._shared.changed:
            state.published[rows] = positions
            self._shared.changed.notify_all()


class _Rows(StepRows):
    """Rows of a step that follow grammars, in the order of their masks. order: indexes in the step; rows, serials: of
    the memory."""

    def __init__(self, guides: ProcessGuides, order: IntArray, rows: IntArray, serials: IntArray) -> None:
        self._guides, self._order, self._rows, self._serials = guides, order, rows, serials

    def follow(self, tokens: IntArray) -> None:
        ids, rows, serials = tokens[self._order], self._rows, self._serials
        has_token = ids >= 0
        if ids.ndim > 1 or not has_token.all():
            # Token by token, row after row.
            at = np.nonzero(has_token)[0]
            ids, rows, serials = ids[has_token], rows[at], serials[at]
        if len(ids):
            self._guides.move(rows, serials, ids)

    def fail(self, error: Exception) -> None:
        self._guides.fail(self._rows, self._serials, error)


def _log_times(parts: Sequence[MaskPart], since_s: float) -> None:
    """Of the last tokens of each part, until they were sent, masks were reported, and these were on the device."""
    now_s = time.perf_counter()
    for part in parts:
        told_s, part.told_s = part.told_s, 0.0
        if told_s:  # Otherwise these are first masks, of outputs that came.
            times_s = part.sent_s, since_s, now_s
            log.debug("masks_published", until_ms=[round((at_s - told_s) * 1e3, 3) for at_s in times_s])


def _cannot_follow(error: Exception) -> MeshError:
    return invalid_grammar(f"the grammar cannot be followed any further: {error}", "")
