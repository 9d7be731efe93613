"""Layers of a decode step as the decoder runs them, captured with GEMMs of one's choice: right, and how fast?

Llama-3.2-3B's shape at context 384. For `gemm_sm90.py`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from gemm_model import (
    CONTEXT,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    MLP,
    QKV,
    RandomKv,
    decoder_config,
    random_tensor,
    random_weights,
)

from radixmesh.daemons.worker.cpu.attention.backend import AttentionShape
from radixmesh.daemons.worker.cuda.attention.backend import DeviceStep
from radixmesh.daemons.worker.cuda.attention.paged_kernels import KeyValueKernels
from radixmesh.daemons.worker.cuda.attention.triton_attention import TritonAttention
from radixmesh.daemons.worker.cuda.gemm.autotuner import Benchmark, GraphBenchmark, MatrixGroup, Timing
from radixmesh.daemons.worker.cuda.gemm.backend import (
    GemmBackend,
    GemmEpilogue,
    GemmKernel,
    GemmProblem,
    TorchGemm,
    TunedGemm,
)
from radixmesh.daemons.worker.cuda.gemm.cublaslt import CublasLt
from radixmesh.daemons.worker.cuda.gemm.cublaslt_kernels import CublasLtKernels
from radixmesh.daemons.worker.cuda.gemm.sm90_kernels import Sm90Gemm, Sm90Kernels
from radixmesh.daemons.worker.cuda.gemm.tuning import plain_groups, tune_kind
from radixmesh.daemons.worker.cuda.model.decoder import LoadedDecoder
from radixmesh.daemons.worker.cuda.model.device_model import DeviceModel, Kernels
from radixmesh.daemons.worker.cuda.ops import TritonOps
from radixmesh.daemons.worker.models.decoder.model import DecoderModel
from radixmesh.daemons.worker.models.model import Placement
from radixmesh.daemons.worker.ranks.group import LocalGroup
from radixmesh.kernels.gemm_sm90.candidates import candidates
from radixmesh.kernels.gemm_sm90.cuda_driver import CudaDriver
from radixmesh.kernels.gemm_sm90.gemm import GemmSm90
from radixmesh.kernels.gemm_sm90.nvrtc import Nvrtc
from radixmesh.kernels.gemm_sm90.variants import GemmConfig, Variant, variant_of
from radixmesh.kernels.rope_kv import KvTarget

_LAYERS, _CHECKED_LAYERS = 28, 4
_CANDIDATES = 9
# N, K and whether it is gated, of the matrices of a layer.
_MATRICES = {
    "gate_up": (2 * MLP, HIDDEN, True),
    "down": (HIDDEN, MLP, False),
    "qkv": (QKV, HIDDEN, False),
    "o": (HIDDEN, HIDDEN, False),
}


class Chain:
    """All layers of a decode step of so many rows; graphs of it by who computes its GEMMs."""

    def __init__(self, num_rows: int, num_layers: int) -> None:
        self.num_rows = num_rows
        self.config = decoder_config(num_layers)
        placement = Placement(device=torch.device("cuda"), dtype=torch.bfloat16, group=LocalGroup())
        self.loaded = LoadedDecoder(DecoderModel(self.config, random_weights(num_layers), placement))
        self.kv = RandomKv(num_layers, num_rows * CONTEXT + 1)
        self.input_TD, self.output_TD = (
            random_tensor(num_rows, HIDDEN),
            torch.empty_like(random_tensor(num_rows, HIDDEN)),
        )
        slots = torch.arange(num_rows, device="cuda", dtype=torch.int32)
        tables = torch.randperm(num_rows * CONTEXT, device="cuda").int().view(num_rows, CONTEXT)
        tables = torch.cat([tables, torch.full_like(tables[:1], num_rows * CONTEXT)])
        none = slots[:0]
        self._step = DeviceStep(
            page_tables=tables,
            row_slots=slots,
            row_positions=torch.full_like(slots, CONTEXT - 1),
            decode_slots=slots,
            decode_kv_lens=torch.full_like(slots, CONTEXT),
            chunk_slots=none,
            chunk_row_starts=torch.zeros_like(slots[:1]),
            chunk_kv_lens=none,
            max_chunk_len=0,
        )
        shape = AttentionShape(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, scale=HEAD_DIM**-0.5)
        self._attention = TritonAttention(
            KeyValueKernels(shape, 1, torch.bfloat16, torch.device("cuda")),
            windows=(None,),
            max_rows=num_rows,
            is_deterministic=False,
            use_pdl=True,
        )
        self.stream = torch.cuda.Stream()
        self._models: list[DeviceModel] = []

    def graph(self, gemm: GemmBackend) -> torch.cuda.CUDAGraph:
        """From the input to the output, which are its own."""
        ops = TritonOps(use_pdl=True, gemm=gemm)
        model = self.loaded.create(Kernels(ops), self.kv, CONTEXT + 1)
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

    def groups(self) -> dict[GemmProblem, MatrixGroup[torch.Tensor]]:
        """The matrices of the layers, gate and up as one gated GEMM."""
        groups = plain_groups(self.loaded.tunable_matrices(), has_gated=True)[: len(_MATRICES)]
        return {group.problem(self.num_rows): group for group in groups}

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


def check_chain(num_rows: int) -> dict[str, object]:
    """With each candidate's option for all matrices in turn."""
    chain = Chain(num_rows, _CHECKED_LAYERS)
    kernel = GemmSm90(CudaDriver(), Nvrtc().cubin)
    inputs = [random_tensor(num_rows, HIDDEN) for _ in range(6)]
    expected = _outputs(chain, chain.graph(TorchGemm()), inputs)
    worst, furthest, num_other_bits, num_replays = 0.0, 0.0, 0, 0
    for index in (0, 1, -1):
        table = {problem: _bound(kernel, problem, options(problem)[index]) for problem in chain.groups()}
        graph = chain.graph(TunedGemm(table))
        first = _outputs(chain, graph, inputs)
        for found, wanted in zip(first, expected, strict=True):
            error = float((found.float() - wanted.float()).norm() / wanted.float().norm())
            # NaN is the worst of all.
            worst = error if not error <= worst else worst
        differs, most, count = _repeated(chain, graph, inputs, first)
        num_other_bits, furthest, num_replays = num_other_bits + differs, max(furthest, most), num_replays + count
    return {
        "failed": int(not (worst < 0.03 and not num_other_bits)),
        "worst": worst,
        "other_bits": num_other_bits,
        "furthest": furthest,
        "replays": num_replays,
    }


def measure(num_rows: int) -> dict[str, object]:
    """Microseconds a layer with cuBLASLt's tuned GEMMs, with ours, and with ours for one matrix or all but one."""
    started = time.monotonic()
    chain = Chain(num_rows, _LAYERS)
    device = torch.device("cuda")
    library = tune_kind(
        lambda: CublasLtKernels(CublasLt(device)),
        plain_groups(chain.loaded.tunable_matrices()),
        [num_rows],
        device,
        event="gemm_tuned",
        failed="gemm_not_tuned",
    )
    kernel = GemmSm90(CudaDriver(), Nvrtc().cubin)
    alone_us, ranked, refused = _ranked(chain, kernel, library)
    best = _best_in_place(chain, kernel, library, ranked)
    ours = {problem: _bound(kernel, problem, config) for problem, config in best.items()}
    graphs = {"library": chain.graph(TunedGemm(library)), "pdl": chain.graph(TunedGemm(library | ours))}
    for problem, bound in ours.items():
        others = {other: gemm for other, gemm in ours.items() if other != problem}
        graphs[f"only_{name_of(problem)}"] = chain.graph(TunedGemm(library | {problem: bound}))
        graphs[f"but_{name_of(problem)}"] = chain.graph(TunedGemm(library | others))
    least = dict.fromkeys(graphs, float("inf"))
    for _ in range(6):
        for name, graph in graphs.items():
            least[name] = min(least[name], chain.replay(graph, 3))
    return {
        "rows": num_rows,
        "failed": len(refused),
        "refused": refused,
        "layer_us": {name: round(us, 2) for name, us in least.items()},
        "chosen": {name_of(problem): str(config) for problem, config in best.items()},
        "alone_us": alone_us,
        "seconds": round(time.monotonic() - started, 1),
    }


def chain_variants(num_rows: int) -> set[Variant]:
    """All that jobs of so many rows compile."""
    return {
        variant_of(config, num_rows, is_gated, torch.bfloat16)
        for num_out, num_in, is_gated in _MATRICES.values()
        for config in _options(num_rows, num_out, num_in, is_gated)
    }


def options(problem: GemmProblem) -> list[GemmConfig]:
    return _options(problem.num_rows, problem.num_out, problem.num_in, problem.epilogue is GemmEpilogue.GATED)


def name_of(problem: GemmProblem) -> str:
    return next(name for name, (*size, _) in _MATRICES.items() if size == [problem.num_out, problem.num_in])


def _options(num_rows: int, num_out: int, num_in: int, is_gated: bool) -> list[GemmConfig]:
    return candidates(num_rows, num_out // (1 + is_gated), num_in, is_gated=is_gated, count=_CANDIDATES)


def _bound(kernel: GemmSm90, problem: GemmProblem, config: GemmConfig) -> GemmKernel:
    return Sm90Gemm(kernel, config, problem.epilogue)


def _ranked(
    chain: Chain, kernel: GemmSm90, library: Mapping[GemmProblem, GemmKernel]
) -> tuple[dict[str, dict[str, float]], dict[GemmProblem, list[GemmConfig]], list[str]]:
    """Microseconds of each GEMM by itself, candidates by those, and why others do not run."""
    kernels = Sm90Kernels(kernel, TunedGemm(library))
    alone_us, ranked, refused = {}, {}, []
    for problem, group in chain.groups().items():
        weights = group.beyond_cache()
        benchmark = GraphBenchmark(chain.stream, kernels.operands(problem, weights), weights)
        library_us, times_us, notes = _alone(benchmark, options(problem))
        refused += [f"{name_of(problem)} {note}" for note in notes]
        rounded_us = {str(config): round(us, 2) for config, us in times_us.items()}
        alone_us[name_of(problem)] = {"library": round(library_us, 2), **rounded_us}
        ranked[problem] = sorted(times_us, key=lambda config, times_us=times_us: times_us[config])
    return alone_us, ranked, refused


def _alone(
    benchmark: Benchmark[GemmConfig], configs: list[GemmConfig]
) -> tuple[float, dict[GemmConfig, float], list[str]]:
    """Microseconds of the library's, of those that run, and why others do not."""
    library = benchmark.candidate(None)
    timings: dict[GemmConfig, Timing] = {}
    refused = []
    for config in configs:
        try:
            timings[config] = benchmark.candidate(config)
        except RuntimeError as error:
            refused.append(f"{config!s}: {error}")
    library_us = min(library() for _ in range(4))
    return library_us, {config: min(timing() for _ in range(4)) for config, timing in timings.items()}, refused


def _best_in_place(
    chain: Chain,
    kernel: GemmSm90,
    library: Mapping[GemmProblem, GemmKernel],
    ranked: Mapping[GemmProblem, list[GemmConfig]],
) -> dict[GemmProblem, GemmConfig]:
    """Of the three that are fastest alone, in their places in the layer: kernels ahead and behind count there."""
    best = {problem: configs[0] for problem, configs in ranked.items()}
    for problem, configs in ranked.items():
        times_us = {}
        for config in configs[:3]:
            table = {each: _bound(kernel, each, chosen) for each, chosen in {**best, problem: config}.items()}
            graph = chain.graph(TunedGemm({**library, **table}))
            times_us[config] = min(chain.replay(graph, 2) for _ in range(4))
        best[problem] = min(times_us, key=lambda config: times_us[config])
    return best


def _outputs(chain: Chain, graph: torch.cuda.CUDAGraph, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    outputs = []
    for input_TD in inputs:
        with torch.cuda.stream(chain.stream):
            chain.input_TD.copy_(input_TD)
            graph.replay()
            outputs.append(chain.output_TD.clone())
    chain.stream.synchronize()
    return outputs


def _repeated(
    chain: Chain, graph: torch.cuda.CUDAGraph, inputs: list[torch.Tensor], first: list[torch.Tensor]
) -> tuple[int, float, int]:
    """Number of outputs that differ from the first one of the same input, by how much at most, and number of all."""
    differs = torch.zeros((), dtype=torch.int64, device="cuda")
    most = torch.zeros((), device="cuda")
    num_replays = 0
    with torch.cuda.stream(chain.stream):
        for turn in range(150):
            at = (turn * turn + turn // 7) % len(inputs)
            chain.input_TD.copy_(inputs[at])
            # Back to back, too: a replay overlaps the end of the one before it, as layers do.
            for _ in range(1 + turn % 3):
                graph.replay()
                num_replays += 1
            differs += (chain.output_TD != first[at]).any()
            most = torch.maximum(most, (chain.output_TD.float() - first[at].float()).abs().max())
        chain.stream.synchronize()
    return int(differs), float(most), num_replays
