"""CPU time of each step of one replay of `radixmesh bench scheduler`, in whichever tree PYTHONPATH names.

    PYTHONPATH=CHECKOUT/src python bench/step_times.py times.npz --workload multi-turn --closed --running 256
    PYTHONPATH=CHECKOUT/src python bench/step_times.py opcodes.json --opcodes --workload multi-turn --requests 700

Writes an .npz: rows int64 [steps, parts], nanoseconds; running int64 [steps], the requests in slots; parts. A replay
is a function of its arguments: step i is the same work in every run, so the least of several runs is its cost.
--opcodes: instead, the bytecode instructions of the scheduler and the runtime by function, which no load changes.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from types import FrameType

import numpy as np

from radixmesh.cli.bench import scheduler

try:
    from radixmesh.cli.bench.replay.replay import Replay
    from radixmesh.cli.bench.replay.step_costs import PARTS
except ModuleNotFoundError:  # Trees of before 2026-11-23 have no folder for it.
    from radixmesh.cli.bench.replay import Replay
    from radixmesh.cli.bench.step_costs import PARTS

# Of the step's path, the worker's side is not the scheduler's cost.
_COUNTED = ("/daemons/scheduler/", "/daemons/runtime/")


def main() -> None:
    out, *arguments = sys.argv[1:]
    is_counting = "--opcodes" in arguments
    options = scheduler._parser().parse_args([word for word in arguments if word != "--opcodes"])
    replay = Replay(scheduler._config_of(options))
    if is_counting:
        with open(out, "w") as file:
            json.dump(_opcodes(replay), file)
        return
    replay.run()
    # Private names, because older trees have no others.
    costs = replay._costs
    steps = sorted(costs._rows)
    rows = np.array([costs._rows[step] for step in steps])
    running = np.array([costs._running.get(step, 0) for step in steps])
    np.savez(out, rows=rows, running=running, parts=np.array(PARTS))


def _opcodes(replay: Replay) -> dict[str, int]:
    counted: Counter[str] = Counter()

    def enter(frame: FrameType, event: str, argument: object) -> object:
        code = frame.f_code
        if not any(folder in code.co_filename for folder in _COUNTED):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        name = f"{code.co_filename.rpartition('/daemons/')[2]}:{code.co_qualname}"

        def step(frame: FrameType, event: str, argument: object) -> object:
            if event == "opcode":
                counted[name] += 1
            return step

        return step

    sys.settrace(enter)
    try:
        replay.run()
    finally:
        sys.settrace(None)
    return dict(counted)


if __name__ == "__main__":
    main()
