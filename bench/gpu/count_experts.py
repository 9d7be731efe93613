"""A worker that counts, on its device, the experts that steps hit; for mesh.py --count-experts.

    EXPERTS_HIT=FILE python bench/gpu/count_experts.py -m radixmesh.daemons.worker ...

Each routed layer's picks are marked by a few operations more, captured in graphs like the others: speeds are measured
without it. Rows that pad a captured step read experts too, and count. On SIGUSR1 the worker writes [experts hit,
routed layers run] to FILE, both since its start.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from pathlib import Path

import torch

from radixmesh.daemons.worker.cuda.ops import Ops, TorchOps, TritonOps
from radixmesh.kernels.moe.route import RouterRule, Routes


class HitCounter:
    """experts hit and layers run, int64 [2] on the device of the first routes; made before any capture, as steps run
    once before they are captured."""

    def __init__(self) -> None:
        self.counts: torch.Tensor | None = None

    def add(self, routes: Routes, num_experts: int) -> None:
        ids_TA = routes.expert_ids_TA
        if self.counts is None:
            self.counts = torch.zeros(2, dtype=torch.int64, device=ids_TA.device)
        is_hit_E = torch.zeros(num_experts, dtype=torch.int64, device=ids_TA.device)
        is_hit_E.scatter_(0, ids_TA.flatten().long(), 1)
        self.counts[0] += is_hit_E.sum()
        self.counts[1] += 1

    def write(self, path: Path) -> None:
        counts = [0, 0] if self.counts is None else self.counts.tolist()
        # Whoever polls must not read half of it.
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(counts))
        partial.rename(path)


def count_in(kind: type[Ops], counter: HitCounter) -> None:
    """From now on routes of such operations are counted."""
    route = kind.route

    def counted(self: Ops, logits_TE: torch.Tensor, rule: RouterRule, bias_E: torch.Tensor | None = None) -> Routes:
        routes = route(self, logits_TE, rule, bias_E)
        counter.add(routes, logits_TE.shape[1])
        return routes

    kind.route = counted  # type: ignore[method-assign]


def main() -> None:
    counter, path = HitCounter(), Path(os.environ["EXPERTS_HIT"])
    for kind in (TritonOps, TorchOps):
        count_in(kind, counter)
    signal.signal(signal.SIGUSR1, lambda *_: counter.write(path))
    assert sys.argv[1] == "-m", sys.argv
    # No module of this folder may stand in for another's.
    del sys.path[0]
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
