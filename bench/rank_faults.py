"""Faults of ranks that compute one model together on CPUs, and of their scheduler: every cell in a mesh of its own.

    python bench/rank_faults.py --times 10 --out bench/results/rank-faults.json

Streams of tiny models stay open while a daemon is killed (SIGKILL) or stopped (SIGSTOP: it hangs in a collective or
ahead of one, and the others wait for it), each time at a random moment. Every answer is compared with the known one.
The file is written anew after each cell, and cells that it has are not run again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from support import fault_injection
from support.fault_injection import Kill, kill_once
from support.jobs import recitations
from support.mesh import running_mesh
from support.stream_load import StreamLoad

MESHES = {
    "TP 2, tiny-llama": ("tp2", "tiny-llama"),
    "TP 2, tiny-deepseek": ("tp2", "tiny-deepseek"),
    "DP 2 + EP 2, tiny-deepseek": ("dp-ep", "tiny-deepseek"),
}
SERVICES = {"rank 0": "worker", "rank 1": "worker-rank-1", "scheduler": "scheduler"}
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
NUM_STREAMS = 6
SEED = 18
# Longer than a machine that is busy with other work takes to start a process that hung.
RECOVERY_S = 240.0


async def run_cell(
    mesh_name: str, service: str, number: signal.Signals, times: int, backend: str = "cpu"
) -> dict[str, object]:
    """Faults one after the other, as clients saw them."""
    compose, model = MESHES[mesh_name]
    fault_injection._RECOVERY_S = RECOVERY_S
    pick = random.Random(f"{SEED} {mesh_name} {service} {number.name}")
    kills: list[Kill] = []
    async with running_mesh(compose, model=model, services=_settings(backend)) as mesh:
        jobs = sorted(recitations(model, with_sampled=False), key=lambda job: len(job.answers[0].ids))
        async with StreamLoad(mesh.client, jobs[-2 * NUM_STREAMS :], num_streams=NUM_STREAMS) as load:
            await load.all_progressed(0.0)
            try:
                while len(kills) < times:
                    kills += [await kill_once(mesh, load, SERVICES[service], number, pick)]
            except TimeoutError:
                for name in ("scheduler", "worker", "worker-rank-1", "router"):
                    print(name, *mesh.cluster.recent_lines(name)[-25:], sep="\n", file=sys.stderr, flush=True)
                print(mesh.cluster.processes, load.failures, kills, file=sys.stderr, flush=True)
                raise
        state = await mesh.scheduler_state()
        wrong = [failure for failure in load.failures if ": got " in failure or " outputs, not " in failure]
        return {
            "faults": len(kills),
            "answers_completed": load.num_completed,
            "requests_failed": len(load.failures) - len(wrong),
            "answers_with_tokens_lost_repeated_or_changed": len(wrong),
            "page_violations": state.num_page_violations,
            "bugs_logged": len(mesh.bugs),
            "longest_stall_s": max(kill.stall_s for kill in kills),
            "longest_back_s": max(kill.back_s for kill in kills),
            "stalls_s": [kill.stall_s for kill in kills],
            "first_failures": load.failures[:3],
        }


def _settings(backend: str) -> dict[str, dict[str, object]]:
    """Of the ranks; on GPUs in float32, in which the tiny models recite."""
    if backend == "cpu":
        return {"worker-rank-1": {"cpu_threads": 1}}
    num_gpus = max(1, torch.cuda.device_count())
    # So many pages, so that cells may run beside each other.
    cuda = {"backend": "cuda", "dtype": "float32", "num_pages": 8192}
    return {"worker": {**cuda, "cuda_device": 0}, "worker-rank-1": {**cuda, "cuda_device": 1 % num_gpus}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10, help="faults of a cell")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--meshes", nargs="+", default=list(MESHES), choices=list(MESHES))
    parser.add_argument("--services", nargs="+", default=list(SERVICES), choices=list(SERVICES))
    parser.add_argument("--signals", nargs="+", default=[number.name for number in SIGNALS])
    parser.add_argument("--backend", default="cpu", choices=("cpu", "cuda"), help="cuda: rank r on GPU r")
    args = parser.parse_args()
    found = json.loads(args.out.read_text()) if args.out.exists() else {"cells": {}}
    found |= {
        "command": f"python bench/rank_faults.py --times {args.times}",
        "machine": f"{os.cpu_count()} cores, shared with other work",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "streams": NUM_STREAMS,
    }
    for name in args.meshes:
        for service in args.services:
            for number in (signal.Signals[name] for name in args.signals):
                cell = f"{name}; {service}; {number.name}"
                if found["cells"].get(cell, {}).get("faults", 0) >= args.times:
                    continue
                began, load = time.monotonic(), os.getloadavg()[0]
                try:
                    row = asyncio.run(run_cell(name, service, number, args.times, args.backend))
                except Exception as error:  # A cell that did not end is a finding too.
                    row = {"faults": 0, "error": repr(error)[:500]}
                loads = [round(each, 1) for each in (load, os.getloadavg()[0])]
                row |= {"seconds": round(time.monotonic() - began, 1), "load_average": loads}
                found["cells"][cell] = row
                args.out.write_text(json.dumps(found, indent=1) + "\n")
                print(json.dumps({cell: row}), file=sys.stderr, flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
