"""SM resources of kernels, found by compiling their launches for an H200 on a machine that has none.

Run as a program without TRITON_INTERPRET: prints a line of JSON for each case, with an entry for each of its launches.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.experimental.gluon._runtime import GluonASTSource
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
        value, param = values[name], kernel.params[index]
        is_specialised = not param.do_not_specialize
        if param.is_constexpr or value is None or (is_specialised and type(value) is int and value == 1):
            signature[name], constants[(index,)] = "constexpr", value
            continue
        signature[name] = mangle_type(value)
        # Loads that are known to be aligned are pipelined, which takes shared memory: as in a real launch.
        is_aligned = isinstance(value, torch.Tensor) or (type(value) is int and value % 16 == 0)
        if is_aligned and is_specialised and not param.do_not_specialize_on_alignment:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, attributes)
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


def _attention_launches(head_dim: int, heads: int, pool_dtype: torch.dtype = torch.bfloat16) -> None:
    from radixmesh.kernels import rope_kv
    from radixmesh.kernels.attention import decode_attention, extend_attention, shared_prefix_attention
    from radixmesh.kernels.deferred_norm import DeferredNormGemm

    rows, kv_heads, bf16 = 4, 8, torch.bfloat16
    q = torch.zeros(rows, heads, head_dim, dtype=bf16)
    pool = torch.zeros(8, kv_heads, head_dim, dtype=bf16).to(pool_dtype)
    tables, ints = torch.zeros(rows, 8, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    shape = rope_kv.HeadShape(heads, kv_heads, head_dim)
    qkv = DeferredNormGemm(torch.zeros(rows, (heads + 2 * kv_heads) * head_dim, dtype=bf16))
    angles = rope_kv.RopeAngles(torch.zeros(8, head_dim // 2), torch.zeros(8, head_dim // 2))
    for factors in (None, torch.ones(heads + 2 * kv_heads)) if pool_dtype != bf16 else (None,):
        target = rope_kv.KvTarget(ints, ints, tables, 1)
        rope_kv.rope_write_kv(qkv, angles, target, pool, pool, shape, rope_kv.HeadNorms(), factors, use_pdl=True)
    plain = decode_attention.DecodeWorkspace(rows, heads, kv_heads, head_dim, "cpu", pool_dtype)
    decode_attention.plan_decode(ints, plain)
    decode_attention.paged_decode(q, pool, pool, tables, ints, ints, 1, 0.1, None, plain, use_pdl=True)
    shared = shared_prefix_attention.SharedPrefixWorkspace(rows, heads, kv_heads, head_dim, "cpu", pool_dtype)
    shared_prefix_attention.paged_shared_decode(q, pool, pool, tables, ints, ints, 1, 0.1, shared, use_pdl=True)
    for chunk_len in (2, 64, 4096):
        extend_attention.paged_extend(q, pool, pool, tables, ints, torch.zeros(5).int(), ints, 1, 0.1, None, chunk_len)


def _tree_launches(head_dim: int, heads: int, num_positions: int) -> None:
    """Attention of trees of drafts."""
    from radixmesh.kernels.attention.tree_attention import TreeWorkspace, paged_tree_attention

    rows, kv_heads, bf16 = 4, 8, torch.bfloat16
    q = torch.zeros(rows * num_positions, heads, head_dim, dtype=bf16)
    pool = torch.zeros(8, kv_heads, head_dim, dtype=bf16)
    tables, ints = torch.zeros(rows, 8, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    workspace = TreeWorkspace(rows, num_positions, heads, kv_heads, head_dim, "cpu")
    masks = torch.zeros(len(q), dtype=torch.int64)
    paged_tree_attention(q, pool, pool, tables, ints, ints, masks, 1, 0.1, workspace, use_pdl=True)
    # The same branches as decodes with tails.
    from radixmesh.kernels.attention import decode_attention
    from radixmesh.kernels.attention.split_pieces import Tails

    slots = torch.zeros(len(q), dtype=torch.int32)
    plans = decode_attention.DecodeWorkspace(len(q), heads, kv_heads, head_dim, "cpu", bf16)
    tails = Tails(slots, torch.zeros(len(q), num_positions, dtype=torch.int32))
    decode_attention.paged_decode(q, pool, pool, tables, slots, slots, 16, 0.1, None, plans, tails=tails, use_pdl=True)


def _branch_launches(topk: int, num_levels: int, num_drafts: int, vocab: int = 128_256) -> None:
    """Trees that a network grows, the steps that verify them, and what latents are in the pool of a branch."""
    from radixmesh.kernels import mla_rows
    from radixmesh.kernels.attention import decode_attention, mla_decode
    from radixmesh.kernels.rope_kv import KvTarget, RopeAngles
    from radixmesh.kernels.sampling import draft_trees, grow_trees, network_rows, penalise
    from radixmesh.kernels.sampling.drafts import DraftInputs, DraftRows, SlotLengths, accept_drafts
    from radixmesh.kernels.sampling.sample_params import SampleParams

    rows, slots, device = 16, 32, torch.device("cpu")
    ints, tables = torch.zeros(rows, dtype=torch.int32), torch.zeros(slots + 1, 64, dtype=torch.int32)
    window = torch.zeros(num_drafts, rows).int()
    inputs = DraftInputs(ints, ints, ints, ints, ints, ints, window, tables[:8, :2], ints[:1], window)
    lengths = tables[:, 0].contiguous()
    state = SlotLengths(lengths, lengths, tables, tables)
    drafted = DraftRows.allocate(rows, num_drafts + 1, device)
    trees = draft_trees.TreeRows.allocate(rows, num_drafts + 1, device)
    draft_trees.branch_rows(inputs, state, drafted, trees, 16)
    ring = torch.zeros(2, rows * 2 * (num_drafts + 2)).int()
    for taken in (None, drafted.tokens):
        accept_drafts(drafted.tokens, ints, drafted, state, ring, ints[:1], taken, window, trees.paths_BP)
    draft_trees.move_paths([torch.zeros(2, 64, 8, 128, dtype=torch.bfloat16), torch.zeros(1, 64, 36).half()], trees)
    params = SampleParams.allocate(slots, max_total_len=64, max_biases=4, max_suppressed=4, device=device)
    found = grow_trees.Candidates.allocate(rows, topk, num_levels, device)
    of_level = [grow_trees.BranchRows.allocate(rows * topk, num_levels, device) for _ in range(2)]
    rank = grow_trees.RankScratch(rows * topk, vocab, topk, device)
    for level, width in ((1, 1), (2, topk)):
        numbers = torch.zeros(rows * width, dtype=torch.int32)
        logits = torch.zeros(rows * width, vocab, dtype=torch.bfloat16)
        grow_trees.rank_drafts(logits, numbers, numbers, params, rank, level, found)
        for first in (0, 1) if level < num_levels else ():
            shape = network_rows.NetworkShape(first, 16, 64, 1023)
            grow_trees.branch_out(found, level, inputs, ints, shape, 64, slots, *of_level)
    grow_trees.choose_drafts(found, inputs, ints)
    counts = torch.zeros(len(drafted.tokens), vocab, dtype=torch.int32)
    logits = torch.zeros(len(drafted.tokens), vocab, dtype=torch.bfloat16)
    penalise.adjust(logits, params, drafted.slots, drafted.kv_lens, counts, counts.float(), trees.branches)
    norm = mla_rows.LatentNorm(torch.zeros(512, dtype=torch.bfloat16), 1e-6, is_interleaved=True)
    target = KvTarget(drafted.positions, drafted.slots, tables, 16, trees.tokens_T)
    angles = RopeAngles(torch.zeros(8, 32), torch.zeros(8, 32))
    for heads in (16, 128):
        q = torch.zeros(len(drafted.slots), heads, 576, dtype=torch.bfloat16)
        pool, q_THY = torch.zeros(64, 576, dtype=torch.bfloat16), torch.zeros(len(q), heads, 192, dtype=torch.bfloat16)
        mla_rows.mla_rows(q_THY, q[:, 0].contiguous(), norm, angles, target, pool, use_pdl=True)
        plans = mla_decode.mla_decode_workspace(len(q), heads, 512, device, torch.bfloat16)
        assert isinstance(plans, decode_attention.DecodeWorkspace)
        of_rows = drafted.slots, drafted.kv_lens
        mla_decode.mla_decode(q, pool, tables, *of_rows, 16, 0.1, plans, tails=trees.tails, use_pdl=True)


def _mask_launches(head_dim: int, heads: int) -> None:
    """Attention with sinks, windows and chunks, and experts with biases and clamps: GPT-OSS and Llama 4."""
    from radixmesh.kernels.attention import decode_attention, extend_attention
    from radixmesh.kernels.moe import grouped_gemm, route

    rows, kv_heads, bf16 = 4, 8, torch.bfloat16
    q, sinks = torch.zeros(rows, heads, head_dim, dtype=bf16), torch.zeros(heads, dtype=bf16)
    pool = torch.zeros(8, kv_heads, head_dim, dtype=bf16)
    tables, ints = torch.zeros(rows, 8, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    for window, chunk, of_heads in ((128, None, sinks), (None, None, sinks), (None, 8192, None)):
        chunks = () if chunk is None else (chunk,)
        plans = decode_attention.DecodeWorkspace(
            rows, heads, kv_heads, head_dim, "cpu", bf16, (window,), attention_chunks=chunks
        )
        decode_attention.plan_decode(ints, plans, use_pdl=True)
        masks = {"sinks_H": of_heads, "attention_chunk": chunk}
        paged = (q, pool, pool, tables, ints)
        decode_attention.paged_decode(*paged, ints, 16, 0.1, window, plans, use_pdl=True, **masks)
        for chunk_len in (2, 64, 4096):
            starts = torch.zeros(rows + 1).int()
            extend_attention.paged_extend(*paged, starts, ints, 16, 0.1, window, chunk_len, **masks)
    num_experts, hidden, mlp = 32, 2880, 2880
    weights = torch.zeros(num_experts, 2 * mlp, hidden, dtype=bf16), torch.zeros(num_experts, hidden, mlp, dtype=bf16)
    biases = torch.zeros(num_experts, 2 * mlp, dtype=bf16), torch.zeros(num_experts, hidden, dtype=bf16)
    gpt_oss = grouped_gemm.ExpertVariant(*biases, swiglu_limit=7.0, swiglu_alpha=1.702)
    for variant in (gpt_oss, grouped_gemm.ExpertVariant(scales_input=True)):
        for num_rows in (1, 64, 256, 4096):
            x_TD = torch.zeros(num_rows, hidden, dtype=bf16)
            rule = route.RouterRule(num_picks=4, is_sigmoid=variant.scales_input)
            routes = route.route(torch.zeros(num_rows, num_experts, dtype=bf16), rule)
            grouped_gemm.routed_experts(x_TD, routes, *weights, residual_TD=x_TD, out=x_TD, variant=variant)


def _latent_launches(dtype: torch.dtype, heads: int, rank: int, rope: int) -> None:
    """Everything around attention over latents; plain and value dims of a head are 2 `rope`."""
    from radixmesh.kernels import mla_rows
    from radixmesh.kernels.attention import (
        decode_attention,
        mla_decode,
        mla_extend,
        mla_prompt,
        shared_prefix_attention,
    )
    from radixmesh.kernels.rope_kv import KvTarget, RopeAngles

    rows, plain = 4, 2 * rope
    tables, ints = torch.zeros(rows, 8, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    pool, expand = torch.zeros(8, rank + rope, dtype=dtype), torch.zeros(heads, 2 * plain, rank, dtype=dtype)
    q_THY = torch.zeros(rows, heads, plain + rope, dtype=dtype)
    for is_interleaved in (False, True):
        norm = mla_rows.LatentNorm(torch.zeros(rank, dtype=dtype), 1e-6, is_interleaved)
        angles = RopeAngles(torch.zeros(8, rope // 2), torch.zeros(8, rope // 2))
        target = KvTarget(positions_T=ints, row_slots_T=ints, page_tables=tables, page_size=1)
        q = mla_rows.mla_rows(
            q_THY, torch.zeros(rows, rank + rope, dtype=dtype), norm, angles, target, pool, use_pdl=True
        )
    mla_rows.head_gemm(q_THY[..., :plain], expand[:, :plain].transpose(1, 2), out=q[..., :rank], use_pdl=True)
    out = torch.zeros(rows, heads, rank, dtype=dtype)
    mla_rows.head_gemm(out, expand[:, plain:], use_pdl=True)
    for is_batch_invariant in (False, True):
        workspace = mla_decode.mla_decode_workspace(
            rows, heads, rank, "cpu", dtype, is_batch_invariant=is_batch_invariant
        )
        decode_attention.plan_decode(ints, workspace, use_pdl=True)
        mla_decode.mla_decode(q, pool, tables, ints, ints, 1, 0.1, workspace, use_pdl=True)
        if dtype.itemsize == 2 and heads >= 64:
            workspace = mla_decode.mla_decode_workspace(
                rows, heads, rank, "cpu", dtype, mla_decode.SM90_CONFIG, is_batch_invariant=is_batch_invariant
            )
            mla_decode.mla_decode(q, pool, tables, ints, ints, 1, 0.1, workspace, use_pdl=True)
    for config in (None, mla_decode.SM90_CONFIG) if dtype.itemsize == 2 else (None,):
        shared = mla_decode.mla_shared_workspace(rows, heads, rank, "cpu", dtype, config)
        if shared is None:
            break
        shared_prefix_attention.plan_shared_decode(ints, shared)
        mla_decode.mla_shared_decode(q, pool, tables, ints, ints, 1, 0.1, shared, use_pdl=True)
        if config is not None:  # Hopper's kernel has RoPE keys of 64 alone: wider ones are computed by the other.
            wide_q, wide_pool = (torch.zeros(*x.shape[:-1], rank + 96, dtype=dtype) for x in (q, pool))
            mla_decode.mla_shared_decode(wide_q, wide_pool, tables, ints, ints, 1, 0.1, shared, use_pdl=True)
    starts = torch.zeros(rows + 1).int()
    mla_extend.mla_extend(q, pool, tables, ints, starts, ints, 1, 0.1, out)
    tokens = mla_prompt.chunk_tokens([tables[0].numpy()], (ints[:1] + 3).numpy(), 1)
    values, q_THn, q_THr = q_THY.new_empty(rows, heads, plain), q_THY[..., :plain], q[..., rank:]
    mla_prompt.mla_prompt(q_THn, q_THr, pool, tokens, expand, starts[:2], ints[:1] + 3, 0.1, values)


def _expert_launches(dtype: torch.dtype, hidden: int, mlp: int, num_experts: int, rows: list[int]) -> None:
    """Routed experts of steps of so many rows, from the router on."""
    from radixmesh.kernels.moe import choose_slots, exchange_rows, grouped_gemm, route, router_logits, row_experts

    # As on Hopper.
    row_experts.has_gdc = lambda device: True
    weights = torch.zeros(num_experts, 2 * mlp, hidden, dtype=dtype), torch.zeros(num_experts, hidden, mlp, dtype=dtype)
    norm = row_experts.RowNorm(torch.zeros(hidden, dtype=dtype), 1e-6)
    groups = route.RouterRule(num_picks=2, is_sigmoid=True, num_groups=4, num_picked_groups=2, group_best=2)
    for num_rows in rows:
        x_TD, w_router_ED = torch.zeros(num_rows, hidden, dtype=dtype), torch.zeros(num_experts, hidden)
        logits_TE = router_logits.router_logits(x_TD, w_router_ED, use_pdl=True)
        route.route(logits_TE, groups, torch.zeros(num_experts), use_pdl=True)
        routes = route.route(logits_TE.to(dtype), route.RouterRule(num_picks=6))
        table, picks_E = torch.zeros(3 * num_experts, dtype=torch.int32), torch.zeros(num_experts, dtype=torch.int32)
        for tokens in (None, choose_slots.TokenRows(torch.zeros(num_rows, dtype=torch.int32), 8)):
            choose_slots.choose_slots(routes.expert_ids_TA, table, picks_E, 1, tokens)
        packed = exchange_rows.pack_rows(x_TD, routes, num_rows)
        exchange_rows.own_routes(packed, hidden * dtype.itemsize // 4, 6, 1, num_experts)
        exchange_rows.own_picks(routes, 1, num_experts)
        exchange_rows.add_parts(torch.zeros(4, num_rows, hidden, dtype=dtype), x_TD)
        slot_rows = torch.zeros(num_experts, 4 * num_rows, hidden, dtype=dtype)
        slot_rows = grouped_gemm.SlotRows(slot_rows, picks_E, 24 * num_rows, 6 * num_rows)
        grouped_gemm.slot_experts(slot_rows, *weights, use_pdl=True)
        grouped_gemm.routed_experts(x_TD, routes, *weights, residual_TD=x_TD, out=x_TD, use_pdl=True)
        if num_rows > 1:
            continue
        router_logits.router_logits(x_TD, w_router_ED, *norm, use_pdl=True)
        for num_parts in (0, 1, 2):
            wide = num_parts * mlp
            shared = torch.zeros(2 * wide, hidden, dtype=dtype), torch.zeros(hidden, wide, dtype=dtype)
            row_experts.row_experts(
                x_TD,
                routes,
                *weights,
                norm=norm,
                shared=row_experts.SharedWeights(*shared) if wide else None,
                residual_TD=x_TD,
                out=x_TD,
                use_pdl=True,
            )


def _fp8_expert_launches(hidden: int, mlp: int, num_experts: int, num_picks: int, rows: list[int]) -> None:
    """FP8 experts of steps of so many rows."""
    from radixmesh.kernels.moe import fp8_grouped_gemm, route
    from radixmesh.kernels.moe.grouped_gemm import SlotRows
    from radixmesh.kernels.moe.quantized_experts import QuantizedExperts

    with torch.device("meta"):
        experts = QuantizedExperts.empty(num_experts, hidden, mlp, torch.device("meta"))
        for num_rows in rows:
            x_TD = torch.zeros(num_rows, hidden, dtype=torch.bfloat16)
            ids_TA, weights_TA = (torch.zeros(num_rows, num_picks, dtype=dtype) for dtype in (torch.int32, torch.float))
            routes = route.Routes(ids_TA, weights_TA)
            fp8_grouped_gemm.fp8_routed_experts(x_TD, routes, experts, residual_TD=x_TD, out=x_TD, use_pdl=True)
            counts_E = torch.zeros(num_experts, dtype=torch.int32)
            x_EXD = torch.zeros(num_experts, num_rows, hidden, dtype=torch.bfloat16)
            slot_rows = SlotRows(x_EXD, counts_E, num_picks * num_rows, num_rows)
            fp8_grouped_gemm.fp8_slot_experts(slot_rows, experts, use_pdl=True)


def _runner_launches(folder: Path) -> None:
    """The warm-up of a model's runner, from one row on, with all of the project's kernels."""
    from radixmesh.daemons.worker.cuda import kernel_choice
    from radixmesh.daemons.worker.cuda.load import load_device_runner
    from support.device_settings import TINY_SETTINGS
    from support.replaying_device import ReplayingDevice

    kernel_choice.kernels_name = lambda settings, device: "triton"
    for is_deterministic in (False, True):
        settings = replace(
            TINY_SETTINGS,
            attention_backend="triton",
            cuda_graphs=True,
            use_pdl=True,
            num_pages=400,
            num_slots=64,
            deterministic=is_deterministic,
        )
        load_device_runner(folder, settings, ReplayingDevice()).warm_up()


def _copy_launches(dtype: torch.dtype, *rows: int) -> None:
    """Gather and scatter of KV whose planes have rows of such sizes."""
    from radixmesh.kernels.kv_copy import RowCopies

    planes = [torch.zeros(3, 8, row, dtype=dtype) for row in rows]
    indexes = torch.zeros(5, dtype=torch.int32)
    copies = RowCopies(planes)
    region = torch.zeros(5 * copies.token_bytes, dtype=torch.uint8)
    copies.gather(indexes, region)
    copies.scatter(indexes, region)


def _draft_launches(num_drafts: int) -> None:
    """Drafts of a step: proposed on the device, expanded, accepted."""
    from radixmesh.daemons.worker.speculation.ngram import NgramDrafter
    from radixmesh.kernels.sampling.drafts import DraftInputs, DraftRows, SlotLengths, accept_drafts, expand_drafts

    rows, slots = 16, 32
    ints = torch.zeros(rows, dtype=torch.int32)
    tables = torch.zeros(slots + 1, 64, dtype=torch.int32)
    inputs = DraftInputs(
        ints, ints, ints, ints, ints, ints, torch.zeros(num_drafts, rows).int(), tables[:8, :2], ints[:1]
    )
    state = SlotLengths(tables[:, 0].contiguous(), tables[:, 0].contiguous(), tables, tables)
    NgramDrafter().on_device().propose(inputs, state)
    drafted = DraftRows.allocate(rows, num_drafts + 1, torch.device("cpu"))
    expand_drafts(inputs, state, drafted)
    _follow_launches(num_drafts, inputs, state)
    ring = torch.zeros(2, rows * (num_drafts + 3)).int()
    for waits in (None, ints):
        accept_drafts(drafted.tokens, ints, drafted, state, ring, ints[:1], waits_B=waits)
    # Rows with positions of their own number.
    size, most = 2 * rows, num_drafts + 1
    ragged = drafted.of(rows, size)
    expand_drafts(inputs._replace(firsts=ints), state, ragged, most)
    for taken in (None, ragged.tokens):
        to = ragged.tokens, ints, ragged, state, ring, ints[:1]
        accept_drafts(*to, taken, waits_B=ints, firsts_B=ints, num_positions=most)


def _follow_launches(num_drafts: int, inputs, state) -> None:
    """Rows of a network that drafts: in a step, ahead of one, of chunks."""
    from radixmesh.kernels.sampling import follow, network_rows

    rows, device, num_slots = len(inputs.slots), torch.device("cpu"), len(state.lengths)
    fresh = network_rows.FreshTokens(
        torch.zeros(1024, dtype=torch.int8), state.lengths, state.lengths, torch.zeros(num_slots, 64).int()
    )
    chain = network_rows.ChainRows.allocate(rows, device)
    for first, page_size in ((1, 1), (0, 16)):
        shape = network_rows.NetworkShape(first, page_size, 64, 1023)
        for columns, of_chain in ((num_drafts + 1, chain), (128, None)):
            of_rows = network_rows.NetworkRows.allocate(rows * columns, rows, device)
            follow.follow_rows(inputs, state, fresh, shape, of_rows, of_chain)
        follow.chain_rows(inputs.slots, inputs, 0, num_slots - 1, shape, chain)
        follow.tokens_written(of_rows.positions, of_rows.slots, state, fresh, page_size)
        starts = torch.zeros(rows + 1, dtype=torch.int32)
        chunks = (inputs.slots, starts, inputs.slots)
        follow.follow_chunks(chunks, of_rows.positions, state.page_tables, fresh, shape, of_rows)
    follow.write_entries(inputs, state)


def _rank_launches(num_ranks: int) -> None:
    """Sums and gathers of ranks, of one element and of one row too: a kernel is specialised for an argument of 1."""
    from radixmesh.kernels.peer_collectives import PeerTable, gather_of_ranks, sum_of_ranks

    table = PeerTable.alone(num_ranks - 1, num_ranks, torch.device("cpu"))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for shape in ((1, 1), (1, 4096), (3, 1000), (40, 4096), (256, 4096)):
            x = torch.zeros(shape, dtype=dtype)
            sum_of_ranks(x, table)
            sum_of_ranks(x, table, x, out=x)
        for rows, vocab in ((1, num_ranks), (1, 128256), (256, 128256), (3, 1001)):
            width = vocab - vocab * (num_ranks - 1) // num_ranks
            gather_of_ranks(torch.zeros(rows, width, dtype=dtype), table, vocab)


def _page_copy_launches(num_layers: int, page_words: int) -> None:
    """Pages saved and loaded, of planes with so many words a page."""
    from radixmesh.kernels.page_copy import copy_pages

    plane = torch.zeros(num_layers, 4, page_words, dtype=torch.int32)
    host = torch.zeros(2, 2 * num_layers * page_words, dtype=torch.int32)
    pages = torch.zeros(1, dtype=torch.int32)
    for to_host in (True, False):
        copy_pages(plane, host, pages, pages, num_layers * page_words, to_host=to_host)


def main() -> None:
    """Arguments as _found() takes them; without any, each line of the standard input holds a JSON list of them."""
    for arguments in [sys.argv[1:]] if sys.argv[1:] else map(json.loads, sys.stdin):
        print(json.dumps(_found(*arguments)), flush=True)


def _found(what: str, *rest: str) -> list[dict]:
    """Of each launch of a case: runner FOLDER; ranks NUM; copies DTYPE ROW ...; page_copies LAYERS WORDS; drafts NUM;
    attention HEAD_DIM HEADS [POOL_DTYPE]; masks HEAD_DIM HEADS; trees HEAD_DIM HEADS POSITIONS; branches TOPK LEVELS
    DRAFTS [VOCAB]; latents DTYPE HEADS RANK ROPE; experts DTYPE HIDDEN MLP EXPERTS ROWS ...; or fp8_experts HIDDEN MLP
    EXPERTS PICKS ROWS ..."""
    found: list[dict] = []
    seen: set[str] = set()

    def record(kernel: JITFunction, *args, grid, warmup, **kwargs) -> None:
        launch = repr([kernel.__name__, *map(_described, args), *((k, _described(v)) for k, v in kwargs.items())])
        if launch not in seen:
            seen.add(launch)
            found.append(compile_launch(kernel, args, kwargs))

    JITFunction.run = record
    if what == "runner":
        _runner_launches(Path(rest[0]))
    elif what == "page_copies":
        _page_copy_launches(int(rest[0]), int(rest[1]))
    elif what == "copies":
        _copy_launches(getattr(torch, rest[0]), *map(int, rest[1:]))
    elif what == "ranks":
        _rank_launches(int(rest[0]))
    elif what == "drafts":
        _draft_launches(int(rest[0]))
    elif what == "attention":
        _attention_launches(int(rest[0]), int(rest[1]), *(getattr(torch, name) for name in rest[2:]))
    elif what == "trees":
        _tree_launches(*map(int, rest))
    elif what == "branches":
        _branch_launches(*map(int, rest))
    elif what == "masks":
        _mask_launches(int(rest[0]), int(rest[1]))
    elif what == "latents":
        _latent_launches(getattr(torch, rest[0]), *map(int, rest[1:]))
    elif what == "fp8_experts":
        hidden, mlp, num_experts, num_picks, *rows = map(int, rest)
        _fp8_expert_launches(hidden, mlp, num_experts, num_picks, rows)
    else:
        sizes = [int(text) for text in rest[1:]]
        _expert_launches(getattr(torch, rest[0]), sizes[0], sizes[1], sizes[2], sizes[3:])
    return found


def _described(value: object) -> object:
    return (str(value.dtype),) if isinstance(value, torch.Tensor) else value


if __name__ == "__main__":
    main()
