"""A process of clients: keeps streams open at a router, checks what comes, and says so in lines of JSON.

    python bench/endurance/client.py --router ADDRESS --streams 32 --number 0 --until MONOTONIC --mix JSON

A line every two seconds and one at the end, when the last stream has ended: totals since the start, and the pauses
since the line before. It begins no requests after `until`, and never gives up on one that it has begun.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys
import time
from array import array
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

sys.path.insert(0, str(Path(__file__).parents[1]))

from endurance.load import Ending, Job, LoadMix, RequestMaker
from radixmesh.client import AsyncClient
from radixmesh.client.async_client import AsyncStream
from radixmesh.client.results import Chunk

_TICK_S = 2.0
# Shorter pauses are not told of.
_PAUSE_S = 0.25
_MAX_FAILURES = 50
_NUM_OLDEST = 3


class Tick(TypedDict):
    """One line. counts: requests by how they ended, totals. pauses: [from, to, 1 if before the first token] on the
    monotonic clock. oldest: some of the open requests, in words. answers: probe -> how often which answer came."""

    number: int
    counts: dict[str, int]
    failures: list[str]
    pauses: list[tuple[float, float, int]]
    num_open: int
    oldest: list[str]
    answers: dict[str, dict[str, int]]
    is_last: bool


@dataclass(slots=True)
class Reading:
    """Outcome of one request."""

    job: Job
    ids: list[array[int]]
    text: str = ""
    is_ended: list[bool] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, job: Job) -> Reading:
        return cls(job, [array("i") for _ in range(job.num_outputs)], is_ended=[False] * job.num_outputs)

    @property
    def num_tokens(self) -> int:
        return sum(len(ids) for ids in self.ids)

    def add(self, chunk: Chunk) -> None:
        self.ids[chunk.index].extend(chunk.ids)
        self.text += chunk.text
        if chunk.finish is not None:
            self.is_ended[chunk.index] = True
            self.reasons.append(chunk.finish.reason)

    def fault(self, vocab_size: int) -> str:
        """Faults of a request that came to its end by itself; empty = none."""
        if not all(self.is_ended) or set(self.reasons) != {"length"}:
            return f"ended with {self.reasons}"
        lengths = [len(ids) for ids in self.ids]
        if lengths != [self.job.out_len] * self.job.num_outputs:
            return f"{lengths} tokens instead of {self.job.out_len}"
        if any(not 0 <= token < vocab_size for ids in self.ids for token in ids):
            return "a token that is not in the vocabulary"
        return ""

    def digest(self) -> str:
        return hashlib.sha256(self.ids[0].tobytes() + self.text.encode()).hexdigest()[:16]


class Clients:
    """`num_streams` requests at a time. Positions are checked by the client itself: a gap or repetition raises."""

    def __init__(self, client: AsyncClient, mix: LoadMix, *, number: int, num_streams: int, until: float) -> None:
        self._client = client
        self._mix = mix
        self._make = RequestMaker(mix, number)
        self._number = number
        self._num_streams = num_streams
        self._until = until
        self._counts: Counter[str] = Counter()
        self._failures: list[str] = []
        self._pauses: list[tuple[float, float, int]] = []
        self._answers: dict[int, Counter[str]] = {}
        self._open: dict[AsyncStream, tuple[float, Reading]] = {}
        """Oldest first."""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            ticking = group.create_task(self._tick())
            await asyncio.gather(*(self._stream() for _ in range(self._num_streams)))
            ticking.cancel()
        self._say(is_last=True)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._say(is_last=False)

    def _say(self, *, is_last: bool) -> None:
        now, answers = time.monotonic(), {str(probe): dict(seen) for probe, seen in self._answers.items()}
        oldest = list(self._open.items())[:_NUM_OLDEST]
        tick = Tick(
            number=self._number,
            counts=dict(self._counts),
            failures=self._failures,
            pauses=self._pauses,
            num_open=len(self._open),
            oldest=[
                f"{_name(reading.job, stream)}, {now - since:.0f} s, {reading.num_tokens} tokens"
                for stream, (since, reading) in oldest
            ],
            answers=answers,
            is_last=is_last,
        )
        print(json.dumps(tick), flush=True)
        self._failures, self._pauses = [], []

    async def _stream(self) -> None:
        while time.monotonic() < self._until:
            job = self._make.next()
            self._counts["begun"] += 1
            self._counts[f"kind {job.kind}"] += 1
            stream, reading = self._client.generate(job.prompt, **job.options), Reading.of(job)
            self._open[stream] = (time.monotonic(), reading)
            try:
                fault = await self._run(job, stream, reading)
            except Exception as error:  # Whatever it is, it is the finding.
                fault = repr(error)
            finally:
                del self._open[stream]
                self._counts["resumed"] += stream.num_resumptions
            if fault:
                self._fail(job, stream, fault)

    async def _run(self, job: Job, stream: AsyncStream, reading: Reading) -> str:
        """Faults that were found; empty = none."""
        try:
            async with asyncio.timeout(job.leave_after if job.ending is Ending.HANG_UP else None):
                return await self._read(job, stream, reading)
        except TimeoutError:
            if job.ending is not Ending.HANG_UP:
                raise
            self._counts["aborted"] += 1
            return ""
        finally:
            self._counts["tokens"] += reading.num_tokens
            await stream.aclose()

    async def _read(self, job: Job, stream: AsyncStream, reading: Reading) -> str:
        last, abort = time.monotonic(), None
        async for chunk in stream:
            now = time.monotonic()
            if now - last > _PAUSE_S:
                self._pauses.append((round(last, 3), round(now, 3), int(not reading.num_tokens)))
            last = now
            reading.add(chunk)
            if abort is None and not all(reading.is_ended) and 0 < job.leave_after <= reading.num_tokens:
                if job.ending is Ending.CANCEL:
                    self._counts["aborted"] += 1
                    return ""
                if job.ending is Ending.ABORT:
                    abort = asyncio.create_task(self._client.abort(stream.request_id))
        outcome = await abort if abort is not None else ""
        if "abort" in reading.reasons:
            self._counts["aborted"] += 1
            return "" if outcome == "found" else f"Abort said {outcome!r} of a request that it ended"
        fault = reading.fault(self._mix.vocab_size)
        if not fault:
            self._finished(job, stream, reading)
        return fault

    def _finished(self, job: Job, stream: AsyncStream, reading: Reading) -> None:
        self._counts["finished"] += 1
        if job.probe >= 0:
            self._answers.setdefault(job.probe, Counter())[reading.digest()] += 1
        else:
            self._make.answered(stream.prompt_ids, reading.ids[0])

    def _fail(self, job: Job, stream: AsyncStream, fault: str) -> None:
        self._counts["failed"] += 1
        if self._counts["failed"] <= _MAX_FAILURES:
            self._failures.append(f"{_name(job, stream)}: {fault[:500]}")


def _name(job: Job, stream: AsyncStream) -> str:
    return f"{job.kind} {job.ending.value} {stream.request_id}"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router", required=True)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--until", type=float, required=True, help="on the monotonic clock, which processes share")
    parser.add_argument("--mix", type=json.loads, required=True)
    args = parser.parse_args()
    async with AsyncClient([args.router]) as client:
        clients = Clients(client, LoadMix(**args.mix), number=args.number, num_streams=args.streams, until=args.until)
        await clients.run()


if __name__ == "__main__":
    asyncio.run(main())
