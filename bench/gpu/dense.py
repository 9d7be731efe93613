"""Everything that is measured of dense models on one GPU, and one document of it all.

    python bench/gpu/dense.py --out results [--gpus 0 1 2 3] [--only mesh replay] > bench/results/h200-dense.json

Each line of work below is a lane: its commands run one after the other on one GPU. Lanes share a GPU in turn if there
are fewer GPUs than lanes; a lane never shares a GPU with another at a time. What a command prints is kept in `--out`,
its errors too; what is there already from a run before is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

_HERE = Path(__file__).parent
# As `bench/workloads.py` calls them, and as the document does.
WORKLOADS = {
    "single-stream": "single_stream",
    "decode-256": "decode_256",
    "random": "seed_random_500",
    "shared-prefix": "shared_prefix_512",
}


class Command(NamedTuple):
    """name: of its files. script in this folder; arguments may name the folder of results as {out}."""

    name: str
    script: str
    arguments: str = ""
    timeout_s: int = 120


def _replayed(workload: str) -> list[Command]:
    plans = f"record_plans={{out}}/{workload}.plans"
    return [
        Command(f"recorded-{workload}", "mesh.py", f"--workloads {workload} --runs 1 --worker {plans}"),
        Command(f"replayed-{workload}", "replay.py", f"{{out}}/{workload}.plans"),
    ]


_FP8_STEPS = "--rows 1 8 64 256 512 --contexts 384 --prefills 128 2048 8192 --trace 4"
LANES: dict[str, list[Command]] = {
    "mesh": [
        Command("mesh", "mesh.py", "--workloads single-stream decode-256 shared-prefix --runs 3"),
        Command("idle", "idle.py"),
        Command("where", "where.py", "--workloads single-stream decode-256 shared-prefix"),
        Command("whole", "whole_mesh.py"),
    ],
    "worker": [
        Command("steps", "steps.py", "--trace 8", 180),
        Command("numerics", "numerics.py", "--tokens 256 --attention triton flashinfer"),
        *(
            Command(shape, "mesh.py", f"--shape {shape} --workloads single-stream decode-256 shared-prefix --runs 2")
            for shape in ("llama-3.1-8b", "qwen3-4b")
        ),
        *(
            Command(name, "steps.py", f"{flags} --rows 1 64 256 --contexts 384 --prefills 128 2048 --mixed")
            for name, flags in (
                ("deterministic", "--deterministic"),
                ("flashinfer", "--attention flashinfer"),
                ("compiled", "--kernels compiled"),
                ("torch", "--kernels torch"),
                ("untuned", "--no-tuning"),
            )
        ),
    ],
    "fp8": [
        Command("fp8-numerics", "numerics.py", "--tokens 256 --quantization fp8 fp8-block", 240),
        *(Command(name, "steps.py", f"--quantization {name} {_FP8_STEPS}", 180) for name in ("fp8", "fp8-block")),
        Command("fp8-mesh", "mesh.py", "--workloads single-stream decode-256 --runs 2 --worker quantization=fp8", 180),
        Command("fp8-gemm", "fp8_gemm.py", "", 300),
        Command("fp8-8b", "steps.py", f"--shape llama-3.1-8b --quantization fp8 {_FP8_STEPS}", 180),
    ],
    "replay": [
        *_replayed("single-stream"),
        *_replayed("decode-256"),
        *_replayed("shared-prefix"),
        *_replayed("random"),
    ],
    "random": [
        Command("random", "mesh.py", "--workloads random --runs 3", 300),
        Command("where-random", "where.py", "--workloads random --every-s 6", 300),
    ],
    "soak": [Command("soak", "soak.py", "", 800)],
}


def run(command: Command, gpu: int, out: Path) -> None:
    target = out / f"{command.name}.json"
    if target.exists() and target.stat().st_size:
        return
    arguments = [part.format(out=out) for part in command.arguments.split()]
    started = time.monotonic()
    with target.open("w") as stdout, (out / f"{command.name}.err").open("w") as stderr:
        try:
            code = subprocess.run(
                [sys.executable, str(_HERE / command.script), *arguments],
                stdout=stdout,
                stderr=stderr,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)},
                timeout=command.timeout_s,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    seconds = round(time.monotonic() - started, 1)
    print(json.dumps({"name": command.name, "gpu": gpu, "code": code, "s": seconds}), file=sys.stderr, flush=True)


def document(out: Path) -> dict[str, object]:
    """One document of what the commands printed."""
    read = _reader(out)
    workloads, tax = {}, {}
    head: dict[str, object] = {}
    for ours, name in WORKLOADS.items():
        part = read("mesh") if ours != "random" else read("random") or read("recorded-random")
        if part:
            workloads[name] = part["workloads"][ours]
            head = head or {key: part[key] for key in ("machine", "versions", "start_s", "start_log")}
        recorded, replayed = read(f"recorded-{ours}"), read(f"replayed-{ours}")
        if recorded and replayed:
            rate = recorded["workloads"][ours]["out_tok_s"]
            tax[name] = {"ratio": round(rate / replayed["tok_s"], 4), "mesh_tok_s": rate, "replay": replayed}
    idle: dict[str, dict[str, float]] = {}
    for row in (read("idle") or {"idle": []})["idle"]:
        idle.setdefault(str(row["depth"]), {})[str(row["rows"])] = row["idle"]
    return {
        "command": "python bench/gpu/dense.py",
        **head,
        "workloads": workloads,
        "mesh_over_replay": {name: row["ratio"] for name, row in tax.items()},
        "idle_ratio": idle,
        "idle": read("idle"),
        "where": {
            WORKLOADS[name]: table
            for part in (read("where"), read("where-random"))
            for name, table in (part or {"where": {}})["where"].items()
        },
        "replay": tax,
        "whole_mesh": read("whole"),
        "numerics": read("numerics"),
        **{
            f"steps_{name}" if name != "steps" else name: read(name)
            for name in ("steps", "deterministic", "flashinfer", "compiled", "torch", "untuned")
        },
        "other_shapes": {
            name: (read(name) or {"workloads": None})["workloads"] for name in ("llama-3.1-8b", "qwen3-4b")
        },
        "fp8": {command.name: read(command.name) for command in LANES["fp8"]},
        "soak": read("soak"),
    }


def _reader(out: Path) -> Callable[[str], dict[str, Any] | None]:
    def read(name: str) -> dict[str, Any] | None:
        path = out / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() and path.stat().st_size else None

    return read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of what the commands print")
    parser.add_argument("--gpus", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--only", nargs="*", choices=LANES, default=list(LANES), help="lanes to run; none: only collect"
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    def on_gpu(index: int) -> None:
        for lane in args.only[index :: len(args.gpus)]:
            for command in LANES[lane]:
                run(command, args.gpus[index], args.out)

    with ThreadPoolExecutor() as pool:
        list(pool.map(on_gpu, range(len(args.gpus))))
    print(json.dumps(document(args.out), indent=1))


if __name__ == "__main__":
    main()
