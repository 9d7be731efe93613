"""Everything that is measured of dense models on one GPU, and one document of it all.

    python bench/gpu/dense.py --out results [--gpus 0 1 2 3] [--only mesh replay] > bench/results/h200-dense.json

The commands of a job run one after the other on one GPU. Jobs share a GPU in turn if there are fewer GPUs than jobs,
never at a time. The output of a command is kept in `--out`, its errors too; a command that has an output there from a
run before is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
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


Reader = Callable[[str], dict[str, Any] | None]
"""The report of a command by its name; None if it was not run."""


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


_SHAPES = ("llama-3.1-8b", "qwen3-4b")
_STEPS = ("fp8", "fp8-block", "deterministic", "flashinfer", "compiled", "torch", "untuned")
_FP8_STEPS = "--rows 1 8 64 256 512 --contexts 384 --prefills 128 2048 8192 --trace 4"
JOBS: dict[str, list[Command]] = {
    "mesh": [
        Command("mesh", "mesh.py", "--workloads single-stream decode-256 shared-prefix --runs 3"),
        Command("idle", "idle.py"),
        Command("where", "where.py", "--workloads single-stream decode-256 shared-prefix"),
        Command("whole", "whole_mesh.py"),
    ],
    "worker": [
        Command("steps", "steps.py", "--trace 8", 180),
        Command("numerics", "numerics.py", "--tokens 256 --attention triton flashinfer"),
        Command("float16-mesh", "mesh.py", "--workloads single-stream decode-256 --runs 2 --worker dtype=float16", 180),
        *(
            Command(shape, "mesh.py", f"--shape {shape} --workloads single-stream decode-256 shared-prefix --runs 2")
            for shape in _SHAPES
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
    """One document of all that the commands printed, as `bench/results_page.py` reads it; parts that were not run are
    left out."""
    read = _reader(out)
    parts = {
        "command": "python bench/gpu/dense.py",
        **_machine(read),
        "workloads": _workloads(read),
        **_replays(read),
        "idle_ratio": _idle_ratio(read("idle")),
        "idle": read("idle"),
        "where": _where(read),
        "whole_mesh": read("whole"),
        "numerics": read("numerics"),
        "numerics_fp8": read("fp8-numerics"),
        **{f"steps_{name.replace('-', '_')}": read(name) for name in _STEPS},
        "steps_now": read("steps"),
        **{f"workloads_{name}": (read(f"{name}-mesh") or {}).get("workloads") for name in ("fp8", "float16")},
        "other_shapes": {name: part["workloads"] for name in _SHAPES if (part := read(name))},
        "fp8": {name: part for name in ("fp8-gemm", "fp8-8b") if (part := read(name))},
        "soak": read("soak"),
        "notes": [],
    }
    return {name: part for name, part in parts.items() if part is not None}


def _machine(read: Reader) -> dict[str, object]:
    """The first start compiles the project's own GEMMs, later ones find them in the cache."""
    cold, warm = read("mesh"), read("recorded-decode-256")
    if cold is None:
        return {}
    start = {"kernels compiled": cold["start_s"], "log": cold["start_log"]}
    if warm is not None:
        start["warm kernel caches"] = warm["start_s"]
    return {"machine": cold["machine"], "versions": cold["versions"], "start_s": start}


def _workloads(read: Reader) -> dict[str, object]:
    workloads = {}
    for ours, name in WORKLOADS.items():
        part = read("mesh") if ours != "random" else read("random") or read("recorded-random")
        if part:
            workloads[name] = part["workloads"][ours]
    return workloads


def _replays(read: Reader) -> dict[str, object]:
    """Tokens a second through the mesh beside those of the same plans replayed by the worker alone."""
    ratios, replays = {}, {}
    for ours, name in WORKLOADS.items():
        recorded, replayed = read(f"recorded-{ours}"), read(f"replayed-{ours}")
        if recorded and replayed:
            rate = recorded["workloads"][ours]["out_tok_s"]
            ratios[name] = round(rate / replayed["tok_s"], 4)
            replays[name] = {"ratio": ratios[name], "mesh_tok_s": rate, "replay": replayed}
    return {"mesh_over_replay": ratios, "replay": replays}


def _idle_ratio(idle: Mapping[str, Any] | None) -> dict[str, dict[str, float]] | None:
    if idle is None:
        return None
    ratios: dict[str, dict[str, float]] = {}
    for row in idle["idle"]:
        ratios.setdefault(str(row["depth"]), {})[str(row["rows"])] = row["idle"]
    return ratios


def _where(read: Reader) -> dict[str, object] | None:
    first, random = read("where"), read("where-random")
    return first and {**first, "where": {**first["where"], **(random or {"where": {}})["where"]}}


def _reader(out: Path) -> Reader:
    def read(name: str) -> dict[str, Any] | None:
        path = out / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() and path.stat().st_size else None

    return read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of what the commands print")
    parser.add_argument("--gpus", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="*", choices=JOBS, default=list(JOBS), help="jobs to run; none: only collect")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    def on_gpu(index: int) -> None:
        for job in args.only[index :: len(args.gpus)]:
            for command in JOBS[job]:
                run(command, args.gpus[index], args.out)

    with ThreadPoolExecutor() as pool:
        list(pool.map(on_gpu, range(len(args.gpus))))
    print(json.dumps(document(args.out), indent=1))


if __name__ == "__main__":
    main()
