"""Rows of a network that drafts: which tokens a step computes, what counts as fresh then, and the chain of drafts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch

from radixmesh.kernels.sampling import follow, network_rows
from radixmesh.kernels.sampling.drafts import DraftInputs, SlotLengths

NUM_SLOTS, MAX_LEN, MOST = 7, 90, 4
DUMMY = NUM_SLOTS


def _ints(values, device, dtype=np.int32):
    return torch.from_numpy(np.ascontiguousarray(values, dtype)).to(device)


class _World(NamedTuple):
    """Slots with pages of their own, and of each slot how many of its first tokens are fresh. tokens: number in the
    pool of each position."""

    state: SlotLengths
    fresh: network_rows.FreshTokens
    shape: network_rows.NetworkShape
    tokens: np.ndarray
    texts: np.ndarray
    lengths: np.ndarray
    fresh_lens: np.ndarray


def _world(device, seed: int, page_size: int, first: int) -> _World:
    random = np.random.default_rng(seed)
    num_pages = -(-MAX_LEN // page_size)
    pages = random.permutation((NUM_SLOTS + 1) * num_pages).reshape(NUM_SLOTS + 1, num_pages)
    pages[DUMMY] = (NUM_SLOTS + 1) * num_pages
    num_tokens = ((NUM_SLOTS + 1) * num_pages + 1) * page_size
    positions = np.arange(MAX_LEN)
    tokens = pages[:, positions // page_size] * page_size + positions % page_size
    texts = random.integers(2, 99, (NUM_SLOTS + 1, MAX_LEN)).astype(np.int32)
    lengths = random.integers(1, MAX_LEN - MOST, NUM_SLOTS + 1)
    lengths[:3], lengths[DUMMY] = (1, 2, MAX_LEN - 1), 0
    fresh_lens = (lengths * random.random(NUM_SLOTS + 1) ** 0.5).astype(int)
    is_fresh = random.random(num_tokens) < 0.7
    for slot in range(NUM_SLOTS):
        is_fresh[tokens[slot, : fresh_lens[slot]]] = True
        is_fresh[tokens[slot, fresh_lens[slot]]] = False
    # Less of it is known at times: tokens that a slot found in the cache are looked at once.
    known = np.where(random.random(NUM_SLOTS + 1) < 0.5, fresh_lens, 0)
    held = texts.copy()
    held[np.arange(NUM_SLOTS + 1), lengths - 1] = 77  # The last token is not in the slot's text yet.
    state = SlotLengths(
        _ints(texts[np.arange(NUM_SLOTS + 1), lengths - 1], device),
        _ints(lengths, device),
        _ints(pages, device),
        _ints(held, device),
    )
    zero = num_tokens - 1
    fresh = network_rows.FreshTokens(
        _ints(is_fresh, device, np.int8),
        _ints(known, device),
        _ints(np.zeros(NUM_SLOTS + 1), device),
        _ints(np.full((NUM_SLOTS + 1, MAX_LEN + 1), zero), device),
    )
    shape = network_rows.NetworkShape(first, page_size, MAX_LEN, zero)
    return _World(state, fresh, shape, tokens, texts, lengths, fresh_lens)


def _inputs(world: _World, device, slots: list[int], is_sent: np.ndarray) -> DraftInputs:
    slots_B = np.array(slots)
    num_rows = len(slots)
    last = world.texts[slots_B, world.lengths[slots_B] - 1]
    is_padding = slots_B == DUMMY
    room = np.where(is_padding, 0, np.minimum(world.lengths[slots_B] + 1 + slots_B % (MOST + 2), MAX_LEN))
    return DraftInputs(
        slots=_ints(slots_B, device),
        max_lens=_ints(room, device),
        tokens=_ints(np.where(is_sent, last, -1), device),
        lengths=_ints(np.where(is_sent, world.lengths[slots_B], -1), device),
        starts=_ints(np.where(is_padding, 0, -1), device),
        counts=_ints(np.where(is_padding, 0, MOST), device),
        window_WB=_ints(np.full((MOST, num_rows + 2), 55), device),
        entries_E2=_ints(np.zeros((1, 2)), device),
        num_entries_1=_ints(np.zeros(1), device),
    )


def _host(tensor: torch.Tensor) -> np.ndarray:
    return tensor.cpu().numpy()


@pytest.mark.parametrize(("page_size", "first"), [(1, 0), (1, 1), (4, 0), (16, 1)])
@pytest.mark.parametrize("columns", [5, 3])
def test_rows_are_the_tokens_that_are_lacking_up_to_the_last_one(monkeypatch, device, page_size, first, columns):
    monkeypatch.setattr(follow, "_BLOCK", 16)
    for seed in range(4):
        world = _world(device, seed, page_size, first)
        random = np.random.default_rng(seed)
        slots = [*random.permutation(NUM_SLOTS).tolist(), DUMMY]
        is_sent = (random.random(len(slots)) < 0.4) & (np.array(slots) != DUMMY)
        inputs = _inputs(world, device, slots, is_sent)
        max_lens = _host(inputs.max_lens).copy()
        rows = network_rows.NetworkRows.allocate(len(slots) * columns, len(slots), device)
        chain = network_rows.ChainRows.allocate(len(slots), device)
        before = _host(world.fresh.is_fresh_N).copy()
        follow.follow_rows(inputs, world.state, world.fresh, world.shape, rows, chain)
        tokens, positions, row_slots, kv_lens, features = (_host(part).reshape(-1, columns) for part in rows[:5])
        after = before.copy()
        for row, slot in enumerate(slots):
            length, fresh_len = world.lengths[slot], world.fresh_lens[slot]
            is_there = slot != DUMMY and length > first and max_lens[row] > length
            start = max(min(fresh_len, length - 1), first)
            wanted = range(start, min(length, start + columns)) if is_there else range(0)
            for column in range(columns):
                if column >= len(wanted):
                    assert (row_slots[row, column], kv_lens[row, column], positions[row, column]) == (DUMMY, 0, 0)
                    assert features[row, column] == world.shape.zero_token
                    continue
                position = wanted[column]
                assert tokens[row, column] == world.texts[slot, position]
                assert (row_slots[row, column], positions[row, column]) == (slot, position - first)
                assert kv_lens[row, column] == position - first + 1
                if position:
                    assert features[row, column] == world.tokens[slot, position - 1]
                after[world.tokens[slot, position]] = 1
            is_reached = bool(wanted) and wanted[-1] == length - 1
            most = max(0, min(MOST, max_lens[row] - length - 1, MAX_LEN - length + 1)) if is_reached else 0
            assert int(inputs.counts[row]) == int(chain.num_drafts[row]) == most
            assert int(inputs.starts[row]) == length
            assert int(chain.sample_slots[row]) == (slot if most else DUMMY)
            assert int(chain.sample_positions[row]) == length
            assert int(chain.last_rows[row]) == row * columns + max(len(wanted) - 1, 0)
            if wanted:
                assert int(world.fresh.fresh_lens_S[slot]) == wanted[-1] + 1
                # Up to the last of its drafts the network finds its KV where the target's is.
                tabled = _host(world.fresh.tables_SL)[slot]
                end = min(length + MOST, max_lens[row])
                assert (tabled[: end - first] == world.tokens[slot, first:end]).all()
                assert (tabled[end - first :] == world.shape.zero_token).all()
            starts = _host(rows.chunk_row_starts)[2 * row : 2 * row + 3]
            assert starts.tolist() == [row * columns, row * columns + len(wanted), (row + 1) * columns]
            of_chunk = [slot, wanted[-1] - first + 1] if wanted else [DUMMY, 0]
            assert [int(rows.chunk_slots[2 * row]), int(rows.chunk_kv_lens[2 * row])] == of_chunk
            assert [int(rows.chunk_slots[2 * row + 1]), int(rows.chunk_kv_lens[2 * row + 1])] == [DUMMY, 0]
        assert (_host(world.fresh.is_fresh_N) == after).all(), "another token counts as fresh, or none"


@pytest.mark.parametrize("first", [0, 1])
def test_a_chain_gives_each_row_as_many_drafts_as_it_may_have(device, first):
    world = _world(device, 3, 1, first)
    slots = [*range(NUM_SLOTS), DUMMY]
    inputs = _inputs(world, device, slots, np.zeros(len(slots), bool))
    world.fresh.fresh_lens_S.copy_(world.state.lengths)
    rows = network_rows.NetworkRows.allocate(len(slots) * 5, len(slots), device)
    chain = network_rows.ChainRows.allocate(len(slots), device)
    follow.follow_rows(inputs, world.state, world.fresh, world.shape, rows, chain)
    counts = _host(inputs.counts).copy()
    assert len(set(counts.tolist())) > 2
    for number in range(MOST):
        sampled = _ints(100 * (number + 1) + np.arange(len(slots)), device)
        follow.chain_rows(sampled, inputs, number, DUMMY, world.shape, chain)
        for row, slot in enumerate(slots):
            is_going = number + 1 < counts[row]
            position = world.lengths[slot] + number - first
            want = [position, slot, position + 1] if is_going else [0, DUMMY, 0]
            assert [int(part[row]) for part in (chain.positions, chain.slots, chain.kv_lens)] == want
            assert int(chain.sample_slots[row]) == want[1]
            assert not is_going or int(chain.sample_positions[row]) == world.lengths[slot] + number + 1
    for row, count in enumerate(counts.tolist()):
        drafts = _host(inputs.window_WB)[:, row].tolist()
        assert drafts == [100 * (number + 1) + row if number < count else 55 for number in range(MOST)]


@pytest.mark.parametrize("page_size", [1, 16])
def test_what_the_target_writes_behind_the_fresh_tokens_is_stale(device, page_size):
    world = _world(device, 5, page_size, 1)
    world.fresh.is_fresh_N.fill_(1)
    slots = np.array([0, 3, 3, 3, DUMMY])
    known = _host(world.fresh.fresh_lens_S)
    positions = np.array([0, known[3] - 1 if known[3] else 0, known[3], known[3] + 1, 0])
    written = follow.tokens_written(_ints(positions, device), _ints(slots, device), world.state, world.fresh, page_size)
    assert _host(written).tolist() == world.tokens[slots, positions].tolist()
    for slot, position in zip(slots.tolist(), positions.tolist(), strict=True):
        is_fresh = bool(world.fresh.is_fresh_N[int(world.tokens[slot, position])])
        assert is_fresh == (position < known[slot])


@pytest.mark.parametrize(("page_size", "first"), [(1, 0), (4, 1)])
def test_chunks_are_followed_where_all_before_them_is_fresh(monkeypatch, device, page_size, first):
    """A chunk behind fresh tokens, one behind others, one from the beginning, and chunks of padding."""
    monkeypatch.setattr(follow, "_BLOCK", 16)
    world = _world(device, 7, page_size, first)
    of_fresh, lapsed, from_zero = 3, 4, 5
    spans = {of_fresh: (20, 45), lapsed: (20, 30), from_zero: (0, 19)}
    fresh_N = world.fresh.is_fresh_N
    fresh_N.zero_()
    world.fresh.fresh_lens_S.zero_()
    for slot, count in ((of_fresh, 20), (lapsed, 19)):
        fresh_N[torch.from_numpy(world.tokens[slot, :count])] = 1
    positions = np.concatenate([np.arange(*span) for span in spans.values()])
    lens = [end - start for start, end in spans.values()]
    num_padding = 3
    starts = [0, *np.cumsum(lens).tolist(), sum(lens) + num_padding, sum(lens) + num_padding]
    chunk_slots = [*spans, DUMMY, DUMMY]
    kv_lens = [*(end for _, end in spans.values()), 0, 0]
    rows = network_rows.NetworkRows.allocate(starts[-1], len(chunk_slots), device)
    positions_T = np.concatenate((positions, np.zeros(num_padding, int)))
    written = follow.follow_chunks(
        tuple(_ints(part, device) for part in (chunk_slots, starts, kv_lens)),  # type: ignore[arg-type]
        _ints(positions_T, device),
        world.state.page_tables,
        world.fresh,
        world.shape,
        rows,
    )
    slots_T = np.concatenate((np.repeat(list(spans), lens), [DUMMY] * num_padding))
    assert _host(written).tolist() == world.tokens[slots_T, positions_T].tolist()
    is_used = (slots_T != DUMMY) & (slots_T != lapsed) & (positions_T >= first)
    assert _host(rows.slots).tolist() == np.where(is_used, slots_T, DUMMY).tolist()
    assert _host(rows.positions).tolist() == np.where(is_used, positions_T - first, 0).tolist()
    before = world.tokens[slots_T, np.maximum(positions_T - 1, 0)]
    has_before = is_used & (positions_T > 0)
    assert _host(rows.features).tolist() == np.where(has_before, before, world.shape.zero_token).tolist()
    assert _host(world.fresh.fresh_lens_S)[list(spans)].tolist() == [45, 19, 19]
    for slot, (start, end) in spans.items():
        seen = _host(fresh_N)[world.tokens[slot, max(start, first) : end]]
        assert (seen == (slot != lapsed)).all()
    skipped = [0, lens[1], first, num_padding, 0]
    row_starts = _host(rows.chunk_row_starts).tolist()
    assert row_starts[1::2] == [start + skip for start, skip in zip(starts[:-1], skipped, strict=True)]
    assert row_starts[::2] == starts
    assert _host(rows.chunk_kv_lens)[1::2].tolist() == [45 - first, 0, 19 - first, 0, 0]
    assert _host(rows.chunk_slots)[1::2].tolist() == [of_fresh, DUMMY, from_zero, DUMMY, DUMMY]
    assert not _host(rows.chunk_kv_lens)[::2].any()
