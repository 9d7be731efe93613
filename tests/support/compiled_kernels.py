"""SM resources of kernels, found by compiling their launches for an H200 on a machine that has none.

Run as a program without TRITON_INTERPRET: prints JSON, one entry for each launch of each case.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import JITFunction, mangle_type

_OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")


def compile_launch(kernel: JITFunction, args: tuple, kwargs: dict) -> dict:
    """Registers and spilled bytes of a thread, shared memory of a program, and threads of a program."""
    binary = compiled(kernel, args, kwargs)
    return {"kernel": kernel.__name__, "shared": binary.metadata.shared, "warps": binary.metadata.num_warps} | _usage(
        binary.asm["cubin"]
    )


def compiled(kernel: JITFunction, args: tuple, kwargs: dict) -> CompiledKernel:
    """A launch with such arguments, for an H200."""
    options = {name: kwargs[name] for name in _OPTIONS if kwargs.get(name) is not None}
    values = dict(zip(kernel.arg_names, args, strict=False)) | {
        k: v for k, v in kwargs.items() if k in kernel.arg_names
    }
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        value = values[name]
        if kernel.params[index].is_constexpr or value is None:
            signature[name], constants[(index,)] = "constexpr", value
        else:
            signature[name] = mangle_type(value)
            if isinstance(value, torch.Tensor):
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def _usage(cubin: bytes) -> dict:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return {"registers": int(found[1]), "stack": int(found[2])}


def _attention_launches(head_dim: int, heads: int) -> None:
    from radixmesh.kernels.attention import decode_attention, extend_attention, shared_prefix_attention

    rows, kv_heads, bf16 = 4, 8, torch.bfloat16
    q = torch.zeros(rows, heads, head_dim, dtype=bf16)
    pool = torch.zeros(8, kv_heads, head_dim, dtype=bf16)
    tables, ints = torch.zeros(rows, 8, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    plain = decode_attention.DecodeWorkspace(rows, heads, kv_heads, head_dim, "cpu")
    decode_attention.plan_decode(ints, plain)
    decode_attention.paged_decode(q, pool, pool, tables, ints, ints, 1, 0.1, None, plain, use_pdl=True)
    shared = shared_prefix_attention.SharedPrefixWorkspace(rows, heads, kv_heads, head_dim, "cpu")
    shared_prefix_attention.paged_shared_decode(q, pool, pool, tables, ints, ints, 1, 0.1, shared, use_pdl=True)
    for chunk_len in (2, 64, 4096):
        extend_attention.paged_extend(q, pool, pool, tables, ints, torch.zeros(5).int(), ints, 1, 0.1, None, chunk_len)


def main() -> None:
    from radixmesh.kernels.attention import extend_attention, split_kv, split_schedule

    found: list[dict] = []
    for kernel in (extend_attention._extend_kernel, split_kv._split_attention_kernel, split_schedule._plan_kernel):

        def record(*args, kernel=kernel, grid, warmup, **kwargs) -> None:
            found.append(compile_launch(kernel, args, kwargs))

        kernel.run = record
    _attention_launches(int(sys.argv[1]), int(sys.argv[2]))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
