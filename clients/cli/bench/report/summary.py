"""A load's figures, out of what was seen of its requests. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from radixmesh.cli.bench.report.request_record import RequestRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Of times in milliseconds; all 0 where there were none."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Distribution:
        ms = 1000 * np.fromiter(seconds, dtype=np.float64)
        if not len(ms):
            return cls(mean=0, p50=0, p90=0, p95=0, p99=0, max=0)
        p50, p90, p95, p99, top = np.percentile(ms, [50, 90, 95, 99, 100]).tolist()
        return cls(mean=float(ms.mean()), p50=p50, p90=p90, p95=p95, p99=p99, max=top)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Of all requests that were sent.

    Rates are per second of duration_s, first sending to last end, and count what failed requests delivered too.
    Distributions are of requests that ended well. ttft_ms: sending to first output. itl_ms: between one delivery and
    the next, whatever it holds. tpot_ms: a request's mean time per output token after the first. e2e_ms: sending to
    end. delay_ms: how much later than planned requests were sent (waiting for a free slot where concurrency is
    bounded; else the generator's own slowness). hit_rate: cached / prompt tokens. is_exact: the server counted the
    tokens, otherwise one per delivery is assumed.
    """

    num_requests: int
    num_done: int
    num_failed: int
    errors: dict[str, int]
    duration_s: float
    requests_per_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    hit_rate: float
    mean_running: float
    max_running: int
    tokens_per_delivery: float
    num_resumptions: int
    is_exact: bool
    ttft_ms: Distribution
    itl_ms: Distribution
    tpot_ms: Distribution
    e2e_ms: Distribution
    delay_ms: Distribution

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def summarise(records: Sequence[RequestRecord]) -> Summary:
    """The figures of requests that were sent and have ended; others are left out."""
    sent = [record for record in records if record.ended]
    done = [record for record in sent if record.is_done]
    duration_s = max((r.ended for r in sent), default=0.0) - min((r.sent for r in sent), default=0.0)
    rate = 1 / duration_s if duration_s > 0 else 0.0
    prompt, cached, output = (
        sum(getattr(record, name) for record in sent) for name in ("prompt_tokens", "cached_tokens", "output_tokens")
    )
    num_deliveries = sum(len(record.deliveries) for record in sent)
    return Summary(
        num_requests=len(sent),
        num_done=len(done),
        num_failed=len(sent) - len(done),
        errors=dict(Counter(record.error for record in sent if record.error).most_common()),
        duration_s=duration_s,
        requests_per_s=len(done) * rate,
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=output,
        prompt_tokens_per_s=prompt * rate,
        output_tokens_per_s=output * rate,
        hit_rate=cached / prompt if prompt else 0.0,
        mean_running=sum(record.e2e_s for record in sent) * rate,
        max_running=_max_running(sent),
        tokens_per_delivery=output / num_deliveries if num_deliveries else 0.0,
        num_resumptions=sum(record.num_resumptions for record in sent),
        is_exact=all(record.is_exact for record in done),
        ttft_ms=Distribution.of(record.ttft_s for record in done if record.ttft_s is not None),
        itl_ms=Distribution.of(gap for record in done for gap in record.gaps_s()),
        tpot_ms=Distribution.of(record.tpot_s for record in done if record.tpot_s is not None),
        e2e_ms=Distribution.of(record.e2e_s for record in done),
        delay_ms=Distribution.of(max(0.0, record.sent - record.due) for record in sent),
    )


def summary_rows(summary: Summary) -> list[tuple[str, ...]]:
    """The table that people read: a name and its figures a row."""
    rows: list[tuple[str, ...]] = []
    for name in ("ttft", "itl", "tpot", "e2e", "delay"):
        d: Distribution = getattr(summary, f"{name}_ms")
        values = (d.mean, d.p50, d.p90, d.p95, d.p99, d.max)
        # Of nothing, where no answer had two tokens, say: no zeros.
        has_some = name == "delay" or d.max > 0
        rows.append((f"{name} (ms)", *(f"{value:.1f}" if has_some else "-" for value in values)))
    return rows


def summary_lines(summary: Summary) -> list[str]:
    """The figures that are no distributions, in sentences; where no request ended well, only that and the reasons."""
    s = summary
    failures = [f"{number} failed: {error}" for error, number in s.errors.items()]
    if not s.num_done:
        return [f"none of {s.num_requests} requests ended well: there is nothing to measure", *failures]
    about = "" if s.is_exact else " (about: the server counted no tokens)"
    lines = [
        f"{s.num_done} of {s.num_requests} requests in {s.duration_s:.2f} s: {s.requests_per_s:.2f} requests/s, "
        f"{s.mean_running:.1f} at a time on average, {s.max_running} at most",
        f"{s.output_tokens} output tokens: {s.output_tokens_per_s:.0f} tokens/s, "
        f"{s.tokens_per_delivery:.2f} per delivery{about}",
        f"{s.prompt_tokens} prompt tokens: {s.prompt_tokens_per_s:.0f} tokens/s, "
        f"{s.cached_tokens} cached: hit rate {100 * s.hit_rate:.1f}%",
    ]
    if s.num_resumptions:
        lines.append(f"{s.num_resumptions} streams were resumed")
    return lines + failures


def _max_running(records: Sequence[RequestRecord]) -> int:
    changes = sorted([(record.sent, 1) for record in records] + [(record.ended, -1) for record in records])
    running = np.cumsum([change for _, change in changes])
    return int(running.max()) if len(running) else 0
