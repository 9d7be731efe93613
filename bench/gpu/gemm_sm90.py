"""PDL GEMMs (kernels/gemm_sm90) on one Hopper GPU: are they right, and how fast is a layer.

    python bench/gpu/gemm_sm90.py > gemm_sm90.json

Checks first, each in a process of its own that is killed when it hangs: every kind of tile against torch, ragged, with
what lies behind the result watched; then four layers as the decoder runs them, captured, replayed hundreds of times
with inputs in turns, whose results must be torch's and the same bits every time. Then, by rows, the 28 layers of
Llama-3.2-3B's shape at context 384 with cuBLASLt's tuned GEMMs and with these. Prints JSON; --jobs NAME... runs some
only, --list names them.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from gemm_chain import chain_variants, check_chain, measure

from radixmesh.kernels.gemm_sm90.cuda_driver import CudaDriver
from radixmesh.kernels.gemm_sm90.gemm import GemmSm90, gate_up_silu_reference, linear_reference
from radixmesh.kernels.gemm_sm90.nvrtc import Nvrtc
from radixmesh.kernels.gemm_sm90.variants import (
    MAX_CLUSTER,
    MAX_SUMS,
    SHARED_BYTES,
    TILE_K,
    GemmConfig,
    Variant,
    variant_of,
)

_ROWS = (64, 128, 32, 256, 16, 8)
_EPS = 1e-5
_NUM_COMPILERS = 4
_SHAPES = ((3072, 3072), (2560, 9728), (5120, 2560), (200, 456), (28672, 512), (72, 64))


@dataclasses.dataclass(frozen=True)
class _Check:
    """GEMMs of these rows, cut in these ways, over _SHAPES."""

    rows: tuple[int, ...]
    tiles: tuple[int, ...]
    split_ks: tuple[int, ...] = (1,)
    stages: tuple[int, ...] = (4,)
    multicast: tuple[int, ...] = (1,)
    is_gated: bool = False
    dtype: torch.dtype = torch.bfloat16
    row_tiles: tuple[int | None, ...] = (None,)

    def configs(self, num_rows: int) -> list[GemmConfig]:
        """Those that fit."""
        found = [
            GemmConfig(tile=tile, split_k=split_k, stages=stages, multicast=multicast, row_tile=row_tile)
            for tile, split_k, stages, multicast, row_tile in itertools.product(
                self.tiles, self.split_ks, self.stages, self.multicast, self.row_tiles
            )
        ]
        return [
            config
            for config in found
            if config.cluster <= MAX_CLUSTER
            and self.variant(config, num_rows).shared_bytes <= SHARED_BYTES
            and self.variant(config, num_rows).sums_a_thread <= MAX_SUMS
        ]

    def variant(self, config: GemmConfig, num_rows: int) -> Variant:
        return variant_of(config, num_rows, self.is_gated, self.dtype)


# The plainest first.
_CHECKS = {
    "plain": _Check(rows=(64, 8, 1, 33), tiles=(64, 128), stages=(2, 4)),
    "split_k": _Check(rows=(64, 5, 40), tiles=(64, 128), split_ks=(2, 3, 5, 8)),
    "gated": _Check(rows=(64, 9, 128), tiles=(64, 128), split_ks=(1, 2, 3), stages=(3,), is_gated=True),
    "many_rows": _Check(rows=(100, 128, 190, 256), tiles=(64, 128), split_ks=(1, 3), stages=(3,)),
    "many_rows_gated": _Check(rows=(200, 256), tiles=(128,), split_ks=(1, 2), stages=(4,), is_gated=True),
    "tile_256": _Check(rows=(16, 64, 128), tiles=(256,), split_ks=(1, 4), stages=(3, 4)),
    "tile_256_gated": _Check(rows=(16, 64, 100), tiles=(256,), split_ks=(1, 2), stages=(4,), is_gated=True),
    "multicast": _Check(rows=(64, 50, 128), tiles=(64, 128), split_ks=(1, 2), stages=(3,), multicast=(2, 4)),
    "multicast_many_rows": _Check(rows=(128, 256), tiles=(128, 256), split_ks=(1, 2, 4), stages=(4,), multicast=(2,)),
    "multicast_gated": _Check(
        rows=(64, 256), tiles=(128,), split_ks=(1, 2), stages=(4,), multicast=(2, 4), is_gated=True
    ),
    "row_tiles": _Check(rows=(256, 100, 190), tiles=(64, 80, 96, 160), stages=(3, 5), row_tiles=(64, 128)),
    "row_tiles_multicast": _Check(
        rows=(256, 100, 30), tiles=(96, 128, 224), stages=(4,), multicast=(2, 4), row_tiles=(64, 128)
    ),
    "row_tiles_half": _Check(rows=(200,), tiles=(96,), stages=(4,), row_tiles=(64,), dtype=torch.float16),
    "half": _Check(rows=(13, 64, 256), tiles=(64, 128), split_ks=(1, 2), stages=(3,), dtype=torch.float16),
}
_CHAIN_CHECKS = (16, 64, 128, 256)


def check(name: str) -> dict[str, object]:
    case = _CHECKS[name]
    nvrtc = Nvrtc()
    kernel = GemmSm90(CudaDriver(), lambda text: nvrtc.cubin(_watched(text)))
    worst, num_checked, failed = 0.0, 0, []
    for (num_out, num_in), num_rows in itertools.product(_SHAPES, case.rows):
        operands = _Operands(num_rows, num_out, num_in, case)
        for config in case.configs(num_rows):
            if config.split_k > -(-num_in // TILE_K):
                continue
            for is_added in (False,) if case.is_gated else (False, True):
                error, note = operands.error(kernel, config, is_added)
                num_checked += 1
                worst = max(worst, error)
                if note or not error < 0.01:
                    case_name = f"{num_rows}x{num_out}x{num_in} {config!s} added {is_added:d}"
                    failed.append(f"{case_name}: {error:.3g} {note}")
    return {"checked": num_checked, "worst": worst, "failed": len(failed), "first_failed": failed[:12]}


class _Operands:
    """Of one shape, and what torch says of it. The result lies in a larger tensor, whose rest must stay as it is."""

    def __init__(self, num_rows: int, num_out: int, num_in: int, case: _Check) -> None:
        self._case, self._num_rows = case, num_rows
        self._x_TK = _random(num_rows, num_in, dtype=case.dtype)
        self._w_NK = _random(num_out * (1 + case.is_gated), num_in, dtype=case.dtype).mul_(num_in**-0.5)
        self._before_TN = _random(num_rows, num_out, dtype=case.dtype)
        self._memory = torch.empty(num_rows + 16, num_out, dtype=case.dtype, device="cuda")

    def error(self, kernel: GemmSm90, config: GemmConfig, is_added: bool) -> tuple[float, str]:
        """Of the norm; and what else is wrong: something was written elsewhere, or a second run gave other bits."""
        results, note = [], ""
        for _ in range(2):
            self._memory.fill_(float("nan"))
            out_TN = self._memory[8 : 8 + self._num_rows]
            if is_added:
                out_TN.copy_(self._before_TN)
            if self._case.is_gated:
                kernel.gate_up_silu(self._x_TK, self._w_NK, config, eps=_EPS, out=out_TN)
            else:
                residual_TN = out_TN if is_added else None
                kernel.linear(self._x_TK, self._w_NK, config, residual_TN=residual_TN, out=out_TN)
            results.append(out_TN.clone())
            if not bool(torch.cat([self._memory[:8], self._memory[8 + self._num_rows :]]).isnan().all()):
                note = "wrote elsewhere"
        if self._case.is_gated:
            expected = gate_up_silu_reference(self._x_TK, self._w_NK, _EPS)
        else:
            expected = linear_reference(self._x_TK, self._w_NK, self._before_TN if is_added else None)
        if bool(results[0].isnan().any()):
            note += f" {int(results[0].isnan().sum())} NaN, first at {results[0].isnan().nonzero()[0].tolist()}"
        elif not torch.equal(*results):
            note += " other bits"
        return float((results[0].float() - expected.float()).norm() / expected.float().norm()), note


def compile_part(part: int) -> dict[str, object]:
    """A part of all that the jobs compile."""
    checked = {
        case.variant(config, num_rows)
        for case in _CHECKS.values()
        for num_rows in case.rows
        for config in case.configs(num_rows)
    }
    timed = {variant for num_rows in {*_ROWS, *_CHAIN_CHECKS} for variant in chain_variants(num_rows)}
    texts = sorted([*(_watched(variant.source()) for variant in checked), *(variant.source() for variant in timed)])
    nvrtc = Nvrtc()
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        sizes = list(threads.map(lambda text: len(nvrtc.cubin(text)), texts[part::_NUM_COMPILERS]))
    return {"failed": 0, "compiled": len(sizes)}


def _watched(text: str) -> str:
    """A kernel in which a wait that does not end is an error, of its process alone."""
    assert "kMaxPolls = 0" in text
    return text.replace("kMaxPolls = 0", "kMaxPolls = 1 << 20")


def _random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def _jobs() -> dict[str, Callable[[], dict[str, object]]]:
    return {
        **{f"compile_{part}": lambda part=part: compile_part(part) for part in range(_NUM_COMPILERS)},
        **{f"check_{name}": lambda name=name: check(name) for name in _CHECKS},
        **{f"chain_{num_rows}": lambda num_rows=num_rows: check_chain(num_rows) for num_rows in _CHAIN_CHECKS},
        **{f"time_{num_rows}": lambda num_rows=num_rows: measure(num_rows) for num_rows in _ROWS},
    }


def _run(name: str, timeout_s: float) -> dict[str, object]:
    """In a process of its own; what it printed last, or why it did not."""
    command = [sys.executable, __file__, "--job", name]
    environment = os.environ | {"CUDA_MODULE_LOADING": "LAZY"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, env=environment)
    except subprocess.TimeoutExpired:
        return {"failed": 1, "error": f"hangs: killed after {timeout_s:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"failed": 1, "error": f"exit {done.returncode}: {done.stderr.strip()[-600:]}"}
    return json.loads(lines[-1])


def _run_all(names: list[str], budget_s: float) -> Mapping[str, dict[str, object]]:
    """Compilers at once, then checks at once, then what is timed, one after the other and only what is right."""
    deadline, reports = time.monotonic() + budget_s, {}
    for kinds, num_at_once, timeout_s in ((("compile",), 4, 40.0), (("check", "chain"), 6, 45.0), (("time",), 1, 25.0)):
        chosen = [name for name in names if name.split("_")[0] in kinds]

        def run(name: str, timeout_s: float = timeout_s) -> dict[str, object]:
            left_s = deadline - time.monotonic()
            return _run(name, min(timeout_s, left_s)) if left_s > 5 else {"failed": 0, "skipped": "no time left"}

        with concurrent.futures.ThreadPoolExecutor(num_at_once) as threads:
            for name, report in zip(chosen, threads.map(run, chosen), strict=True):
                reports[name] = report
                print(name, json.dumps(report)[:300], file=sys.stderr, flush=True)
    return reports


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", default=list(_jobs()))
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--budget-s", type=float, default=115)
    parser.add_argument("--output", help="where the report is written too")
    parser.add_argument("--job", help="one, in this process")
    args = parser.parse_args()
    if args.list:
        print(" ".join(_jobs()))
        return
    if args.job:
        with torch.inference_mode():
            print(json.dumps(_jobs()[args.job]()))
        return
    started = time.monotonic()
    reports = _run_all(args.jobs, args.budget_s)
    failed = [name for name, report in reports.items() if report.get("failed")]
    seconds = round(time.monotonic() - started, 1)
    text = json.dumps({"failed": failed, "seconds": seconds, "jobs": reports}, separators=(",", ":"))
    if args.output:
        Path(args.output).write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
