"""Speed of decodes with drafts over those without, at acceptances that are forced, of the worker alone.

    python bench/gpu/speculation.py > bench/results/h200-speculation.json

In process, as bench/gpu/verify.py. The weights of the last matrix are zero, so that every token is id 0, and a drafter
proposes that with the probability `acceptance`, another id otherwise, each position by itself. ngram: every draft is
right, once two tokens are there. ngram, wrong: the device searches, and proposes another id; adaptive: as many drafts
of each row as pay. --mixed A B: of the rows by turns drafts are right with A and with B; all or nothing: rows have all
drafts or none, where that pays; by row: as many as pay. Steps follow each other, two ahead of the one that is read.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
import triton
from gpu.mesh import gpu_name
from gpu.steps import Bench
from gpu.verify import verifying_runner

from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.runtime.steps.step import Admit
from radixmesh.daemons.worker.cuda.step.device_drafter import DeviceDrafter
from radixmesh.daemons.worker.runner import DecodeRows, RowBounds, SampleInput
from radixmesh.daemons.worker.speculation.adaptive import DraftLengths
from radixmesh.daemons.worker.speculation.drafter import Drafter, DraftRow, EachRow
from radixmesh.daemons.worker.speculation.ngram import NgramDrafter
from radixmesh.kernels.sampling.drafts import DraftInputs, SlotLengths

_STEPS_AHEAD = 2


def forced(acceptance: float, seed: int = 0) -> Drafter:
    """Right at so many positions, wherever a step begins."""
    is_right = np.random.default_rng(seed).random(1 << 16) < acceptance

    def draft(sample: SampleInput, most: int) -> Sequence[int]:
        return np.where(is_right[sample.position : sample.position + most], 0, 1).tolist()

    return EachRow(draft)


def mixed(acceptances: Sequence[float]) -> Drafter:
    """As forced(), of rows by turns; the first id of a row's prompt says which it is."""
    drafters = [forced(acceptance, seed) for seed, acceptance in enumerate(acceptances)]

    def draft(sample: SampleInput, most: int) -> Sequence[int]:
        of_row = drafters[int(sample.prompt_ids[0]) % len(drafters)]
        (ids,) = of_row.propose([DraftRow(sample=sample, most=most)])
        return ids.tolist()

    return EachRow(draft)


class WrongNgrams(NgramDrafter):
    """Searches as much, and is right nowhere."""

    def on_device(self) -> DeviceDrafter:
        return _WrongOnDevice(super().on_device())


class _WrongOnDevice(DeviceDrafter):
    def __init__(self, search: DeviceDrafter) -> None:
        self._search = search

    def propose(self, inputs: DraftInputs, state: SlotLengths) -> None:
        self._search.propose(inputs, state)
        inputs.window_WB.fill_(1)


class SpeculationBench(Bench):
    """Rows from `context` tokens on, each with its own length; the host knows those of the results that it has read."""

    def stream(self, num_rows: int, context: int, num_tokens: int, k: int) -> dict[str, float]:
        """Tokens a second of all rows, tokens of a row in a step, and ms of a step."""
        length = context + num_tokens + 64 * (k + 1)
        tables = self._tables(num_rows, length)
        prompt = np.random.default_rng(1).permutation(self.runner.vocab_size - 2)[:context].astype(np.int32) + 2
        for slot in range(num_rows):
            sampling = Sampling(temperature=0.0)
            prompt[0] = 2 + slot % 2
            self.runner.admitted(
                Admit(
                    slot=slot,
                    generation=1,
                    request_id="r",
                    prompt_ids=prompt.copy(),
                    max_total_len=length,
                    sampling=sampling,
                )
            )
        known = np.full(num_rows, context, np.int32)
        tokens = np.zeros((self.num_slots, length), np.int32)
        num_pages = np.full(self.num_slots, tables.shape[1], np.int32)
        slots, max_lens = np.arange(num_rows, dtype=np.int32), np.full(num_rows, length, np.int32)
        running: deque[object] = deque()
        begun, num_steps, first, start = False, 0, 0, time.perf_counter()
        while known.mean() < context + num_tokens:
            bounds = RowBounds(max_lens=max_lens, known_lens=known.copy(), tokens=tokens)
            rows = DecodeRows(
                slots=slots,
                ids=slots,
                positions=known - 1,
                page_tables=tables,
                num_pages=num_pages,
                seeds=np.zeros(num_rows, np.uint64),
                is_sampled=np.zeros(num_rows, np.bool_),
                bounds=bounds,
            )
            running.append(self.runner.launch(rows, (), 0))
            if len(running) > _STEPS_AHEAD:
                known = known + running.popleft().result().counts  # type: ignore[attr-defined]
                num_steps += begun
                if not begun and known.mean() > context + 3 * (k + 1):
                    begun, first, start = True, int(known.sum()), time.perf_counter()
        seconds = time.perf_counter() - start
        yielded = int(known.sum()) - first
        return {
            "tokens_per_s": round(yielded / seconds, 1),
            "tokens_a_row": round(yielded / num_rows / num_steps, 3),
            "ms": round(seconds / num_steps * 1e3, 3),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 64, 256])
    parser.add_argument("--acceptances", type=float, nargs="*", default=[0.7, 0.0])
    parser.add_argument("--mixed", type=float, nargs=2, help="acceptances of rows by turns, and nothing else")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=200)
    args = parser.parse_args()
    runner = verifying_runner(args.shape, max(args.rows), args.drafts)
    with torch.inference_mode():
        runner.model._head._w_NK.zero_()
    bench = SpeculationBench(runner, num_slots=max(args.rows))
    bench.decode(1, 200, 50)
    plain = {rows: rows / bench.decode(rows, args.context + args.tokens // 2, args.tokens)[0] for rows in args.rows}
    results = []
    most_rows, by_row = max(args.rows), partial(DraftLengths, max(args.rows), args.drafts)
    cases: list[tuple[str, Drafter, int, Callable[[], DraftLengths | None]]] = []
    if args.mixed:
        cases += [
            ("mixed, chains", mixed(args.mixed), most_rows, lambda: None),
            ("mixed, all or nothing", mixed(args.mixed), most_rows, partial(by_row, is_whole=True)),
            ("mixed, by row", mixed(args.mixed), most_rows, by_row),
        ]
    else:
        cases += [(f"forced {share}", forced(share), 1, lambda: None) for share in args.acceptances]
        cases += [
            ("ngram", NgramDrafter(), 1, lambda: None),
            ("ngram, adaptive", NgramDrafter(), most_rows, by_row),
            ("ngram, wrong", WrongNgrams(), 1, lambda: None),
            ("ngram, wrong, adaptive", WrongNgrams(), most_rows, by_row),
        ]
    for name, drafter, most_captured, create in cases:
        graph_rows = tuple(rows for rows in sorted(args.rows) if rows <= most_captured)
        lengths = create()
        runner.verify(drafter, max_drafts=args.drafts, graph_rows=graph_rows, lengths=lengths)
        for rows in graph_rows:
            got = bench.stream(rows, args.context, args.tokens, args.drafts)
            speed = {
                "plain_tokens_per_s": round(plain[rows], 1),
                "speed_up": round(got["tokens_per_s"] / plain[rows], 3),
            }
            results.append({"drafter": name, "rows": rows, "drafts": args.drafts, **got, **speed})
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    output = {
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{gpu_name()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__},
        "shape": args.shape,
        "context": args.context,
        "results": results,
    }
    print(json.dumps(output, indent=1))


if __name__ == "__main__":
    main()
