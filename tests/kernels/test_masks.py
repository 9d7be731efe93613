"""Masks of grammars on the device: against the CPU's masked rows, and late ones that leave a slot as it was."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from support.device_samples import new_target, params_of

from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.worker.guided.guide import mask_row
from radixmesh.daemons.worker.runner import SampleInput
from radixmesh.daemons.worker.sampling.sampler import sample_tokens
from radixmesh.kernels.sampling import forced, sample
from radixmesh.kernels.sampling.drafts import DraftInputs, DraftRows, SlotLengths, accept_drafts
from radixmesh.kernels.sampling.forced import HEAD, HostChains, confirm_chains, propose_forced, take_chains
from radixmesh.kernels.sampling.masks import (
    LATE,
    NO_LENGTH,
    NO_MASK,
    GuidedSlots,
    HostMasks,
    allowed_token,
    apply_masks,
    clamp_positions,
    settle_masks,
    take_masks,
)
from radixmesh.kernels.sampling.sample import SampleScratch, SlotRows, TokenTarget, cut_of, sample_rows
from radixmesh.kernels.sampling.sample_params import Needs

_NAN, _INF = float("nan"), float("inf")
_NONE = np.empty(0, np.int32)


def _ints(values: object, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def _host(allowed: np.ndarray, positions: list[int], device: torch.device) -> HostMasks:
    """Masks bool [M, V] as a worker's host holds them."""
    num_masks, vocab_size = allowed.shape
    padded = np.zeros((num_masks, -(-vocab_size // 32) * 32), np.bool_)
    padded[:, :vocab_size] = allowed
    words = torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32).copy())
    flags = torch.tensor(positions, dtype=torch.int32)
    is_gpu = device.type == "cuda"
    return HostMasks(words.pin_memory() if is_gpu else words, flags.pin_memory() if is_gpu else flags)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [31, 64, 2500, 5000])
def test_masked_rows_sample_as_on_the_cpu(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    rng = np.random.default_rng(vocab_size)
    samplings = [Sampling(temperature=0.0), Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=3), Sampling()]
    inputs = [
        SampleInput(sampling=sampling, prompt_ids=_NONE, output_ids=_NONE, position=4 + row)
        for row, sampling in enumerate(samplings)
    ]
    logits = (torch.randn(4, vocab_size, device=device) * 3).to(dtype)
    allowed = rng.random((4, vocab_size)) < np.array([[0.5], [0.02], [0.3], [0.5]])
    allowed[np.arange(4), rng.integers(0, vocab_size, 4)] = True
    rows = logits.float().cpu().numpy()
    # The last row follows no grammar.
    masked = np.stack([mask_row(row, mask, _NONE)[0] for row, mask in zip(rows[:3], allowed, strict=False)] + [rows[3]])
    expected = sample_tokens(masked, inputs)
    slots, positions = _ints([3, 2, 1, 0], device), _ints([sample.position for sample in inputs], device)
    state = GuidedSlots(_ints([NO_MASK, 0, 1, 2, NO_MASK], device), _ints([NO_LENGTH, 6, 5, 4, NO_LENGTH], device),
                        _ints([0] * 5, device))  # fmt: skip
    host, taken = _host(allowed[[2, 1, 0]], [6, 5, 4], device), _ints([0] * 4, device)
    params, target = params_of(inputs, [3, 2, 1, 0], device), new_target(4, 4, device, ring_index=1)
    take_masks(slots, positions, state, host, taken)
    assert taken.tolist() == [2, 1, 0, NO_MASK]
    apply_masks(logits, taken, host)
    assert torch.equal(logits[3].cpu().float(), torch.from_numpy(rows[3]))
    scratch = SampleScratch(4, vocab_size, device, has_penalties=False)
    sample_rows(logits, SlotRows(params, slots, positions), scratch, target, Needs.NOISE | Needs.FILTERS)
    settle_masks(taken, slots, positions, state, host, target, params.tokens_SL)
    tokens = target.ring_RT[1, :4].tolist()
    assert tokens == expected and all(allowed[row, token] for row, token in enumerate(tokens[:3]))
    assert state.lengths.tolist() == [NO_LENGTH, 7, 6, 5, NO_LENGTH]
    assert state.last_tokens.tolist()[1:4] == tokens[2::-1]


@pytest.mark.parametrize("num_programs", [1024, 8])
def test_the_highest_of_masked_rows_is_that_of_their_masked_logits(num_programs, device, monkeypatch) -> None:
    """As a sample of all rows would find it in the masked logits, at the borders of its splits too; free and late rows
    keep theirs."""
    monkeypatch.setattr(sample, "_PROGRAMS", num_programs)
    num_rows, vocab_size, rng = 4, 9000, np.random.default_rng(1)
    logits = torch.from_numpy(rng.standard_normal((num_rows, vocab_size)).astype(np.float32)).to(device)
    logits[0, 8191] = logits[2, 4096] = 9.0
    taken = _ints([0, NO_MASK, 1, LATE], device)
    allowed = rng.random((2, vocab_size)) < 0.01
    allowed[0, 8191] = allowed[1, 4096] = True
    host = _host(allowed, [0, 0], device)
    inputs = [
        SampleInput(sampling=Sampling(temperature=0.0), prompt_ids=_NONE, output_ids=_NONE, position=4)
        for _ in range(num_rows)
    ]
    slots, positions = _ints(list(range(num_rows)), device), _ints([4] * num_rows, device)
    params = params_of(inputs, list(range(num_rows)), device)
    target = new_target(num_rows, num_rows, device, ring_index=0)
    rows = SlotRows(params, slots, positions)
    scratch, anew = (SampleScratch(num_rows, vocab_size, device, has_penalties=False) for _ in range(2))
    sample_rows(logits, rows, scratch, target, Needs.NOTHING)
    apply_masks(logits, taken, host, scratch.highest_TS)
    sample_rows(logits, rows, anew, target, Needs.NOTHING)
    splits = cut_of(num_rows, vocab_size).splits
    assert splits > 1 and torch.equal(scratch.highest_TS[:, :splits], anew.highest_TS[:, :splits])
    assert target.ring_RT[0, 0] == 8191 and target.ring_RT[0, 2] == 4096
    is_gone = logits.cpu().numpy() == -np.inf
    assert (is_gone[0] == ~allowed[0]).all() and (is_gone[2] == ~allowed[1]).all() and not is_gone[[1, 3]].any()


def test_a_late_row_leaves_its_slot_as_it_was(device: torch.device) -> None:
    """The mask is that of the position before: the row's token is none, and its slot's last token is the one before."""
    allowed = np.ones((2, 40), np.bool_)
    slots, positions = _ints([0, 1], device), _ints([9, 12], device)
    state = GuidedSlots(_ints([0, 1, NO_MASK], device), _ints([7, 12, NO_LENGTH], device), _ints([5, 6, 0], device))
    host, taken = _host(allowed, [6, 12], device), _ints([0, 0], device)
    target = new_target(2, 3, device, ring_index=0)
    target.ring_RT[0, :2] = 33
    target.last_tokens_S[:] = 33
    take_masks(slots, positions, state, host, taken)
    # The host was two steps ahead of the first row.
    assert taken.tolist() == [LATE, 1] and positions.tolist() == [7, 12]
    logits = torch.zeros(2, 40, device=device)
    apply_masks(logits, taken, host)
    assert not logits.any()
    settle_masks(taken, slots, positions, state, host, target, torch.zeros(3, 64, dtype=torch.int32, device=device))
    assert target.ring_RT[0, :2].tolist() == [-1, 33] and target.last_tokens_S.tolist()[:2] == [5, 33]
    assert state.lengths.tolist() == [7, 13, NO_LENGTH] and state.last_tokens.tolist()[:2] == [5, 33]


@pytest.mark.parametrize("row", [[_NAN] * 80, [-_INF] * 80])
def test_broken_logits_leave_the_lowest_allowed_id(row: list[float], device: torch.device) -> None:
    allowed = np.zeros((1, 80), np.bool_)
    allowed[0, [37, 79]] = True
    sample = SampleInput(sampling=Sampling(temperature=1.0), prompt_ids=_NONE, output_ids=_NONE, position=3)
    slots, positions = _ints([0], device), _ints([3], device)
    state = GuidedSlots(_ints([0, NO_MASK], device), _ints([3, NO_LENGTH], device), _ints([5, 0], device))
    host, taken = _host(allowed, [3], device), _ints([0], device)
    params, target = params_of([sample], [0], device), new_target(1, 1, device, ring_index=1)
    logits = torch.tensor([row], device=device)
    take_masks(slots, positions, state, host, taken)
    apply_masks(logits, taken, host)
    scratch = SampleScratch(1, 80, device, has_penalties=False)
    sample_rows(logits, SlotRows(params, slots, positions), scratch, target, Needs.NOISE)
    settle_masks(taken, slots, positions, state, host, target, params.tokens_SL)
    assert target.ring_RT[1, 0].item() == 37 == target.last_tokens_S[0].item() == params.tokens_SL[0, 3].item()


def test_rows_ahead_of_their_slot_are_brought_back(device: torch.device) -> None:
    lengths = _ints([NO_LENGTH, 8, 8, NO_LENGTH], device)
    slots, positions, kv_lens = _ints([0, 1, 2, 3], device), _ints([5, 9, 7, 0], device), _ints([6, 10, 8, 0], device)
    clamp_positions(slots, positions, kv_lens, lengths)
    assert positions.tolist() == [5, 7, 7, 0] and kv_lens.tolist() == [6, 8, 8, 0]
    # Of a step with chunks, whose rows have ids: a chunk of the slot is nobody's decode.
    slots, positions, kv_lens = _ints([1, 1, 1, 1], device), _ints([9, 9, 10, 11], device), _ints([10, 0, 0], device)
    clamp_positions(slots, positions, kv_lens, lengths, _ints([-1, 4, 4, 4], device))
    assert positions.tolist() == [7, 9, 10, 11] and kv_lens.tolist() == [8, 0, 0]


def test_masks_of_a_chain_count_behind_its_own_tokens_alone(device):
    """Rows: at the base, behind two ids of the chain, behind another id, behind its end, ahead of it, without a
    grammar; then a chain that is not there yet. What was begun twice since it was taken counts as late."""
    chains = HostChains(
        versions_M2=torch.tensor([[3, 3], [0, 0]], dtype=torch.int32),
        chains_CH=torch.zeros(4, HEAD + 3, dtype=torch.int32),
        words_MW=torch.zeros(4 * 4, 2, dtype=torch.int32),
    )
    chains.chains_CH[1] = torch.tensor([5, 2, 40, 41, 99])
    chains.words_MW[4:8, 1] = torch.tensor([1 << 8, 1 << 9, 1 << 10, -1])  # Ids 40, 41, 42.
    if device.type == "cuda":
        chains = HostChains(*(part.pin_memory() for part in chains))
    ints = partial(torch.tensor, dtype=torch.int32, device=device)
    masks_S, tokens_SL = ints([0, 0, 0, 1, NO_MASK]), torch.zeros(5, 16, dtype=torch.int32, device=device)
    tokens_SL[0, 5:8] = ints([40, 41, 42])
    tokens_SL[1, 5:8] = ints([40, 50, 42])
    slots, positions = ints([0, 0, 1, 1, 0, 2, 4, 3]), ints([5, 7, 6, 7, 8, 4, 5, 5])
    taken, seen = torch.zeros(8, dtype=torch.int32, device=device), torch.zeros(8, dtype=torch.int32, device=device)
    take_chains(slots, positions, masks_S, chains, tokens_SL, taken, seen)
    assert taken.tolist() == [4, 6, 5, LATE, LATE, LATE, NO_MASK, LATE]
    sampled = ints([[7, 42, 7, 1, 2, 3, 4, 5]])
    target = TokenTarget(ring_RT=sampled, ring_index_1=ints([0]), last_tokens_S=ints([0] * 5))
    chains.versions_M2[0, 1] = 4  # The other chain is being written: this one stays.
    confirm_chains(taken, seen, slots, masks_S, chains, target)
    assert sampled.tolist() == [[40, 42, 41, 1, 2, 3, 4, 5]]
    assert taken.tolist() == [4, 6, 5, LATE, LATE, LATE, NO_MASK, LATE]
    chains.versions_M2[0] = torch.tensor([4, 5])
    confirm_chains(taken, seen, slots, masks_S, chains, target)
    assert taken.tolist() == [LATE] * 6 + [NO_MASK, LATE]


@pytest.mark.parametrize("head", [[-(10**9), 3], [-(2**31), 2**31 - 1], [2**31 - 1, -5], [5, -(2**31)], [4, 10**9]])
def test_numbers_that_are_no_chain_are_used_for_nothing(head, device):
    """Another process writes them. In the middle of memory whose every other number would be seen."""
    chains_CH = torch.full((2 * 3, HEAD + 3), 77, dtype=torch.int32)
    chains_CH[3, :2] = torch.tensor(head)
    chains_CH[3, 2:] = torch.tensor([-1, 10**9, 3])
    versions = torch.tensor([[0, 0], [1, 1], [0, 0]], dtype=torch.int32)
    chains = HostChains(versions, chains_CH, torch.zeros(6 * 4, 2, dtype=torch.int32))
    if device.type == "cuda":
        chains = HostChains(*(part.pin_memory() for part in chains))
    ints = partial(torch.tensor, dtype=torch.int32, device=device)
    tokens_SL = torch.full((3, 16), 77, dtype=torch.int32, device=device)
    taken, seen = ints([0] * 3), ints([0] * 3)
    take_chains(ints([1] * 3), ints([0, 5, 15]), ints([NO_MASK, 1, NO_MASK]), chains, tokens_SL, taken, seen)
    assert all(number == LATE or 3 * 4 <= number < 4 * 4 for number in taken.tolist())
    window = torch.full((2, 1), -1, dtype=torch.int32, device=device)
    nothing = torch.zeros(0, 2, dtype=torch.int32, device=device)
    inputs = DraftInputs(*(ints([number]) for number in (1, 16, -1, -1, -1, 2)), window, nothing, ints([0]))
    state = SlotLengths(ints([0] * 3), ints([9, 5, 9]), ints([[0]] * 3), tokens_SL)
    propose_forced(inputs, state, ints([NO_MASK, 1, NO_MASK]), chains, 60, has_others=False)
    assert inputs.starts.tolist() == [5] and 0 <= inputs.counts.item() <= 2
    assert all(-1 <= draft < 60 for draft in window.flatten().tolist())


def test_a_mask_that_is_written_while_it_is_read_counts_as_late(device, monkeypatch):
    if device.type == "cuda":
        pytest.skip("only the interpreter calls a function of the host within a kernel")
    ints = partial(torch.tensor, dtype=torch.int32)
    words = torch.full((4, 2), -1, dtype=torch.int32)
    chains = HostChains(ints([[3, 4]]), torch.zeros(2, HEAD + 1, dtype=torch.int32), words)

    def read_beside_the_host(*arguments):
        chains.versions_M2[0, 1] = 5
        words[2] = ints([1, 0])  # The mask of another position: id 0 alone.
        return allowed_token(*arguments)

    monkeypatch.setattr(forced, "allowed_token", read_beside_the_host)
    taken, sampled, last_tokens = ints([2]), ints([[40]]), ints([40])
    target = TokenTarget(ring_RT=sampled, ring_index_1=ints([0]), last_tokens_S=last_tokens)
    confirm_chains(taken, ints([3]), ints([0]), ints([0]), chains, target)
    assert taken.tolist() == [LATE] and sampled.tolist() == [[40]] and last_tokens.tolist() == [40]


def test_a_row_yields_nothing_from_its_first_late_position_on(device):
    ints = partial(torch.tensor, dtype=torch.int32, device=device)
    rows = DraftRows.allocate(3, 3, device)
    rows.tokens.copy_(ints([1, 2, 3] * 3))
    rows.num_drafts.copy_(ints([2, 2, 2]))
    lengths, tokens_SL, ring = ints([4, 4, 4]), ints([[0] * 12] * 3), ints([[0] * 15])
    state = SlotLengths(ints([1, 1, 1]), lengths, ints([[0], [0], [0]]), tokens_SL)
    taken = ints([5, 6, 7, 5, LATE, 7, LATE, 6, 7])
    accept_drafts(ints([2, 3, 4] * 3), ints([0, 1, 2]), rows, state, ring, ints([0]), taken)
    assert ring[0, 9:12].tolist() == [3, 1, 0] and lengths.tolist() == [7, 5, 4]
    assert state.last_tokens.tolist() == [4, 2, 1]
