"""Offered load and what came of it."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hop_ladder.processes import cpu_s
from hop_ladder.rungs import Prompt, Rung


@dataclass(slots=True)
class Trace:
    """One request: seconds of its start and of each message, tokens of each message."""

    start_s: float
    times_s: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One run of one rung at one load point. cpu_s: by daemon; `client` is this process."""

    traces: Sequence[Trace]
    wall_s: float
    cpu_s: dict[str, float]

    @property
    def num_tokens(self) -> int:
        return sum(sum(trace.counts) for trace in self.traces)

    @property
    def tok_s(self) -> float:
        """From the first submit to the last token."""
        return self.num_tokens / self.wall_s

    @property
    def steady_tok_s(self) -> float:
        """The decode rates of all requests together, each from its first message to its last: no ramp in it."""
        return sum(
            sum(trace.counts[1:]) / (trace.times_s[-1] - trace.times_s[0])
            for trace in self.traces
            if len(trace.counts) > 1
        )

    @property
    def coalescing(self) -> float:
        """Tokens a message."""
        return self.num_tokens / sum(len(trace.times_s) for trace in self.traces)

    def ttft_ms(self) -> list[float]:
        return sorted(1000 * (trace.times_s[0] - trace.start_s) for trace in self.traces)

    def itl_ms(self) -> list[float]:
        """Between the messages of a stream, as a reader sees them."""
        return sorted(
            1000 * (after - before)
            for trace in self.traces
            for before, after in zip(trace.times_s, trace.times_s[1:], strict=False)
        )


async def one_at_a_time(rung: Rung, prompts: Iterator[Prompt], num_requests: int, num_tokens: int) -> Sample:
    """Low load: the next request starts when the one before has ended."""
    return await _measured(rung, [[next(prompts)] for _ in range(num_requests)], num_tokens)


async def all_at_once(rung: Rung, prompts: Iterator[Prompt], num_requests: int, num_tokens: int) -> Sample:
    """All requests start together."""
    return await _measured(rung, [[next(prompts) for _ in range(num_requests)]], num_tokens)


async def _measured(rung: Rung, waves: Sequence[Sequence[Prompt]], num_tokens: int) -> Sample:
    """Waves one after the other, each wave's requests together."""
    pids = {**rung.pids, "client": os.getpid()}
    gc.collect()
    before, start_s = {name: cpu_s(pid) for name, pid in pids.items()}, time.monotonic()
    traces: list[Trace] = []
    for wave in waves:
        traces += await asyncio.gather(*(_one(rung, prompt, num_tokens) for prompt in wave))
    wall_s = time.monotonic() - start_s
    used = {name: cpu_s(pid) - before[name] for name, pid in pids.items()}
    return Sample(traces=traces, wall_s=wall_s, cpu_s=used)


async def _one(rung: Rung, prompt: Prompt, num_tokens: int) -> Trace:
    """Raises RuntimeError unless every token came: a fast answer that lacks some would flatter its rung."""
    trace = Trace(time.monotonic())
    async for message in rung.stream(prompt, num_tokens):
        if message.ids:
            trace.times_s.append(time.monotonic())
            trace.counts.append(len(message.ids))
    if sum(trace.counts) != num_tokens:
        raise RuntimeError(f"{rung.name} gave {sum(trace.counts)} of {num_tokens} tokens")
    return trace
