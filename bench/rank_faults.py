"""Faults of ranks that compute one model together, and of their scheduler: tokens compared, stalls measured.

    python bench/rank_faults.py --times 10 --out bench/results/rank-faults.json
    python bench/rank_faults.py --backend cuda --times 3 --beside 2 2 3 --seconds 190 --recovery-s 60 --out FILE

Streams of tiny models stay open while a daemon is killed (SIGKILL) or stopped (SIGSTOP: it hangs in a collective or
ahead of one, and the others wait for it), each time at a random moment. Every answer is compared with the known one.
A mesh stays up for all faults of its kind, which it is given one by one: `rank_fault_mesh.py`, a process each. The file
is written anew after each fault. A second run adds those that it lacks, cells that were seen least first. The second
command is for two GPUs and 32 cores: meshes beside each other share the GPUs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rank_fault_mesh import MESHES, NUM_STREAMS, SERVICES, SIGNALS

_SUMS = (
    *("faults", "tokens_compared", "answers_completed", "requests_failed"),
    *("answers_with_tokens_lost_repeated_or_changed", "page_violations", "bugs_logged"),
)
_CHILD = Path(__file__).with_name("rank_fault_mesh.py")
# Meshes that take the place of one that failed.
_MOST_STARTS = 3
# From the last fault's beginning to the end of everything: a recovery, and answers that end.
_LATE_S = 30.0


class Board:
    """Faults that are still to be made, and what was seen of those that were. The file is written with each change."""

    def __init__(
        self, out: Path, found: dict[str, Any], cells: Sequence[str], times: int, seen: Mapping[str, int]
    ) -> None:
        """seen: faults of cells in other files, for the order alone."""
        self._out, self.found, self._cells, self._times, self._seen = out, found, cells, times, seen
        self._under_way = Counter[str]()

    def next(self, kind: str) -> str | None:
        """The cell whose turn it is on a mesh of this kind; None: nothing is left to do on it."""
        left = [cell for cell in self._cells if cell.startswith(f"{kind}; ") and self._num(cell) < self._times]
        if not left:
            return None
        cell = min(left, key=lambda cell: (self._num(cell) + self._seen.get(cell, 0), self._cells.index(cell)))
        self._under_way[cell] += 1
        return cell

    def note(self, cell: str, told: Mapping[str, Any], *, is_over: bool = True) -> None:
        """Adds what a mesh told. is_over: of the fault that next() named; otherwise of what came behind it."""
        row = self.found["cells"].setdefault(cell, {"faults": 0})
        if is_over:
            self._under_way[cell] -= 1
        if "error" in told:
            row.setdefault("errors", []).append(told["error"])
        for name in _SUMS:
            row[name] = row.get(name, 0) + told.get(name, 0)
        for name in ("stall", "back"):
            if f"{name}_s" in told:
                row.setdefault(f"{name}s_s", []).append(told[f"{name}_s"])
                row[f"longest_{name}_s"] = max(row[f"{name}s_s"])
        row["first_failures"] = [*row.get("first_failures", []), *told.get("failures", [])][:3]
        row["seconds"] = round(row.get("seconds", 0.0) + told.get("seconds", 0.0), 1)
        row["load_average"] = round(os.getloadavg()[0], 1)
        self.write()
        print(json.dumps({cell: told}), file=sys.stderr, flush=True)

    def write(self) -> None:
        beside = self._out.with_suffix(".part")
        beside.write_text(json.dumps(self.found, indent=1) + "\n")
        # A kill amid this leaves the former file.
        beside.replace(self._out)

    def _num(self, cell: str) -> int:
        row = self.found["cells"].get(cell, {})
        return row.get("faults", 0) + len(row.get("errors", ())) + self._under_way[cell]


async def _serve(board: Board, kind: str, number: int, args: argparse.Namespace, until: float, after: asyncio.Event,
                 is_up: asyncio.Event) -> None:  # fmt: skip
    """Makes faults on meshes of one kind, one mesh at a time, until none is left or the time is over. after: begins
    only then; is_up: set when the first of them serves, or did not come to that."""
    await after.wait()
    for start in range(_MOST_STARTS):
        cell = None if time.monotonic() >= until else board.next(kind)
        if cell is None:
            break
        words = ("--kind", kind, "--backend", args.backend, "--number", str(number), "--recovery-s", args.recovery_s)
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(
            sys.executable, _CHILD, *map(str, words), "--start", str(start), stdin=pipe, stdout=pipe
        )
        try:
            latest = until + args.recovery_s + _LATE_S - time.monotonic()
            await asyncio.wait_for(_make_faults(board, kind, cell, child, until, is_up), latest)
        except TimeoutError:
            print(f"{kind} {number} made no end", file=sys.stderr, flush=True)
        finally:
            is_up.set()
            with suppress(ProcessLookupError):
                child.terminate()
            await child.wait()
    is_up.set()


async def _make_faults(
    board: Board, kind: str, cell: str | None, child: asyncio.subprocess.Process, until: float, is_up: asyncio.Event
) -> None:
    """Until the mesh tells an error, or nothing is left; then its streams end, and it says what became of them."""
    assert child.stdin is not None and child.stdout is not None
    told = await _told(child)
    is_up.set()
    last = cell
    while cell is not None and "error" not in told:
        if time.monotonic() >= until:
            board.note(cell, {})
            break
        _, service, number = cell.split("; ")
        child.stdin.write(f"{json.dumps({'service': service, 'signal': number})}\n".encode())
        told, last = await _told(child), cell
        board.note(cell, told)
        cell = None if "error" in told else board.next(kind)
    if "error" in told:
        if last is cell:
            board.note(last, told)
        return
    child.stdin.close()
    if last is not None:
        board.note(last, await _told(child), is_over=False)


async def _told(child: asyncio.subprocess.Process) -> dict[str, Any]:
    assert child.stdout is not None
    line = await child.stdout.readline()
    told: dict[str, Any] = json.loads(line) if line else {"error": "the process of the mesh ended"}
    return told


async def run(board: Board, args: argparse.Namespace) -> None:
    until = time.monotonic() + (args.seconds or 1e9)
    async with asyncio.TaskGroup() as tasks:
        first = asyncio.Event()
        first.set()
        ups = {kind: asyncio.Event() for kind in args.meshes}
        for number in range(max(args.beside)):
            for kind, num_beside in zip(args.meshes, args.beside, strict=True):
                if number >= num_beside:
                    continue
                # The first one compiles kernels, which the others find.
                after = ups[kind] if number else first
                tasks.create_task(_serve(board, kind, number, args, until, after, ups[kind]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10, help="faults of a cell")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--meshes", nargs="+", default=list(MESHES), choices=list(MESHES))
    parser.add_argument("--services", nargs="+", default=list(SERVICES), choices=list(SERVICES))
    parser.add_argument("--signals", nargs="+", default=[number.name for number in SIGNALS])
    parser.add_argument("--cells", nargs="+", default=[], help="words, such as 'rank 1; SIGSTOP': cells with none of "
                        "them are left out")  # fmt: skip
    parser.add_argument("--backend", default="cpu", choices=("cpu", "cuda"), help="cuda: rank r on GPU r")
    parser.add_argument("--beside", type=int, nargs="+", default=[1], help="meshes of a kind at a time: one number, or "
                        "one for each of --meshes")  # fmt: skip
    parser.add_argument("--seconds", type=float, help="time after which no fault begins")
    parser.add_argument("--recovery-s", type=float, default=240.0, help="longest that a fault may take")
    parser.add_argument("--seen", type=Path, help="another file, cells of which come last")
    args = parser.parse_args()
    if len(args.beside) == 1:
        args.beside *= len(args.meshes)
    if len(args.beside) != len(args.meshes):
        parser.error(f"--beside has {len(args.beside)} numbers for {len(args.meshes)} kinds of meshes")
    found = json.loads(args.out.read_text()) if args.out.exists() else {"cells": {}}
    found |= {
        "command": f"python {' '.join(sys.argv)}",
        "machine": f"{os.cpu_count()} cores, shared with other work",
        "versions": {"python": platform.python_version()},
        "streams": NUM_STREAMS,
    }
    if args.backend == "cuda":
        import torch

        gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        found |= {"machine": f"{os.cpu_count()} cores, {', '.join(gpus)}"}
        found["versions"]["torch"] = torch.__version__
    cells = [
        f"{kind}; {service}; {signal.Signals[name].name}"
        for kind in args.meshes
        for service in args.services
        for name in args.signals
    ]
    cells = [cell for cell in cells if not args.cells or any(word in cell for word in args.cells)]
    other = json.loads(args.seen.read_text())["cells"] if args.seen else {}
    board = Board(args.out, found, cells, args.times, {cell: row["faults"] for cell, row in other.items()})
    began = time.monotonic()
    asyncio.run(run(board, args))
    found["seconds"] = round(time.monotonic() - began, 1)
    board.write()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
