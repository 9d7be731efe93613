"""Cost of logprobs: decodes of many requests through scheduler and worker, none or some of which ask for alternatives.

    python bench/gpu/logprobs.py --runs 3 > bench/results/h200-logprobs.json

ratio: output tokens per second with requests that ask over those with none, of the best runs of each. Runs alternate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import triton
from gpu.mesh import gpu_name, worker_flags
from hop_ladder.bulk_stream import BulkStream
from hop_ladder.processes import Processes

from radixmesh.cli.bench.workloads import make_workload

_START_S = 240.0


async def measure(args: argparse.Namespace) -> dict[str, object]:
    turns = make_workload("decode-256", num_requests=None)
    prompts, lengths = [turn.new_ids for turn in turns], [turn.out_len for turn in turns]
    # Spread over the batch, as they come in service.
    some = {index * len(prompts) // args.asking: args.top for index in range(args.asking)}
    every = dict.fromkeys(range(len(prompts)), args.top)
    cases = {"none": {}, "some": some, "all": every}
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    with tempfile.TemporaryDirectory() as folder:
        async with Processes(Path(folder), "unix", start_s=_START_S) as processes:
            await processes.start("worker", "worker", worker_flags(args, Path(folder), "127.0.0.1:0"))
            scheduler = {"workers": processes.address("worker"), "pipeline_depth": "auto", "chunk_tokens": 8192}
            await processes.start("scheduler", "scheduler", scheduler)
            for run in range(args.runs):
                for name, num_top in cases.items():
                    key = f"{name}-{run}"
                    async with BulkStream(processes.address("scheduler"), key, key) as stream:
                        await asyncio.sleep(0.3)
                        start = time.monotonic()
                        await stream.submit(prompts, lengths, num_top)
                        await stream.until(num_finished=len(turns), timeout_s=args.timeout_s)
                        seconds[name].append(stream.last_token_at - start)
                        assert stream.num_tokens == sum(lengths), (stream.num_tokens, sum(lengths))
                    print(key, round(seconds[name][-1], 3), file=sys.stderr, flush=True)
    tok_s = {name: [round(sum(lengths) / wall, 1) for wall in of_case] for name, of_case in seconds.items()}
    best = {name: max(runs) for name, runs in tok_s.items()}
    return {
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{gpu_name()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__},
        "shape": args.shape,
        "requests": len(prompts),
        "asking": {"none": 0, "some": args.asking, "all": len(prompts)},
        "alternatives": args.top,
        "out_tok_s": best,
        "ratio": {name: round(best[name] / best["none"], 4) for name in ("some", "all")},
        "runs": tok_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.2-3b")
    parser.add_argument("--asking", type=int, default=32)
    parser.add_argument("--top", type=int, default=5)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--timeout-s", type=float, default=100.0)
    parser.add_argument("--worker", nargs="*", default=[], metavar="FLAG=VALUE", help="flags of the worker")
    print(json.dumps(asyncio.run(measure(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
