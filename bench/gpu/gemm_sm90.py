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

from radixmesh.daemons.worker.cpu.attention.backend import AttentionShape
from radixmesh.daemons.worker.cuda.attention.backend import DeviceStep
from radixmesh.daemons.worker.cuda.attention.triton_attention import TritonAttention
from radixmesh.daemons.worker.cuda.gemm.backend import GemmBackend, TorchGemm
from radixmesh.daemons.worker.cuda.gemm.cublaslt_tuning import MatrixGroup, matrix_groups, tuned_gemm
from radixmesh.daemons.worker.cuda.gemm.pdl_benchmark import GraphBenchmark
from radixmesh.daemons.worker.cuda.gemm.pdl_gemm import GemmEpilogue, PdlGemm, PdlShape
from radixmesh.daemons.worker.cuda.gemm.pdl_kernel import Sm90Kernel
from radixmesh.daemons.worker.cuda.model.decoder import LoadedDecoder
from radixmesh.daemons.worker.cuda.model.device_model import DeviceModel, Kernels
from radixmesh.daemons.worker.cuda.ops import KvTarget, TritonOps
from radixmesh.daemons.worker.group import LocalGroup
from radixmesh.daemons.worker.models.decoder.config import DecoderConfig
from radixmesh.daemons.worker.models.decoder.model import DecoderModel
from radixmesh.daemons.worker.models.decoder.weights import AttentionWeights, DecoderLayer, DecoderWeights, MlpWeights
from radixmesh.daemons.worker.models.kv_layout import KvPlanes
from radixmesh.daemons.worker.models.model import Placement
from radixmesh.daemons.worker.models.rope_config import RopeConfig
from radixmesh.kernels.gemm_sm90.candidates import candidates
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
_HIDDEN, _MLP, _HEADS, _KV_HEADS, _HEAD_DIM = 3072, 8192, 24, 8, 128
_QKV = (_HEADS + 2 * _KV_HEADS) * _HEAD_DIM
_LAYERS, _CHECKED_LAYERS, _CONTEXT = 28, 4, 384
_EPS = 1e-5
_CANDIDATES = 9
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


class _Kv(KvPlanes):
    def __init__(self, num_layers: int, num_tokens: int) -> None:
        shape = (num_tokens, _KV_HEADS, _HEAD_DIM)
        self._planes = {(plane, layer): _random(*shape) for plane in ("keys", "values") for layer in range(num_layers)}

    def tokens(self, plane: str, layer: int) -> torch.Tensor:
        return self._planes[plane, layer]


class _Chain:
    """All layers of a decode step of so many rows; graphs of it by who computes its GEMMs."""

    def __init__(self, num_rows: int, num_layers: int) -> None:
        self.num_rows = num_rows
        self.config = _decoder_config(num_layers)
        placement = Placement(device=torch.device("cuda"), dtype=torch.bfloat16, group=LocalGroup())
        self.loaded = LoadedDecoder(DecoderModel(self.config, _weights(num_layers), placement))
        self.kv = _Kv(num_layers, num_rows * _CONTEXT + 1)
        self.input_TD, self.output_TD = _random(num_rows, _HIDDEN), torch.empty_like(_random(num_rows, _HIDDEN))
        slots = torch.arange(num_rows, device="cuda", dtype=torch.int32)
        tables = torch.randperm(num_rows * _CONTEXT, device="cuda").int().view(num_rows, _CONTEXT)
        tables = torch.cat([tables, torch.full_like(tables[:1], num_rows * _CONTEXT)])
        none = slots[:0]
        self._step = DeviceStep(
            page_tables=tables,
            row_slots=slots,
            row_positions=torch.full_like(slots, _CONTEXT - 1),
            decode_slots=slots,
            decode_kv_lens=torch.full_like(slots, _CONTEXT),
            chunk_slots=none,
            chunk_row_starts=torch.zeros_like(slots[:1]),
            chunk_kv_lens=none,
            max_chunk_len=0,
        )
        self._attention = TritonAttention(
            AttentionShape(num_heads=_HEADS, num_kv_heads=_KV_HEADS, head_dim=_HEAD_DIM, scale=_HEAD_DIM**-0.5),
            page_size=1,
            windows=(None,),
            max_rows=num_rows,
            dtype=torch.bfloat16,
            device=torch.device("cuda"),
            is_deterministic=False,
            use_pdl=True,
        )
        self.stream = torch.cuda.Stream()
        self._models: list[DeviceModel] = []

    def graph(self, gemm: GemmBackend) -> torch.cuda.CUDAGraph:
        """From the input to the output, which are its own."""
        ops = TritonOps(use_pdl=True, gemm=gemm)
        model = self.loaded.create(Kernels(ops), self.kv, _CONTEXT + 1)
        # Tensors that the graph reads must stay alive.
        self._models.append(model)
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            self._run(model)
            self.stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._run(model)
            finally:
                graph.capture_end()
        return graph

    def _run(self, model: DeviceModel) -> None:
        step = self._step
        # A kernel, not a copy, which nothing can begin beside.
        x_TD = torch.mul(self.input_TD, 1)
        attention = self._attention.begin(step, "")
        target = KvTarget(step.row_positions, step.row_slots, step.page_tables, 1)
        torch.mul(model.layers(x_TD, target, attention), 1, out=self.output_TD)

    def replay(self, graph: torch.cuda.CUDAGraph, count: int = 1) -> float:
        """Microseconds a layer, of a replay."""
        with torch.cuda.stream(self.stream):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
            start.record(self.stream)
            for _ in range(count):
                graph.replay()
            end.record(self.stream)
            end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / count / self.config.num_layers


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


def check_chain(num_rows: int) -> dict[str, object]:
    """With each candidate's place of all matrices in turn."""
    chain = _Chain(num_rows, _CHECKED_LAYERS)
    kernel = Sm90Kernel(GemmSm90(CudaDriver(), Nvrtc().cubin))
    inputs = [_random(num_rows, _HIDDEN) for _ in range(6)]
    expected = _outputs(chain, chain.graph(TorchGemm()), inputs)
    worst, furthest, num_other_bits, num_replays = 0.0, 0.0, 0, 0
    configs = _configs(chain)
    for place in (0, 1, -1):
        table = {shape: options[place] for shape, options in configs.items()}
        graph = chain.graph(PdlGemm(kernel, table, TorchGemm()))
        first = _outputs(chain, graph, inputs)
        for found, wanted in zip(first, expected, strict=True):
            error = float((found.float() - wanted.float()).norm() / wanted.float().norm())
            # NaN is the worst of all.
            worst = error if not error <= worst else worst
        differs = torch.zeros((), dtype=torch.int64, device="cuda")
        most = torch.zeros((), device="cuda")
        with torch.cuda.stream(chain.stream):
            for turn in range(150):
                at = (turn * turn + turn // 7) % len(inputs)
                chain.input_TD.copy_(inputs[at])
                # Back to back, too: a replay behind another begins beside it as layers do.
                for _ in range(1 + turn % 3):
                    graph.replay()
                    num_replays += 1
                differs += (chain.output_TD != first[at]).any()
                most = torch.maximum(most, (chain.output_TD.float() - first[at].float()).abs().max())
            chain.stream.synchronize()
        num_other_bits += int(differs)
        furthest = max(furthest, float(most))
    is_right = worst < 0.03 and not num_other_bits
    return {
        "failed": int(not is_right),
        "worst": worst,
        "other_bits": num_other_bits,
        "furthest": furthest,
        "replays": num_replays,
    }


def _outputs(chain: _Chain, graph: torch.cuda.CUDAGraph, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    outputs = []
    for input_TD in inputs:
        with torch.cuda.stream(chain.stream):
            chain.input_TD.copy_(input_TD)
            graph.replay()
            outputs.append(chain.output_TD.clone())
    chain.stream.synchronize()
    return outputs


def measure(num_rows: int) -> dict[str, object]:
    started = time.monotonic()
    chain = _Chain(num_rows, _LAYERS)
    kernel = Sm90Kernel(GemmSm90(CudaDriver(), Nvrtc().cubin))
    tuned = tuned_gemm(chain.loaded.tunable_matrices(), torch.bfloat16, [num_rows], torch.device("cuda"))
    # One by one, then in their places in the layer, where what stands ahead of and behind them counts.
    ranked: dict[PdlShape, list[GemmConfig]] = {}
    alone, refused = {}, []
    for (group, _), (shape, options) in zip(_groups(chain.loaded), _configs(chain).items(), strict=True):
        benchmark = GraphBenchmark(kernel, tuned, chain.stream, shape, group.weights)
        library_us, times_us, notes = _alone(benchmark, options)
        refused += [f"{_name(shape)} {note}" for note in notes]
        rounded_us = {str(config): round(us, 2) for config, us in times_us.items()}
        alone[_name(shape)] = {"library": round(library_us, 2), **rounded_us}
        ranked[shape] = sorted(times_us, key=lambda config: times_us[config])
    best = {shape: options[0] for shape, options in ranked.items()}
    graphs = {"library": chain.graph(tuned)}
    for shape, options in ranked.items():
        tried = {config: chain.graph(PdlGemm(kernel, {**best, shape: config}, tuned)) for config in options[:3]}
        times_us = {config: min(chain.replay(graph, 2) for _ in range(4)) for config, graph in tried.items()}
        best[shape] = min(times_us, key=lambda config: times_us[config])
    graphs["pdl"] = chain.graph(PdlGemm(kernel, best, tuned))
    for shape in best:
        one = {shape: best[shape]}
        graphs[f"only_{_name(shape)}"] = chain.graph(PdlGemm(kernel, one, tuned))
        others = {other: config for other, config in best.items() if other != shape}
        graphs[f"but_{_name(shape)}"] = chain.graph(PdlGemm(kernel, others, tuned))
    least = dict.fromkeys(graphs, float("inf"))
    for _ in range(6):
        for name, graph in graphs.items():
            least[name] = min(least[name], chain.replay(graph, 3))
    return {
        "rows": num_rows,
        "failed": len(refused),
        "refused": refused,
        "layer_us": {name: round(us, 2) for name, us in least.items()},
        "chosen": {_name(shape): str(config) for shape, config in best.items()},
        "alone_us": alone,
        "seconds": round(time.monotonic() - started, 1),
    }


def _alone(benchmark: GraphBenchmark, options: list[GemmConfig]) -> tuple[float, dict[GemmConfig, float], list[str]]:
    """Microseconds of the library's, of those that run, and why others do not."""
    library = benchmark.candidate(None)
    takes: dict[GemmConfig, Callable[[], float]] = {}
    refused = []
    for config in options:
        try:
            takes[config] = benchmark.candidate(config)
        except RuntimeError as error:
            refused.append(f"{config!s}: {error}")
    library_us = min(library() for _ in range(4))
    return library_us, {config: min(take() for _ in range(4)) for config, take in takes.items()}, refused


def _name(shape: PdlShape) -> str:
    return {
        (_QKV, _HIDDEN): "qkv",
        (_HIDDEN, _HIDDEN): "o",
        (2 * _MLP, _HIDDEN): "gate_up",
        (_HIDDEN, _MLP): "down",
    }[shape.num_out, shape.num_in]


def _groups(loaded: LoadedDecoder) -> list[tuple[MatrixGroup, GemmEpilogue]]:
    uses = (GemmEpilogue.GATED, GemmEpilogue.ADDED, GemmEpilogue.PLAIN, GemmEpilogue.ADDED)
    return list(zip(matrix_groups(loaded.tunable_matrices())[:4], uses, strict=True))


def _configs(chain: _Chain) -> dict[PdlShape, list[GemmConfig]]:
    return {
        PdlShape.of(chain.num_rows, group.weights[0], use): _options(
            chain.num_rows, group.weights[0].shape[0], group.weights[0].shape[1], use is GemmEpilogue.GATED
        )
        for group, use in _groups(chain.loaded)
    }


def _options(num_rows: int, num_out: int, num_in: int, is_gated: bool) -> list[GemmConfig]:
    return candidates(num_rows, num_out // (1 + is_gated), num_in, is_gated=is_gated, count=_CANDIDATES)


def _variants() -> tuple[set[Variant], set[Variant]]:
    """All that the jobs compile: checks, and the others."""
    checked, timed = set(), set()
    for case in _CHECKS.values():
        for num_rows in case.rows:
            checked.update(case.variant(config, num_rows) for config in case.configs(num_rows))
    matrices = ((2 * _MLP, _HIDDEN, True), (_HIDDEN, _MLP, False), (_QKV, _HIDDEN, False), (_HIDDEN, _HIDDEN, False))
    for num_rows, (num_out, num_in, is_gated) in itertools.product({*_ROWS, *_CHAIN_CHECKS}, matrices):
        for config in _options(num_rows, num_out, num_in, is_gated):
            timed.add(variant_of(config, num_rows, is_gated, torch.bfloat16))
    return checked, timed


def _watched(text: str) -> str:
    """A kernel in which a wait that does not end is an error, of its process alone."""
    assert "kMaxTurns = 0" in text
    return text.replace("kMaxTurns = 0", "kMaxTurns = 1 << 20")


def compile_part(part: int) -> dict[str, object]:
    checked, timed = _variants()
    texts = sorted([*(_watched(variant.source()) for variant in checked), *(variant.source() for variant in timed)])[
        part::_NUM_COMPILERS
    ]
    nvrtc = Nvrtc()
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        sizes = list(threads.map(lambda text: len(nvrtc.cubin(text)), texts))
    return {"failed": 0, "compiled": len(sizes)}


def _decoder_config(num_layers: int) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=512,
        hidden_size=_HIDDEN,
        mlp_size=_MLP,
        num_layers=num_layers,
        num_heads=_HEADS,
        num_kv_heads=_KV_HEADS,
        head_dim=_HEAD_DIM,
        max_total_len=_CONTEXT + 1,
        norm_eps=_EPS,
        rope=RopeConfig(theta=500000.0),
        windows=(None,) * num_layers,
        is_tied=True,
    )


def _weights(num_layers: int) -> DecoderWeights:
    """[in, out] views of what lies [out, in]; the norms' are ones."""

    def random_weight(num_out: int, num_in: int) -> torch.Tensor:
        return _random(num_out, num_in).mul_(num_in**-0.5).t()

    ones_D = torch.ones(_HIDDEN, dtype=torch.bfloat16, device="cuda")
    layers = tuple(
        DecoderLayer(
            attention=AttentionWeights(
                norm_D=ones_D,
                w_qkv_DX=random_weight(_QKV, _HIDDEN),
                b_qkv_X=None,
                q_norm_d=None,
                k_norm_d=None,
                w_o_QD=random_weight(_HIDDEN, _HEADS * _HEAD_DIM),
                b_o_D=None,
            ),
            mlp_norm_D=ones_D,
            mlp=MlpWeights(
                w_gate_up_DF2=random_weight(2 * _MLP, _HIDDEN),
                b_gate_up_F2=None,
                w_down_FD=random_weight(_HIDDEN, _MLP),
                b_down_D=None,
            ),
        )
        for _ in range(num_layers)
    )
    head_DO = random_weight(512, _HIDDEN)
    return DecoderWeights(embedding_VD=head_DO.t(), layers=layers, final_norm_D=ones_D, head_DO=head_DO)


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
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
