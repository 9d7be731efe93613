"""Time of decode steps, prompts and both together of the worker alone, against the roofline; and where it goes.

    python bench/gpu/steps.py --rows 1 8 64 256 512 --contexts 128 2048 > steps.json

In process: the runner is driven by hand, steps follow each other without a wait. The KV is random: on zeros a GPU is
faster than on data.
With --trace N the kernels of N steps are summed by name from a profiler trace, and GPU idle is the share of the time
between the first and the last kernel that no kernel covers.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from gpu.shapes import roofline_s, write_shape

from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.runtime.steps.step import Admit
from radixmesh.daemons.worker.cuda.load import DeviceSettings, load_cuda_runner
from radixmesh.daemons.worker.cuda.runner import DeviceRunner
from radixmesh.daemons.worker.runner import DecodeRows, SampleInput, Segment, StepOutput
from radixmesh.daemons.worker.step_handle import StepHandle

NUM_SLOTS = 512


class Bench:
    """Slots with pages of their own, in an order that is shuffled as after hours of use."""

    def __init__(self, runner: DeviceRunner, num_slots: int = NUM_SLOTS) -> None:
        self.runner = runner
        self.num_slots = num_slots
        self._rng = np.random.default_rng(0)
        with torch.inference_mode():
            for layer in range(runner.num_layers):
                for plane in runner.pool.plane_names:
                    tokens = runner.pool.tokens(plane, layer)
                    # Slices: not every dtype of pages has random numbers of its own.
                    for part in tokens.split(1 << 18):
                        part.copy_(torch.randn(part.shape, device=part.device, dtype=torch.bfloat16))

    def decode(self, num_rows: int, context: int, num_steps: int) -> tuple[float, list[StepHandle[StepOutput]]]:
        """Seconds a step; the context grows by one every step, from `context` - num_steps on."""
        length = context + num_steps + 8
        tables = self._tables(num_rows, length)
        num_pages = np.full(self.num_slots, tables.shape[1], np.int32)
        for slot in range(num_rows):
            self.runner.admitted(self._admit(slot, length))
        steps = []
        for step in range(num_steps + 5):
            if step == 5:
                steps[-1].wait()
                start = time.perf_counter()
            positions = np.full(num_rows, context - num_steps // 2 + step, np.int32)
            rows = DecodeRows(
                slots=np.arange(num_rows, dtype=np.int32),
                ids=np.zeros(num_rows, np.int32),
                positions=positions,
                page_tables=tables,
                num_pages=num_pages,
                seeds=np.zeros(num_rows, np.uint64),
                is_sampled=np.zeros(num_rows, np.bool_),
            )
            steps.append(self.runner.launch(rows, (), 0))
            if len(steps) > 3:
                steps[-3].result()
        steps[-1].wait()
        return (time.perf_counter() - start) / num_steps, steps

    def prompts(self, num_tokens: int, num_steps: int, *, num_decodes: int = 0, context: int = 0) -> dict[str, float]:
        """Of a prompt of so many tokens, beside decodes: ms of a step when steps follow each other, of one step alone
        from its launch to its tokens, and of the host's to launch it."""
        length = max(num_tokens, context) + 8
        tables = self._tables(num_decodes + 1, length)
        for slot in range(num_decodes + 1):
            self.runner.admitted(self._admit(slot, length))
        rows = DecodeRows(
            slots=np.arange(num_decodes, dtype=np.int32),
            ids=np.zeros(num_decodes, np.int32),
            positions=np.full(num_decodes, context - 1, np.int32),
            page_tables=tables,
            num_pages=np.full(self.num_slots, tables.shape[1], np.int32),
            seeds=np.zeros(num_decodes, np.uint64),
            is_sampled=np.zeros(num_decodes, np.bool_),
        )
        segment = Segment(
            slot=num_decodes,
            ids=self._rng.integers(10, self.runner.vocab_size, num_tokens).astype(np.int32),
            start=0,
            pages=tables[num_decodes],
            sample=SampleInput(
                sampling=Sampling(temperature=0.0),
                prompt_ids=np.zeros(1, np.int32),
                output_ids=np.zeros(0, np.int32),
                position=num_tokens,
            ),
        )
        alone = []
        for _ in range(3):
            start = time.perf_counter()
            self.runner.launch(rows, [segment], 0).result()
            alone.append(time.perf_counter() - start)
        steps, launches = [], []
        start = time.perf_counter()
        for _ in range(num_steps):
            began = time.perf_counter()
            steps.append(self.runner.launch(rows, [segment], 0))
            launches.append(time.perf_counter() - began)
        steps[-1].wait()
        seconds = (time.perf_counter() - start) / num_steps
        figures = {"ms": seconds, "alone_ms": min(alone), "launch_ms": float(np.median(launches))}
        return {name: round(value * 1e3, 3) for name, value in figures.items()}

    def _admit(self, slot: int, length: int) -> Admit:
        """With a last token of its own: rows that are all alike make a GPU faster than it is."""
        return Admit(
            slot=slot,
            generation=1,
            request_id=f"r{slot}",
            prompt_ids=self._rng.integers(10, self.runner.vocab_size, 1).astype(np.int32),
            max_total_len=length,
            sampling=Sampling(temperature=0.0),
        )

    def _tables(self, num_rows: int, length: int) -> np.ndarray:
        size = self.runner.page_size
        columns = -(-length // size)
        pages = self._rng.permutation(min(self.runner.num_pages, num_rows * columns))[: num_rows * columns]
        if len(pages) < num_rows * columns:
            raise ValueError(f"{num_rows} rows of {length} tokens need more than {self.runner.num_pages} pages")
        tables = np.zeros((self.num_slots, columns), np.int32)
        tables[:num_rows] = pages.reshape(num_rows, columns)
        return tables


def trace(work: Callable[[], object]) -> dict[str, object]:
    """Kernels of `work` by name, and the share of time without one."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    spans = []
    by_name: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in profile.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        spans.append((event.time_range.start, event.time_range.end))
        by_name[event.name][0] += 1
        by_name[event.name][1] += event.time_range.elapsed_us()
    spans.sort()
    busy, end = 0.0, spans[0][0]
    for first, last in spans:
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    top = sorted(by_name.items(), key=lambda item: -item[1][1])[:14]
    return {
        "idle": round(1.0 - busy / (end - spans[0][0]), 5),
        "total_us": round(end - spans[0][0], 1),
        "kernels": [{"name": name[:60], "count": int(count), "us": round(us, 1)} for name, (count, us) in top],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.2-3b")
    parser.add_argument("--attention", default="triton")
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32, 64, 128, 256, 512])
    parser.add_argument("--contexts", type=int, nargs="*", default=[128, 2048, 8192])
    parser.add_argument("--prefills", type=int, nargs="*", default=[16, 128, 512, 1024, 2048, 8192])
    parser.add_argument("--mixed", nargs="*", default=["256:384:128"], metavar="DECODES:CONTEXT:CHUNK")
    parser.add_argument("--no-graphs", action="store_true", help="everything is launched kernel by kernel")
    parser.add_argument("--trace", type=int, default=0, metavar="N")
    parser.add_argument("--no-pdl", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--no-tuning", action="store_true", help="GEMMs as cuBLAS chooses")
    parser.add_argument("--kernels", default="triton", help="triton, compiled (torch.compile) or torch")
    parser.add_argument("--quantization", default="none", help="of weights: none, fp8 or fp8-block")
    args = parser.parse_args()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        settings = DeviceSettings(
            dtype="bfloat16",
            attention_backend=args.attention,
            load_format="dummy",
            page_size=args.page_size,
            num_pages=None,
            num_slots=NUM_SLOTS,
            max_tokens_per_step=8192,
            max_total_len=16384,
            mem_fraction=0.88,
            cuda_graphs=not args.no_graphs,
            use_pdl=not args.no_pdl,
            deterministic=args.deterministic,
            tune_gemm=not args.no_tuning,
            kernels=args.kernels,
            quantization=args.quantization,
        )
        runner = load_cuda_runner(write_shape(args.shape, Path(folder)), settings)
    bench = Bench(runner)
    # The device's clocks and the libraries take some tens of steps to come up.
    bench.decode(1, 200, 100)
    result: dict[str, Any] = {"load_s": round(time.perf_counter() - started, 2), "pages": runner.num_pages}
    rows = []
    for context in args.contexts:
        for num_rows in args.rows:
            if num_rows * (context + 100) > runner.num_pages * args.page_size:
                continue
            seconds, _ = bench.decode(num_rows, context, 30)
            least = roofline_s(args.shape, rows=num_rows, context=context, quantization=args.quantization)
            rows.append(
                {
                    "rows": num_rows,
                    "context": context,
                    "ms": round(seconds * 1e3, 3),
                    "roofline": round(least / seconds, 3),
                }
            )
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            if args.trace and context == args.contexts[0]:
                rows[-1]["trace"] = trace(lambda n=num_rows, c=context: bench.decode(n, c, args.trace))
    result["decode"] = rows
    result["prefill"] = []
    for tokens in args.prefills:
        prefill: dict[str, object] = {"tokens": tokens, **bench.prompts(tokens, 10)}
        if args.trace:
            prefill["trace"] = trace(lambda n=tokens: bench.prompts(n, args.trace))
        result["prefill"].append(prefill)
    mixes = [tuple(map(int, mix.split(":"))) for mix in args.mixed]
    result["mixed"] = [
        {"decodes": decodes, "context": context, "chunk": chunk}
        | bench.prompts(chunk, 10, num_decodes=decodes, context=context)
        for decodes, context, chunk in mixes
    ]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
