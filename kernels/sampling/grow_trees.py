"""Trees of drafts that a network grows on the device, level by level, as EAGLE-2 does (Li et al. 2024).

    rank       of each row of the network the K likeliest ids: candidates, K of each row of the frontier
    branch     the K best candidates of the level are the frontier: the network's next rows
    choose     of all candidates the best W, which are the row's drafts: never one without the one that it follows

A candidate's score is the sum of the network's log probabilities on its path. Sampled rows count them with the noise by
which the target will sample, so that what is likely is what that noise is about to pick (CPU: `cpu/growing_tree.py`).
Candidates of a tree are numbered from 1 on as they come; 0 is the row's last token.

B rows, K candidates behind a row of the frontier, F rows of it (1, then K), N candidates of a tree, D levels, W drafts,
R = B x F rows of a forward of the network, V vocabulary, X blocks of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from radixmesh.kernels.attention.split_pieces import Tails
from radixmesh.kernels.sampling.candidates import BLOCK
from radixmesh.kernels.sampling.drafts import DraftInputs
from radixmesh.kernels.sampling.network_rows import NetworkShape
from radixmesh.kernels.sampling.sample import random_bits
from radixmesh.kernels.sampling.sample_params import SampleParams, order_of, packed_order, value_of

MAX_CANDIDATES = 4096
"""Of a tree: they are sorted by one program."""
_LOWEST = tl.constexpr(-(2**63))


class Candidates(NamedTuple):
    """ids_BN, parents_BN int32 (the candidate that each follows), scores_BN float32. frontier_BK int32: candidates."""

    ids_BN: torch.Tensor
    parents_BN: torch.Tensor
    scores_BN: torch.Tensor
    frontier_BK: torch.Tensor

    @classmethod
    def allocate(cls, max_rows: int, topk: int, num_levels: int, device: torch.device) -> Candidates:
        num = topk + (num_levels - 1) * topk**2
        if num > MAX_CANDIDATES:
            raise ValueError(f"a tree has at most {MAX_CANDIDATES} candidates, not {num}")
        ids_BN = torch.zeros(max_rows, num, dtype=torch.int32, device=device)
        return cls(ids_BN, ids_BN.clone(), ids_BN.float(), ids_BN[:, :topk].clone())

    def of(self, num_rows: int) -> Candidates:
        """Those of the first rows: the same memory."""
        return Candidates(*(part[:num_rows] for part in self))


class BranchRows(NamedTuple):
    """The network's next rows, int32 [R]: id, position, slot (the dummy where a row is not used), KV length; token of
    the pool for their KV; row of the forward before whose draft they are (int64); slots and positions to sample at.
    tails: the tokens of the paths that they end."""

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    kv_lens: torch.Tensor
    tokens: torch.Tensor
    before: torch.Tensor
    sample_slots: torch.Tensor
    sample_positions: torch.Tensor
    starts: torch.Tensor
    tails_RD: torch.Tensor

    @classmethod
    def allocate(cls, num_rows: int, num_levels: int, device: torch.device) -> BranchRows:
        tensors = [torch.zeros(num_rows, dtype=torch.int32, device=device) for _ in range(9)]
        tensors[5] = tensors[5].long()
        tensors.append(torch.zeros(num_rows, max(1, num_levels - 1), dtype=torch.int32, device=device))
        return cls(*tensors)

    def of(self, num_rows: int) -> BranchRows:
        """The first rows: the same memory."""
        return BranchRows(*(part[:num_rows] for part in self))

    @property
    def tails(self) -> Tails:
        return Tails(self.starts, self.tails_RD)


class RankScratch:
    """The best ids of each block of the vocabulary, [R, X, K], and how much weight a block has: its highest score, and
    the sum of exponentials over that."""

    def __init__(self, max_rows: int, vocab_size: int, topk: int, device: torch.device) -> None:
        blocks = triton.cdiv(vocab_size, BLOCK)
        size = triton.next_power_of_2(topk)
        self.best_RXK = torch.zeros(max_rows, blocks, size, dtype=torch.int64, device=device)
        self.weights_RX2 = torch.zeros(max_rows, blocks, 2, dtype=torch.float32, device=device)


@triton.jit
def _gumbel32(bits):
    """float32 noise, -log(-log(u)) of u = (bits + 0.5) / 2^32: near u = 1 by the series of -log(1 - v)."""
    v = ((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * (2.0**-32)
    u = (bits.to(tl.float32) + 0.5) * (2.0**-32)
    return -tl.log(tl.where(v < 0.0078125, v * (1.0 + v * (0.5 + v * 0.33333334)), -tl.log(u)))


@triton.jit
def _block_kernel(
    logits_ptr, slots_ptr, positions_ptr, temperature_ptr, seed_ptr, best_ptr, weights_ptr, V, stride, X,
    K2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    mask = ids < V
    score = tl.load(logits_ptr + row * stride + ids, mask=mask, other=float("-inf")).to(tl.float32)
    score = tl.where(score == score, score, float("-inf"))
    temperature = tl.load(temperature_ptr + slot)
    if temperature > 0.0:
        factor = tl.minimum(1.0 / temperature, 1e30).to(tl.float32)
        bits = random_bits(tl.load(seed_ptr + slot), tl.load(positions_ptr + row), block, BLOCK)
        score = score * factor + _gumbel32(bits)
    packed = tl.where(mask, packed_order(score, ids, False), _LOWEST)
    to = (row * X + block) * K2 + tl.arange(0, K2)
    tl.store(best_ptr + to, tl.topk(packed, K2))
    highest = tl.max(score, 0)
    weights = tl.where(score > float("-inf"), tl.exp(score - highest), 0.0)
    tl.store(weights_ptr + (row * X + block) * 2, highest)
    tl.store(weights_ptr + (row * X + block) * 2 + 1, tl.sum(weights, 0))


@triton.jit(do_not_specialize=["first", "dummy_slot"])
def _rank_kernel(
    best_ptr, weights_ptr, slots_ptr, frontier_ptr, ids_ptr, parents_ptr, scores_ptr, first, dummy_slot, X,
    N: tl.constexpr, K: tl.constexpr, K2: tl.constexpr, F: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tree = row // F
    of_frontier = (row % F).to(tl.int32)
    at = tl.arange(0, BLOCKS * K2)
    best = tl.topk(tl.load(best_ptr + row * X * K2 + at, mask=at < X * K2, other=_LOWEST), K2)
    block = tl.arange(0, BLOCKS)
    highs = tl.load(weights_ptr + (row * X + block) * 2, mask=block < X, other=float("-inf"))
    sums = tl.load(weights_ptr + (row * X + block) * 2 + 1, mask=block < X, other=0.0)
    highest = tl.max(highs, 0)
    total = highest + tl.log(tl.sum(tl.where(highs > float("-inf"), sums * tl.exp(highs - highest), 0.0), 0))
    parent = tl.zeros((), tl.int32)
    before = tl.zeros((), tl.float32)
    if F > 1:
        parent = tl.load(frontier_ptr + tree * K + of_frontier)
        before = tl.load(scores_ptr + tree * N + parent - 1)
    # Rounding gives a sure token more than its share: its candidate would come ahead of the one that it follows.
    share = value_of(best) - total
    score = before + tl.where(share > 0.0, 0.0, share)
    is_there = (tl.load(slots_ptr + row) != dummy_slot) & (score == score)
    k = tl.arange(0, K2)
    to = tree * N + first + of_frontier * K + k
    tl.store(ids_ptr + to, tl.where(is_there, (0xFFFFFFFF - (best & 0xFFFFFFFF)).to(tl.int32), 0), mask=k < K)
    tl.store(parents_ptr + to, tl.zeros_like(k) + parent, mask=k < K)
    tl.store(scores_ptr + to, tl.where(is_there, score, float("-inf")), mask=k < K)


def rank_drafts(
    logits_RV: torch.Tensor,
    slots_R: torch.Tensor,
    positions_R: torch.Tensor,
    params: SampleParams,
    scratch: RankScratch,
    level: int,
    found: Candidates,
) -> None:
    """The likeliest ids behind each row of the frontier become candidates of level `level`, from 1. Can be captured.

    logits as for `sample_rows`, rows tree by tree. slots and positions int32, as the target samples there. Rows of
    the dummy slot give candidates of the score -inf.
    """
    num_rows, vocab_size = logits_RV.shape
    num_trees, num = found.ids_BN.shape
    topk = found.frontier_BK.shape[1]
    size, blocks = scratch.best_RXK.shape[2], scratch.best_RXK.shape[1]
    width = 1 if level == 1 else topk
    assert num_rows == num_trees * width and len(slots_R) == len(positions_R) == num_rows, logits_RV.shape
    assert logits_RV.stride(1) == 1 and triton.cdiv(vocab_size, BLOCK) == blocks and num_rows <= len(scratch.best_RXK)
    _block_kernel[(blocks, num_rows)](
        logits_RV, slots_R, positions_R, params.temperature_S, params.seed_S, scratch.best_RXK, scratch.weights_RX2,
        vocab_size, logits_RV.stride(0), blocks, K2=size, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    _rank_kernel[(num_rows,)](
        scratch.best_RXK, scratch.weights_RX2, slots_R, found.frontier_BK, found.ids_BN, found.parents_BN,
        found.scores_BN, _first_of(level, topk), len(params.seed_S) - 1, blocks, N=num, K=topk, K2=size, F=width,
        BLOCKS=triton.next_power_of_2(blocks), num_warps=4,
    )  # fmt: skip


@triton.jit
def _ranked(scores, number, is_in):
    """int64 that orders candidates: the higher score first, then the lower number."""
    packed = (order_of(scores, False).to(tl.int64) << 32) + (0xFFFFFFFF - number.to(tl.int64))
    return tl.where(is_in, packed, _LOWEST)


@triton.jit(do_not_specialize=["first", "level", "scratch_first", "dummy_slot"])
def _branch_kernel(
    ids_ptr, scores_ptr, frontier_ptr, lengths_ptr, num_drafts_ptr, row_slots_ptr, row_ids_ptr, positions_ptr,
    slots_ptr, kv_lens_ptr, tokens_ptr, before_ptr, sample_slots_ptr, sample_positions_ptr, starts_ptr, tails_ptr,
    tails_before_ptr, first, level, scratch_first, dummy_slot, N: tl.constexpr, K: tl.constexpr, K2: tl.constexpr,
    NUM: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, BLOCK_T: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    tree = tl.program_id(0)
    c = tl.arange(0, BLOCK_N)
    scores = tl.load(scores_ptr + tree * N + first + c, mask=c < NUM, other=float("-inf"))
    best = tl.topk(_ranked(scores, c, c < NUM), K2)
    k = tl.arange(0, K2)
    is_row = k < K
    chosen = (0xFFFFFFFF - (best & 0xFFFFFFFF)).to(tl.int32)
    chosen = tl.where(is_row, chosen, 0)
    length = tl.load(lengths_ptr + tree)
    is_going = level < tl.load(num_drafts_ptr + tree)
    slot = tl.where(is_going, tl.load(row_slots_ptr + tree), dummy_slot)
    slots = tl.zeros_like(k) + slot
    row = tree * K + k
    tl.store(frontier_ptr + row, first + chosen + 1, mask=is_row)
    tl.store(row_ids_ptr + row, tl.load(ids_ptr + tree * N + first + chosen, mask=is_row, other=0), mask=is_row)
    position = length - FIRST + level - 1
    tl.store(positions_ptr + row, tl.where(is_going, position, 0) + k * 0, mask=is_row)
    tl.store(slots_ptr + row, slots, mask=is_row)
    tl.store(kv_lens_ptr + row, tl.where(is_going, position + 1, 0) + k * 0, mask=is_row)
    token = scratch_first + (tree * TAIL + level - 1) * K + k
    tl.store(tokens_ptr + row, token, mask=is_row)
    of_frontier = chosen // K if NUM > K else chosen * 0
    before = tree * K + of_frontier if NUM > K else of_frontier + tree
    tl.store(before_ptr + row, before.to(tl.int64), mask=is_row)
    tl.store(sample_slots_ptr + row, slots, mask=is_row)
    tl.store(sample_positions_ptr + row, k * 0 + length + level, mask=is_row)
    tl.store(starts_ptr + row, k * 0 + length - FIRST, mask=is_row)
    step = tl.arange(0, BLOCK_T)
    is_before = is_row[:, None] & (step < level - 1)[None, :]
    path = tl.load(tails_before_ptr + before[:, None] * TAIL + step[None, :], mask=is_before, other=0)
    path = tl.where((step == level - 1)[None, :], token[:, None], path)
    tl.store(tails_ptr + row[:, None] * TAIL + step[None, :], path, mask=is_row[:, None] & (step < level)[None, :])


def branch_out(
    found: Candidates,
    level: int,
    inputs: DraftInputs,
    num_drafts_B: torch.Tensor,
    shape: NetworkShape,
    scratch_first: int,
    dummy_slot: int,
    rows: BranchRows,
    rows_before: BranchRows,
) -> None:
    """The best candidates of a level that another one follows become the frontier and `rows`, K of each tree. Can be
    captured.

    num_drafts_B: a tree grows no deeper than it may have drafts. KV of the rows goes to tokens of the network's pool
    from scratch_first on, K x (levels - 1) of each tree. rows_before: of the level before, other memory than `rows`.
    """
    num_trees, num = found.ids_BN.shape
    topk, tail = found.frontier_BK.shape[1], rows.tails_RD.shape[1]
    size = topk if level == 1 else topk**2
    assert len(rows.ids) == num_trees * topk and rows.tails_RD.data_ptr() != rows_before.tails_RD.data_ptr()
    assert 1 <= level <= tail and len(num_drafts_B) == num_trees, (level, tail)
    _branch_kernel[(num_trees,)](
        found.ids_BN, found.scores_BN, found.frontier_BK, inputs.starts, num_drafts_B, inputs.slots, *rows,
        rows_before.tails_RD, _first_of(level, topk), level, scratch_first, dummy_slot, N=num, K=topk,
        K2=triton.next_power_of_2(topk), NUM=size, BLOCK_N=triton.next_power_of_2(size), TAIL=tail,
        BLOCK_T=triton.next_power_of_2(tail), FIRST=shape.first, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["window_stride", "parents_stride"])
def _choose_kernel(
    ids_ptr, parents_ptr, scores_ptr, num_drafts_ptr, window_ptr, draft_parents_ptr, window_stride, parents_stride,
    N: tl.constexpr, BLOCK_N: tl.constexpr, W2: tl.constexpr,
):  # fmt: skip
    tree = tl.program_id(0)
    c = tl.arange(0, BLOCK_N)
    scores = tl.load(scores_ptr + tree * N + c, mask=c < N, other=float("-inf"))
    best = tl.topk(_ranked(scores, c, c < N), W2)
    n = tl.arange(0, W2)
    is_draft = n < tl.load(num_drafts_ptr + tree)
    chosen = tl.where(is_draft, (0xFFFFFFFF - (best & 0xFFFFFFFF)).to(tl.int32), N)
    ids = tl.load(ids_ptr + tree * N + chosen, mask=is_draft, other=0)
    parents = tl.load(parents_ptr + tree * N + chosen, mask=is_draft, other=0)
    # A candidate's score is at most that of the one it follows, and ties go to the earlier one: that one comes before.
    is_parent = (chosen + 1)[None, :] == parents[:, None]
    position = tl.sum(tl.where(is_parent, (n + 1)[None, :], 0), 1)
    tl.store(window_ptr + n * window_stride + tree, ids, mask=is_draft)
    tl.store(draft_parents_ptr + n * parents_stride + tree, position, mask=is_draft)


def choose_drafts(found: Candidates, inputs: DraftInputs, num_drafts_B: torch.Tensor) -> None:
    """The best candidates become drafts: ids in the window of the inputs and positions that they follow in its
    parents, as many as num_drafts_B says. Can be captured."""
    num_trees, num = found.ids_BN.shape
    parents_WB = inputs.parents_WB
    assert parents_WB is not None and num <= MAX_CANDIDATES
    most = min(len(inputs.window_WB), num)
    size = triton.next_power_of_2(num)
    _choose_kernel[(num_trees,)](
        found.ids_BN, found.parents_BN, found.scores_BN, num_drafts_B, inputs.window_WB, parents_WB,
        inputs.window_WB.stride(0), parents_WB.stride(0), N=num, BLOCK_N=size,
        W2=min(triton.next_power_of_2(most), size), num_warps=4 if size > 128 else 1,
    )  # fmt: skip


def _first_of(level: int, topk: int) -> int:
    """Candidates before those of a level."""
    return 0 if level == 1 else topk + (level - 2) * topk**2
