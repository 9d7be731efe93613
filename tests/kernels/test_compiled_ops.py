"""Operations that torch.compile fuses against the references: traced alone for most, compiled where a compiler is."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from support.rounding import kernel_tolerance

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.cuda.compiled_ops import CompiledOps
from radixmesh.daemons.worker.cuda.ops import Ops, TorchOps
from radixmesh.kernels.deferred_norm import DeferredNormGemm
from radixmesh.kernels.rope_kv import HeadNorms, HeadShape, KvTarget, RopeAngles

# Only the number of rows, the layer or the thread changes between calls: an op is traced once for all of them.
_ROWS = (8, 1, 3, 2, 16, 1, 8)
# Of the rows that are normed: the longest sum.
_NUM_FEATURES = 96
_HEADS = HeadShape(4, 2, 8)
_PAGE_SIZE, _NUM_TOKENS, _LAYERS = 2, 24, 2


@pytest.fixture(autouse=True)
def _compiles_anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


@dataclass(frozen=True)
class _Case:
    """Epilogue of a row's GEMM."""

    is_unnormed: bool
    has_bias: bool
    has_head_norms: bool


@pytest.mark.parametrize("case", [_Case(True, True, True), _Case(False, False, False)])
def test_traced_once_for_rows_and_once_for_one_row(case: _Case) -> None:
    ops = CompiledOps(backend="eager")
    _compare_all(ops, case, (16, 1))
    torch.compiler.set_stance("fail_on_recompile")
    _compare_all(ops, case, _ROWS)
    errors: list[BaseException] = []
    # The steps are another thread's than the start.
    thread = threading.Thread(target=_catching, args=(errors, lambda: _compare_all(ops, case, _ROWS)))
    thread.start()
    thread.join()
    assert not errors, errors


def test_an_error_of_the_compiler_says_what_to_do() -> None:
    with pytest.raises(MeshError, match=r"no toolchain.*--kernels triton") as caught:
        CompiledOps(backend=_broken_backend).check(torch.ones(8), 1e-6)
    assert caught.value.metadata["feature"] == "torch.compile"


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_operations_are_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """RoPE and the write to the pool; without vector instructions and shared headers, which take a minute."""
    from torch._inductor import config

    monkeypatch.setattr(config.cpp, "simdlen", 1)
    monkeypatch.setattr(config, "cpp_cache_precompile_headers", False)
    ops = CompiledOps()
    for num_rows in (8, 3):
        _compare_rope(ops, _Case(True, True, False), num_rows)


@pytest.mark.full
def test_without_a_compiler_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    monkeypatch.setattr(config, "force_disable_caches", True)
    monkeypatch.setattr(config.cpp, "cxx", ("no-such-compiler",))
    with pytest.raises(MeshError, match="--kernels triton"):
        CompiledOps().check(torch.ones(8), 1e-6)


def _compare_all(ops: Ops, case: _Case, sizes: tuple[int, ...]) -> None:
    for num_rows in sizes:
        _compare_rope(ops, case, num_rows)
        gate_up = _gemm(case, num_rows, 64)
        want = TorchOps()
        with torch.inference_mode():
            _check_same(ops.silu_mul(gate_up, 1e-5), want.silu_mul(gate_up, 1e-5))
            x_TD, w_D = torch.randn(num_rows, _NUM_FEATURES), torch.randn(_NUM_FEATURES)
            _check_same(ops.rms_norm(x_TD, w_D, 1e-5), want.rms_norm(x_TD, w_D, 1e-5))


@torch.inference_mode()
def _compare_rope(ops: Ops, case: _Case, num_rows: int) -> None:
    """In every layer of a pool like the worker's, whose layers lie behind each other."""
    d, width = _HEADS.head_dim, _HEADS.num_heads + 2 * _HEADS.num_kv_heads
    planes = torch.zeros(2, 2, _LAYERS, _NUM_TOKENS, _HEADS.num_kv_heads, d)  # of both, keys and values
    angles = torch.rand(2, _NUM_TOKENS, d // 2) * 6
    indexes = torch.randperm(_NUM_TOKENS)[:num_rows]
    tables = torch.randperm(_NUM_TOKENS // _PAGE_SIZE).reshape(3, -1).int()
    per_slot = tables.shape[1] * _PAGE_SIZE
    target = KvTarget((indexes % per_slot).int(), (indexes // per_slot).int(), tables, _PAGE_SIZE)
    norms = torch.randn(2, d) if case.has_head_norms else (None, None)
    for layer in range(_LAYERS):
        qkv = _gemm(case, num_rows, width * d)
        queries = [
            each.rope_write_kv(
                qkv, RopeAngles(*angles), target, keys[layer], values[layer], _HEADS, HeadNorms(*norms, 1e-5)
            )
            for each, (keys, values) in zip((ops, TorchOps()), planes, strict=True)
        ]
        _check_same(*queries)
        _check_same(*planes)
        assert int(planes[0, 0, layer].abs().sum((1, 2)).count_nonzero()) == num_rows


def _gemm(case: _Case, num_rows: int, width: int) -> DeferredNormGemm:
    return DeferredNormGemm(
        torch.randn(num_rows, width),
        torch.randn(width) if case.has_bias else None,
        3 * torch.randn(num_rows, _NUM_FEATURES) if case.is_unnormed else None,
    )


def _check_same(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, **kernel_tolerance(got.dtype, _NUM_FEATURES, float(want.abs().max())))


def _broken_backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
    raise RuntimeError("no toolchain")


def _catching(errors: list[BaseException], work: Callable[[], None]) -> None:
    try:
        work()
    except BaseException as error:
        errors.append(error)
