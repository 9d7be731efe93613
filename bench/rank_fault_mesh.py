"""One mesh of ranks under a load, which makes the faults that it is told to: `rank_faults.py` starts it.

Its lines are JSON. It says {} when it serves; gets {"service", "signal"} for each fault, and tells what clients saw of
it; at the end of what it gets its streams end, and it tells what became of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.fault_injection import kill_once
from support.jobs import recitations
from support.mesh import Mesh, running_mesh
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
_START_S = 150.0
# Answers that are under way when the last fault is over.
_FINISH_S = 60.0
_STOP_S = 10.0


class Seen:
    """The part of a load's and a mesh's news that was told, so that each fault is told what is new."""

    def __init__(self, mesh: Mesh, load: StreamLoad) -> None:
        self._mesh, self._load = mesh, load
        self._completed = self._right = self._failures = self._bugs = 0

    def news(self) -> dict[str, Any]:
        failures, bugs = self._load.failures[self._failures :], self._mesh.bugs[self._bugs :]
        wrong = [failure for failure in failures if ": got " in failure or " outputs, not " in failure]
        told = {
            "tokens_compared": self._load.num_right - self._right,
            "answers_completed": self._load.num_completed - self._completed,
            "requests_failed": len(failures) - len(wrong),
            "answers_with_tokens_lost_repeated_or_changed": len(wrong),
            "bugs_logged": len(bugs),
            "failures": [*failures[:3], *bugs[:3]],
        }
        self._failures, self._bugs = len(self._load.failures), len(self._mesh.bugs)
        self._completed, self._right = self._load.num_completed, self._load.num_right
        return told


async def serve(args: argparse.Namespace, lines: asyncio.StreamReader) -> None:
    compose, model = MESHES[args.kind]
    pick = random.Random(f"{SEED} {args.kind} {args.number} {args.start}")
    jobs = sorted(recitations(model, with_sampled=False), key=lambda job: len(job.answers[0].ids))
    async with asyncio.timeout(None) as limit:
        async with running_mesh(compose, model=model, services=_settings(args), timeout_s=_START_S) as mesh:
            load = StreamLoad(mesh.client, jobs[-2 * NUM_STREAMS :], num_streams=NUM_STREAMS, finish_s=_FINISH_S)
            seen = Seen(mesh, load)
            async with load:
                await load.all_progressed(0.0)
                tell({})
                while line := await lines.readline():
                    fault = json.loads(line)
                    try:
                        tell(await _fault(mesh, load, seen, pick, args.recovery_s, **fault))
                    except TimeoutError as error:
                        for name in ("scheduler", "worker", "worker-rank-1", "router"):
                            print(name, *mesh.cluster.recent_lines(name)[-25:], sep="\n", file=sys.stderr, flush=True)
                        print(mesh.cluster.processes, load.failures, file=sys.stderr, flush=True)
                        tell({"error": f"{fault}: {error!r}"[:500], **seen.news()})
                        raise
            tell(seen.news())
            limit.reschedule(asyncio.get_running_loop().time() + _STOP_S)


async def _fault(
    mesh: Mesh, load: StreamLoad, seen: Seen, pick: random.Random, recovery_s: float, service: str, signal: str
) -> dict[str, Any]:
    began = time.monotonic()
    kill = await kill_once(mesh, load, SERVICES[service], SIGNALS_BY_NAME[signal], pick, recovery_s)
    state = await mesh.scheduler_state()
    return {
        "faults": 1,
        "stall_s": kill.stall_s,
        "back_s": kill.back_s,
        "page_violations": state.num_page_violations,
        **seen.news(),
        "seconds": round(time.monotonic() - began, 1),
    }


SIGNALS_BY_NAME = {number.name: number for number in SIGNALS}


def _settings(args: argparse.Namespace) -> dict[str, dict[str, object]]:
    """Of the ranks; on GPUs in float32, in which the tiny models recite."""
    if args.backend == "cpu":
        return {"worker-rank-1": {"cpu_threads": 1}}
    import torch

    num_gpus = max(1, torch.cuda.device_count())
    # So many pages, so that meshes may run beside each other; processes that fill masks would start with each rank.
    cuda = {"backend": "cuda", "dtype": "float32", "num_pages": 8192, "mask_processes": 0}
    devices = [(rank + args.number) % num_gpus for rank in range(2)]
    return {"worker": {**cuda, "cuda_device": devices[0]}, "worker-rank-1": {**cuda, "cuda_device": devices[1]}}


def tell(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


async def _main(args: argparse.Namespace) -> None:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    # Whoever ends it wants no daemons left behind.
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    with suppress(TimeoutError, asyncio.CancelledError):
        await serve(args, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", required=True, choices=list(MESHES))
    parser.add_argument("--backend", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--number", type=int, default=0, help="of the mesh among those of its kind")
    parser.add_argument("--start", type=int, default=0, help="meshes that had this place before")
    parser.add_argument("--recovery-s", type=float, default=240.0)
    asyncio.run(_main(parser.parse_args()))


if __name__ == "__main__":
    main()
