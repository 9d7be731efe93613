"""From rows to the positions that verify their drafts and back, against a row by row reading of the module."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from radixmesh.kernels.sampling.drafts import DraftInputs, DraftRows, SlotLengths, accept_drafts, expand_drafts

NUM_SLOTS, DUMMY, MAX_LEN = 12, 12, 40


def _random_case(seed: int, num_rows: int, num_drafts: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    random = np.random.default_rng(seed)
    window = num_drafts + 3
    slots = random.permutation(NUM_SLOTS)[:num_rows].astype(np.int32)
    state = {
        "last_tokens": random.integers(2, 9, NUM_SLOTS + 1).astype(np.int32),
        "lengths": random.integers(5, 12, NUM_SLOTS + 1).astype(np.int32),
    }
    is_new = random.random(num_rows) < 0.3
    lengths = np.where(is_new, random.integers(5, 12, num_rows), -1)
    exact = np.where(is_new, lengths, state["lengths"][slots])
    inputs = {
        "slots": slots,
        "max_lens": exact + random.integers(-1, num_drafts + 3, num_rows),
        "tokens": np.where(is_new, random.integers(2, 9, num_rows), -1),
        "lengths": lengths,
        # Behind the row's length, at it, or ahead of it: then none of them continues the row.
        "starts": exact - random.integers(-1, 4, num_rows),
        "counts": random.integers(0, window + 1, num_rows),
        "window_WB": random.integers(2, 9, (window, num_rows)),
    }
    inputs["slots"][-1], inputs["max_lens"][-1], inputs["lengths"][-1] = DUMMY, 0, -1
    return state, {name: values.astype(np.int32) for name, values in inputs.items()}


@pytest.mark.parametrize("num_drafts", [1, 2, 4, 8])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("is_ragged", [False, True])
def test_rows_expand_to_their_drafts_and_advance_by_those_that_sampling_confirms(num_drafts, seed, is_ragged, device):
    """is_ragged: each row has its own number of positions, and the one of padding maybe none."""
    num_rows, num_positions = 7, num_drafts + 1
    sizes = np.full(num_rows, num_positions)
    if is_ragged:
        sizes = np.random.default_rng(seed).integers(1, num_positions + 1, num_rows)
        sizes[-1] = seed
    ends = np.cumsum(sizes)
    firsts, size = ends - sizes, int(ends[-1])
    most = num_positions if is_ragged else None
    state, inputs = _random_case(seed, num_rows, num_drafts)
    on_device = {name: torch.from_numpy(values.copy()).to(device) for name, values in {**inputs}.items()}
    tables = torch.zeros(NUM_SLOTS + 1, 6, dtype=torch.int32, device=device)
    tokens_SL = torch.zeros(NUM_SLOTS + 1, MAX_LEN, dtype=torch.int32, device=device)
    slots = SlotLengths(
        torch.from_numpy(state["last_tokens"].copy()).to(device),
        torch.from_numpy(state["lengths"].copy()).to(device),
        tables,
        tokens_SL,
    )
    entries = torch.tensor([[3, 5], [20, 6], [0, 0]], dtype=torch.int32, device=device)
    rows = DraftRows.allocate(num_rows + 2, num_positions, device).of(num_rows, size)
    number = torch.tensor([2], dtype=torch.int32, device=device)
    firsts_B = torch.from_numpy(firsts.astype(np.int32)).to(device) if is_ragged else None
    sent = DraftInputs(**on_device, entries_E2=entries, num_entries_1=number, firsts=firsts_B)
    expand_drafts(sent, slots, rows, most)
    assert tables.view(-1)[[3, 20]].tolist() == [5, 6] and int(tables.count_nonzero()) == 2
    random = np.random.default_rng(seed + 100)
    got = [part.cpu().numpy() for part in rows]
    # Tokens that confirm about half of the drafts: the next position's own token.
    sampled = np.where(random.random(len(got[0])) < 0.7, np.roll(got[0], -1), 1).astype(np.int32)
    ring = torch.full((2, size + 2 * num_rows + 3), -7, dtype=torch.int32, device=device)
    one = torch.ones(1, dtype=torch.int32, device=device)
    # Rows that wait for another sampling do not advance; those of a captured step that do not wait are done by it.
    before = [numbers.clone() for numbers in slots]
    to = on_device["slots"], rows, slots, ring, one
    ragged = {"firsts_B": firsts_B, "num_positions": most}
    accept_drafts(torch.from_numpy(sampled).to(device), *to, waits_B=torch.ones_like(on_device["slots"]), **ragged)
    assert all(torch.equal(now, then) for now, then in zip(slots, before, strict=True))
    assert (ring[1, size : size + num_rows] == 0).all()
    accept_drafts(torch.from_numpy(sampled).to(device), *to, waits_B=torch.zeros_like(on_device["slots"]), **ragged)
    ring_1 = ring[1].cpu().numpy()
    assert (ring[0].cpu().numpy() == -7).all() and (ring_1[size + 2 * num_rows :] == -7).all()
    assert ring_1[: len(sampled)].tolist() == sampled.tolist()
    last_tokens, lengths = slots.last_tokens.tolist(), slots.lengths.tolist()
    used = set()
    assert got[6].tolist() == [
        start for row in range(num_rows) for start in (firsts[row], firsts[row] + got[4][row] + 1)
    ] + [size]
    for row in range(num_rows):
        slot = int(inputs["slots"][row])
        is_new = inputs["lengths"][row] >= 0
        last = int((inputs["tokens"] if is_new else state["last_tokens"][inputs["slots"]])[row])
        length = int((inputs["lengths"] if is_new else state["lengths"][inputs["slots"]])[row])
        room = int(inputs["max_lens"][row]) - length
        skipped = length - int(inputs["starts"][row])
        drafts = inputs["window_WB"][: inputs["counts"][row], row].tolist()[skipped:] if skipped >= 0 else []
        drafts = drafts[: max(0, min(sizes[row] - 1, room - 1))]
        at = slice(firsts[row], ends[row])
        num_used = 1 + len(drafts) if room > 0 else 0
        unused = int(sizes[row]) - num_used
        want_tokens = [last, *drafts][:num_used] + [0] * unused
        positions = [length - 1 + number for number in range(num_used)]
        assert got[0][at].tolist() == want_tokens
        assert got[1][at].tolist() == positions + [0] * unused
        assert got[2][at].tolist() == [slot] * num_used + [DUMMY] * unused
        assert got[3][at].tolist() == [position + 1 for position in positions] + [0] * unused
        assert got[4][row] == (len(drafts) if room > 0 else -1)
        assert got[5][2 * row : 2 * row + 2].tolist() == [slot if num_used else DUMMY, DUMMY]
        assert got[7][2 * row : 2 * row + 2].tolist() == [length - 1 + num_used if num_used else 0, 0]
        row_sampled = sampled[at].tolist()
        count = 0
        if room > 0:
            count = 1
            while count <= len(drafts) and row_sampled[count - 1] == drafts[count - 1]:
                count += 1
        assert ring_1[size + row] == count
        assert ring_1[size + num_rows + row] == (len(drafts) if room > 0 else 0)
        if slot != DUMMY:
            assert lengths[slot] == length + count
            assert last_tokens[slot] == (row_sampled[count - 1] if count else last)
            assert tokens_SL[slot, length - 1] == (last if room > 0 else 0)
            # Of the slot's tokens those that count are what was sampled.
            assert tokens_SL[slot, length : length + count].tolist() == row_sampled[:count]
            used.add(slot)
    for slot in set(range(NUM_SLOTS + 1)) - used:
        assert lengths[slot] == state["lengths"][slot] and last_tokens[slot] == state["last_tokens"][slot]
