"""When a process counts as hung, and how soon it is started again."""

import os
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixmesh.daemons.cluster.compose.compose import HealthCheck
from radixmesh.daemons.cluster.processes.backoff import RestartBackoff
from radixmesh.daemons.cluster.processes.cpu_starvation import CpuStarvation
from radixmesh.daemons.cluster.processes.exits import MemoryKills, end_of
from radixmesh.daemons.cluster.processes.hang_detector import HangDetector, Liveness, ProbeAnswer
from radixmesh.daemons.runtime.common_settings import PredecessorEnd

SERVING, NOT_SERVING = ProbeAnswer.SERVING, ProbeAnswer.NOT_SERVING
SILENT, REFUSED, DRAINING = ProbeAnswer.SILENT, ProbeAnswer.REFUSED, ProbeAnswer.DRAINING


def make_detector():
    """Checks every second, five seconds of window, ten of start period, twenty to stop."""
    check = HealthCheck(container_port=1, start_period_s=10.0)
    return HangDetector(check, window_s=5.0, stop_grace_s=20.0)


def seconds_until_hung(detector, answer, *, excused=False, limit=100):
    for second in range(1, limit + 1):
        if detector.observe(answer, elapsed_s=1.0, excused=excused) is Liveness.HUNG:
            return second
    return None


@pytest.mark.parametrize(
    ("answer", "excused", "expected"),
    [
        (SILENT, False, 5),
        (SILENT, True, 5),
        (NOT_SERVING, False, 5),
        (NOT_SERVING, True, None),
        (DRAINING, False, 20),
        (REFUSED, False, 20),
    ],
)
def test_time_to_be_found_hung_after_serving(answer, excused, expected):
    detector = make_detector()
    assert detector.observe(SERVING, elapsed_s=1.0, excused=False) is Liveness.HEALTHY
    assert seconds_until_hung(detector, answer, excused=excused) == expected


@pytest.mark.parametrize(("answer", "expected"), [(SILENT, 15), (REFUSED, 15), (NOT_SERVING, None)])
def test_time_to_be_found_hung_before_serving(answer, expected):
    assert seconds_until_hung(make_detector(), answer) == expected


def test_one_good_answer_clears_everything():
    detector = make_detector()
    for _ in range(20):
        detector.observe(SERVING, elapsed_s=1.0, excused=False)
        assert [detector.observe(SILENT, elapsed_s=1.0, excused=False) for _ in range(4)] == [Liveness.UNWELL] * 4


def test_a_pause_of_the_supervisor_is_not_one_of_the_process():
    detector = make_detector()
    detector.observe(SERVING, elapsed_s=1.0, excused=False)
    assert detector.observe(SILENT, elapsed_s=3600.0, excused=False) is Liveness.UNWELL


@pytest.mark.parametrize(
    ("starved_s", "expected"),
    [
        (0.0, 5),
        (0.5, 10),
        (0.75, 20),
        (1.0, 25),  # A process that hangs while it computes waits for a CPU too, and is found in the end.
        (7.0, 25),
    ],
)
def test_time_without_a_cpu_does_not_count(starved_s, expected):
    detector = make_detector()
    detector.observe(SERVING, elapsed_s=1.0, excused=False)
    num_checks = 1
    while detector.observe(SILENT, elapsed_s=1.0, excused=False, starved_s=starved_s) is not Liveness.HUNG:
        num_checks += 1
    assert num_checks in (expected, expected + 1), "sums of floats"


def test_a_busy_process_without_a_cpu_starves_and_a_stopped_one_does_not():
    cpu = min(os.sched_getaffinity(0))
    endless = [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{cpu}}})\nwhile True: pass"]
    processes = [subprocess.Popen(endless) for _ in range(3)]
    try:
        starved = CpuStarvation(processes[0].pid)
        stopped = CpuStarvation(processes[1].pid)
        started = time.monotonic()
        while starved.take_s() < 0.05:  # Until they run at all.
            assert time.monotonic() - started < 60
            time.sleep(0.1)
        processes[1].send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, processes[1].pid, os.WSTOPPED | os.WNOWAIT)  # It stops when it next gets the CPU.
        stopped.take_s()
        started, starved_s = time.monotonic(), starved.take_s()
        time.sleep(1.0)
        starved_s, waited_s = starved.take_s(), time.monotonic() - started
        assert 0.1 * waited_s < starved_s < 1.2 * waited_s
        assert stopped.take_s() == 0.0
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_process_that_is_gone_does_not_starve():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert CpuStarvation(process.pid).take_s() == 0.0


def test_backoff_doubles_to_its_limit_and_starts_over_after_a_stable_run():
    backoff = RestartBackoff(initial_s=0.1, max_s=5.0, stable_s=1.0)
    pauses = [backoff.pause_after(0.5) for _ in range(8)]
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])
    assert [backoff.pause_after(1.0), backoff.pause_after(0.0)] == pytest.approx([0.1, 0.2])


@given(st.lists(st.floats(0, 10), min_size=1, max_size=50))
def test_backoff_stays_between_its_limits(healthy_times):
    backoff = RestartBackoff()
    assert all(0.1 <= backoff.pause_after(healthy_s) <= 5.0 for healthy_s in healthy_times)


@pytest.mark.parametrize(
    ("exit_code", "memory_was_short", "expected"),
    [
        (-signal.SIGKILL, False, PredecessorEnd.FROM_OUTSIDE),
        (-signal.SIGKILL, True, PredecessorEnd.UNKNOWN),  # A request that eats all memory must still be found.
        (-signal.SIGTERM, True, PredecessorEnd.FROM_OUTSIDE),
        (-signal.SIGSEGV, False, PredecessorEnd.BY_ITSELF),
        (-signal.SIGABRT, False, PredecessorEnd.BY_ITSELF),
        (0, False, PredecessorEnd.FROM_OUTSIDE),
        (4, False, PredecessorEnd.FROM_OUTSIDE),
        (1, False, PredecessorEnd.BY_ITSELF),
    ],
)
def test_the_cause_of_an_end(exit_code, memory_was_short, expected):
    assert end_of(exit_code, memory_was_short=memory_was_short) is expected


def test_kills_for_want_of_memory_are_seen_in_the_kernels_count(tmp_path, monkeypatch):
    count = tmp_path / "vmstat"
    monkeypatch.setattr("radixmesh.daemons.cluster.processes.exits._VMSTAT", count)
    assert MemoryKills().has_happened(), "where nobody counts it cannot be told"
    count.write_text("pgfault 7\noom_kill 3\n")
    kills = MemoryKills()
    assert not kills.has_happened()
    count.write_text("pgfault 8\noom_kill 4\n")
    assert kills.has_happened()
