"""Kernels at the sizes of real models, in captured graphs, where there is a GPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.device_samples import check_sampled, new_target, params_of
from support.rounding import typical_chain_error
from torch.nn import functional

from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.worker.runner import SampleInput
from radixmesh.kernels.deferred_norm import DeferredNormGemm
from radixmesh.kernels.gemv import gate_up_silu, gate_up_silu_reference, linear, linear_reference
from radixmesh.kernels.rope_kv import (
    HeadNorms,
    HeadShape,
    KvTarget,
    RopeAngles,
    rope_write_kv,
    rope_write_kv_reference,
)
from radixmesh.kernels.sampling.sample import SampleScratch, SlotRows, sample_rows
from radixmesh.kernels.sampling.sample_params import Needs
from radixmesh.kernels.silu_mul import silu_mul, silu_mul_reference

pytestmark = pytest.mark.gpu

_HIDDEN, _MLP, _VOCAB = 3072, 8192, 128256
_NONE = np.empty(0, np.int32)


@pytest.mark.parametrize("use_pdl", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 8])
def test_a_captured_chain_of_gemms_equals_torch(num_rows: int, use_pdl: bool) -> None:
    x, norm = _random(num_rows, _HIDDEN), _random(_HIDDEN)
    qkv, o, down = _weight(5120, _HIDDEN), _weight(_HIDDEN, 5120), _weight(_HIDDEN, _MLP)
    gate_up = _weight(2 * _MLP, _HIDDEN)

    def ours() -> torch.Tensor:
        hidden = x.clone()
        for _ in range(3):
            heads = linear(hidden, qkv, None, None, norm, 1e-6, use_pdl=use_pdl)
            linear(heads, o, None, hidden, out=hidden, use_pdl=use_pdl)
            gated = gate_up_silu(hidden, gate_up, None, 1e-6, use_pdl=use_pdl)
            linear(gated, down, None, hidden, out=hidden, use_pdl=use_pdl)
        return hidden

    def theirs() -> torch.Tensor:
        hidden = x.clone()
        for _ in range(3):
            hidden = linear_reference(linear_reference(hidden, qkv, None, None, norm, 1e-6), o, None, hidden)
            gated = gate_up_silu_reference(hidden, gate_up, None, 1e-6)
            hidden = linear_reference(gated, down, None, hidden)
        return hidden

    actual, expected = _captured(ours), theirs()
    # Four results a layer, in both chains.
    error = (actual.float() - expected.float()).norm() / expected.float().norm()
    assert error < typical_chain_error(2 * 3 * 4, torch.bfloat16), error


@pytest.mark.parametrize("use_pdl", [False, True])
@pytest.mark.parametrize("num_rows", [2, 256, 1000])
def test_a_captured_chain_of_rows_that_are_not_normed_equals_torch(num_rows: int, use_pdl: bool) -> None:
    """Layers but for their attention; the factors are read behind GEMMs that a library launches."""
    num_heads, num_kv_heads, d = 24, 8, 128
    x = _random(num_rows, _HIDDEN) * 4
    qkv, o, down = (
        _weight((num_heads + 2 * num_kv_heads) * d, _HIDDEN),
        _weight(_HIDDEN, _HIDDEN),
        _weight(_HIDDEN, _MLP),
    )
    gate_up, angles = _weight(2 * _MLP, _HIDDEN), torch.rand(num_rows, d // 2, device="cuda")
    tables = torch.randperm(num_rows, device="cuda").to(torch.int32)[None]
    slots = torch.zeros(num_rows, dtype=torch.int32, device="cuda")
    positions = torch.arange(num_rows, dtype=torch.int32, device="cuda")
    targets = RopeAngles(angles.cos(), angles.sin()), KvTarget(positions, slots, tables, 1)
    pools = torch.zeros(2, 2, num_rows, num_kv_heads, d, device="cuda", dtype=torch.bfloat16)
    heads = HeadShape(num_heads, num_kv_heads, d), HeadNorms()

    def ours() -> torch.Tensor:
        rows = x.clone()
        for _ in range(3):
            gemm = DeferredNormGemm(functional.linear(rows, qkv), norm_input_TD=rows)
            q = rope_write_kv(gemm, *targets, *pools[0], *heads, use_pdl=use_pdl)
            rows.addmm_(q.flatten(1), o.t())
            gated = silu_mul(functional.linear(rows, gate_up), norm_input_TD=rows, use_pdl=use_pdl)
            rows.addmm_(gated, down.t())
        return rows

    def theirs() -> torch.Tensor:
        rows = x.clone()
        for _ in range(3):
            gemm = DeferredNormGemm(functional.linear(rows, qkv), norm_input_TD=rows)
            q = rope_write_kv_reference(gemm, *targets, *pools[1], *heads)
            rows = torch.addmm(rows, q.flatten(1), o.t())
            gated = silu_mul_reference(functional.linear(rows, gate_up), norm_input_TD=rows)
            rows = torch.addmm(rows, gated, down.t())
        return rows

    for actual, expected in ((_captured(ours), theirs()), (pools[0], pools[1])):
        # Three GEMMs a layer that are rounded by themselves, two that are added and then rounded; in both chains.
        error = (actual.float() - expected.float()).norm() / expected.float().norm()
        assert error < typical_chain_error(2 * 3 * 6, torch.bfloat16), error


@pytest.mark.parametrize("num_rows", [1, 40])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.0),
        Sampling(),
        Sampling(temperature=0.6, top_p=0.9),
        Sampling(top_k=50, min_p=0.01),
        Sampling(temperature=3.0, top_p=0.999),
        Sampling(temperature=0.7, repetition_penalty=1.2, presence_penalty=0.5),
    ],
    ids=str,
)
def test_samples_over_a_big_vocabulary_are_the_cpus(sampling: Sampling, num_rows: int) -> None:
    generator = np.random.default_rng(num_rows)
    inputs = [_input(sampling, generator) for _ in range(num_rows)]
    scratch = SampleScratch(num_rows, _VOCAB, torch.device("cuda"), has_penalties=True)
    check_sampled(_random(num_rows, _VOCAB).mul_(3), inputs, scratch)


def test_a_captured_draw_follows_what_the_device_holds() -> None:
    generator = np.random.default_rng(0)
    inputs = [_input(Sampling(temperature=0.8, top_p=0.95), generator) for _ in range(4)]
    device = torch.device("cuda")
    params, scratch = params_of(inputs, range(4), device), SampleScratch(4, _VOCAB, device, has_penalties=False)
    logits = _random(4, _VOCAB).mul_(3)
    slots = torch.arange(4, dtype=torch.int32, device=device)
    positions = torch.tensor([sample.position for sample in inputs], dtype=torch.int32, device=device)

    target = new_target(4, 4, device, ring_index=1)

    def sample_all() -> torch.Tensor:
        sample_rows(logits, SlotRows(params, slots, positions), scratch, target, Needs.NOISE | Needs.FILTERS)
        return target.ring_RT[1].clone()

    graph, out = _graph(sample_all)
    for _ in range(3):
        logits.copy_(_random(4, _VOCAB).mul_(3))
        positions += 1
        params.temperature_S.mul_(0.9)
        expected = sample_all().tolist()
        graph.replay()
        assert out.tolist() == expected


def _input(sampling: Sampling, generator: np.random.Generator) -> SampleInput:
    seeded = Sampling(
        **{name: getattr(sampling, name) for name in Sampling.__slots__ if name != "seed"},
        seed=int(generator.integers(0, 2**63)),
    )
    output_ids = generator.integers(0, _VOCAB, 20).astype(np.int32)
    return SampleInput(sampling=seeded, prompt_ids=_NONE, output_ids=output_ids, position=20)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _weight(num_out: int, num_in: int) -> torch.Tensor:
    return _random(num_out, num_in) * num_in**-0.5


def _captured(run: Callable[[], torch.Tensor]) -> torch.Tensor:
    graph, out = _graph(run)
    graph.replay()
    torch.cuda.synchronize()
    return out


def _graph(run: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = run()
    return graph, out
