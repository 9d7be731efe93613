"""N-gram drafts of the kernel are those of the host, id for id."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from radixmesh.daemons.worker.speculation.ngram import ngram_drafts
from radixmesh.kernels.sampling import ngram
from radixmesh.kernels.sampling.drafts import DraftInputs, SlotLengths

NUM_SLOTS, DUMMY = 9, 9


def _ints(values, device):
    return torch.from_numpy(np.ascontiguousarray(values, np.int32)).to(device)


@pytest.mark.parametrize(
    ("num_ids", "max_len", "window", "block"), [(2, 12, 30, 64), (3, 70, 40, 16), (6, 70, 64, 64), (200, 70, 64, 16)]
)
@pytest.mark.parametrize("num_drafts", [1, 4, 8])
def test_drafts_are_those_of_the_host(monkeypatch, device, num_ids, max_len, window, block, num_drafts):
    """Rows whose last token and length are sent and rows that the device keeps, padding, and rows with drafts of the
    host's, which stay as they are."""
    monkeypatch.setattr(ngram, "_BLOCK", block)
    random = np.random.default_rng(num_ids * 100 + num_drafts)
    texts = random.integers(0, num_ids, (NUM_SLOTS + 1, max_len + 1)).astype(np.int32)
    lengths = random.integers(1, max_len + 1, NUM_SLOTS + 1).astype(np.int32)
    lengths[:3], lengths[DUMMY] = (1, 2, 3), 0
    slots = np.array([*random.permutation(NUM_SLOTS), DUMMY], np.int32)
    last_tokens = texts[np.arange(NUM_SLOTS + 1), lengths - 1]
    held = texts.copy()
    # The last token is not in the slot's text yet: a prompt's last chunk has sampled it.
    held[np.arange(NUM_SLOTS + 1), lengths - 1] = 77
    is_sent, is_from_host = random.random(len(slots)) < 0.4, random.random(len(slots)) < 0.2
    is_sent[-1] = is_from_host[-1] = False
    staged = np.full((num_drafts, len(slots) + 2), 55, np.int32)
    most = random.integers(1, num_drafts + 1, len(slots)).astype(np.int32)
    state = SlotLengths(
        _ints(np.where(np.isin(np.arange(NUM_SLOTS + 1), slots[is_sent]), 66, last_tokens), device),
        _ints(np.where(np.isin(np.arange(NUM_SLOTS + 1), slots[is_sent]), 44, lengths), device),
        _ints(np.zeros((NUM_SLOTS + 1, 1)), device),
        _ints(held, device),
    )
    inputs = DraftInputs(
        slots=_ints(slots, device),
        max_lens=_ints(np.zeros(len(slots)), device),
        tokens=_ints(np.where(is_sent, last_tokens[slots], -1), device),
        lengths=_ints(np.where(is_sent, lengths[slots], -1), device),
        starts=_ints(np.where(is_from_host, 7, np.where(slots == DUMMY, 0, -1)), device),
        counts=_ints(np.where(is_from_host, 1, np.where(slots == DUMMY, 0, most)), device),
        window_WB=_ints(staged, device),
        entries_E2=_ints(np.zeros((1, 2)), device),
        num_entries_1=_ints(np.zeros(1), device),
    )
    limits = {"min_match": 2, "max_match": 5, "window": window}
    ngram.propose_ngrams(inputs, state, **limits)
    starts, counts, drafts = (part.cpu().numpy() for part in (inputs.starts, inputs.counts, inputs.window_WB))
    tokens_SL = state.tokens_SL.cpu().numpy()
    num_found = 0
    for row, slot in enumerate(slots.tolist()):
        if slot == DUMMY or is_from_host[row]:
            assert (starts[row], counts[row]) == ((7, 1) if is_from_host[row] else (0, 0))
            assert (drafts[:, row] == 55).all() and (tokens_SL[slot] == held[slot]).all()
            continue
        text = texts[slot, : lengths[slot]]
        want = ngram_drafts(text, int(most[row]), **limits).tolist()
        num_found += bool(want)
        assert starts[row] == lengths[slot] and counts[row] == len(want)
        assert drafts[: len(want), row].tolist() == want
        assert (tokens_SL[slot] == held[slot]).all()
    assert num_found or num_ids == 200
    assert (drafts[:, len(slots) :] == 55).all()
