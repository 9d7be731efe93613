"""Streams kept open while something happens to the mesh, each compared with its known answer, each pause measured."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

from radixmesh.client import AsyncClient
from radixmesh.client.results import Completion, CompletionOutput
from support.jobs import Job, answers_of


@dataclass(slots=True, kw_only=True)
class StreamLog:
    """One stream's progress: moments (monotonic) of its chunks, and number of chunks before each of its requests."""

    moments: list[float] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)

    def gaps(self, since: float, until: float) -> list[float]:
        """Times between two chunks of the same request, of those that end in [since, until]."""
        firsts = set(self.starts)
        return [
            after - before
            for index, (before, after) in enumerate(itertools.pairwise(self.moments), 1)
            if index not in firsts and since <= after <= until
        ]

    def longest_pause(self, since: float, until: float) -> float:
        """Longest time between two chunks of the same request, of those that touch [since, until]; a request's wait for
        its first chunk is none."""
        firsts = set(self.starts)
        pairs = enumerate(itertools.pairwise([*self.moments, until]), 1)
        return max((b - a for index, (a, b) in pairs if index not in firsts and b >= since and a <= until), default=0.0)

    def longest_gap(self, since: float, until: float) -> float:
        """Longest time without a chunk, of the gaps that touch [since, until]."""
        before = [moment for moment in self.moments if moment < since]
        inside = [moment for moment in self.moments if since <= moment <= until]
        points = [*(before[-1:] or [since]), *inside]
        return max((b - a for a, b in itertools.pairwise(points)), default=until - points[0])


class StreamLoad:
    """`num_streams` streams at a time, each running `jobs` one after the other, from enter to exit.

    failures: what went wrong, in words, as soon as it has; empty is what a test asserts. num_right: tokens of outputs,
    ended or not, that were the answer's. num_tokens: of outputs that ended;
    num_lost and num_repeated: fewer and more of them than the answer has. pause_s: a slow reader's, after each chunk.
    finish_s: how long streams may take to finish their jobs at the end.
    """

    def __init__(
        self,
        client: AsyncClient,
        jobs: Sequence[Job],
        *,
        num_streams: int = 16,
        pause_s: float = 0.0,
        finish_s: float = 180.0,
    ) -> None:
        assert all(job.answers for job in jobs), "a load needs to know every answer"
        self._client = client
        self._jobs = jobs
        self._logs = [StreamLog() for _ in range(num_streams)]
        self._tasks: list[asyncio.Task[None]] = []
        self._is_ending = False
        self._pause_s = pause_s
        self._finish_s = finish_s
        self.failures: list[str] = []
        self.num_completed = 0
        self.num_resumptions = 0
        self.num_right = 0
        self.num_tokens = 0
        self.num_lost = 0
        self.num_repeated = 0

    async def __aenter__(self) -> StreamLoad:
        self._tasks = [asyncio.create_task(self._run(number)) for number in range(len(self._logs))]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.finish()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def finish(self) -> None:
        """Lets every stream finish the job it is at."""
        self._is_ending = True
        _, late = await asyncio.wait(self._tasks, timeout=self._finish_s)
        if late:
            self.failures.append(f"{len(late)} streams made no end within {self._finish_s:g} s")

    async def all_progressed(self, since: float, timeout_s: float = 60.0) -> float:
        """Waits until every stream has had a chunk after `since`; the longest gap of any stream around that time."""

        def waiting() -> list[int]:
            return [number for number, log in enumerate(self._logs) if not log.moments or log.moments[-1] <= since]

        try:
            async with asyncio.timeout(timeout_s):
                while waiting():
                    await asyncio.sleep(0.01)
        except TimeoutError:
            message = f"no news within {timeout_s:g} s of streams {waiting()} of {len(self._logs)}: {self.failures[:3]}"
            raise TimeoutError(message) from None
        return self.longest_gap(since)

    def longest_gap(self, since: float) -> float:
        now = time.monotonic()
        return max(log.longest_gap(since, now) for log in self._logs)

    def longest_pause(self, since: float) -> float:
        """As longest_gap(), without the waits of requests for their first chunks."""
        now = time.monotonic()
        return max(log.longest_pause(since, now) for log in self._logs)

    def gaps(self, since: float, until: float) -> list[float]:
        """Times between two chunks, of all streams, in order of length."""
        return sorted(gap for log in self._logs for gap in log.gaps(since, until))

    def gap_figures(self, since: float) -> dict[str, float]:
        """Milliseconds between two chunks of a stream, from `since` until now."""
        gaps = self.gaps(since, time.monotonic())
        shares = {"p50_ms": 0.5, "p99_ms": 0.99, "max_ms": 1.0}
        return {
            name: round(1e3 * gaps[min(len(gaps) - 1, int(share * len(gaps)))], 1) for name, share in shares.items()
        }

    async def _run(self, number: int) -> None:
        turn = number
        while not self._is_ending:
            job = self._jobs[turn % len(self._jobs)]
            turn += len(self._logs) if len(self._jobs) > len(self._logs) else 1
            await self._run_job(job, self._logs[number])

    async def _run_job(self, job: Job, log: StreamLog) -> None:
        outputs: dict[int, CompletionOutput] = {}
        is_wrong = False
        log.starts.append(len(log.moments))
        stream = self._client.generate(job.prompt, messages=job.messages, **job.options)
        try:
            async for chunk in stream:
                log.moments.append(time.monotonic())
                output = outputs.setdefault(chunk.index, CompletionOutput(index=chunk.index))
                num_before = len(output.ids)
                output.add(chunk)
                wrong = _first_wrong(output, num_before, job)
                if wrong is None:
                    self.num_right += len(output.ids) - num_before
                elif not is_wrong:
                    is_wrong = True
                    self.failures.append(f"{job.name} ({stream.request_id}): got {wrong}")
                if self._pause_s:
                    await asyncio.sleep(self._pause_s)
        except Exception as error:  # Whatever it is, it is the finding.
            self.failures.append(f"{job.name} ({stream.request_id}): {error!r}")
            return
        finally:
            self.num_resumptions += stream.num_resumptions
            await stream.aclose()
        completion = Completion(
            request_id=stream.request_id,
            model=stream.model,
            prompt_ids=stream.prompt_ids,
            outputs=[outputs[index] for index in sorted(outputs)],
        )
        self.num_completed += 1
        got = answers_of(completion)
        for output, answer in zip(got, job.answers, strict=False):
            self.num_tokens += len(output.ids)
            self.num_lost += max(0, len(answer.ids) - len(output.ids))
            self.num_repeated += max(0, len(output.ids) - len(answer.ids))
        if got != job.answers and not is_wrong:
            self.failures.append(f"{job.name} ({stream.request_id}): {_difference(got, job)}")


def _first_wrong(output: CompletionOutput, num_before: int, job: Job) -> str | None:
    """The tokens from num_before on, in words, unless they are the answer's."""
    answer = job.answers[output.index].ids if output.index < len(job.answers) else ()
    new = tuple(output.ids[num_before:])
    wanted = tuple(answer[num_before : len(output.ids)])
    return None if new == wanted else f"{new} at {num_before}, not {wanted}"


def _difference(got: tuple[object, ...], job: Job) -> str:
    if len(got) != len(job.answers):
        return f"{len(got)} outputs, not {len(job.answers)}"
    pairs = [(a, b) for a, b in zip(got, job.answers, strict=True) if a != b]
    return f"got {pairs[0][0]!r}, not {pairs[0][1]!r}"
