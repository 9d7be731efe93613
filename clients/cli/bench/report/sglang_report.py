"""A load's figures under the names of sglang.bench_serving's JSON lines, for tools that plot those."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from radixmesh.cli.bench.report.request_record import RequestRecord
from radixmesh.cli.bench.report.summary import Summary

_PERCENTILES = (90, 95, 99)


def sglang_report(
    records: Sequence[RequestRecord],
    summary: Summary,
    *,
    dataset: str,
    request_rate: float | None,
    concurrency: int | None,
) -> dict[str, object]:
    """One line of its --output-file. Times in milliseconds, rates per second, tokens as the server counted them.

    request_rate: None = as the workload says, which that tool calls inf.
    """
    done = [record for record in records if record.is_done]
    inputs, outputs = sum(r.prompt_tokens for r in done), sum(r.output_tokens for r in done)
    per_s = 1 / summary.duration_s if summary.duration_s else 0.0
    times = {
        "e2e_latency": [record.e2e_s for record in done],
        "ttft": [record.ttft_s for record in done if record.ttft_s is not None],
        "tpot": [record.tpot_s for record in done if record.tpot_s is not None],
        "itl": [gap for record in done for gap in record.gaps_s()],
    }
    return {
        "tag": None,
        "backend": "radixmesh",
        "dataset_name": dataset,
        "request_rate": request_rate if request_rate is not None else float("inf"),
        "max_concurrency": concurrency,
        "duration": summary.duration_s,
        "completed": len(done),
        "total_input_tokens": inputs,
        "total_input_text_tokens": inputs,
        "total_input_vision_tokens": 0,
        "total_output_tokens": outputs,
        "total_output_tokens_retokenized": outputs,
        "request_throughput": len(done) * per_s,
        "input_throughput": inputs * per_s,
        "output_throughput": outputs * per_s,
        "total_throughput": (inputs + outputs) * per_s,
        **{key: value for name, seconds in times.items() for key, value in _figures(name, seconds).items()},
        "concurrency": sum(times["e2e_latency"]) * per_s,
        "accept_length": None,
        "max_concurrent_requests": summary.max_running,
    }


def sglang_details(records: Sequence[RequestRecord]) -> dict[str, object]:
    """The lists that its --output-details adds, one entry a request; itls a list of each."""
    return {
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": [record.output_tokens for record in records],
        "ttfts": [record.ttft_s or 0.0 for record in records],
        "itls": [record.gaps_s() for record in records],
        "generated_texts": [record.output_text for record in records],
        "errors": [record.error for record in records],
    }


def _figures(name: str, seconds: Sequence[float]) -> dict[str, float]:
    ms: npt.NDArray[np.float64] = 1000 * np.asarray(seconds or [0.0])
    figures = {"mean": float(ms.mean()), "median": float(np.median(ms)), "std": float(ms.std())}
    figures |= {f"p{p}": float(np.percentile(ms, p)) for p in _PERCENTILES}
    return {f"{figure}_{name}_ms": value for figure, value in figures.items()}
