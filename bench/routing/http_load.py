"""Clients of /v1/completions that stream: each sends one round of prompts after the other. As little work a token as
can be."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

_MAX_LINE = 1 << 22


@dataclass
class Record:
    """One request. Seconds from its sending; num_tokens: events with text. is_opening: of those that all clients send
    at once at the beginning."""

    first_s: float = 0.0
    done_s: float = 0.0
    num_tokens: int = 0
    error: str = ""
    is_opening: bool = False


@dataclass
class Outcome:
    """All requests of a run."""

    seconds: float = 0.0
    records: list[Record] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        good = [record for record in self.records if not record.error]
        first = sorted(record.first_s for record in good) or [0.0]
        later = sorted(record.first_s for record in good if not record.is_opening) or [0.0]
        return {
            "tok_s": round(sum(record.num_tokens for record in good) / max(self.seconds, 1e-9), 1),
            "ttft_p50_ms": _quantile_ms(first, 0.5),
            "ttft_p99_ms": _quantile_ms(first, 0.99),
            "later_ttft_p50_ms": _quantile_ms(later, 0.5),
            "later_ttft_p99_ms": _quantile_ms(later, 0.99),
            "requests": len(good),
            "failed": len(self.records) - len(good),
            "seconds": round(self.seconds, 1),
        }


def _quantile_ms(seconds: list[float], share: float) -> int:
    return round(1e3 * seconds[int(share * (len(seconds) - 1))])


Conversation = Iterator[list[tuple[str, int]]]
"""Rounds of one client: prompts that are sent at once, with their output lengths; the next follows their answers."""


async def run_load(host: str, port: int, model: str, conversations: Iterable[Conversation], at_once: int) -> Outcome:
    """`at_once` clients take conversations, one round after the other, until there are none."""
    outcome, rest = Outcome(), iter(conversations)

    async def client() -> None:
        is_opening = True
        for conversation in rest:
            for prompts in conversation:
                answers = (_complete(host, port, model, prompt, num_output) for prompt, num_output in prompts)
                records = await asyncio.gather(*answers)
                for record in records:
                    record.is_opening = is_opening
                outcome.records += records
                is_opening = False

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(at_once)))
    outcome.seconds = time.perf_counter() - started
    return outcome


async def _complete(host: str, port: int, model: str, prompt: str, num_output: int) -> Record:
    record, started = Record(), time.perf_counter()
    body = json.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": num_output,
            "min_tokens": num_output,
            "ignore_eos": True,
            "temperature": 1.0,
            "seed": 1,
            "stream": True,
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    try:
        reader, writer = await asyncio.open_connection(host, port, limit=_MAX_LINE)
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            record.error = status.decode().strip()
        async for line in reader:
            if line.startswith(b"data: {") and b'"choices":[]' not in line:
                if b'"error"' in line[:20]:
                    record.error = line[:200].decode()
                record.first_s = record.first_s or time.perf_counter() - started
                record.num_tokens += 1
            elif line.startswith(b"data: [DONE]"):
                break
        else:
            record.error = record.error or "the stream broke"
        writer.close()
    except OSError as error:
        record.error = str(error)
    # Events may bring several tokens, and the last one brings none: the count that was asked for is what came.
    record.num_tokens = 0 if record.error else num_output
    record.done_s = time.perf_counter() - started
    return record
