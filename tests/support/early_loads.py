"""Loads that kernels issue before the kernel ahead has ended, found in what they compile to for an H200.

Run as a program without TRITON_INTERPRET: prints JSON, for each kernel the pointers that it loads from before it waits
(griddepcontrol.wait).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from types import ModuleType

import torch
from triton.runtime.jit import JITFunction

from support.compiled_kernels import compiled

_REGISTER = re.compile(r"%[a-z]+\d+")


def loads_before_wait(kernel: JITFunction, ptx: str, names: list[str]) -> list[str] | None:
    """names: of the kernel's parameters. An address comes from a parameter by whatever is computed from that. None: it
    never waits."""
    before, wait, _ = ptx.partition("griddepcontrol.wait")
    if not wait:
        return None
    sources: dict[str, set[str]] = {}
    found: set[str] = set()
    for line in before.splitlines():
        registers = _REGISTER.findall(line.partition("//")[0])
        parameter = re.search(rf"ld\.param\S*\s.*\[{kernel.__name__}_param_(\d+)\]", line)
        if parameter:
            sources[registers[0]] = {names[int(parameter[1])]}
        elif "ld.global" in line:
            found |= {name for register in registers for name in sources.get(register, ()) if name.endswith("_ptr")}
        elif registers:
            target, *inputs = registers
            sources[target] = set().union(*(sources.get(register, set()) for register in inputs))
    return sorted(found)


def _launches() -> dict[str, tuple[ModuleType, Callable[[], object]]]:
    """A launch of each kernel, with the module it is in."""
    from radixmesh.kernels import gemv, rms_norm, rope_kv, silu_mul
    from radixmesh.kernels.deferred_norm import DeferredNormGemm
    from radixmesh.kernels.sampling import sample
    from radixmesh.kernels.sampling.sample_params import Needs, SampleParams

    bf16, rows, hidden = torch.bfloat16, 2, 64
    x, w, ints = torch.zeros(rows, hidden, dtype=bf16), torch.ones(hidden, dtype=bf16), torch.zeros(rows).int()
    angles, tables = torch.zeros(8, 16), torch.zeros(4, 8, dtype=torch.int32)
    qkv, bias, norm_d = torch.zeros(rows, 8 * 32, dtype=bf16), torch.zeros(8 * 32, dtype=bf16), w[:32]
    pool = torch.zeros(8, 2, 32, dtype=bf16)
    params = SampleParams.allocate(3, max_total_len=8, max_biases=1, max_suppressed=1, device=torch.device("cpu"))
    scratch = sample.SampleScratch(rows, hidden, torch.device("cpu"), has_penalties=False)
    target = sample.TokenTarget(ring_RT=tables, ring_index_1=ints[:1], last_tokens_S=torch.zeros(4).int())

    def rope() -> None:
        targets = rope_kv.RopeAngles(angles, angles), rope_kv.KvTarget(ints, ints, tables, 1)
        heads = rope_kv.HeadShape(4, 2, 32), rope_kv.HeadNorms(norm_d, norm_d)
        rope_kv.rope_write_kv(DeferredNormGemm(qkv, bias, x), *targets, pool, pool.clone(), *heads, use_pdl=True)

    def sample_tokens() -> None:
        sample.sample_rows(x, sample.SlotRows(params, ints, ints), scratch, target, Needs.NOISE, use_pdl=True)

    return {
        "_rope_kv_kernel": (rope_kv, rope),
        "_rms_norm_kernel": (rms_norm, lambda: rms_norm.rms_norm(x, w, 1e-6, use_pdl=True)),
        "_silu_mul_kernel": (silu_mul, lambda: silu_mul.silu_mul(qkv, bias_2F=bias, norm_input_TD=x, use_pdl=True)),
        "_gemv_kernel": (gemv, lambda: gemv.linear(x[:1], x, w[:2], w[None, :2], w, 1e-6, use_pdl=True)),
        "_highest_kernel": (sample, sample_tokens),
        "_gumbel_kernel": (sample, sample_tokens),
        "_finish_kernel": (sample, sample_tokens),
    }


def _first_launches() -> dict[str, tuple[ModuleType, Callable[[], object]]]:
    """Of the kernels that begin a step, when all before it is over."""
    from radixmesh.kernels import fetch_step_inputs, scatter_embed

    def ints(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    def begin() -> None:
        tables, last, embedding = ints(4, 8), ints(4), torch.zeros(10, 64, dtype=torch.bfloat16)
        scatter_embed.scatter_embed(ints(2), ints(2), ints(8, 2), ints(1), tables, last, embedding, use_pdl=True)

    return {
        "_fetch_step_inputs_kernel": (
            fetch_step_inputs,
            lambda: fetch_step_inputs.fetch_step_inputs(ints(4, 64), ints(1), ints(64), 16),
        ),
        "_scatter_embed_kernel": (scatter_embed, begin),
    }


def _fp8_launches() -> dict[str, tuple[ModuleType, Callable[[], object]]]:
    from radixmesh.kernels.fp8 import gemv as fp8_gemv
    from radixmesh.kernels.fp8 import linear as fp8_linear
    from radixmesh.kernels.fp8 import quantize_rows, silu_quantize
    from radixmesh.kernels.fp8.quantized import quantize_matrix, quantize_rows_reference

    bf16, rows, hidden = torch.bfloat16, 2, 128
    x, w = torch.zeros(rows, hidden, dtype=bf16), torch.ones(hidden, dtype=bf16)
    matrix, quantized = quantize_matrix(x, is_grouped=True), quantize_rows_reference(x, is_grouped=True)

    def norm() -> None:
        quantize_rows.norm_quantize(x, w, 1e-6, delta_TD=x.clone(), bias_D=w, is_grouped=True, use_pdl=True)

    def silu() -> None:
        silu_quantize.silu_quantize(x, bias_2F=w, is_grouped=True, use_pdl=True)

    return {
        "_fp8_gemv_kernel": (
            fp8_gemv,
            lambda: fp8_gemv.fp8_gemv(x[:1], matrix, w[:2], w[None, :2], w, 1e-6, use_pdl=True),
        ),
        "_fp8_linear_kernel": (fp8_linear, lambda: fp8_linear.fp8_linear(quantized, matrix, bf16, use_pdl=True)),
        "_quantize_rows_kernel": (quantize_rows, norm),
        "_silu_quantize_kernel": (silu_quantize, silu),
    }


def main() -> None:
    from radixmesh.kernels import gemv
    from radixmesh.kernels.fp8 import gemv as fp8_gemv
    from radixmesh.kernels.fp8 import linear as fp8_linear
    from radixmesh.kernels.sampling import sample

    # There is no GPU to ask, and neither a launch.
    for module in (gemv, fp8_gemv, fp8_linear):
        module.has_gdc = lambda device: True
    for name in ("_highest_kernel", "_gumbel_kernel", "_finish_kernel"):
        getattr(sample, name).run = lambda *args, **kwargs: None
    found = {}
    for name, (module, launch) in (_first_launches() | _launches() | _fp8_launches()).items():
        kernel = getattr(module, name)
        idle = kernel.run

        def record(*args, kernel=kernel, grid, warmup, **kwargs) -> None:
            binary = compiled(kernel, args, kwargs)
            constants = {n for n, p in zip(kernel.arg_names, kernel.params, strict=True) if p.is_constexpr}
            names = [n for n in kernel.arg_names if n not in constants]
            found[kernel.__name__] = loads_before_wait(kernel, binary.asm["ptx"], names)

        kernel.run = record
        launch()
        kernel.run = idle
    print(json.dumps(found))


if __name__ == "__main__":
    main()
