"""Prompts computed by some GPUs, outputs decoded by others: a whole mesh of `compose/pd.yml` under streams of ids.

    python bench/gpu/pd_load.py --shape llama-3.1-8b --pairs 2 --streams 64 --prompt 4096 --out 256
    python bench/gpu/pd_load.py --backend cpu --model compose/models/tiny-llama --streams 4 --prompt 40 --out 20

--pairs K: K prefill workers and K decode workers, each with a scheduler of its own and, on GPUs, a GPU of its own.
Streams ask for one output after the other until --requests are done. transfers: outputs whose KV another worker had
computed. Weights of a shape are random, and its tokenizer made up.
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
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import numpy as np
import torch
from gpu.mesh import gpu_name
from gpu.shapes import SHAPES, write_shape
from gpu.whole_mesh import write_tokenizer
from support.mesh import Mesh, running_mesh

_LEAST_ID = 5
_EXTRA = """
  {name}: &{name}
    image: radixmesh/worker:local
    restart: unless-stopped
    command: ["radixmesh", "{daemon}"]
    environment: {environment}
    volumes: ["{folder}:/models/{model}:ro"]
    healthcheck:
      test: ["CMD", "radixmesh", "health", "127.0.0.1:50051", "--timeout", "9"]
      x-local: {{interval: 1s, timeout: 5s, retries: 20, start_period: 400s, start_interval: 200ms}}
"""


def overlay(args: argparse.Namespace, folder: Path) -> str:
    """Workers and schedulers beyond the first pair, which the file has."""
    text = "services:"
    for pair in range(1, args.pairs):
        for role, suffix in (("decode", ""), ("prefill", "-prefill")):
            worker, scheduler = f"worker{suffix}-{pair}", f"scheduler{suffix}-{pair}"
            common = {"RADIXMESH_LISTEN": "0.0.0.0:50051", "RADIXMESH_METRICS_LISTEN": "0.0.0.0:9100"}
            of_worker = {**common, "RADIXMESH_MODEL": f"/models/{args.name}"}
            of_scheduler = {**common, "RADIXMESH_WORKERS": f"{worker}:50051", "RADIXMESH_ROLE": role}
            for name, daemon, values in ((worker, "worker", of_worker), (scheduler, "scheduler", of_scheduler)):
                text += _EXTRA.format(
                    name=name, daemon=daemon, environment=json.dumps(values), folder=folder, model=args.name
                )
    return text


def services(args: argparse.Namespace) -> dict[str, dict[str, object]]:
    """Settings of workers, each with a GPU of its own, and of the router."""
    found: dict[str, dict[str, object]] = {}
    schedulers = []
    for pair in range(args.pairs):
        end = f"-{pair}" if pair else ""
        for index, suffix in enumerate(("", "-prefill")):
            settings: dict[str, object] = {"backend": args.backend, "transfer_staging_bytes": args.staging_bytes}
            if args.backend == "cuda":
                gpu = (2 * pair + index) % max(1, torch.cuda.device_count())
                settings |= {"cuda_device": gpu, "max_total_len": 16_384, "max_tokens_per_step": 8192}
                settings |= {"load_format": "auto" if args.model else "dummy", "num_slots": args.streams}
            found[f"worker{suffix}{end}"] = settings
            schedulers.append(f"scheduler{suffix}{end}:50051")
    found["router"] = {"schedulers": ",".join(schedulers), "prefill_min_tokens": 8}
    return found


async def measure(args: argparse.Namespace) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as name:
        folder = args.model.resolve() if args.model else write_shape(args.shape, Path(name))
        args.name = folder.name
        if args.model is None:
            vocab_size = SHAPES[args.shape]["vocab_size"]
            assert isinstance(vocab_size, int)
            write_tokenizer(folder, vocab_size)
        file = Path(name) / "pairs.yml"
        file.write_text(overlay(args, folder))
        started, of = time.monotonic(), services(args)
        async with running_mesh(
            "pd",
            model=args.name,
            folder=folder,
            overlays=(file,) if args.pairs > 1 else (),
            services=of,
            timeout_s=args.start_s,
        ) as mesh:
            start_s = time.monotonic() - started
            result = await _run(mesh, args)
    return {
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{gpu_name()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "layout": f"{args.pairs}P{args.pairs}D",
        "start_s": round(start_s, 2),
        **result,
    }


async def _run(mesh: Mesh, args: argparse.Namespace) -> dict[str, object]:
    rng = np.random.default_rng(0)
    prompts = iter([rng.integers(_LEAST_ID, args.vocab_size, args.prompt).tolist() for _ in range(args.requests)])
    first_s: list[float] = []
    gaps: list[float] = []
    num_tokens = 0

    async def stream() -> None:
        nonlocal num_tokens
        for ids in prompts:
            asked = last = time.monotonic()
            got = 0
            async for chunk in mesh.client.generate(ids, max_tokens=args.out, ignore_eos=True, temperature=1.0):
                now = time.monotonic()
                if chunk.ids:
                    (gaps if got else first_s).append(now - (last if got else asked))
                    last, got = now, got + len(chunk.ids)
            assert got == args.out, f"{got} tokens, not {args.out}"
            num_tokens += got

    started = time.monotonic()
    async with asyncio.timeout(args.timeout_s):
        await asyncio.gather(*(stream() for _ in range(args.streams)))
    wall = time.monotonic() - started
    return {
        "requests": args.requests,
        "out_tok_s": round(num_tokens / wall, 1),
        "prompt_tok_s": round(args.requests * args.prompt / wall, 1),
        "first_token_ms": _quantiles(first_s),
        "chunk_gap_ms": _quantiles(gaps),
        "bugs_logged": len(mesh.bugs),
    }


def _quantiles(seconds: list[float]) -> dict[str, float]:
    values = np.array(seconds or [0.0]) * 1e3
    return {name: round(float(np.quantile(values, at)), 2) for name, at in (("p50", 0.5), ("p99", 0.99))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=list(SHAPES))
    parser.add_argument("--model", type=Path, default=None, help="a folder, instead of a shape with random weights")
    parser.add_argument("--backend", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--pairs", type=int, default=1)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--out", type=int, default=256)
    parser.add_argument("--vocab-size", type=int, default=30_000, help="ids of prompts are below it")
    parser.add_argument("--staging-bytes", type=int, default=4 * 2**30, help="memory of a worker for transfers")
    parser.add_argument("--start-s", type=float, default=400.0)
    parser.add_argument("--timeout-s", type=float, default=300.0)
    print(json.dumps(asyncio.run(measure(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
