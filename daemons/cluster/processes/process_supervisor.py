"""Keeps one process of the cluster running: start, check, restart, stop."""

import asyncio
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from radixmesh.daemons.cluster.compose.compose import HealthCheck
from radixmesh.daemons.cluster.errors import SpawnError
from radixmesh.daemons.cluster.plan import ProcessSpec
from radixmesh.daemons.cluster.processes.backoff import RestartBackoff
from radixmesh.daemons.cluster.processes.child_process import ChildProcess
from radixmesh.daemons.cluster.processes.cpu_starvation import CpuStarvation
from radixmesh.daemons.cluster.processes.exits import MemoryKills, end_of, last_words, starts_in_vain
from radixmesh.daemons.cluster.processes.hang_detector import HangDetector, Liveness
from radixmesh.daemons.cluster.processes.health_probe import AlwaysServing, GrpcHealthProbe, HealthProbe, NeverReached
from radixmesh.daemons.cluster.processes.process_status import ProcessState, ProcessStatus
from radixmesh.daemons.runtime.common_settings import PredecessorEnd
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.lifecycle import ExitCode
from radixmesh.daemons.runtime.security.tls_files import TlsFiles
from radixmesh.daemons.runtime.settings import PREFIX

_RECENT_LINES = 200
_STATES = {
    Liveness.STARTING: ProcessState.STARTING,
    Liveness.HEALTHY: ProcessState.HEALTHY,
    Liveness.UNWELL: ProcessState.UNWELL,
}


class ProcessSupervisor:
    """Owns one ProcessSpec and at most one ChildProcess. All methods belong to the event loop's thread.

    `dependencies_ready` is awaited before the first start only: what dies later is restarted at once, whatever the
    state of the others, for every daemon copes with the absence of its peers. `dependencies_healthy` tells whether
    what the process depends on is healthy now.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        *,
        folder: Path,
        hang_window_s: float | None,
        dependencies_ready: Callable[[], Awaitable[None]],
        dependencies_healthy: Callable[[], bool],
        on_line: Callable[[str, str], None],
        on_status: Callable[[ProcessStatus], None],
    ) -> None:
        self.spec = spec
        self._folder = folder
        self._own_hang_window_s = hang_window_s
        self._dependencies_ready = dependencies_ready
        self._dependencies_healthy = dependencies_healthy
        self._on_line = on_line
        self._on_status = on_status
        self._backoff = RestartBackoff()
        self._recent: deque[str] = deque(maxlen=_RECENT_LINES)
        self._child: ChildProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._healthy_since: float | None = None
        self._predecessor_end = PredecessorEnd.UNKNOWN
        self._has_served = False
        self.exit_codes: deque[int] = deque(maxlen=2)
        self.gave_up = ""
        """Why it is not started again, in a sentence; empty = it is."""
        self.status = ProcessStatus(
            service=spec.service,
            replica=spec.replica,
            state=ProcessState.WAITING,
            address=spec.address,
            pid=None,
            restarts=0,
            detail="",
            started_at=None,
        )

    @property
    def recent_lines(self) -> tuple[str, ...]:
        """The last lines that the process printed, over all its runs."""
        return tuple(self._recent)

    @property
    def _check(self) -> HealthCheck:
        return self.spec.health or HealthCheck(container_port=0)

    @property
    def _hang_window_s(self) -> float:
        return self._check.hang_window_s if self._own_hang_window_s is None else self._own_hang_window_s

    def begin(self, *, waits: bool = True) -> None:
        """Starts the supervision in the background. waits: for what the process depends on."""
        assert self._task is None, f"{self.spec.name} is supervised already"
        self._task = asyncio.create_task(self._supervise(waits), name=f"supervise {self.spec.name}")

    def begin_again(self, spec: ProcessSpec) -> None:
        """After stop(): starts the process as `spec` says, and supervises it as one that has not served yet."""
        assert self._child is None, f"{self.spec.name} still runs"
        self.spec = spec
        self._task = None
        self._backoff = RestartBackoff()
        self._healthy_since = None
        self._has_served = False
        self.exit_codes.clear()
        self.gave_up = ""
        # Whatever it was at, it is not why its predecessor ended.
        self._predecessor_end = PredecessorEnd.FROM_OUTSIDE
        self.status = replace(self.status, restarts=self.status.restarts + 1)
        self.begin(waits=False)

    def send_signal(self, number: signal.Signals) -> bool:
        """Signals the process; False if it does not run now."""
        if self._child is None or self._child.exit_code is not None:
            return False
        self._child.send_signal(number)
        return True

    async def stop(self, *, hurry_s: float | None = None) -> None:
        """Ends supervision and process: SIGTERM, the grace period, SIGKILL. Cancelling it kills at once.

        hurry_s: seconds after which a second SIGTERM tells a daemon not to wait for what it has.
        """
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._child is not None:
            try:
                await self._child.stop(self.spec.stop_grace_s, hurry_s)
            except asyncio.CancelledError:
                await self._child.kill()
                raise
            finally:
                self._child = None
                self._enter(ProcessState.STOPPED, "", pid=None)
        else:
            self._enter(ProcessState.STOPPED, "", pid=None)

    async def _supervise(self, waits: bool) -> None:
        try:
            if waits:
                await self._dependencies_ready()
            await self._keep_running()
        except Exception as error:
            # Of the supervision itself. What nobody watches is not left running, and why is said.
            self.gave_up = (
                f"{self.spec.name} is not supervised any more ({type(error).__name__}: {error}): start it anew"
            )
            told = traceback.format_exc()
            if self._child is not None:
                await self._child.kill()
                self._child = None
            with suppress(Exception):  # It may be what those who listen do with a line that has failed.
                for line in told.splitlines():
                    self._take_line(line)
            self._enter(ProcessState.ENDED, "its supervision failed; gave up", pid=None)

    async def _keep_running(self) -> None:
        while True:
            reason, exit_code = await self._run_once()
            self._child = None
            self.exit_codes.append(exit_code)
            if not self._has_served and starts_in_vain(self.spec.argv, tuple(self.exit_codes)):
                self.gave_up = f"{self.spec.name} cannot start, and no restart cures that: {last_words(self._recent)}"
                self._enter(ProcessState.ENDED, f"{reason}; gave up, no restart cures that", pid=None)
                return
            if not self.spec.restart.restarts(exit_code):
                self._enter(ProcessState.ENDED, reason, pid=None)
                return
            healthy_s = 0.0 if self._healthy_since is None else time.monotonic() - self._healthy_since
            self._healthy_since = None
            pause_s = self._backoff.pause_after(healthy_s)
            restarts = self.status.restarts + 1
            self._enter(
                ProcessState.BACKOFF, f"{reason}; restart {restarts} in {pause_s:.1f} s", pid=None, restarts=restarts
            )
            await asyncio.sleep(pause_s)

    async def _run_once(self) -> tuple[str, int]:
        """Runs the process to its end; returns why it ended, in words, and its exit code."""
        try:
            spec = _with_predecessor_end(self.spec, self._predecessor_end)
            memory = MemoryKills()
            self._child = child = await ChildProcess.spawn(spec, self._folder, self._take_line)
        except SpawnError as error:
            return str(error), 1
        self.status = replace(self.status, started_at=time.time())
        self._enter(ProcessState.STARTING, "", pid=child.pid)
        exited = asyncio.create_task(child.wait())
        try:
            async with self._probe() as probe:
                hung = await self._watch(probe, exited, CpuStarvation(child.pid))
            if hung is None:
                self._remember_end(exited.result(), memory)
                return _describe_exit(exited.result()), exited.result()
            self._predecessor_end = PredecessorEnd.BY_ITSELF
            return f"hung: {hung}; killed", await child.kill()
        finally:
            exited.cancel()

    async def _watch(self, probe: HealthProbe, exited: "asyncio.Task[int]", starvation: CpuStarvation) -> str | None:
        """Checks until the process ends (None) or is found hung (what was heard last)."""
        # A check is late as well, and its answer lost, where we are the ones without a CPU.
        own = CpuStarvation(os.getpid())
        detector = HangDetector(self._check, window_s=self._hang_window_s, stop_grace_s=self.spec.stop_grace_s)
        started = previous = time.monotonic()
        pause_s = min(self._check.start_interval_s, 0.05)
        while not (await asyncio.wait([exited], timeout=pause_s))[0]:
            answer = await probe.ask(self._check.timeout_s)
            if exited.done():
                return None
            now = time.monotonic()
            liveness = detector.observe(
                answer,
                elapsed_s=now - previous,
                excused=not self._dependencies_healthy(),
                starved_s=max(starvation.take_s(), own.take_s()),
            )
            previous = now
            if liveness is Liveness.HUNG:
                return f"{answer.value} for {self._hang_window_s:g} s"
            if liveness is Liveness.HEALTHY and self._healthy_since is None:
                self._healthy_since, self._has_served = now, True
            if _STATES[liveness] is not self.status.state:
                detail = f"after {now - started:.1f} s" if liveness is Liveness.HEALTHY else answer.value
                self._enter(_STATES[liveness], detail, pid=self.status.pid)
            pause_s = self._check.start_interval_s if liveness is Liveness.STARTING else self._check.interval_s
        return None

    def _remember_end(self, exit_code: int, memory: MemoryKills) -> None:
        """Keeps what the next run is told of its predecessor.

        A run that was not seen healthy may have worked all the same: its own end counts, but a kill then does not
        excuse the death before it. One that never started has no end worth telling.
        """
        if exit_code in (ExitCode.USAGE, ExitCode.NOT_STARTED):
            return
        end = end_of(exit_code, memory_was_short=memory.has_happened())
        is_excuse = end is PredecessorEnd.FROM_OUTSIDE
        if is_excuse and self._healthy_since is None and self._predecessor_end is PredecessorEnd.BY_ITSELF:
            return
        self._predecessor_end = end

    def _probe(self) -> HealthProbe:
        address = self.spec.address
        if self.spec.health is None or address is None:
            return AlwaysServing()
        try:
            return GrpcHealthProbe(address, TlsFiles.from_environment(self.spec.environment))
        except MeshError as error:  # The process has the same files: it is about to say the same, and leave.
            self._take_line(f"no health check: {error}")
            return NeverReached()

    def _take_line(self, line: str) -> None:
        self._recent.append(line)
        self._on_line(self.spec.name, line)

    def _enter(self, state: ProcessState, detail: str, *, pid: int | None, restarts: int | None = None) -> None:
        restarts = self.status.restarts if restarts is None else restarts
        self.status = replace(self.status, state=state, detail=detail, pid=pid, restarts=restarts)
        self._on_status(self.status)


def _with_predecessor_end(spec: ProcessSpec, end: PredecessorEnd) -> ProcessSpec:
    if end is PredecessorEnd.UNKNOWN:
        return spec
    return replace(spec, environment={**spec.environment, PREFIX + "PREDECESSOR_END": end.value})


def _describe_exit(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"
