"""Replaces the processes of a cluster, one step after the other: try, leave, start, wait until ready."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

from radixmesh.daemons.cluster.errors import RollAbortedError, RollRefusedError
from radixmesh.daemons.cluster.plan import ProcessSpec
from radixmesh.daemons.cluster.processes.process_status import ProcessState, ProcessStatus
from radixmesh.daemons.cluster.processes.process_supervisor import ProcessSupervisor
from radixmesh.daemons.cluster.roll.roll_plan import RollStep, hurry_s_of, is_alone, is_tried

# Peers dial again within 1.25 s, and a front asks its routers once a second: before the next replica leaves, this one
# has to be known again.
_SETTLE_S = 2.0
# Ends of a process in a row before it has served, after which the roll gives up.
_MOST_ENDS = 3
_LAST_LINES = 5
_POLL_S = 0.02


class RollEvent(NamedTuple):
    """Progress of one process: `trying`, `tried`, `leaving`, `starting`, `ready`, `restoring`; seconds in that state's
    past: of the spare process, of leaving, and from leaving to ready."""

    process: str
    what: str
    seconds: float = 0.0


class Cluster(Protocol):
    """The cluster as a roll uses it."""

    @property
    def processes(self) -> tuple[ProcessStatus, ...]: ...

    def supervisor(self, service: str, replica: int) -> ProcessSupervisor: ...

    def spare(self, spec: ProcessSpec) -> Awaitable[ProcessSupervisor]:
        """A supervisor of a process as `spec` says on other ports, not begun yet."""
        ...


class Roller:
    """run(), once. ready_s: how long a process may take until it serves. is_trying: whether new processes are tried
    beside the old ones first. end(): no further step begins."""

    def __init__(
        self,
        cluster: Cluster,
        steps: Sequence[RollStep],
        *,
        ready_s: float,
        is_trying: bool,
        on_event: Callable[[RollEvent], None],
    ) -> None:
        self._cluster = cluster
        self._steps = steps
        self._ready_s = ready_s
        self._is_trying = is_trying
        self._on_event = on_event
        self._replaced: list[str] = []
        self._is_ending = False

    def end(self) -> None:
        self._is_ending = True

    async def run(self) -> list[str]:
        """Names of the processes that were replaced.

        Raises RollRefusedError if something is not healthy to begin with, RollAbortedError if a new process does not
        serve in time: it says what was replaced and what serves.
        """
        if unwell := self._unwell():
            raise RollRefusedError(f"not healthy: {', '.join(unwell)}; a roll starts from a cluster that serves")
        tried: set[str] = set()
        for step in self._steps:
            if self._is_ending:
                raise RollAbortedError(f"ended as asked; {self._told()}")
            for spec in step.specs:
                if self._is_trying and spec.service not in tried and is_tried(spec):
                    await self._try(spec)
                tried.add(spec.service)
            await self._wait_until_all_serve()
            await self._replace(step)
            if not all(is_alone(spec, self._others()) for spec in step.specs) and step is not self._steps[-1]:
                await asyncio.sleep(_SETTLE_S)
        return self._replaced

    async def _try(self, spec: ProcessSpec) -> None:
        self._on_event(RollEvent(spec.name, "trying"))
        started = time.monotonic()
        spare = await self._cluster.spare(spec)
        spare.begin(waits=False)
        try:
            problem = await self._problem_of(spare)
        finally:
            await spare.stop()
        if problem:
            raise RollAbortedError(
                f"the new {spec.name} does not serve: {problem}\nthe old one was left as it is; {self._told()}"
            )
        self._on_event(RollEvent(spec.name, "tried", time.monotonic() - started))

    async def _wait_until_all_serve(self) -> None:
        """Waits until processes that have died meanwhile serve again: only then may the next one leave."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._ready_s):
                while self._unwell():  # noqa: ASYNC110 - supervisors tell of changes by their state only.
                    await asyncio.sleep(_POLL_S)
        if unwell := self._unwell():
            raise RollAbortedError(f"not healthy: {', '.join(unwell)}; {self._told()}")

    def _unwell(self) -> list[str]:
        return [status.name for status in self._cluster.processes if status.state is not ProcessState.HEALTHY]

    async def _replace(self, step: RollStep) -> None:
        supervisors = [self._cluster.supervisor(spec.service, spec.replica) for spec in step.specs]
        old = [supervisor.spec for supervisor in supervisors]
        began = time.monotonic()
        for supervisor in supervisors:
            self._on_event(RollEvent(supervisor.spec.name, "leaving"))
            await supervisor.stop(hurry_s=hurry_s_of(supervisor.spec, self._others()))
        left = time.monotonic()
        for supervisor, spec in zip(reversed(supervisors), reversed(step.specs), strict=True):
            self._on_event(RollEvent(spec.name, "starting", left - began))
            supervisor.begin_again(spec)
            if problem := await self._problem_of(supervisor):
                told = await self._restore(supervisors, old)
                raise RollAbortedError(f"the new {spec.name} does not serve: {problem}\n{told}; {self._told()}")
            self._on_event(RollEvent(spec.name, "ready", time.monotonic() - began))
        self._replaced += [spec.name for spec in step.specs]

    async def _restore(self, supervisors: Sequence[ProcessSupervisor], old: Sequence[ProcessSpec]) -> str:
        """Starts what was stopped with the settings that it had; what came of it, in words."""
        told = []
        for supervisor, spec in zip(reversed(supervisors), reversed(old), strict=True):
            self._on_event(RollEvent(spec.name, "restoring"))
            await supervisor.stop()
            supervisor.begin_again(spec)
            problem = await self._problem_of(supervisor)
            told.append(f"{spec.name} {'does not serve either' if problem else 'serves with its old settings again'}")
        return ", ".join(told)

    async def _problem_of(self, supervisor: ProcessSupervisor) -> str:
        """Waits until a process is healthy; else why it is not, with what it printed last."""
        before = supervisor.status.restarts
        with suppress(TimeoutError):
            async with asyncio.timeout(self._ready_s):
                while True:
                    status = supervisor.status
                    if status.state is ProcessState.HEALTHY:
                        return ""
                    if status.state is ProcessState.ENDED or status.restarts - before >= _MOST_ENDS:
                        break
                    await asyncio.sleep(_POLL_S)
        status = supervisor.status
        why = supervisor.gave_up or f"{status.state.value} {status.detail}".rstrip()
        return "\n  ".join((why, *supervisor.recent_lines[-_LAST_LINES:]))

    def _others(self) -> list[ProcessSpec]:
        """Processes that serve now."""
        return [
            self._cluster.supervisor(status.service, status.replica).spec
            for status in self._cluster.processes
            if status.state is ProcessState.HEALTHY
        ]

    def _told(self) -> str:
        left = [spec.name for step in self._steps for spec in step.specs if spec.name not in self._replaced]
        return f"replaced: {', '.join(self._replaced) or 'nothing'}; not replaced: {', '.join(left) or 'nothing'}"
