"""The client processes of a run, and what they have told of themselves so far."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import TracebackType

from hop_ladder.processes import ROOT

from endurance.client import Tick
from endurance.load import LoadMix

_SHIM = ROOT / "daemons" / "cluster" / "processes" / "die_with_parent.py"
_CLIENT = Path(__file__).with_name("client.py")
# A line may hold many pauses.
_MAX_LINE_BYTES = 1 << 26


class ClientProcesses:
    """An async context manager: starts the processes, and kills what is left of them.

    failures: what went wrong, in words. until: monotonic time after which no request begins.
    """

    def __init__(
        self, folder: Path, router: str, mix: LoadMix, *, num_streams: int, num_processes: int, until: float
    ) -> None:
        self._folder = folder
        self._router = router
        self._mix = mix
        self._until = until
        self._shares = [num_streams // num_processes] * num_processes
        for number in range(num_streams % num_processes):
            self._shares[number] += 1
        self._processes: list[asyncio.subprocess.Process] = []
        self._reading: list[asyncio.Task[None]] = []
        self._last: dict[int, Tick] = {}
        self._is_over = False
        self.failures: list[str] = []
        self.pauses: list[tuple[float, float, int]] = []
        """(from, to, 1 if before the first token), on the monotonic clock."""

    async def __aenter__(self) -> ClientProcesses:
        for number, share in enumerate(self._shares):
            self._processes.append(await self._spawn(number, share))
        self._reading = [
            asyncio.create_task(self._read(number, process)) for number, process in enumerate(self._processes)
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over = True
        for process in self._processes:
            if process.returncode is None:
                process.kill()
        await asyncio.gather(*self._reading, return_exceptions=True)

    @property
    def counts(self) -> Counter[str]:
        """Requests by how they ended, tokens, kinds: of all processes."""
        total: Counter[str] = Counter()
        for tick in self._last.values():
            total.update(tick["counts"])
        return total

    @property
    def num_open(self) -> int:
        """Requests that had not ended when their process last spoke."""
        return sum(tick["num_open"] for tick in self._last.values())

    @property
    def oldest(self) -> list[str]:
        """Some of those that are open, in words."""
        return [words for tick in self._last.values() for words in tick["oldest"]]

    @property
    def answers(self) -> dict[str, Counter[str]]:
        """Probe -> how often which answer came."""
        merged: dict[str, Counter[str]] = {}
        for tick in self._last.values():
            for probe, seen in tick["answers"].items():
                merged.setdefault(probe, Counter()).update(seen)
        return merged

    def longest_pause(self, since: float, until: float, *, before_first: bool) -> float:
        """Longest of the pauses that ended in [since, until), before or behind the first token."""
        lengths = [b - a for a, b, is_first in self.pauses if since <= b < until and is_first == before_first]
        return round(max(lengths, default=0.0), 3)

    async def ended(self, timeout_s: float) -> bool:
        """True if every process came to its end within that time."""
        _, late = await asyncio.wait(self._reading, timeout=timeout_s)
        return not late

    async def _spawn(self, number: int, share: int) -> asyncio.subprocess.Process:
        arguments = {
            "router": self._router,
            "streams": share,
            "number": number,
            "until": self._until,
            "mix": json.dumps(self._mix.fields()),
        }
        command = [sys.executable, "-IS", str(_SHIM), str(os.getpid()), sys.executable, str(_CLIENT)]
        for name, value in arguments.items():
            command += [f"--{name}", str(value)]
        with (self._folder / f"client-{number}.log").open("wb") as log:
            return await asyncio.create_subprocess_exec(
                *command,
                env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=log,
                limit=_MAX_LINE_BYTES,
            )

    async def _read(self, number: int, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            tick: Tick = json.loads(line)
            self._last[number] = tick
            self.failures += tick["failures"]
            self.pauses += [(a, b, is_first) for a, b, is_first in tick["pauses"]]
        code = await process.wait()
        if self._is_over:
            return  # Killed with requests open: num_open tells of those.
        if code or number not in self._last or not self._last[number]["is_last"]:
            log = (self._folder / f"client-{number}.log").read_text()[-2000:]
            self.failures.append(f"client process {number} ended with {code}: {log}")
