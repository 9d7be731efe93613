"""Cost of a step that verifies drafts over a step of one token a row, of the worker alone.

    python bench/gpu/verify.py > bench/results/h200-verify.json

In process: the runner is driven by hand, steps follow each other without a wait, the KV is random. Hardly a draft is
right, so that lengths grow as they do without; a step costs the same whatever is accepted. positions: of a row, its
last token and the drafts. ratio: the step's time over that of a plain one of as many rows. break_even: tokens that a
row must yield beside the first, of the drafts, for a token to cost as much as without. --results: file of what is
known so far, after each case.

--trace adds to each case microseconds of a plain step and of one that verifies, by kind of kernel and by kernel, from
a profiler trace of --steps steps (what several kernels share is the first one's; idle: none runs), and the kernels of
the middle of a step in order: each one's duration, and its start after the end of those before it (negative: under PDL
it begins beside them).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
import triton
from gpu.kept import Kept
from gpu.mesh import gpu_name
from gpu.shapes import write_shape
from gpu.steps import Bench
from gpu.where import STEP_KERNEL, Span, spent, table

from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.runtime.steps.step import Admit
from radixmesh.daemons.runtime.telemetry.logs import configure_logging
from radixmesh.daemons.worker.cuda.load import DeviceSettings, load_cuda_runner
from radixmesh.daemons.worker.cuda.runner import DeviceRunner
from radixmesh.daemons.worker.runner import DecodeRows, RowBounds, SampleInput
from radixmesh.daemons.worker.speculation.drafter import EachRow
from radixmesh.daemons.worker.speculation.settings import Speculation

_DRAFT = 11
# Steps at the start of a trace that are left out: the first ones wait for each other.
_LEFT_OUT = 8
# Kernels of the middle of a step that are shown in order: two layers and some.
_IN_ORDER = 16


def wrong_drafts(sample: SampleInput, most: int) -> Sequence[int]:
    """As many as are asked for, of which sampling confirms hardly one."""
    return [_DRAFT] * most


class VerifyBench(Bench):
    """Steps of rows with bounds; the device's lengths start at those of the prompts."""

    def verify(self, num_rows: int, context: int, num_steps: int) -> dict[str, float]:
        """Ms of a step, ms that the host takes to launch one, and tokens that a row yields in one."""
        first, length = context - num_steps // 2, context + 20 * num_steps
        tables = self._tables(num_rows, length)
        for slot in range(num_rows):
            self.runner.admitted(_admit(slot, first, length))
        tokens = np.zeros((self.num_slots, length), np.int32)
        num_pages = np.full(self.num_slots, tables.shape[1], np.int32)
        slots = np.arange(num_rows, dtype=np.int32)
        max_lens = np.full(num_rows, length, np.int32)
        steps, launches, yielded = [], [], 0
        for step in range(num_steps + 5):
            if step == 5:
                steps[-1].wait()
                start = time.perf_counter()
            # The least length by now: the window of drafts continues where the device is.
            known = np.full(num_rows, first + step, np.int32)
            rows = DecodeRows(
                slots=slots,
                ids=slots,
                positions=known - 1,
                page_tables=tables,
                num_pages=num_pages,
                seeds=np.zeros(num_rows, np.uint64),
                is_sampled=np.zeros(num_rows, np.bool_),
                bounds=RowBounds(max_lens=max_lens, known_lens=known, tokens=tokens),
            )
            began = time.perf_counter()
            steps.append(self.runner.launch(rows, (), 0))
            launches.append(time.perf_counter() - began)
            if len(steps) > 3:
                yielded += int(steps[-4].result().counts.sum())
        steps[-1].wait()
        seconds = (time.perf_counter() - start) / num_steps
        return {
            "ms": round(seconds * 1e3, 3),
            "launch_ms": round(float(np.median(launches)) * 1e3, 3),
            "tokens_a_row": round(yielded / (len(steps) - 3) / num_rows, 3),
        }


def traced(work: Callable[[], object]) -> dict[str, object]:
    """Microseconds of a step by kind and by kernel, and the kernels of the middle of the last step in order."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    spans = [
        Span(float(event.time_range.start), float(event.time_range.end), event.name)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return by_step(sorted(spans))


def by_step(spans: Sequence[Span]) -> dict[str, object]:
    """spans: by start, of more than `_LEFT_OUT` steps."""
    ends = [index for index, span in enumerate(spans) if STEP_KERNEL in span.name]
    first, last = ends[_LEFT_OUT], ends[-1]
    window = spent([Span(spans[first].end, spans[first].end, "begin"), *spans[first + 1 : last + 1]])
    figures = table([window])
    counts: dict[str, int] = {}
    for span in spans[first + 1 : last + 1]:
        counts[span.name[:60]] = counts.get(span.name[:60], 0) + 1
    num_steps = len(ends) - 1 - _LEFT_OUT
    middle = (ends[-2] + last) // 2
    overs = list(accumulate((span.end for span in spans), max))
    order = [
        {
            "kernel": spans[index].name[:60],
            "after": round(spans[index].start - overs[index - 1], 2),
            "us": round(spans[index].end - spans[index].start, 2),
        }
        for index in range(middle, min(middle + _IN_ORDER, last))
    ]
    return {
        "us": round(window.total_us / num_steps, 1),
        **{name: figures[name] for name in ("us_per_step", "us_per_step_of_kernels", "others_us")},
        "launches_per_step": {name: round(count / num_steps, 2) for name, count in counts.items()},
        "in_order": order,
    }


def _admit(slot: int, prompt_len: int, max_total_len: int) -> Admit:
    return Admit(
        slot=slot,
        generation=1,
        request_id=f"r{slot}",
        prompt_ids=np.full(prompt_len, 5 + slot, np.int32),
        max_total_len=max_total_len,
        sampling=Sampling(temperature=0.0),
    )


def verifying_runner(
    shape: str,
    num_slots: int,
    max_drafts: int,
    speculation: Speculation | None = None,
    prepare: Callable[[Path], None] = lambda folder: None,
) -> DeviceRunner:
    """Random weights of that shape, with kernels that take drafts, and GEMMs tuned for max_drafts of a row.
    speculation: of a network that drafts. prepare: completes the model's folder."""
    settings = DeviceSettings(
        dtype="bfloat16",
        attention_backend="triton",
        load_format="dummy",
        page_size=1,
        num_pages=None,
        num_slots=num_slots,
        max_tokens_per_step=2048,
        max_total_len=8192,
        mem_fraction=0.75,
        cuda_graphs=True,
        use_pdl=True,
        deterministic=False,
        speculation=speculation,
        max_drafts=max_drafts,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = write_shape(shape, Path(folder))
        prepare(path)
        return load_cuda_runner(path, settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 64, 256])
    parser.add_argument("--positions", type=int, nargs="*", default=[2, 4, 5, 8])
    parser.add_argument("--contexts", type=int, nargs="*", default=[512, 2048])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--trace", action="store_true", help="where both kinds of steps spend their time")
    parser.add_argument("--results", type=Path, default=None, metavar="FILE")
    args = parser.parse_args()
    # Choices of the autotuner, to stderr.
    configure_logging("info", "worker", "bench")
    with Kept(args.results) as kept:
        measure(args, kept)


def measure(args: argparse.Namespace, kept: Kept) -> None:
    kept.note(
        command=" ".join(["python", *sys.argv]),
        machine=f"{gpu_name()}, {os.cpu_count()} cores",
        versions={"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__},
        shape=args.shape,
    )
    cases = [(num_rows, context) for context in args.contexts for num_rows in args.rows]
    results = []
    for positions in args.positions:
        runner = verifying_runner(args.shape, max(args.rows), positions - 1)
        bench = VerifyBench(runner, num_slots=max(args.rows))
        bench.decode(1, 200, 100)
        plain = {case: bench.decode(*case, args.steps)[0] * 1e3 for case in cases}
        print(json.dumps({str(case): round(ms, 3) for case, ms in plain.items()}), file=sys.stderr, flush=True)
        plain_traces = {case: traced(partial(bench.decode, *case, args.steps)) for case in cases if args.trace}
        runner.verify(EachRow(wrong_drafts), max_drafts=positions - 1, graph_rows=tuple(sorted(args.rows)))
        for num_rows, context in cases:
            got = bench.verify(num_rows, context, args.steps)
            ratio = got["ms"] / plain[num_rows, context]
            case = {"rows": num_rows, "context": context, "positions": positions}
            of_plain = {"plain_ms": round(plain[num_rows, context], 3), "ratio": round(ratio, 3)}
            results.append({**case, **got, **of_plain, "break_even": round(ratio - 1, 3)})
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
            if args.trace:
                verify_trace = traced(partial(bench.verify, num_rows, context, args.steps))
                results[-1] |= {"plain_trace": plain_traces[num_rows, context], "verify_trace": verify_trace}
            kept.note(steps=results)
        # A worker has the memory to itself; a runner is part of cycles.
        del runner, bench
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
