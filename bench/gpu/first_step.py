"""Time of the first step of a row whose KV has come from elsewhere, on a GPU that was idle before: one token of a
prompt is computed, then decodes follow.

    python bench/gpu/first_step.py --shape llama-3.1-8b --idle-ms 0 3 10 30 100 300

In process: the runner is driven by hand. Medians of --times rounds. launch_ms: of the host, from the call to its
return; first_ms: from there until the token is on the host; device_ms: of the first step and of those behind it, which
are launched without a wait. profile: of --profile further first steps, each after 30 ms, the functions in which the
host spends most of launch_ms: milliseconds a step in the function alone and with those it calls, calls, and its name.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from gpu.shapes import write_shape

from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.runtime.steps.step import Admit
from radixmesh.daemons.worker.cuda.load import DeviceSettings, load_cuda_runner
from radixmesh.daemons.worker.cuda.runner import DeviceRunner
from radixmesh.daemons.worker.cuda.step.prompt_steps import no_rows
from radixmesh.daemons.worker.runner import DecodeRows, SampleInput, Segment

NUM_SLOTS = 128
_BEHIND = 6


class FirstSteps:
    """Rounds of one prompt each. temperature: of the request."""

    def __init__(self, runner: DeviceRunner, num_tokens: int, temperature: float) -> None:
        self._runner, self._num_tokens = runner, num_tokens
        self._sampling = Sampling(temperature=temperature, seed=7)
        self._rng = np.random.default_rng(0)
        self.profile: cProfile.Profile | None = None

    def run(self, idle_ms: float) -> dict[str, list[float]]:
        """One round, after a pause."""
        runner, length = self._runner, self._num_tokens + 64
        pages = self._rng.permutation(runner.num_pages)[: -(-length // runner.page_size)].astype(np.int32)
        tables = np.zeros((NUM_SLOTS, len(pages)), np.int32)
        tables[0] = pages
        num_pages = np.zeros(NUM_SLOTS, np.int32)
        num_pages[0] = len(pages)
        prompt = self._rng.integers(10, runner.vocab_size, self._num_tokens).astype(np.int32)
        first = prompt[-1:]
        rows = {"page_tables": tables, "num_pages": num_pages}
        admit = Admit(
            slot=0,
            generation=1,
            request_id="r",
            prompt_ids=prompt,
            output_ids=first,
            cached_len=self._num_tokens,
            max_total_len=length,
            sampling=self._sampling,
        )
        sample = SampleInput(
            sampling=self._sampling, prompt_ids=prompt, output_ids=first, position=self._num_tokens + 1
        )
        segment = Segment(slot=0, ids=first, start=self._num_tokens, pages=pages, sample=sample)
        time.sleep(idle_ms / 1e3)
        began = time.perf_counter()
        if self.profile is not None:
            self.profile.enable()
        runner.admitted(admit)
        handles = [runner.launch(decode_rows(rows, 0, ()), [segment], 0)]
        if self.profile is not None:
            self.profile.disable()
        launched = time.perf_counter()
        behind = range(self._num_tokens + 1, self._num_tokens + 1 + _BEHIND)
        handles += [runner.launch(decode_rows(rows, position, (0,)), (), 0) for position in behind]
        outputs = [handles[0].result()]
        got = time.perf_counter()
        outputs += [handle.result() for handle in handles[1:]]
        return {
            "launch_ms": [(launched - began) * 1e3],
            "first_ms": [(got - launched) * 1e3],
            "device_ms": [(output.end_ns - output.start_ns) / 1e6 for output in outputs],
        }


def dummy_runner(shape: str, *, num_pages: int) -> DeviceRunner:
    """Of a shape with random weights, and pages of one token."""
    settings = DeviceSettings(
        dtype="bfloat16",
        attention_backend="triton",
        load_format="dummy",
        page_size=1,
        num_pages=num_pages,
        num_slots=NUM_SLOTS,
        max_tokens_per_step=8192,
        max_total_len=16384,
        mem_fraction=0.88,
        cuda_graphs=True,
        use_pdl=True,
        deterministic=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        return load_cuda_runner(write_shape(shape, Path(folder)), settings)


def decode_rows(tables: Mapping[str, np.ndarray], position: int, slots: tuple[int, ...]) -> DecodeRows:
    """Rows of these slots, all at one position."""
    num = len(slots)
    if not num:
        return DecodeRows(**{**_fields(no_rows()), **tables})
    return DecodeRows(
        slots=np.array(slots, np.int32),
        ids=np.zeros(num, np.int32),
        positions=np.full(num, position, np.int32),
        seeds=np.full(num, 7, np.uint64),
        is_sampled=np.ones(num, np.bool_),
        **tables,
    )


def _profiled(steps: FirstSteps, num: int) -> list[str]:
    if not num:
        return []
    steps.profile = cProfile.Profile()
    for _ in range(num):
        steps.run(30)
    spent = pstats.Stats(steps.profile).stats  # type: ignore[attr-defined]
    largest = sorted(spent.items(), key=lambda item: -item[1][2])[:40]
    return [
        f"{1e3 * own / num:.3f} {1e3 * whole / num:.3f} {calls / num:g} {Path(file).name}:{line} {name}"
        for (file, line, name), (_, calls, own, whole, _) in largest
    ]


def _fields(rows: DecodeRows) -> dict[str, np.ndarray]:
    return {name: getattr(rows, name) for name in ("slots", "ids", "positions", "seeds", "is_sampled")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--idle-ms", type=float, nargs="*", default=[0, 3, 10, 30, 100, 300, 1000])
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--times", type=int, default=7)
    parser.add_argument("--profile", type=int, default=40, metavar="STEPS")
    parser.add_argument("--results", type=Path, default=None, metavar="FILE")
    args = parser.parse_args()
    runner = dummy_runner(args.shape, num_pages=40_000)
    steps = FirstSteps(runner, args.prompt, args.temperature)
    for _ in range(10):
        steps.run(0)
    rows = []
    for idle_ms in args.idle_ms:
        rounds = [steps.run(idle_ms) for _ in range(args.times)]
        found = {name: np.median([one[name] for one in rounds], axis=0).round(3).tolist() for name in rounds[0]}
        rows.append({"idle_ms": idle_ms, **found})
        print(json.dumps(rows[-1]), flush=True)
    told = {
        "command": " ".join(["python", *sys.argv]),
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "rows": rows,
        "profile": _profiled(steps, args.profile),
    }
    if args.results is not None:
        args.results.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
