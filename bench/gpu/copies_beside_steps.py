"""Time of decode steps while KV is copied beside them, as it is on both sides of a transfer.

    python bench/gpu/copies_beside_steps.py --shape llama-3.1-8b --mib 64 256 1024

In process: the runner is driven by hand. Steps of --rows rows are launched back to back; once two are, KV is scattered
to pages that no row has, from memory of the same GPU, or gathered from there, to such memory: as a worker copies what
comes, and what it sends. It runs beside the first steps: launches are ahead of them. Medians of --times rounds.
device_ms: of each step; gap_ms: from the end of the step before; copy_ms: device time of the copy; late_ms: time by
which all steps took longer than without a copy.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from gpu.first_step import decode_rows, dummy_runner

from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.runtime.steps.step import Admit
from radixmesh.daemons.worker.cuda.runner import DeviceRunner
from radixmesh.daemons.worker.kv_transfer.device_memory import Copied, DevicePiece, TokenNumbers
from radixmesh.daemons.worker.step_handle import DONE

_STEPS, _LAUNCHED_BEFORE = 8, 2
_MIB = 1 << 20


class Decodes:
    """Rows that decode, all of them at the same position."""

    def __init__(self, runner: DeviceRunner, num_rows: int, context: int) -> None:
        self._runner, self._context, self._slots = runner, context, tuple(range(num_rows))
        length, rng = context + _STEPS, np.random.default_rng(0)
        # Tokens of the pool's second half are the copies'.
        pages = rng.permutation(runner.num_pages // 2)[: num_rows * length].astype(np.int32).reshape(num_rows, length)
        num_pages = np.full(num_rows, length, np.int32)
        self._tables = {"page_tables": pages, "num_pages": num_pages}
        prompt = rng.integers(10, runner.vocab_size, context).astype(np.int32)
        for slot in self._slots:
            runner.admitted(
                Admit(
                    slot=slot,
                    generation=1,
                    request_id=f"r{slot}",
                    prompt_ids=prompt,
                    output_ids=prompt[-1:],
                    cached_len=context,
                    max_total_len=length,
                    sampling=Sampling(temperature=1.0, seed=slot),
                )
            )

    def run(self, copy: Callable[[], Copied] | None) -> dict[str, list[float]]:
        """One round."""
        handles, copied = [], None
        for step in range(_STEPS):
            if step == _LAUNCHED_BEFORE and copy is not None:
                copied = copy()
            rows = decode_rows(self._tables, self._context + step, self._slots)
            handles.append(self._runner.launch(rows, (), 0))
        outputs = [handle.result() for handle in handles]
        times = [(output.start_ns, output.end_ns) for output in outputs]
        found = {
            "device_ms": [(end - start) / 1e6 for start, end in times],
            "gap_ms": [(after[0] - before[1]) / 1e6 for before, after in itertools.pairwise(times)],
            "all_ms": [(times[-1][1] - times[0][0]) / 1e6],
        }
        if copied is not None:
            copied.event.wait()
            found["copy_ms"] = [1e3 * copied.seconds()]
        return found


def measure(decodes: Decodes, copy: Callable[[], Copied] | None, times: int) -> dict[str, list[float]]:
    """Medians."""
    rounds = [decodes.run(copy) for _ in range(times + 2)][2:]
    return {name: np.median([one[name] for one in rounds], axis=0).round(3).tolist() for name in rounds[0]}


def main() -> None:
    """Prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--context", type=int, default=600)
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--times", type=int, default=15)
    args = parser.parse_args()
    runner = dummy_runner(args.shape, num_pages=100_000)
    device, token_bytes = runner.kv_device, runner.kv_token_bytes
    assert device is not None
    region = DevicePiece(address := device.allocate(max(args.mib) * _MIB), max(args.mib) * _MIB)
    device.warm_up(DevicePiece(address, region.num_bytes))
    decodes = Decodes(runner, args.rows, args.context)
    plain = measure(decodes, None, args.times)
    cases = [{"copy": "none", **plain}]
    others = np.random.default_rng(1).permutation(runner.num_pages // 2).astype(np.int32) + runner.num_pages // 2
    for mib in args.mib:
        tokens = others[: mib * _MIB // token_bytes]
        piece = region.part(0, len(tokens) * token_bytes)
        copies = {
            "scatter": lambda tokens=tokens, piece=piece: device.scatter(TokenNumbers(tokens), piece, None, DONE),
            "gather": lambda tokens=tokens, piece=piece: device.gather(TokenNumbers(tokens), piece, None),
        }
        for name, copy in copies.items():
            got = measure(decodes, copy, args.times)
            late_ms = round(got["all_ms"][0] - plain["all_ms"][0], 3)
            cases.append({"copy": name, "mib": mib, **got, "late_ms": late_ms})
    told = {
        "command": " ".join(["python", *sys.argv]),
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "rows": args.rows,
        "context": args.context,
        "cases": cases,
    }
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
