"""Compiled grammars by source: a cache in front of a few compiler processes, with limits on time, memory and size."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.guided.backend import installed_format
from radixmesh.daemons.runtime.guided.source import GrammarSource, invalid_grammar
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.tokenizer.grammar.processes import CompilerProcess, CompilerProcessEnded
from radixmesh.daemons.tokenizer.grammar.tenant_turns import TenantTurns

log = get_logger(__name__)

# Artefacts in the cache: small ones take more memory than their bytes.
_MAX_KEPT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarLimits:
    """Of one compilation: seconds on its process, bytes of memory beyond the process's own, bytes of its artefact.

    max_waiting: compilations that wait for a process before others are refused, three quarters of them of one tenant.
    cache_bytes: artefacts that are kept.
    """

    num_processes: int = 1
    timeout_s: float = 5.0
    memory_bytes: int = 1 << 30
    artefact_bytes: int = 8 << 20
    max_waiting: int = 64
    cache_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class Artefact:
    """hash: SHA-256 (hex) of data. is_cached: it was compiled before."""

    hash: str
    data: bytes
    is_cached: bool = False


@dataclass(slots=True, eq=False)
class _Job:
    """num_waiting: callers. has_begun: it has a process. tenant: of the first caller."""

    task: asyncio.Task[Artefact]
    tenant: str
    num_waiting: int = 0
    has_begun: bool = False


class GrammarCompiler:
    """On the event loop. format: of the artefacts; "" = the library is not installed.

    A process starts with the first grammar: it imports torch, seconds and hundreds of MiB that others do not need.
    """

    def __init__(self, folder: Path, backend: str, limits: GrammarLimits) -> None:
        self.format = installed_format(backend)
        self._folder = folder
        self._backend = backend
        self._limits = limits
        self._turns = TenantTurns(limits.num_processes)
        self._idle: list[CompilerProcess] = []
        self._artefacts: OrderedDict[str, Artefact] = OrderedDict()
        self._num_bytes = 0
        self._running: dict[str, _Job] = {}
        self._is_closed = False

    async def compile(self, source: GrammarSource, timeout_s: float = 0.0, *, tenant: str = "") -> Artefact:
        """timeout_s: 0 = the daemon's own limit, which is the most. Equal sources that come at once are compiled once;
        tenants take turns.

        Raises UNSUPPORTED, INVALID_GRAMMAR (wrong, or beyond a limit), OVERLOADED, or NOT_SERVING where no process can
        be started.
        """
        if not self.format:
            message = f"{self._backend} is not installed beside this tokenizer: leave the constraint out"
            raise MeshError(ErrorReason.ERROR_REASON_UNSUPPORTED, message, {"feature": "grammar"})
        digest = source.digest
        known = self._artefacts.get(digest)
        if known is not None:
            self._artefacts.move_to_end(digest)
            return known
        job = self._running.get(digest)
        if job is None:
            self._require_room(tenant)
            most_s = min(timeout_s or self._limits.timeout_s, self._limits.timeout_s)
            job = self._running[digest] = _Job(
                asyncio.create_task(self._compile(source, digest, most_s, tenant)), tenant
            )
            job.task.add_done_callback(lambda _: self._ended(digest, job))
        job.num_waiting += 1
        try:
            # A client that leaves does not take the others' compilation with it.
            return await asyncio.shield(job.task)
        finally:
            job.num_waiting -= 1
            if not job.num_waiting and not job.has_begun:
                # Nobody waits for it any more: those behind it need not wait for it either.
                self._ended(digest, job)
                job.task.cancel()

    @property
    def pids(self) -> list[int]:
        """Of the processes that wait for a grammar."""
        return [process.pid for process in self._idle]

    def close(self) -> None:
        self._is_closed = True
        for process in self._idle:
            process.close()
        self._idle = []

    def _require_room(self, tenant: str) -> None:
        """Raises OVERLOADED."""
        most, num_own = self._limits.max_waiting, sum(job.tenant == tenant for job in self._running.values())
        if len(self._running) >= most or num_own >= -(-3 * most // 4):
            message = (
                f"{len(self._running)} grammars wait to be compiled, {num_own} of them of this tenant: retry later, or "
                "on another replica"
            )
            raise MeshError(ErrorReason.ERROR_REASON_OVERLOADED, message, {"retry_after_ms": "500"})

    def _ended(self, digest: str, job: _Job) -> None:
        if self._running.get(digest) is job:
            del self._running[digest]
        if job.task.done() and not job.task.cancelled():
            job.task.exception()  # Read, though all who waited may have left.

    async def _compile(self, source: GrammarSource, digest: str, timeout_s: float, tenant: str) -> Artefact:
        async with self._turns.turn(tenant):
            self._running[digest].has_begun = True
            data = await self._by_process(source, timeout_s)
        artefact = Artefact(await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest()), data)
        self._keep(digest, artefact)
        return artefact

    async def _by_process(self, source: GrammarSource, timeout_s: float) -> bytes:
        """A process may have been killed by somebody else: what ends two of them is the grammar."""
        try:
            return await self._once(source, timeout_s)
        except CompilerProcessEnded:
            log.warning("grammar_compiler_ended", form=source.form.value, num_bytes=len(source.text))
        try:
            return await self._once(source, timeout_s)
        except CompilerProcessEnded as error:
            message = f"compiling the {source.form.value} takes too much memory or recursion: simplify it"
            raise invalid_grammar(message, "memory") from error

    async def _once(self, source: GrammarSource, timeout_s: float) -> bytes:
        process = await self._take_process()
        is_whole = False
        try:
            async with asyncio.timeout(timeout_s):
                data = await process.compile(source, self._limits.artefact_bytes)
            is_whole = True
            return data
        except MeshError as error:
            # After a bound it keeps the memory that it took, and the rest of its answer.
            is_whole = error.metadata.get("limit") not in ("memory", "artefact_bytes")
            raise
        except TimeoutError as error:
            message = f"the {source.form.value} is not compiled within {timeout_s:g} s: simplify it"
            raise invalid_grammar(message, "time") from error
        finally:
            if is_whole and not self._is_closed:
                self._idle.append(process)
            else:
                process.close()

    async def _take_process(self) -> CompilerProcess:
        while self._idle:
            process = self._idle.pop()
            if process.is_alive:
                return process
            process.close()
        return await self._started()

    async def _started(self) -> CompilerProcess:
        limits = self._limits
        return await CompilerProcess.start(self._folder, self._backend, limits.memory_bytes, limits.timeout_s)

    def _keep(self, digest: str, artefact: Artefact) -> None:
        self._artefacts[digest] = Artefact(artefact.hash, artefact.data, is_cached=True)
        self._num_bytes += len(artefact.data)
        while self._num_bytes > self._limits.cache_bytes or len(self._artefacts) > _MAX_KEPT:
            _, dropped = self._artefacts.popitem(last=False)
            self._num_bytes -= len(dropped.data)
