"""FP8 weights on a GPU: kernels at the sizes of real models, in captured graphs, against torch; and decoders, from
checkpoints of every form and quantised when loaded, that still know the texts they were taught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.device_settings import TINY_SETTINGS
from support.fp8_folders import Form, dequantised_model, write_fp8
from support.llama_folders import TINY_LLAMA, random_llama
from support.plan_driver import GREEDY, PROMPTS, PlanDriver
from support.recite import recited_wrongly
from support.rounding import (
    largest_logprob_error,
    typical_chain_error,
    typical_fp8_error,
    typical_model_error,
    unit_roundoff,
)
from transformers import AutoConfig

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.cuda.fp8.gemm import (
    ScaledMmGemm,
    TritonFp8Gemm,
    TunedFp8Gemm,
    check_small_gemm,
    tried_library,
)
from radixmesh.daemons.worker.cuda.load import load_cuda_runner
from radixmesh.daemons.worker.cuda.runner import DeviceRunner
from radixmesh.daemons.worker.runner import Segment
from radixmesh.kernels.fp8.gemv import (
    fp8_gate_up_silu,
    fp8_gate_up_silu_reference,
    fp8_gemv,
    fp8_gemv_reference,
)
from radixmesh.kernels.fp8.linear import fp8_linear, fp8_linear_reference
from radixmesh.kernels.fp8.quantize_rows import norm_quantize, norm_quantize_reference, quantize_rows
from radixmesh.kernels.fp8.quantized import (
    FP8,
    QuantizedMatrix,
    QuantizedRows,
    quantize_matrix,
    quantize_rows_reference,
)
from radixmesh.kernels.fp8.silu_quantize import silu_quantize, silu_quantize_reference

pytestmark = pytest.mark.gpu

_HIDDEN, _MLP = 3072, 8192
_GROUPS = [pytest.param(False, id="channel"), pytest.param(True, id="block")]
SETTINGS = replace(
    TINY_SETTINGS,
    dtype="bfloat16",
    attention_backend="triton",
    num_pages=4096,
    max_total_len=256,
    cuda_graphs=True,
    use_pdl=True,
    tune_gemm=False,
)


@pytest.mark.parametrize("use_pdl", [False, True])
@pytest.mark.parametrize("is_grouped", _GROUPS)
def test_a_captured_chain_of_gemms_of_one_row_equals_torch(is_grouped: bool, use_pdl: bool) -> None:
    x, norm = _random(1, _HIDDEN), _random(_HIDDEN)
    qkv, o, gate_up, down = (
        _matrix(*shape, is_grouped)
        for shape in ((5120, _HIDDEN), (_HIDDEN, 5120), (2 * _MLP, _HIDDEN), (_HIDDEN, _MLP))
    )

    def ours() -> torch.Tensor:
        hidden = x.clone()
        for _ in range(3):
            heads = fp8_gemv(hidden, qkv, None, None, norm, 1e-6, use_pdl=use_pdl)
            fp8_gemv(heads, o, None, hidden, out=hidden, use_pdl=use_pdl)
            gated = fp8_gate_up_silu(hidden, gate_up, norm, 1e-6, use_pdl=use_pdl)
            fp8_gemv(gated, down, None, hidden, out=hidden, use_pdl=use_pdl)
        return hidden

    def theirs() -> torch.Tensor:
        hidden = x.float()
        for _ in range(3):
            hidden = hidden + fp8_gemv_reference(fp8_gemv_reference(hidden, qkv, None, None, norm, 1e-6), o)
            gated = fp8_gate_up_silu_reference(hidden, gate_up, norm, 1e-6)
            hidden = hidden + fp8_gemv_reference(gated, down)
        return hidden

    # Four results a layer.
    assert _error(_captured(ours), theirs()) < typical_chain_error(3 * 4, torch.bfloat16)


@pytest.mark.parametrize("is_grouped", _GROUPS)
@pytest.mark.parametrize(("num_rows", "use_pdl"), [(2, True), (64, True), (256, False), (1000, True)])
def test_a_captured_chain_of_rows_made_fp8_equals_torch(num_rows: int, is_grouped: bool, use_pdl: bool) -> None:
    """Layers but for their attention, as the decoder launches them."""
    x, norm, bias = _random(num_rows, _HIDDEN) * 4, _random(_HIDDEN), _random(_HIDDEN)
    qkv, o, gate_up, down = (
        _matrix(*shape, is_grouped)
        for shape in ((_HIDDEN, _HIDDEN), (_HIDDEN, _HIDDEN), (2 * _MLP, _HIDDEN), (_HIDDEN, _MLP))
    )
    gemm = tried_library(TritonFp8Gemm(use_pdl=use_pdl), x.device)
    options = {"is_grouped": is_grouped, "use_pdl": use_pdl}

    def ours() -> torch.Tensor:
        rows, added = x.clone(), None
        for _ in range(2):
            quantized = norm_quantize(rows, norm, 1e-5, delta_TD=added, **options)
            heads = gemm.linear(quantized, qkv, torch.bfloat16)
            added = gemm.linear(quantize_rows(heads, **options), o, torch.bfloat16)
            quantized = norm_quantize(rows, norm, 1e-5, delta_TD=added, bias_D=bias, **options)
            gated = silu_quantize(gemm.linear(quantized, gate_up, torch.bfloat16), **options)
            added = gemm.linear(gated, down, torch.bfloat16)
        assert added is not None
        return rows.add_(added)

    def theirs() -> torch.Tensor:
        rows, added, exact = x.float(), None, torch.float32
        for _ in range(2):
            quantized = norm_quantize_reference(rows, norm, 1e-5, delta_TD=added, is_grouped=is_grouped)
            heads = fp8_linear_reference(quantized, qkv, exact)
            added = fp8_linear_reference(quantize_rows_reference(heads, is_grouped=is_grouped), o, exact)
            quantized = norm_quantize_reference(rows, norm, 1e-5, delta_TD=added, bias_D=bias, is_grouped=is_grouped)
            gated = silu_quantize_reference(fp8_linear_reference(quantized, gate_up, exact), is_grouped=is_grouped)
            added = fp8_linear_reference(gated, down, exact)
        assert added is not None
        return rows + added

    # If bfloat16 falls to the other side between two numbers of FP8, the next layer rounds anew: four times a
    # layer, in both chains, of all but the rows that they begin with.
    want = theirs()
    share = float((want - x).norm() / want.norm())
    assert _error(_captured(ours), want) < share * typical_chain_error(2 * 2 * 4, FP8)


@pytest.mark.parametrize("groups", ["channel", "block", "rows of blocks"])
@pytest.mark.parametrize("num_rows", [1, 17, 64, 300, 2100])
@pytest.mark.parametrize(("num_out", "num_in"), [(_HIDDEN, _MLP), (1000, 1232)])
def test_gemms_equal_torch_at_any_number_of_rows(num_rows, num_out, num_in, groups) -> None:
    w = _matrix(num_out, num_in, groups != "channel")
    if groups == "rows of blocks":
        w = QuantizedMatrix(w.data_NK, w.scales.repeat_interleave(128, 0)[:num_out].contiguous(), 1, True)
    rows = quantize_rows(_random(num_rows, num_in), is_grouped=w.is_grouped)
    want = fp8_linear_reference(rows, w, torch.float32)
    # One rounding; groups of 128, whose sums tensor cores keep to some fourteen bits, are no further off than that.
    most = typical_chain_error(2, torch.bfloat16)
    assert _error(fp8_linear(rows, w, torch.bfloat16, use_pdl=True), want) < most
    library = tried_library(_NoGemm(), rows.data_PK.device)
    if num_rows > 1 and library.takes(rows, w, torch.bfloat16):
        # Sums of a whole row lose half of the last of fourteen bits with every 32 terms.
        lost = 0.0 if w.is_grouped else num_in / 32 * 2**-14
        assert _error(library.linear(rows, w, torch.bfloat16), want) < most + lost


class _NoGemm(TritonFp8Gemm):
    def linear(self, rows: QuantizedRows, w: QuantizedMatrix, dtype: torch.dtype) -> torch.Tensor:
        raise AssertionError("the library was to compute this")


def test_the_library_computes_small_gemms_as_it_should() -> None:
    device = torch.device("cuda")
    for is_grouped in (False, True):
        check_small_gemm(TritonFp8Gemm(), device, is_grouped=is_grouped)
    # Of blocks it depends on its version.
    assert False in tried_library(_NoGemm(), device).groupings


@pytest.mark.parametrize("tune_gemm", [False, True])
@pytest.mark.parametrize("quantization", ["fp8", "fp8-block"])
def test_gemms_are_chosen_by_measurement(quantization: str, tune_gemm: bool) -> None:
    runner = _runner(TINY_LLAMA, quantization=quantization, tune_gemm=tune_gemm)
    gemm = runner.model.kernels.fp8.gemm  # type: ignore[attr-defined]
    assert isinstance(gemm, TunedFp8Gemm if tune_gemm else ScaledMmGemm)
    assert recited_wrongly(runner, lag=1, chunk_len=16)[0] == 0


@pytest.mark.parametrize("num_rows", [1, 300])
@pytest.mark.parametrize("is_grouped", _GROUPS)
def test_rows_are_made_fp8_as_in_torch(num_rows: int, is_grouped: bool) -> None:
    x, norm, gate_up = _random(num_rows, _HIDDEN) * 9, _random(_HIDDEN), _random(num_rows, 2 * _MLP)
    for got, want in (
        (quantize_rows(x, is_grouped=is_grouped), quantize_rows_reference(x, is_grouped=is_grouped)),
        (
            norm_quantize(x, norm, 1e-5, is_grouped=is_grouped),
            norm_quantize_reference(x, norm, 1e-5, is_grouped=is_grouped),
        ),
        (silu_quantize(gate_up, is_grouped=is_grouped), silu_quantize_reference(gate_up, is_grouped=is_grouped)),
    ):
        # Roundings of a norm's sum, or of as many, add like a random walk. Where that crosses the border of two FP8
        # numbers, which are a sixteenth of their size apart or more, they differ by an eighth at most.
        numel = want.data_TK.numel()
        error = 6 * want.data_TK.shape[1] ** 0.5 * unit_roundoff(torch.float32)
        torch.testing.assert_close(got.scales_TG, want.scales_TG, rtol=error, atol=0)
        num_expected = numel * 16 * 2 * error
        most = num_expected + 4 * num_expected**0.5 + 1
        assert int((got.data_TK.float() != want.data_TK.float()).sum()) <= most
        assert _error(got.dequantized(), want.dequantized()) < (most / numel) ** 0.5 / 8


@pytest.mark.parametrize(("dtype", "cuda_graphs"), [("bfloat16", True), ("bfloat16", False), ("float32", True)])
@pytest.mark.parametrize("quantization", ["fp8", "fp8-block"])
def test_a_model_that_was_taught_texts_recites_them(quantization, dtype, cuda_graphs) -> None:
    runner = _runner(TINY_LLAMA, quantization=quantization, dtype=dtype, cuda_graphs=cuda_graphs)
    for chunk_len, lag, is_alone in ((7, 2, False), (64, 1, False), (64, 2, True)):
        num_wrong, num_tokens = recited_wrongly(runner, lag=lag, chunk_len=chunk_len, is_alone=is_alone)
        assert num_wrong == 0 and num_tokens > 200, (num_wrong, num_tokens, chunk_len, is_alone)


@pytest.mark.parametrize("form", Form)
def test_checkpoints_of_every_form_recite(form: Form, tmp_path: Path) -> None:
    folder = write_fp8(TINY_LLAMA, tmp_path / "fp8", form, kept=("layers.1.mlp.down_proj",))
    runner = _runner(folder, cuda_graphs=form is Form.BLOCK)
    assert recited_wrongly(runner, lag=2, chunk_len=16)[0] == 0


@pytest.mark.parametrize("kernels", ["torch", pytest.param("compiled", marks=pytest.mark.full)])
def test_other_kernels_recite(kernels: str) -> None:
    assert recited_wrongly(_runner(TINY_LLAMA, quantization="fp8", kernels=kernels), lag=1, chunk_len=16)[0] == 0


@pytest.mark.parametrize("form", [Form.STATIC_TENSOR, Form.BLOCK])
def test_steps_of_one_row_and_of_more_are_near_the_dequantised_weights(form: Form, tmp_path: Path) -> None:
    source = tmp_path / "plain"
    random_llama("biases").save_pretrained(source)
    folder = write_fp8(source, tmp_path / "fp8", form)
    ids = np.array([5, 99, 3, 42, 42, 7, 130], np.int32)
    with torch.inference_mode():
        want = dequantised_model(folder)(torch.from_numpy(ids).long()[None]).logits[0]
    config = AutoConfig.from_pretrained(folder)
    for dtype, most in (
        ("float32", largest_logprob_error(config, len(ids), 1.0)),
        ("bfloat16", typical_model_error(config, 1.0, torch.bfloat16)),
    ):
        runner = _runner(folder, dtype=dtype)
        assert _error(_logits(runner, ids, 1), want) < most
        # Rows are FP8 too.
        assert _error(_logits(runner, ids, len(ids)), want) < typical_fp8_error(config) + most
        other = _logits(_runner(folder, dtype=dtype, kernels="torch", cuda_graphs=False), ids, len(ids))
        assert _error(_logits(runner, ids, len(ids)), other) < typical_fp8_error(config)


@pytest.mark.parametrize("quantization", ["fp8", "fp8-block"])
def test_deterministic_mode_does_not_depend_on_batch_or_chunks(quantization: str) -> None:
    runner = _runner(TINY_LLAMA, quantization=quantization, deterministic=True)
    outputs = []
    for chunk_len, alone in ((64, False), (7, False), (64, True), (1, True)):
        logprobs: dict[int, list[float]] = {}
        for group in ([slot] for slot in range(len(PROMPTS))) if alone else [range(len(PROMPTS))]:
            runner.clear()
            driver = PlanDriver(runner, lag=1)
            for slot in group:
                driver.add(slot, PROMPTS[slot], replace(GREEDY, num_top_logprobs=2), chunk_len=chunk_len, num_out=40)
            driver.finish(12)
            for result in driver.results:
                for part in result.logprobs:
                    logprobs.setdefault(part.slot, []).extend(part.logprobs.own.tolist())
        outputs.append({slot: values[:10] for slot, values in logprobs.items()})
    assert all(output == outputs[0] for output in outputs[1:])


def test_a_form_that_the_checkpoint_has_not_is_refused(tmp_path: Path) -> None:
    folder = write_fp8(TINY_LLAMA, tmp_path / "fp8", Form.BLOCK)
    with pytest.raises(MeshError, match="quantization"):
        _runner(folder, quantization="fp8")
    assert recited_wrongly(_runner(folder, quantization="none"), lag=1, chunk_len=16)[0] == 0


def _runner(folder: Path, **changes: object) -> DeviceRunner:
    runner = load_cuda_runner(folder, replace(SETTINGS, **changes))  # type: ignore[arg-type]
    assert isinstance(runner, DeviceRunner)
    return runner


def _logits(runner: DeviceRunner, ids: np.ndarray, chunk_len: int) -> torch.Tensor:
    pages = np.arange(len(ids), dtype=np.int32)
    parts = [
        runner.logits([Segment(slot=1, ids=ids[start : start + chunk_len], start=start, pages=pages)])[0]
        for start in range(0, len(ids), chunk_len)
    ]
    return torch.from_numpy(np.concatenate(parts))


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _matrix(num_out: int, num_in: int, is_grouped: bool) -> QuantizedMatrix:
    weight = _random(num_out, num_in) * num_in**-0.5
    # Channels and blocks whose scales differ.
    weight *= torch.linspace(0.5, 2, num_out, device="cuda")[:, None]
    return quantize_matrix(weight, is_grouped=is_grouped)


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def _captured(run: Callable[[], torch.Tensor]) -> torch.Tensor:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = run()
    graph.replay()
    torch.cuda.synchronize()
    return out
