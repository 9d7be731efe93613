"""Samples one token from each row of logits, as the CPU sampler does (version 1: `daemons/worker/sampling`).

T rows, V vocabulary, S splits of a row. All parameters are read from device memory by the row's slot, so that one
captured graph serves whatever its slots ask for; `Needs` leave out the launches that no row needs.

    adjust (penalise.py)   logits -> float32, penalties, biases, suppressed ids become NaN   only with PENALTIES
    highest                the best (value, lowest id) of each split
    cut off (cutoff.py)    the last (value, id) in rank that top-k, top-p and min-p keep       only with FILTERS
    gumbel                 the best (score + noise, lowest id) of each split                   only with NOISE
    finish                 the best of the splits, written where the slot's next decode and the host look for it

Values are compared as packed integers, (order of the value, lower ids first): a maximum of those is exact and decides
ties as the reference does. Noise and scores are float64, as there. What may differ from the CPU: logarithms and
exponentials of another library by a rounding (a token changes where two sums are that close), and top-p's border, whose
sums are float32 here (an id at the border is in or out wrongly where the sum meets top_p within about 1e-6).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from radixmesh.kernels.sampling.candidates import BLOCK, CandidateScratch
from radixmesh.kernels.sampling.cutoff import NO_CUT, cut_off
from radixmesh.kernels.sampling.penalise import adjust
from radixmesh.kernels.sampling.sample_params import (
    Branches,
    Needs,
    SampleParams,
    order_of,
    packed_order,
    value_of,
)

_MAX_SPLITS = 128
_CANDIDATES = 1024
_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # The interpreter knows no assembler.
MARGIN = 4e-4  # Between totals by float32, in units of log(2): those further apart are in the same order exactly.
_AT_ONCE = 2  # Blocks that are loaded together where little is computed.
_PROGRAMS = 1024  # As many programs as fill the device; more rows need fewer splits.


class SampleScratch:
    """Device memory that `sample_rows` works in, for up to `max_rows` rows; all graphs of one stream may share it."""

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
        *,
        has_penalties: bool,
        num_candidates: int = _CANDIDATES,
    ) -> None:
        """With penalties, 8 bytes a row and id of the vocabulary, else some 12 KB a row.

        `num_candidates`, a power of two: filters that keep fewer ids are fast.
        """
        self.highest_TS = torch.empty(max_rows, _MAX_SPLITS, dtype=torch.int64, device=device)
        self.best_TS = torch.empty(max_rows, _MAX_SPLITS, dtype=torch.float64, device=device)
        self.best_ids_TS = torch.empty(max_rows, _MAX_SPLITS, dtype=torch.int32, device=device)
        self.cut_T = torch.full((max_rows,), NO_CUT, dtype=torch.int64, device=device)
        self.candidates = CandidateScratch(max_rows, _MAX_SPLITS, num_candidates, device)
        rows = max_rows if has_penalties else 0
        self.adjusted_TV = torch.empty(rows, vocab_size, dtype=torch.float32, device=device)
        # All zero between calls: the kernel that reads a count clears it.
        self.counts_TV = torch.zeros(rows, vocab_size, dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTarget:
    """Destinations of sampled tokens, all int32: for row t ring_RT[ring_index_1[0], t] and last_tokens_S[its slot].

    ring_index_1 is on the device, so that each replay of a captured step writes to another row of the ring.
    """

    ring_RT: torch.Tensor
    ring_index_1: torch.Tensor
    last_tokens_S: torch.Tensor


class SlotRows(NamedTuple):
    """int32 [T] each: the rows' slots in `params`, and the indexes of the tokens in prompt + output. branches: of rows
    that are not behind all of their slot's tokens."""

    params: SampleParams
    row_slots_T: torch.Tensor
    positions_T: torch.Tensor
    branches: Branches | None = None


@dataclass(frozen=True, slots=True)
class Cut:
    """Split of rows over programs: `splits` programs a row, of `num_blocks` blocks of ids each."""

    splits: int
    num_blocks: int


@triton.jit(do_not_specialize=["num_blocks"])
def _highest_kernel(
    logits_ptr, highest_ptr, V, stride, num_blocks, BLOCK: tl.constexpr, MAX_SPLITS: tl.constexpr,
    IS_ADJUSTED: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    split = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, AT_ONCE * BLOCK)
    start = split * num_blocks * BLOCK
    end = tl.minimum(start + num_blocks * BLOCK, V)
    # Each lane keeps its first highest value; packed integers, which cost several times as much, come once at the end.
    order = tl.full((AT_ONCE * BLOCK,), -(2**31), tl.int32)
    best_id = start + lane
    logits_at = logits_ptr + row * stride
    # Ids past the end count as no more than those before them. Loads of the next ids are under way beside these.
    loaded = tl.load(logits_at + best_id, mask=best_id < end, other=float("-inf"))
    while start < end:
        ids = start + lane
        next_ids = ids + AT_ONCE * BLOCK
        next_loaded = tl.load(logits_at + next_ids, mask=next_ids < end, other=float("-inf"))
        of_ids = order_of(loaded.to(tl.float32), IS_ADJUSTED)
        best_id = tl.where(of_ids > order, ids, best_id)
        order = tl.maximum(of_ids, order)
        loaded = next_loaded
        start += AT_ONCE * BLOCK
    packed = (order.to(tl.int64) << 32) + (0xFFFFFFFF - best_id.to(tl.int64))
    tl.store(highest_ptr + row * MAX_SPLITS + split, tl.max(tl.where(best_id < end, packed, -(2**63)), axis=0))


@triton.jit(do_not_specialize=["num_splits", "num_blocks"])
def _gumbel_kernel(
    logits_ptr, highest_ptr, cut_ptr, row_slots_ptr, positions_ptr, temperature_ptr, seed_ptr, best_ptr, best_id_ptr,
    V, stride, num_splits, num_blocks, BLOCK: tl.constexpr, MAX_SPLITS: tl.constexpr,
    IS_ADJUSTED: tl.constexpr, HAS_CUT: tl.constexpr, MARGIN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(row_slots_ptr + row).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot)
    if PDL:
        # Programs of greedy rows wait too: the kernel behind this one counts on the end of those ahead of it.
        tl.extra.cuda.gdc_wait()
    splits = tl.arange(0, MAX_SPLITS)
    packed = tl.load(highest_ptr + row * MAX_SPLITS + splits, mask=splits < num_splits, other=-(2**63))
    highest = value_of(tl.max(packed, axis=0))
    if (temperature > 0.0) & (highest > float("-inf")):
        seed = tl.load(seed_ptr + slot)
        position = tl.load(positions_ptr + row)
        logits_at = logits_ptr + row * stride
        is_infinite = highest == float("inf")
        cut = tl.zeros((), tl.int64)
        if HAS_CUT:
            cut = tl.load(cut_ptr + row)
        factor = score_factor(temperature)
        # Lanes: ids of a block by the counters of their noise, four each.
        lane = 4 * tl.arange(0, BLOCK // 4)[:, None] + tl.arange(0, 4)[None, :]
        first = split * num_blocks
        end = tl.minimum(first + num_blocks, (V + BLOCK - 1) // BLOCK)

        # Every lane keeps the best of its totals by float32, and how good the second is: nothing is exchanged between
        # threads, and float64 logarithms of all ids would take most of the time.
        near = tl.full((BLOCK // 4, 4), float("-inf"), tl.float32)
        second = near
        near_block = lane * 0
        near_bits = near_block.to(tl.uint32)
        block = first
        while block < end:
            x, is_kept = _candidates(logits_at, block * BLOCK + lane, V, highest, cut, IS_ADJUSTED, HAS_CUT)
            is_any = True
            if IS_ADJUSTED or HAS_CUT:
                # Nothing is left of most blocks behind a filter, and noise is what costs.
                is_any = tl.max((is_kept & (x > float("-inf"))).to(tl.int32)) != 0
            if is_any:
                bits = _random_quads(seed, position, block, BLOCK)
                total = tl.where(is_kept, near_total(x, highest, is_infinite, factor, bits), float("-inf"))
                is_better = total > near
                second = tl.maximum(second, tl.minimum(total, near))
                near = tl.maximum(total, near)
                near_block = tl.where(is_better, block, near_block)
                near_bits = tl.where(is_better, bits, near_bits)
            block += 1
        nearest = tl.max(near)
        winner = tl.min(tl.where(near == nearest, lane, BLOCK))
        is_winner = lane == winner
        runner_up = tl.max(tl.where(is_winner, second, near))
        best = tl.full((), float("-inf"), tl.float64)
        best_id = tl.full((), 2**31 - 1, tl.int32)
        # Totals by float32 say nothing where 1 / temperature is none.
        bar = tl.where(temperature > 1e-30, nearest - MARGIN, float("-inf"))
        if runner_up < bar:
            bits = tl.sum(tl.where(is_winner, near_bits, near_bits * 0))
            best_id = tl.sum(tl.where(is_winner, near_block, 0)) * BLOCK + winner
            x = tl.load(logits_at + best_id).to(tl.float32)
            best = _score(x, highest, is_infinite, temperature) + gumbel_noise(bits)
        elif nearest > float("-inf"):
            # Too close: exactly, for the blocks with totals that are nearly as good.
            block = first
            while block < end:
                ids = block * BLOCK + lane
                x, is_kept = _candidates(logits_at, ids, V, highest, cut, IS_ADJUSTED, HAS_CUT)
                bits = _random_quads(seed, position, block, BLOCK)
                total = tl.where(is_kept, near_total(x, highest, is_infinite, factor, bits), float("-inf"))
                if tl.max(total) >= bar:
                    score = _score(x, highest, is_infinite, temperature)
                    exact = tl.where(is_kept, score + gumbel_noise(bits), float("-inf"))
                    block_best = tl.max(exact)
                    block_id = tl.min(tl.where(exact == block_best, ids, 2**31 - 1))
                    # Blocks come in the order of ids: an equal sum later on is a higher id.
                    best_id = tl.where(block_best > best, block_id, best_id)
                    best = tl.maximum(block_best, best)
                block += 1
        tl.store(best_ptr + row * MAX_SPLITS + split, best)
        tl.store(best_id_ptr + row * MAX_SPLITS + split, best_id)


@triton.jit
def _candidates(logits_at, ids, V, highest, cut, IS_ADJUSTED: tl.constexpr, HAS_CUT: tl.constexpr):
    """Values of ids, and which of them may be sampled. +inf - +inf is NaN: with +inf in the row, only the ids that have
    it are candidates."""
    mask = ids < V
    x = tl.load(logits_at + ids, mask=mask, other=float("-inf")).to(tl.float32)
    is_kept = mask & tl.where(highest == float("inf"), x == highest, x == x)
    if HAS_CUT:
        is_kept = is_kept & (packed_order(x, ids, IS_ADJUSTED) >= cut)
    return x, is_kept


@triton.jit
def random_bits(seed, position, block, BLOCK: tl.constexpr):
    """32 bits for each id of a block: Philox4x32-10, four ids a counter."""
    quads = block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    zeros = quads * 0
    x0, x1, x2, x3 = tl.philox(seed, quads, zeros + position, zeros, zeros)
    return tl.interleave(tl.interleave(x0, x2), tl.interleave(x1, x3))


@triton.jit
def _random_quads(seed, position, block, BLOCK: tl.constexpr):
    """The same as [BLOCK / 4, 4]: of a counter all four are in one thread."""
    quads = block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    zeros = quads * 0
    x0, x1, x2, x3 = tl.philox(seed, quads, zeros + position, zeros, zeros)
    return tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), (BLOCK // 4, 4))


@triton.jit
def _score(x, highest, is_infinite, temperature):
    """float64, at most 0."""
    return tl.where(is_infinite, 0.0, x.to(tl.float64) - highest.to(tl.float64)) / temperature


@triton.jit
def gumbel_noise(bits):
    """float64 noise: -log(-log(u)) of u = (bits + 0.5) / 2^32."""
    uniform = (bits.to(tl.float64) + 0.5) * (2.0**-32)
    return -tl.log(-tl.log(uniform))


@triton.jit
def score_factor(temperature):
    """Of `near_total`. Bounded: a product of it with 0 is 0."""
    return (tl.minimum(1.0 / temperature, 1e30) * 1.4426950408889634).to(tl.float32)


@triton.jit
def near_total(x, highest, is_infinite, factor, bits):
    """(score + noise) log2(e) in float32, within half of the margin wherever it is more than -100.

    Of v = 1 - u near 0, from where most of the best ids come, -log(u) is v + v^2 / 2 + v^3 / 3; v is computed from the
    complement of the bits, where 1 - u would lose its digits.
    """
    score = tl.where(is_infinite, 0.0, x - highest)
    v = tl.fma((bits ^ 0xFFFFFFFF).to(tl.float32), 2.0**-32, 2.0**-33)
    u = tl.fma(bits.to(tl.float32), 2.0**-32, 2.0**-33)
    series = v * tl.fma(v, tl.fma(v, 0.33333334, 0.5), 1.0)
    exponential = tl.where(v < 0.015625, series, -0.6931471805599453 * _log2(u))
    return tl.fma(score, factor, -_log2(exponential))


@triton.jit
def _log2(x):
    """By the instruction: wrong by 2^-22 near 1, or of the result; the library's takes twenty."""
    if _IS_INTERPRETED:
        return tl.log2(x)
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit(do_not_specialize=["num_splits", "ring_stride", "tokens_stride"])
def _finish_kernel(
    highest_ptr, best_ptr, best_id_ptr, row_slots_ptr, positions_ptr, temperature_ptr, ring_ptr, ring_index_ptr,
    last_tokens_ptr, tokens_ptr, num_splits, ring_stride, tokens_stride, MAX_SPLITS: tl.constexpr,
    HAS_SAMPLED: tl.constexpr, HAS_PENALTIES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slots_ptr + row).to(tl.int64)
    ring_index = tl.load(ring_index_ptr).to(tl.int64)
    temperature = tl.zeros((), tl.float64)
    if HAS_SAMPLED:
        temperature = tl.load(temperature_ptr + slot)
    if PDL:
        tl.extra.cuda.gdc_wait()
    splits = tl.arange(0, MAX_SPLITS)
    mask = splits < num_splits
    packed = tl.max(tl.load(highest_ptr + row * MAX_SPLITS + splits, mask=mask, other=-(2**63)), axis=0)
    token = (0xFFFFFFFF - (packed & 0xFFFFFFFF)).to(tl.int32)
    if HAS_SAMPLED:
        if (temperature > 0.0) & (value_of(packed) > float("-inf")):
            best = tl.load(best_ptr + row * MAX_SPLITS + splits, mask=mask, other=float("-inf"))
            ids = tl.load(best_id_ptr + row * MAX_SPLITS + splits, mask=mask, other=2**31 - 1)
            token = tl.min(tl.where(best == tl.max(best, axis=0), ids, 2**31 - 1), axis=0)
    tl.store(ring_ptr + ring_index * ring_stride + row, token)
    tl.store(last_tokens_ptr + slot, token)
    if HAS_PENALTIES:
        tl.store(tokens_ptr + slot * tokens_stride + tl.load(positions_ptr + row), token)


def sample_rows(
    logits_TV: torch.Tensor,
    rows: SlotRows,
    scratch: SampleScratch,
    target: TokenTarget,
    needs: Needs,
    *,
    has_highest: bool = False,
    use_pdl: bool = False,
) -> None:
    """Writes a token sampled from each row of logits to `target`. Can be captured in a graph.

    logits [T, V] of float32, float16 or bfloat16, ids contiguous; not modified. needs: of all rows together; what it
    leaves out is ignored in every row. With penalties the tokens are added to the slots' lists in the parameters too; a
    scratch made without them refuses. has_highest: the call before was of the same logits without penalties, and
    highest_TS of the scratch is as it left it. `use_pdl` as in `rms_norm`; slots, temperatures and ring index are read
    before the wait: no kernel of a step writes them but the one that fetches its inputs.
    """
    _check(logits_TV, rows, scratch, target)
    num_rows, vocab_size = logits_TV.shape
    if num_rows == 0:
        return
    params, row_slots_T, positions_T, branches = rows
    is_adjusted, has_filters = Needs.PENALTIES in needs, Needs.FILTERS in needs
    if is_adjusted:
        assert num_rows <= len(scratch.counts_TV), "the scratch was made without penalties"
        adjust(logits_TV, params, row_slots_T, positions_T, scratch.counts_TV, scratch.adjusted_TV, branches)
        logits_TV = scratch.adjusted_TV[:num_rows]
    cut = cut_of(num_rows, vocab_size)
    if is_adjusted or not has_highest:
        _launch_highest(logits_TV, scratch, cut, is_adjusted=is_adjusted, use_pdl=use_pdl)
    if Needs.NOISE in needs:
        if has_filters:
            highest_T = scratch.highest_TS[:num_rows, : cut.splits].amax(dim=1)
            cut_off(
                logits_TV, params, row_slots_T, highest_T, scratch.candidates, scratch.cut_T, cut.splits,
                cut.num_blocks, is_adjusted=is_adjusted,
            )  # fmt: skip
        _gumbel_kernel[(cut.splits, num_rows)](
            logits_TV, scratch.highest_TS, scratch.cut_T, row_slots_T, positions_T, params.temperature_S, params.seed_S,
            scratch.best_TS, scratch.best_ids_TS, vocab_size, logits_TV.stride(0), cut.splits, cut.num_blocks,
            BLOCK=BLOCK, MAX_SPLITS=_MAX_SPLITS, IS_ADJUSTED=is_adjusted, HAS_CUT=has_filters, MARGIN=MARGIN,
            PDL=use_pdl, num_warps=4, maxnreg=64, enable_fp_fusion=False, launch_pdl=use_pdl,
        )  # fmt: skip
    _launch_finish(rows, scratch, target, cut, needs, use_pdl=use_pdl)


def _launch_highest(
    logits_TV: torch.Tensor, scratch: SampleScratch, cut: Cut, *, is_adjusted: bool, use_pdl: bool
) -> None:
    num_rows, vocab_size = logits_TV.shape
    _highest_kernel[(cut.splits, num_rows)](
        logits_TV, scratch.highest_TS, vocab_size, logits_TV.stride(0), cut.num_blocks, BLOCK=BLOCK,
        MAX_SPLITS=_MAX_SPLITS, IS_ADJUSTED=is_adjusted, AT_ONCE=_AT_ONCE, PDL=use_pdl, num_warps=4,
        launch_pdl=use_pdl,
    )  # fmt: skip


def _launch_finish(
    rows: SlotRows,
    scratch: SampleScratch,
    target: TokenTarget,
    cut: Cut,
    needs: Needs,
    *,
    use_pdl: bool,
) -> None:
    params, row_slots_T, positions_T, _ = rows
    _finish_kernel[(len(row_slots_T),)](
        scratch.highest_TS, scratch.best_TS, scratch.best_ids_TS, row_slots_T, positions_T, params.temperature_S,
        target.ring_RT, target.ring_index_1, target.last_tokens_S, params.tokens_SL, cut.splits,
        target.ring_RT.stride(0), params.tokens_SL.stride(0), MAX_SPLITS=_MAX_SPLITS,
        HAS_SAMPLED=Needs.NOISE in needs, HAS_PENALTIES=Needs.PENALTIES in needs, PDL=use_pdl, num_warps=1,
        launch_pdl=use_pdl,
    )  # fmt: skip


def compile_sampling(
    params: SampleParams, vocab_size: int, dtype: torch.dtype, branches: Branches | None = None
) -> None:
    """Runs every variant of `sample_rows` once for the dummy slot, with logits of `dtype`: no request waits for a
    compiler. Kernels do not depend on the number of rows. branches: of a row, for the variants that take any, alone.
    """
    device = params.seed_S.device
    scratch = SampleScratch(1, vocab_size, device, has_penalties=True)
    logits_TV = torch.zeros(1, vocab_size, dtype=dtype, device=device)
    row_slots_T = torch.full((1,), len(params.seed_S) - 1, dtype=torch.int32, device=device)
    positions_T = torch.zeros(1, dtype=torch.int32, device=device)
    target = TokenTarget(
        ring_RT=positions_T.new_zeros(1, 1),
        ring_index_1=positions_T,
        last_tokens_S=positions_T.new_zeros(len(params.seed_S)),
    )
    rows = SlotRows(params, row_slots_T, positions_T, branches)
    if branches is not None:
        sample_rows(logits_TV, rows, scratch, target, Needs.PENALTIES)
        return
    for penalties in (Needs.NOTHING, Needs.PENALTIES):
        for noise in (Needs.NOTHING, Needs.NOISE, Needs.NOISE | Needs.FILTERS):
            sample_rows(logits_TV, rows, scratch, target, penalties | noise)


def cut_of(num_rows: int, vocab_size: int) -> Cut:
    """The split of so many rows: column s of highest_TS is of the ids of split s."""
    blocks = triton.cdiv(vocab_size, BLOCK)
    splits = min(max(_PROGRAMS // num_rows, 1), blocks, _MAX_SPLITS)
    num_blocks = triton.cdiv(blocks, splits)
    return Cut(triton.cdiv(blocks, num_blocks), num_blocks)


def _check(logits_TV: torch.Tensor, rows: SlotRows, scratch: SampleScratch, target: TokenTarget) -> None:
    (num_rows, vocab_size), (_, row_slots_T, positions_T, _) = logits_TV.shape, rows
    assert logits_TV.stride(1) == 1 and vocab_size < 2**31, (logits_TV.shape, logits_TV.stride())
    assert row_slots_T.dtype == positions_T.dtype == torch.int32, (row_slots_T.dtype, positions_T.dtype)
    assert row_slots_T.shape == positions_T.shape == (num_rows,), (row_slots_T.shape, positions_T.shape)
    assert num_rows <= len(scratch.cut_T), (num_rows, len(scratch.cut_T))
    assert target.ring_RT.dtype == target.ring_index_1.dtype == target.last_tokens_S.dtype == torch.int32
    assert target.ring_RT.stride(1) == 1 and num_rows <= target.ring_RT.shape[1], target.ring_RT.shape
    assert target.last_tokens_S.is_contiguous(), target.last_tokens_S.stride()
