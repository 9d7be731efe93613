"""Kernels compiled for the GPU, which the interpreter does not do: that they compile, and what they hold of an SM."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
pytestmark = pytest.mark.skipif(
    not all((_TOOLS / name).is_file() for name in ("ptxas", "cuobjdump")),
    reason="this triton brings no ptxas, or no cuobjdump",
)
_SM_REGISTERS = 65536
_SM_SHARED, _PROGRAM_SHARED, _RESERVED = 228 << 10, 227 << 10, 1 << 10


class Compiler:
    """Compiles case by case in a process of its own, which takes seconds to start; one that failed has a successor."""

    def __init__(self, folder):
        self._errors = folder / "stderr"
        self._process = None

    def launches(self, *arguments):
        """Launches of a case, as `support.compiled_kernels` finds them."""
        if self._process is None:
            environment = os.environ | {
                "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
                "TRITON_INTERPRET": "0",
            }
            command = [sys.executable, "-m", "support.compiled_kernels"]
            pipe = subprocess.PIPE
            with self._errors.open("w") as errors:
                self._process = subprocess.Popen(
                    command, env=environment, stdin=pipe, stdout=pipe, stderr=errors, text=True
                )
        try:
            self._process.stdin.write(json.dumps([str(argument) for argument in arguments]) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
            assert line, self._errors.read_text()[-2000:]
        except BaseException:
            # Its answer would be taken for that to the next case.
            self.close()
            raise
        return json.loads(line)

    def close(self):
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    compiler = Compiler(tmp_path_factory.mktemp("compiler"))
    yield compiler.launches
    compiler.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "head_dim, heads, pool_dtype",
    [
        (128, 24, "bfloat16"),
        pytest.param(64, 32, "bfloat16", marks=pytest.mark.full),
        pytest.param(128, 32, "float8_e4m3fn", marks=pytest.mark.full),
    ],
)
def test_default_configurations_fit(compiled, head_dim, heads, pool_dtype):
    launches = compiled("attention", head_dim, heads, pool_dtype)
    split = [launch for launch in launches if launch["kernel"] == "_split_attention_kernel"]
    extend = [launch for launch in launches if launch["kernel"] == "_extend_kernel"]
    assert len(split) == 3 and len(extend) == 3
    for launch, resident in [*zip(split, (4, 2, 4), strict=True), *((launch, 1) for launch in extend)]:
        assert launch["shared"] <= _PROGRAM_SHARED
        assert resident * (launch["shared"] + _RESERVED) <= _SM_SHARED, launch
        assert resident * launch["registers"] * 32 * launch["warps"] <= _SM_REGISTERS, launch
        # A few registers are spilled around a loop, none in it.
        assert launch["stack"] <= 128, launch


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("heads", "num_positions"), [(32, 8), pytest.param(64, 64, marks=pytest.mark.full)])
def test_kernels_of_trees_compile_and_fit(compiled, heads, num_positions):
    launches = compiled("trees", 128, heads, num_positions)
    assert {launch["kernel"] for launch in launches} == {"_split_attention_kernel", "_tree_kernel"}
    for launch in launches:
        assert launch["shared"] <= _PROGRAM_SHARED, launch
        assert launch["kernel"] != "_tree_kernel" or launch["stack"] <= 128, launch


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "shape", [(4, 4, 7), *(pytest.param(of, marks=pytest.mark.full) for of in ((8, 6, 31), (2, 2, 5, 1000)))]
)
def test_kernels_of_steps_with_trees_compile_and_fit(compiled, shape):
    launches = compiled("branches", *shape)
    of_trees = {"_branch_kernel", "_accept_kernel", "_move_kernel", "_block_kernel", "_rank_kernel", "_choose_kernel"}
    of_latents = {"_mla_rows_kernel", "_mla_split_kernel"}
    names = {launch["kernel"] for launch in launches}
    assert names == of_trees | of_latents | {"_count_kernel", "_adjust_kernel", "_bias_kernel"}
    for launch in launches:
        assert launch["shared"] <= _PROGRAM_SHARED, launch
        assert launch["kernel"] not in of_trees or launch["stack"] <= 128, launch


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_ranks", [4, *(pytest.param(num, marks=pytest.mark.full) for num in (2, 8))])
def test_kernels_of_ranks_compile_and_fit(compiled, num_ranks):
    launches = compiled("ranks", num_ranks)
    by_parts = {"_sum_by_parts_kernel"} if num_ranks > 2 else set()
    assert {launch["kernel"] for launch in launches} == {"_sum_kernel", "_gather_kernel"} | by_parts
    for launch in launches:
        # All programs of a launch are there at once, one an SM, or two.
        on_an_sm = 2 if launch["kernel"] == "_sum_by_parts_kernel" else 1
        # Numbers of eight ranks at a time are more than the registers of a thread.
        most_spilled = 128 if num_ranks < 8 else 320
        assert launch["shared"] <= _PROGRAM_SHARED and launch["stack"] <= most_spilled, launch
        assert launch["registers"] * 32 * launch["warps"] * on_an_sm <= _SM_REGISTERS, launch


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("dtype", "heads", "rank", "rope"),
    [
        ("bfloat16", 16, 512, 64),
        pytest.param("float32", 4, 48, 16, marks=pytest.mark.full),  # tiny-deepseek
        *(pytest.param(dtype, 16, 512, 64, marks=pytest.mark.full) for dtype in ("float16", "float32")),
        pytest.param("bfloat16", 128, 512, 64, marks=pytest.mark.full),
    ],
)
def test_kernels_of_latent_attention_compile_and_fit(compiled, dtype, heads, rank, rope):
    launches = compiled("latents", dtype, heads, rank, rope)
    names = {launch["kernel"] for launch in launches}
    assert names >= {
        "_mla_rows_kernel",
        "_head_gemm_kernel",
        "_mla_split_kernel",
        "_mla_extend_kernel",
        "_mla_prompt_kernel",
        *(("mla_split_sm90_kernel",) if dtype != "float32" else ()),
    }
    assert all(launch["shared"] <= _PROGRAM_SHARED for launch in launches), launches


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        ("bfloat16", (2048, 1408, 64, 1)),
        pytest.param("bfloat16", (2048, 1408, 64, 100, 256, 512, 4096), marks=pytest.mark.full),
        pytest.param("float32", (2048, 1408, 64, 1, 256, 512, 4096), marks=pytest.mark.full),
        pytest.param("float32", (128, 64, 8, 1, 4, 64), marks=pytest.mark.full),
    ],
)
def test_kernels_of_routed_experts_compile_and_fit(compiled, dtype, sizes):
    launches = compiled("experts", dtype, *sizes)
    names = {launch["kernel"] for launch in launches}
    assert names >= {"_route_kernel", "_choose_slots_kernel", "_group_rows_kernel"}
    assert names >= {"_gate_up_kernel", "_down_kernel", "_combine_kernel"}
    assert names >= {"_pack_kernel", "_own_routes_kernel", "_group_places_kernel", "_add_parts_kernel"}
    if 1 in sizes[3:]:
        assert names >= {"_router_logits_kernel", "_row_gate_up_kernel", "_row_down_kernel"}
    assert all(launch["stack"] <= 64 for launch in launches if "_row_" in launch["kernel"]), launches
    assert all(launch["shared"] <= _PROGRAM_SHARED for launch in launches), launches


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kernels_of_fp8_experts_compile_and_fit(compiled):
    launches = compiled("fp8_experts", 7168, 2048, 256, 8, 1, 512, 4096)  # DeepSeek-V3
    launches += compiled("fp8_experts", 128, 64, 8, 2, 1, 64)  # tiny-deepseek
    assert {launch["kernel"] for launch in launches} >= {
        "_fp8_gate_up_kernel",
        "_fp8_down_kernel",
        "_group_places_kernel",
    }
    assert all(launch["shared"] <= _PROGRAM_SHARED and launch["stack"] == 0 for launch in launches), launches


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("head_dim", "heads"), [(64, 64), pytest.param(128, 40, marks=pytest.mark.full)])
def test_kernels_of_gpt_oss_and_llama_4_compile_and_fit(compiled, head_dim, heads):
    launches = compiled("masks", head_dim, heads)
    names = {launch["kernel"] for launch in launches}
    assert names >= {"_split_attention_kernel", "_extend_kernel", "_gate_up_kernel", "_down_kernel", "_route_kernel"}
    for launch in launches:
        assert launch["shared"] <= _PROGRAM_SHARED, launch
        if launch["kernel"] == "_split_attention_kernel":
            # All programs of a launch are resident at once.
            assert 4 * (launch["shared"] + _RESERVED) <= _SM_SHARED, launch
            assert 4 * launch["registers"] * 32 * launch["warps"] <= _SM_REGISTERS, launch


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_drafts", [4, pytest.param(1, marks=pytest.mark.full), pytest.param(8, marks=pytest.mark.full)]
)
def test_kernels_of_drafts_compile_and_fit(compiled, num_drafts):
    launches = compiled("drafts", num_drafts)
    of_networks = {f"_{name}_kernel" for name in ("entries", "follow", "follow_chunks", "chain", "written")}
    drafting = {"_ngram_kernel", "_expand_kernel", "_accept_kernel"} | of_networks
    assert {launch["kernel"] for launch in launches} == drafting
    for launch in launches:
        # A program a row: many rows are resident at a time, and hardly a register is spilled.
        assert launch["shared"] <= 8 << 10 and launch["stack"] <= 64, launch


@pytest.mark.slow
@pytest.mark.parametrize(("num_layers", "page_words"), [(32, 512), pytest.param(61, 144, marks=pytest.mark.full)])
def test_kernels_of_page_copies_compile_and_fit(compiled, num_layers, page_words):
    """Pages of one token: 8B's planes, and V3's latents in bf16 at a quarter."""
    launches = compiled("page_copies", num_layers, page_words)
    assert len(launches) == 2 and {launch["kernel"] for launch in launches} == {"_page_copy_kernel"}
    # Eight fit an SM beside whatever computes there.
    assert all(launch["registers"] <= 64 and launch["stack"] == 0 for launch in launches), launches


@pytest.mark.slow
@pytest.mark.parametrize("rows", [(1024, 1024), (576,), (36, 3)])
def test_kernels_that_copy_kv_compile_and_fit(compiled, rows):
    launches = compiled("copies", "bfloat16", *rows)
    assert len(launches) == 2 * len(set(rows)), "planes that lie alike are copied by one"
    assert all(launch["stack"] == 0 and launch["registers"] <= 128 for launch in launches), launches


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-deepseek"])
def test_every_kernel_of_a_runner_compiles_and_fits(compiled, model):
    launches = compiled("runner", Path(__file__).parents[2] / "compose" / "models" / model)
    assert len({launch["kernel"] for launch in launches}) > 15
    assert all(launch["shared"] <= _PROGRAM_SHARED for launch in launches), launches
