"""Threads that move outputs on through their grammars while the model computes."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from queue import SimpleQueue

from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.guided.guide import Guide
from radixmesh.daemons.worker.guided.shared_calls import run_together

log = get_logger(__name__)

# Outputs that a thread takes at a time: one whose mask is suddenly slow holds up the others, once. Each group waits a
# few times for the interpreter's lock, so that a step of many outputs is cut in as many groups as there are threads.
# They are few, because all of them, and the step thread, want that lock: the library has threads that do not.
_MIN_GROUP, _MAX_GROUP = 8, 128
_MIN_THREADS, _MAX_THREADS = 2, 3
_OTHER_CORES = 2  # For the step thread, and for the threads that talk to the scheduler.
# The same of a thread that leaves the filling to the library's threads: the masks of the first ones are where they are
# read before those of the last ones are begun.
_MAX_HERE = 128
_SLOW_THREADS = 2
_SLOW_NICE = 15
# A thread that comes back from a library asks for the interpreter's lock; the default of 5 ms is as long as a step.
# While another one computes in Python, it has it 0.30 ms later with 0.2 ms here, and 0.15 ms later with this: each mask
# of a chain, and each group of masks, asks a few times. The other one computes as much as before.
_SWITCH_S = 0.00005
# Threads that follow_here() shares its groups with: the library accepts the tokens of a call one after the other, but
# without the interpreter's lock.
_GROUP_THREADS = 1
_Job = tuple[Sequence[tuple[Guide, int]], Sequence[Guide], float]
"""Return value of `Guide.begin`, and when the tokens were known, by the clock of perf_counter()."""
_Groups = tuple[Sequence[Sequence[tuple[Guide, int]]], float, threading.Lock]
"""Groups, when their tokens were known, and a lock that is held until they are through."""


class MaskFiller:
    """Quick outputs go to a few threads, slow ones to others: a bomb holds up none but its like. Starts with the first
    output that follows a grammar."""

    def __init__(self, num_threads: int | None = None) -> None:
        self._num_threads = num_threads or max(_MIN_THREADS, min(_MAX_THREADS, (os.cpu_count() or 1) - _OTHER_CORES))
        self._quick: SimpleQueue[_Job] = SimpleQueue()
        self._slow: SimpleQueue[_Job] = SimpleQueue()
        self._groups: SimpleQueue[_Groups] = SimpleQueue()
        self._has_started = False
        self._starting = threading.Lock()
        self._num_turns = 0

    def begin(self, guide: Guide) -> None:
        """An output was admitted."""
        self._put((), [guide])

    def follow(self, moves: Iterable[tuple[Guide, Sequence[int]]]) -> None:
        """Tokens were sampled for these outputs. Any thread."""
        told_s = time.perf_counter()
        self._put(*Guide.begin(moves), told_s)

    def follow_here(self, moves: Iterable[tuple[Guide, Sequence[int]]]) -> None:
        """The same, of outputs that share calls by the calling thread and a few others, until they are through: the
        library's own threads fill their masks."""
        told_s = time.perf_counter()
        shared, alone = Guide.begin(moves)
        self._put((), alone, told_s)
        if shared:
            self._start()  # Chains grow there.
        here, *others = _dealt(self._in_turns(shared), 1 + _GROUP_THREADS)
        waiting: list[threading.Lock] = []
        for groups in others:
            through = threading.Lock()
            through.acquire()
            waiting.append(through)
            self._groups.put((groups, told_s, through))
        _run_groups(here, told_s, self._quick, self._slow)
        for through in waiting:
            through.acquire()

    def _in_turns(self, shared: Sequence[tuple[Guide, int]]) -> Sequence[Sequence[tuple[Guide, int]]]:
        """Groups of equal size. Masks of the last one may be late: each time it is another one."""
        num = -(-len(shared) // _MAX_HERE)
        if num < 2:
            return (shared,) if shared else ()
        size = -(-len(shared) // num)
        groups = [shared[start : start + size] for start in range(0, len(shared), size)]
        self._num_turns += 1
        first = self._num_turns % len(groups)
        return (*groups[first:], *groups[:first])

    def _put(self, shared: Sequence[tuple[Guide, int]], alone: Sequence[Guide], told_s: float = 0.0) -> None:
        if not shared and not alone:
            return
        self._start()
        quick = [guide for guide in alone if not guide.is_slow]
        size = min(_MAX_GROUP, max(_MIN_GROUP, -(-len(shared) // self._num_threads)))
        for start in range(0, len(shared), size):
            self._quick.put((shared[start : start + size], (), told_s))
        size = max(_MIN_GROUP, -(-len(quick) // self._num_threads))
        for start in range(0, len(quick), size):
            self._quick.put(((), quick[start : start + size], told_s))
        for guide in alone:
            if guide.is_slow:
                self._slow.put(((), [guide], told_s))

    def _start(self) -> None:
        with self._starting:
            if self._has_started:
                return
            self._has_started = True
        hand_over_quickly()
        for queue, count in ((self._quick, self._num_threads), (self._slow, _SLOW_THREADS)):
            for number in range(count):
                # Not joined at exit: a library that is stuck in a mask must not keep the process alive.
                args = (queue, self._quick, self._slow)
                threading.Thread(target=_work, args=args, name=f"masks-{number}", daemon=True).start()
        for _ in range(_GROUP_THREADS):
            of_groups = (self._groups, self._quick, self._slow)
            threading.Thread(target=_work_on_groups, args=of_groups, name="masks-groups", daemon=True).start()


def hand_over_quickly() -> None:
    """Threads of this process that compute in Python leave the interpreter to others that want it after a moment."""
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))


def _work(queue: SimpleQueue[_Job], quick: SimpleQueue[_Job], slow: SimpleQueue[_Job]) -> None:
    if queue is slow:
        # Of this thread alone, on Linux: bombs take the cores that nothing else wants.
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _SLOW_NICE)
    while True:
        shared, alone, told_s = queue.get()
        _run_safely(shared, alone, told_s, quick, slow)


def _work_on_groups(queue: SimpleQueue[_Groups], quick: SimpleQueue[_Job], slow: SimpleQueue[_Job]) -> None:
    while True:
        groups, told_s, through = queue.get()
        try:
            _run_groups(groups, told_s, quick, slow)
        finally:
            through.release()


def _run_groups(
    groups: Sequence[Sequence[tuple[Guide, int]]], told_s: float, quick: SimpleQueue[_Job], slow: SimpleQueue[_Job]
) -> None:
    for group in groups:
        _run_safely(group, (), told_s, quick, slow)


def _run_safely(
    shared: Sequence[tuple[Guide, int]],
    alone: Sequence[Guide],
    told_s: float,
    quick: SimpleQueue[_Job],
    slow: SimpleQueue[_Job],
) -> None:
    """As run_together(). What nobody foresaw ends these outputs, and not the thread that all others need."""
    try:
        left = run_together(shared, alone, told_s)
        for guide in left.slow:
            slow.put(((), [guide], 0.0))
        for start in range(0, len(left.growing), _MIN_GROUP):
            quick.put(((), left.growing[start : start + _MIN_GROUP], 0.0))
    except Exception as error:
        log.exception("masks_failed", rows=len(shared) + len(alone))
        Guide.fail_all([*(guide for guide, _ in shared), *alone], error)


def _dealt(groups: Sequence[Sequence[tuple[Guide, int]]], num: int) -> Sequence[Sequence[Sequence[tuple[Guide, int]]]]:
    """The groups of each of at most `num` threads, one after the other; the first has some, or there are none."""
    return [groups[first::num] for first in range(max(1, min(num, len(groups))))]
