"""All measurements of several GPUs in one run: parts in processes of their own, results as they come.

    python bench/gpu/four.py --gpus 4 --out bench/results/h200x4-groups.json
    python bench/gpu/four.py --gpus 2 --out h200x2.json --minutes 10 --only sums rows-70b
    python bench/gpu/four.py --dry --out /tmp/dry.json

A part that fails, or does not end within its time limit, is noted with the end of what it said and with the results
that it had by then, and the next one begins; parts that the file has all results of are not run again (--again runs
them). --minutes: of all parts together; those that have no time left are noted as such. --dry: tiny models, ranks on
CPUs that meet over gloo: the same programs in the same order. NVLink multicast is off in all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from gpu.mesh import gpu_name

_HERE = Path(__file__).parent
_MODELS = _HERE.parents[1] / "compose" / "models"
# Multicast resets whole machines where its service is not set up.
_NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}
_TAIL = 1500
# Scripts that write what they know to --results as it comes.
_KEEP_RESULTS = ("rank_load.py", "pd_load.py", "expert_rows.py")
# Steps of all rows are to be at low latency; no experts move.
_LOW_LATENCY = ("--scheduler", "low_latency_max_tokens=512", "expert_balance_threshold=0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """commands: run beside each other, each of which prints JSON. skip: the reason for which nothing is run."""

    name: str
    commands: Sequence[Sequence[str]] = ()
    limit_s: float = 240.0
    skip: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


def parts(args: argparse.Namespace) -> list[Part]:
    """In the order of what is worth most."""
    return [
        *(*_dense(args), *_experts(args), *_transports(args), *_faults(args), _pairs(args)),
        *(*_overlap(args), *_moves(args)),
    ]


def _dense(args: argparse.Namespace) -> list[Part]:
    """Sums of ranks; a 70B shape by all GPUs, and by two groups of half of them."""
    found, half = [], max(1, args.gpus // 2)
    if not args.dry:
        found.append(Part(name="sums", commands=[_script("groups.py", "sums", "--ranks", args.gpus)]))
    shape = _shape(args, "llama-3.1-70b" if args.gpus >= 4 else "llama-3.1-8b", "tiny-llama")
    load = (*shape, "--layout", "tp", *_decodes(args, ["1x128", "256x128"], "512"))
    whole = _script("rank_load.py", *load, "--ranks", args.gpus)
    halves = [_script("rank_load.py", *load, "--ranks", half, "--first-gpu", first) for first in (0, half)]
    found.append(Part(name=f"dense: TP {args.gpus}", commands=[whole], limit_s=400))
    found.append(Part(name=f"dense: TP {half} x 2 replicas", commands=halves, limit_s=400))
    return found


def _experts(args: argparse.Namespace) -> list[Part]:
    """Attention tensor-parallel against data-parallel with shared experts, by transport."""
    found = []
    transports = ("host",) if args.dry else ("nccl", "nixl", "deepep")
    decodes = _decodes(args, ["128x1024", "512x1024", "128x8192"], "128")
    for shape in ("deepseek-v2-lite", "deepseek-v3-12-layers"):
        folder = _shape(args, shape, "tiny-deepseek")
        quantized = ["--worker", "quantization=fp8-block"] if shape == "deepseek-v3-12-layers" and not args.dry else []
        tp = _script("rank_load.py", *folder, "--layout", "tp", "--ranks", args.gpus, *decodes, *quantized)
        found.append(Part(name=f"{shape}: TP {args.gpus}", commands=[tp], limit_s=400))
        for transport in transports:
            flags = [*quantized] if args.dry else [*(quantized or ["--worker"]), f"ep_transport={transport}"]
            flags += _LOW_LATENCY
            dp = _script("rank_load.py", *folder, "--layout", "dp-ep", "--ranks", args.gpus, *decodes, *flags)
            found.append(Part(name=f"{shape}: DP + EP {args.gpus}, {transport}", commands=[dp], limit_s=400))
    return found


def _transports(args: argparse.Namespace) -> list[Part]:
    """Dispatch and combine of a layer beside the transport's own calls."""
    if args.dry:
        sizes = ("--device", "cpu", "--hidden", 256, "--experts", 16, "--picks", 4, "--calls", 2, "--rows", 2, 8)
        return [
            Part(name="rows: host", commands=[_script("expert_rows.py", "--ranks", 2, "--transports", "host", *sizes)])
        ]
    return [
        Part(name=f"rows: {name}", commands=[_script("expert_rows.py", "--ranks", args.gpus, "--transports", name)])
        for name in ("nccl", "nixl", "deepep")
    ]


def _faults(args: argparse.Namespace) -> list[Part]:
    """A rank that is killed amid a load: tokens compared on a tiny model, time to be back on a large one."""
    backend = "cpu" if args.dry else "cuda"
    shape = _shape(args, "deepseek-v2-lite", "tiny-deepseek")
    load = (*shape, "--layout", "dp-ep", "--ranks", args.gpus, *_decodes(args, ["128x1024"], "512"), "--kill", 1)
    out = Path(args.out).with_suffix(".faults.json")
    meshes = ("--meshes", "DP 2 + EP 2, tiny-deepseek", "TP 2, tiny-llama")
    cells = ("--services", "rank 1", "--signals", "SIGKILL", "--times", 1 if args.dry else 3)
    compared = [sys.executable, str(_HERE.parent / "rank_faults.py"), "--backend", backend, "--out", str(out)]
    return [
        Part(name="kill of a rank: time", commands=[_script("rank_load.py", *load)], limit_s=400),
        Part(name="kill of a rank: tokens", commands=[_texts(compared, *meshes, *cells)], limit_s=400),
    ]


def _pairs(args: argparse.Namespace) -> Part:
    if args.dry:
        shape = ("--backend", "cpu", "--model", _MODELS / "tiny-llama", "--loads", "streams")
        sizes: tuple[object, ...] = ("--pairs", 2, "--streams", 2, "--requests", 4, "--prompt", 40, "--out", 20)
        sizes = (*sizes, "--staging-bytes", 1 << 26)
    else:
        shape = ("--shape", "llama-3.1-8b", "--loads", "streams")
        sizes = ("--pairs", args.gpus // 2, "--streams", 64, "--requests", 192, "--prompt", 4096, "--out", 256)
    return Part(name="2P2D", commands=[_script("pd_load.py", *shape, *sizes)], limit_s=400)


def _overlap(args: argparse.Namespace) -> list[Part]:
    """Two half batches, off and on, by rows of a rank; off for other transports and shapes is among `_experts`."""
    load = ("--layout", "dp-ep", "--ranks", args.gpus)
    if args.dry:
        lite, decodes = _shape(args, "", "tiny-deepseek"), _decodes(args, [], "")
        return [
            Part(
                name=f"two-batch overlap {name}",
                commands=[_script("rank_load.py", *lite, *load, *decodes, "--worker", f"two_batch_min_rows={rows}")],
            )
            for name, rows in (("off", 0), ("on", 1))
        ]
    cells = [("deepseek-v2-lite", "nccl", 0), ("deepseek-v2-lite", "nccl", 2), ("deepseek-v2-lite", "nixl", 2)]
    cells += [("deepseek-v3-12-layers", "nccl", 2), ("deepseek-v3-12-layers", "nixl", 2)]
    found = []
    for shape, transport, rows in cells:
        sizes = ["128x1024", "512x1024"] if shape != "deepseek-v2-lite" else ["32x1024", "128x1024", "512x1024"]
        flags = (f"ep_transport={transport}", f"two_batch_min_rows={rows}", *_quantized(shape))
        command = _script(
            *("rank_load.py", "--shape", shape, *load, *_decodes(args, sizes, "128"), "--worker", *flags),
            *_LOW_LATENCY,
        )
        name = f"two-batch overlap {'on' if rows else 'off'}: {shape}, {transport}"
        found.append(Part(name=name, commands=[command], limit_s=400))
    return found


def _moves(args: argparse.Namespace) -> list[Part]:
    """Experts of a skewed router: balancedness and speed before they move, meanwhile, and after."""
    # By these skews the busiest of four ranks has about half of the work.
    cells = (("", 2, 1.0),) if args.dry else (("deepseek-v2-lite", 8, 1.0), ("deepseek-v3-12-layers", 32, 0.5))
    found = []
    for shape, num_redundant, skew in cells:
        name = f"EPLB on a skewed router{f': {shape}' if shape else ''}"
        flags = (f"ep_redundant_experts={num_redundant}", *_quantized(shape))
        decodes = ("--decode", "4x16", "--out", 100) if args.dry else _decodes(args, ["256x1024"], "256")
        command = _script(
            *("rank_load.py", *_shape(args, shape, "tiny-deepseek"), "--layout", "dp-ep", "--ranks", args.gpus),
            *(*decodes, "--router-skew", skew, "--balance", "--balance-s", 20 if args.dry else 60, "--worker", *flags),
            *("--scheduler", "low_latency_max_tokens=512"),
        )
        found.append(Part(name=name, commands=[command], limit_s=500))
    return found


def _quantized(shape: str) -> tuple[str, ...]:
    return ("quantization=fp8-block",) if shape == "deepseek-v3-12-layers" else ()


def _shape(args: argparse.Namespace, shape: str, tiny: str) -> tuple[object, ...]:
    if args.dry:
        return ("--backend", "cpu", "--model", _MODELS / tiny, "--vocab-size", 60)
    return ("--shape", shape)


def _decodes(args: argparse.Namespace, decodes: Sequence[str], out: str) -> tuple[object, ...]:
    return ("--decode", "2x16", "3x24", "--out", 20) if args.dry else ("--decode", *decodes, "--out", out)


def _script(name: str, *arguments: object) -> list[str]:
    return _texts([sys.executable, str(_HERE / name)], *arguments)


def _texts(command: Sequence[str], *arguments: object) -> list[str]:
    return [*command, *map(str, arguments)]


def run(part: Part, limit_s: float) -> dict[str, object]:
    """Results of its commands, or the reason why there are none. Nothing of it runs any more afterwards."""
    if part.skip:
        return {"skipped": part.skip}
    with tempfile.TemporaryDirectory() as folder:
        return _run(part, limit_s, Path(folder))


def _run(part: Part, limit_s: float, folder: Path) -> dict[str, object]:
    """folder: for results as they come. They are files: a pipe that nobody reads would hold a command up."""
    environment = {**os.environ, **_NO_MULTICAST, **part.environment}
    running: list[_Running] = []
    for number, command in enumerate(part.commands):
        output, said, kept = (folder / f"{number}.{name}" for name in ("output", "said", "kept"))
        more = ["--results", str(kept)] if Path(command[1]).name in _KEEP_RESULTS else []
        with output.open("wb") as stdout, said.open("wb") as stderr:
            process = subprocess.Popen(
                [*command, *more], env=environment, start_new_session=True, stdout=stdout, stderr=stderr
            )
        running.append(_Running(process, " ".join(command), output, said, kept))
    deadline, results, errors = time.monotonic() + limit_s, [], []
    for one in running:
        try:
            status = one.process.wait(max(0.1, deadline - time.monotonic()))
            wrong = f"ended with {status}: {_end_of(one.said)}" if status else ""
        except subprocess.TimeoutExpired:
            wrong = f"did not end within {limit_s:.0f} s: {_end_of(one.said)}"
        _kill(one.process)
        one.process.wait()
        found = _json(one.output) or _json(one.kept)
        if not wrong and found is None:
            wrong = f"printed no JSON: {_end_of(one.output)}"
        results.append(found)
        if wrong:
            errors.append(f"{one.command} {wrong}")
    if errors:
        return {"errors": errors, "results": results}
    return {"results": results}


class _Running(NamedTuple):
    """A command that runs. output, said: what it prints; kept: results so far, of those that keep them."""

    process: subprocess.Popen[bytes]
    command: str
    output: Path
    said: Path
    kept: Path


def _json(path: Path) -> object:
    """None: there is none."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text())
    return None


def _end_of(path: Path) -> str:
    return path.read_text(errors="replace")[-_TAIL:]


def _kill(process: subprocess.Popen[bytes]) -> None:
    """A command with all that it started, which has its own session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=None, help="by default all that there are, 2 with --dry")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="parts with one of these in their names")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--list", action="store_true", help="names parts and their commands, and runs nothing")
    args = parser.parse_args()
    args.gpus = args.gpus or (2 if args.dry else torch.cuda.device_count())
    chosen = [part for part in parts(args) if not args.only or any(word in part.name for word in args.only)]
    if args.list:
        for part in chosen:
            print(part.name, *(" ".join(command) for command in part.commands), part.skip, sep="\n  ")
        return
    found = json.loads(args.out.read_text()) if args.out.exists() else {"parts": {}}
    found |= {
        "command": " ".join(["python", "bench/gpu/four.py", *sys.argv[1:]]),
        "machine": f"{gpu_name()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "gpus": args.gpus,
    }
    end = time.monotonic() + 60.0 * args.minutes
    for part in chosen:
        before = found["parts"].get(part.name, {})
        if "results" in before and "errors" not in before and not args.again:
            continue
        began = time.monotonic()
        left = end - began
        outcome = run(part, min(part.limit_s, left)) if left > 0 else {"skipped": "no time was left"}
        found["parts"][part.name] = {**outcome, "seconds": round(time.monotonic() - began, 1)}
        args.out.write_text(json.dumps(found, indent=1) + "\n")
        state = "failed" if "errors" in outcome else str(outcome.get("skipped", "done"))
        print(f"{part.name}: {state} after {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
