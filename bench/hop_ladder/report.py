"""Samples as figures: medians over rounds, ratios within a round, and how far rounds lie apart.

What else runs on the machine can only slow a round down, so best rounds are compared with best rounds as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from hop_ladder.load import Sample

Figures = dict[str, object]
Rounds = Sequence[Mapping[str, Sample]]
"""By round, then by rung."""


def low_load(rounds: Rounds, baseline: str) -> Figures:
    """Time to first token per rung, and what it adds to the baseline's."""
    figures: Figures = {}
    for name in rounds[0]:
        ttft = [median(samples[name].ttft_ms()) for samples in rounds]
        added = [mine - median(samples[baseline].ttft_ms()) for mine, samples in zip(ttft, rounds, strict=True)]
        figures[name] = {
            "ttft_ms": spread(ttft),
            "added_ttft_ms": spread(added),
            "added_ttft_ms_of_best_rounds": _round(min(ttft) - min(median(s[baseline].ttft_ms()) for s in rounds)),
            "ttft_p99_ms": _round(percentile(sorted(t for s in rounds for t in s[name].ttft_ms()), 0.99)),
            "itl_ms": _latency([t for s in rounds for t in s[name].itl_ms()]),
            "cpu_ms_per_request": _cpu([s[name] for s in rounds], sum(len(s[name].traces) for s in rounds)),
        }
    return figures


def high_load(rounds: Rounds, baseline: str, ideal_tok_s: float) -> Figures:
    """Throughput, ratios to the baseline's, inter-token latency, CPU. ideal_tok_s: of a worker that never idles."""
    figures: Figures = {"ideal_tok_s": _round(ideal_tok_s)}
    for name in rounds[0]:
        samples = [round_[name] for round_ in rounds]
        pairs = [(round_[name], round_[baseline]) for round_ in rounds]
        num_tokens = sum(sample.num_tokens for sample in samples)
        figures[name] = {
            "tok_s": spread([sample.tok_s for sample in samples]),
            "steady_tok_s": spread([sample.steady_tok_s for sample in samples]),
            "tok_s_ratio": spread([mine.tok_s / base.tok_s for mine, base in pairs], 4),
            "steady_ratio": spread([mine.steady_tok_s / base.steady_tok_s for mine, base in pairs], 4),
            "steady_ratio_of_best_rounds": _round(
                max(mine.steady_tok_s for mine, _ in pairs) / max(base.steady_tok_s for _, base in pairs), 4
            ),
            "worker_busy": _round(median(sample.steady_tok_s for sample in samples) / ideal_tok_s, 4),
            "ttft_ms": _latency([t for sample in samples for t in sample.ttft_ms()]),
            "itl_ms": _latency([t for sample in samples for t in sample.itl_ms()]),
            "tokens_per_message": _round(median(sample.coalescing for sample in samples)),
            "cpu_s_per_1000_tokens": _cpu(samples, num_tokens),
            "cores_busy": _round(
                sum(sum(sample.cpu_s.values()) for sample in samples) / sum(sample.wall_s for sample in samples)
            ),
        }
    return figures


def spread(values: Sequence[float], digits: int = 3) -> Figures:
    """Median and extremes over the rounds."""
    low, high = min(values), max(values)
    return {"median": _round(median(values), digits), "min": _round(low, digits), "max": _round(high, digits)}


def percentile(ordered: Sequence[float], share: float) -> float:
    """Of ascending values."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def _latency(values: Sequence[float]) -> Figures:
    ordered = sorted(values)
    return {"p50": _round(percentile(ordered, 0.5)), "p99": _round(percentile(ordered, 0.99))}


def _cpu(samples: Sequence[Sample], num: int) -> Figures:
    """Per 1,000 of whatever `num` counts: seconds per 1,000 tokens, or milliseconds per request."""
    used = {name: sum(sample.cpu_s[name] for sample in samples) for name in samples[0].cpu_s}
    used["all"] = sum(used.values())
    return {name: _round(1000 * seconds / num) for name, seconds in used.items()}


def _round(value: float, digits: int = 3) -> float:
    return round(value, digits)
