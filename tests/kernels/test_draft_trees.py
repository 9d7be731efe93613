"""Trees of drafts on the device: how they grow, what a step computes of them, and what is left of the accepted path."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from support.paged_pool import PagedPool
from support.triton_interpreter import DEVICE

from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.worker.cpu.growing_tree import GrowingTree, ranked_rows
from radixmesh.daemons.worker.runner import SampleInput
from radixmesh.kernels.attention.decode_attention import (
    DecodeWorkspace,
    paged_decode,
    paged_decode_reference,
    plan_decode,
)
from radixmesh.kernels.attention.mla_decode import mla_decode, mla_decode_reference, mla_decode_workspace
from radixmesh.kernels.attention.split_pieces import Tails
from radixmesh.kernels.attention.split_schedule import SplitConfig
from radixmesh.kernels.attention.tree_attention import tree_masks
from radixmesh.kernels.sampling import draft_trees, grow_trees, network_rows
from radixmesh.kernels.sampling.drafts import DraftInputs, DraftRows, SlotLengths, accept_drafts, expand_drafts
from radixmesh.kernels.sampling.penalise import adjust
from radixmesh.kernels.sampling.sample_params import Branches, SampleParams

NUM_SLOTS, DUMMY, MAX_LEN, LATE = 6, 6, 64, -2


def _ints(values) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.int32)).to(DEVICE)


class _World(NamedTuple):
    """Rows of slots with trees of drafts, of which some are chains, some cut off, and the last one padding."""

    inputs: DraftInputs
    state: SlotLengths
    rows: DraftRows
    trees: draft_trees.TreeRows
    lengths: np.ndarray
    num_drafts: np.ndarray
    parents: np.ndarray
    tables: np.ndarray
    page_size: int


def _world(seed: int, num_drafts: int, page_size: int) -> _World:
    random = np.random.default_rng(seed)
    num_rows, num_pages = 5, -(-MAX_LEN // page_size)
    tables = random.permutation((NUM_SLOTS + 1) * num_pages).reshape(NUM_SLOTS + 1, num_pages).astype(np.int32)
    lengths = random.integers(2, MAX_LEN - num_drafts - 1, NUM_SLOTS + 1).astype(np.int32)
    slots = random.permutation(NUM_SLOTS)[:num_rows].astype(np.int32)
    slots[-1], lengths[DUMMY] = DUMMY, 0
    parents = np.array([[random.integers(0, n + 1) for _ in range(num_rows)] for n in range(num_drafts)], np.int32)
    is_chain = np.arange(num_rows) == 1
    parents[0, is_chain] = -1
    counts = random.integers(1, num_drafts + 1, num_rows)
    counts[:2] = num_drafts
    # The third row has no room for all of its drafts, the fourth has none at all.
    room = np.full(num_rows, num_drafts + 1)
    room[2], room[3], room[4] = max(1, num_drafts - 1), 0, 0
    used = np.where(room > 0, np.minimum(counts, room - 1), -1)
    state = SlotLengths(
        _ints(random.integers(2, 9, NUM_SLOTS + 1)),
        _ints(lengths),
        _ints(tables),
        _ints(np.zeros((DUMMY + 1, MAX_LEN))),
    )
    inputs = DraftInputs(
        slots=_ints(slots),
        max_lens=_ints(lengths[slots] + room),
        tokens=_ints(np.full(num_rows, -1)),
        lengths=_ints(np.full(num_rows, -1)),
        starts=_ints(lengths[slots]),
        counts=_ints(counts),
        # Siblings differ, and no draft is the id 0.
        window_WB=_ints(10 + np.arange(num_drafts)[:, None] + np.zeros(num_rows)),
        entries_E2=_ints(np.zeros((1, 2))),
        num_entries_1=_ints([0]),
        parents_WB=_ints(parents),
    )
    parents[:, is_chain] = np.arange(num_drafts)[:, None]
    rows = DraftRows.allocate(num_rows + 2, num_drafts + 1, DEVICE).of(num_rows)
    trees = draft_trees.TreeRows.allocate(num_rows + 2, num_drafts + 1, DEVICE).of(num_rows)
    expand_drafts(inputs, state, rows)
    draft_trees.branch_rows(inputs, state, rows, trees, page_size)
    return _World(inputs, state, rows, trees, lengths[slots], used, parents, tables, page_size)


def _path(world: _World, row: int, number: int) -> list[int]:
    """Positions from the first draft to this one."""
    found = []
    while number:
        found.append(number)
        number = int(world.parents[number - 1, row])
    return found[::-1]


def _token(world: _World, row: int, number: int) -> int:
    """Of the pool, where the KV of a position is."""
    at, slot = world.lengths[row] - 1 + number, int(world.inputs.slots[row])
    return int(world.tables[slot, at // world.page_size]) * world.page_size + at % world.page_size


@pytest.mark.parametrize(("num_drafts", "page_size"), [(1, 1), (6, 1), (5, 16), (9, 4)])
@pytest.mark.parametrize("seed", range(2))
def test_positions_are_those_of_depths_and_tails_are_paths(num_drafts, page_size, seed):
    world = _world(seed, num_drafts, page_size)
    size = num_drafts + 1
    rows, trees = ([part.cpu().numpy() for part in of] for of in (world.rows, world.trees))
    tokens, positions, slots, kv_lens = (part.reshape(-1, size) for part in rows[:4])
    kv_tokens, starts, tails, ids, masks = (part.reshape(-1, size, *part.shape[1:]) for part in trees[:5])
    parents = np.full((len(world.lengths), size), -2)
    for row, count in enumerate(world.num_drafts):
        length = world.lengths[row]
        assert trees[5][row] == (length - 1 if count >= 0 else 0)
        for number in range(size):
            if number > count:
                unused = slots[row, number], kv_lens[row, number], positions[row, number], masks[row, number]
                assert unused == (DUMMY, 0, 0, 0)
                continue
            path = _path(world, row, number)
            parents[row, number] = world.parents[number - 1, row] if number else -1
            assert (positions[row, number], kv_lens[row, number]) == (length - 1 + len(path), length + len(path))
            assert kv_tokens[row, number] == _token(world, row, number) and starts[row, number] == length
            assert tails[row, number, : len(path)].tolist() == [_token(world, row, at) for at in path]
            assert ids[row, number, : len(path)].tolist() == [tokens[row, at] for at in path]
    assert masks.flatten().tolist() == tree_masks(torch.from_numpy(parents)).tolist()


@pytest.mark.parametrize(("num_drafts", "page_size", "has_masks"), [(6, 4, False), (9, 1, True), (1, 16, False)])
@pytest.mark.parametrize("seed", range(3))
def test_the_accepted_path_is_yielded_and_its_kv_moves_to_its_positions(num_drafts, page_size, has_masks, seed):
    world = _world(seed, num_drafts, page_size)
    random = np.random.default_rng(seed)
    size, num_rows = num_drafts + 1, len(world.lengths)
    tokens = world.rows.tokens.cpu().numpy().reshape(num_rows, size)
    sampled = np.full((num_rows, size), 5, np.int32)
    for row in range(num_rows):
        for number in range(size):
            children = [n for n in range(1, max(world.num_drafts[row], 0) + 1) if world.parents[n - 1, row] == number]
            if children and random.random() < 0.8:
                sampled[row, number] = tokens[row, random.choice(children)]
    is_late = random.random((num_rows, size)) < 0.2 if has_masks else np.zeros((num_rows, size), bool)
    taken = _ints(np.where(is_late, LATE, 0)).flatten() if has_masks else None
    ring = torch.full((2, 2 * num_rows * (size + 1) + 3), -7, dtype=torch.int32, device=DEVICE)
    accept_drafts(
        *(_ints(sampled).flatten(), world.inputs.slots, world.rows, world.state, ring),
        *(_ints([1]), taken, world.inputs.parents_WB, world.trees.paths_BP),
    )
    got = ring[1].cpu().numpy()
    num_tokens = (NUM_SLOTS + 2) * -(-MAX_LEN // page_size) * page_size
    plane = torch.arange(2 * num_tokens * 3, device=DEVICE).view(2, num_tokens, 3).to(torch.int16)
    before = plane.clone()
    draft_trees.move_paths([plane], world.trees)
    want = before.clone()
    for row in range(num_rows):
        path, slot = [0], int(world.inputs.slots[row])
        while following := [
            n
            for n in range(1, max(world.num_drafts[row], 0) + 1)
            if world.parents[n - 1, row] == path[-1]
            and tokens[row, n] == sampled[row, path[-1]]
            and not is_late[row, n]
        ]:
            path += following
        count = len(path) if world.num_drafts[row] >= 0 and not is_late[row, 0] else 0
        yielded = sampled[row, path].tolist()[:count]
        assert got[row * size :][:count].tolist() == yielded
        assert got[num_rows * size + row] == count
        assert got[num_rows * (size + 1) + row] == max(world.num_drafts[row], 0)
        places = got[num_rows * (size + 2) + row * size :][:size].tolist()
        assert places[:count] == path[:count] and all(places[n] == n for n in range(max(count, 1), size))
        if not count:
            continue
        length = int(world.lengths[row])
        assert (world.state.lengths[slot], world.state.last_tokens[slot]) == (length + count, yielded[-1])
        assert world.state.tokens_SL[slot, length : length + count].tolist() == yielded
        for depth, number in enumerate(path):
            want[:, _token(world, row, depth)] = before[:, _token(world, row, number)]
    assert torch.equal(plane, want)
    assert got[2 * num_rows * (size + 1) :].tolist() == [-7] * 3


def _logits(path: tuple[int, ...], vocab_size: int) -> np.ndarray:
    """Of a network that is a table: different behind every path."""
    return np.random.default_rng([7, *path]).normal(0, 2, vocab_size).astype(np.float32)


@pytest.mark.parametrize(("topk", "levels", "most"), [(2, 3, 4), (4, 4, 7), (3, 1, 3), (5, 2, 9)])
def test_trees_grow_as_those_of_the_cpu(topk, levels, most):
    vocab_size, first, page_size = 1200, 1, 4
    samplings = [
        Sampling(temperature=0.0),
        Sampling(temperature=0.7, seed=11),
        Sampling(temperature=1.0, seed=2**63 + 1),
    ]
    num_rows = len(samplings) + 2
    params = SampleParams.allocate(num_rows, max_total_len=8, max_biases=1, max_suppressed=1, device=DEVICE)
    for slot, sampling in enumerate(samplings):
        params.temperature_S[slot] = sampling.temperature
        params.seed_S[slot] = int(np.uint64(sampling.seed or 0).astype(np.int64))
    lengths = np.array([9, 20, 31, 12, 40])
    # A row that drafts less than its tree is deep, and one that drafts nothing.
    num_drafts = np.array([most, most, most, min(2, most), 0])
    slots = np.where(num_drafts > 0, np.arange(num_rows), num_rows)
    inputs = DraftInputs(
        *(_ints(np.arange(num_rows)), *[_ints(lengths)] * 4, _ints(num_drafts)),
        *(_ints(np.zeros((most, num_rows))), _ints(np.zeros((1, 2))), _ints([0]), _ints(np.zeros((most, num_rows)))),
    )
    found = grow_trees.Candidates.allocate(num_rows + 1, topk, levels, DEVICE).of(num_rows)
    of_levels = [grow_trees.BranchRows.allocate(num_rows * topk, levels, DEVICE) for _ in range(2)]
    scratch = grow_trees.RankScratch(num_rows * topk, vocab_size, topk, DEVICE)
    paths: list[tuple[int, ...]] = [()] * num_rows
    of_rows = _ints(slots), _ints(lengths)
    for level in range(1, levels + 1):
        logits = np.stack(
            [_logits((row // max(1, len(paths) // num_rows), *path), vocab_size) for row, path in enumerate(paths)]
        )
        grow_trees.rank_drafts(torch.from_numpy(logits).to(DEVICE), *of_rows, params, scratch, level, found)
        if level == levels:
            break
        rows, before = of_levels[level % 2], of_levels[(level + 1) % 2]
        shape = network_rows.NetworkShape(first, page_size, 64, 0)
        grow_trees.branch_out(found, level, inputs, inputs.counts, shape, 500, num_rows, rows, before)
        ids, parents = rows.ids.tolist(), rows.before.tolist()
        paths = [(*paths[parent], token) for parent, token in zip(parents, ids, strict=True)]
        of_rows = rows.sample_slots, rows.sample_positions
        for row, path in enumerate(paths):
            tree, is_going = row // topk, level < num_drafts[row // topk]
            assert len(path) == level and rows.slots[row] == (tree if is_going else num_rows)
            assert rows.kv_lens[row] == (lengths[tree] - first + level if is_going else 0)
            assert rows.positions[row] == max(int(rows.kv_lens[row]) - 1, 0)
            tail = rows.tails_RD[row, :level].tolist()
            assert tail[-1] == rows.tokens[row] and 500 <= tail[0] < 500 + num_rows * topk * (levels - 1)
            if level > 1:
                assert tail[:-1] == before.tails_RD[parents[row], : level - 1].tolist()
        assert len(set(rows.tokens.tolist())) == len(paths)
    grow_trees.choose_drafts(found, inputs, inputs.counts)
    for row, sampling in enumerate([*samplings, samplings[0]]):
        tree = GrowingTree(topk)
        for depth in range(min(levels, int(num_drafts[row]))):
            prefixes = [tuple(tree.ids(tree.path(node)).tolist()) for node in tree.frontier]
            rows_of = np.stack([_logits((row, *prefix), vocab_size) for prefix in prefixes])
            none = np.zeros(0, np.int32)
            sample = SampleInput(
                sampling=sampling, prompt_ids=none, output_ids=none, position=int(lengths[row]) + depth
            )
            tree.grow(ranked_rows(rows_of, [sample] * len(prefixes), topk))
        best = tree.best(int(num_drafts[row]))
        want = _paths(best.ids.tolist(), best.parents[1:].tolist())
        ids = inputs.window_WB[: num_drafts[row], row].tolist()
        parents = inputs.parents_WB[: num_drafts[row], row].tolist()  # type: ignore[index]
        assert all(parent <= number for number, parent in enumerate(parents))
        assert sorted(_paths(ids, parents)) == sorted(want)


def _paths(ids: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(ids, parents, strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def test_more_candidates_than_a_program_sorts_are_refused():
    with pytest.raises(ValueError, match="4096 candidates"):
        grow_trees.Candidates.allocate(1, 16, 18, DEVICE)


def test_ids_that_cannot_be_drafted_come_last():
    """Of logits that are -inf, or no number."""
    params = SampleParams.allocate(1, max_total_len=8, max_biases=1, max_suppressed=1, device=DEVICE)
    logits = torch.full((1, 40), float("-inf"), device=DEVICE)
    logits[0, 7], logits[0, 9], logits[0, 3] = 1.0, 2.0, float("nan")
    found = grow_trees.Candidates.allocate(1, 3, 1, DEVICE)
    grow_trees.rank_drafts(logits, _ints([0]), _ints([4]), params, grow_trees.RankScratch(1, 40, 3, DEVICE), 1, found)
    assert found.ids_BN[0, :2].tolist() == [9, 7] and found.scores_BN[0, 2] == float("-inf")
    torch.testing.assert_close(found.scores_BN[0, :2].exp().sum(), torch.tensor(1.0, device=DEVICE))


def test_a_candidate_does_not_come_ahead_of_the_one_that_it_follows():
    """A device's logarithm rounds: a sure token may seem to have more than all of the weight."""
    params = SampleParams.allocate(1, max_total_len=8, max_biases=1, max_suppressed=1, device=DEVICE)
    logits = torch.full((1, 40), -100.0, device=DEVICE)
    logits[0, 7] = 0.25
    found, scratch = grow_trees.Candidates.allocate(1, 2, 2, DEVICE), grow_trees.RankScratch(1, 40, 2, DEVICE)
    grow_trees.rank_drafts(logits, _ints([0]), _ints([4]), params, scratch, 1, found)
    scratch.weights_RX2[0, 0, 1] = 0.999999
    grow_trees._rank_kernel[(1,)](
        scratch.best_RXK, scratch.weights_RX2, _ints([0]), found.frontier_BK, found.ids_BN, found.parents_BN,
        found.scores_BN, 0, 1, 1, N=6, K=2, K2=2, F=1, BLOCKS=1,
    )  # fmt: skip
    assert found.ids_BN[0, 0] == 7 and found.scores_BN[0, 0] == 0.0 > found.scores_BN[0, 1]


def _with_room(pool: PagedPool) -> None:
    pool.keys, pool.values = (
        torch.cat((plane, torch.full_like(plane[:16], float("nan")))) for plane in (pool.keys, pool.values)
    )


def _scattered_tails(pool: PagedPool, tail_lens: list[int]) -> Tails:
    """The last tokens of each row moved to tokens that no sequence has, and NaN where they were."""
    is_free = torch.ones(len(pool.keys), dtype=torch.bool)
    places = []
    for row, length in enumerate(pool.lengths.tolist()):
        positions = torch.arange(length)
        table = pool.page_tables[pool.slots[row]].cpu()
        places.append(table[positions // pool.page_size].long() * pool.page_size + positions % pool.page_size)
        is_free[places[-1]] = False
    free = is_free.nonzero()[:, 0].tolist()
    tokens = torch.zeros(len(tail_lens), max(tail_lens) + 1, dtype=torch.int32)
    starts = pool.lengths.cpu() - torch.tensor(tail_lens, dtype=torch.int32)
    for row, tail_len in enumerate(tail_lens):
        for step in range(tail_len):
            place, to = places[row][int(starts[row]) + step], free.pop()
            for plane in (pool.keys, pool.values):
                plane[to] = plane[place]
                plane[place] = float("nan")
            tokens[row, step] = to
    return Tails(starts.to(DEVICE), tokens.to(DEVICE))


@pytest.mark.parametrize(
    ("page_size", "window", "is_batch_invariant"), [(16, None, False), (4, 5, False), (1, None, True)]
)
def test_the_kv_of_a_tail_is_where_it_says(page_size, window, is_batch_invariant):
    lengths, tail_lens = [40, 7, 0, 130, 21], [3, 7, 0, 4, 1]
    pool = PagedPool.random(lengths, 2, 16, page_size, torch.float32)
    _with_room(pool)
    q = torch.randn(len(lengths), 6, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    inputs = (q, pool.keys, pool.values, pool.page_tables, pool.slots, pool.lengths, page_size, 0.3, window)
    want = paged_decode_reference(*inputs)
    tails = _scattered_tails(pool, tail_lens)
    config = SplitConfig(heads=1, block_n=16, num_warps=4, num_stages=1, programs_per_sm=1, min_tiles=1)
    workspace = DecodeWorkspace(8, 6, 2, 16, DEVICE, torch.float32, (window,), config, is_batch_invariant)
    plan_decode(pool.lengths, workspace)
    got = paged_decode(*inputs, workspace, tails=tails)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(paged_decode_reference(*inputs, tails=tails), want)


def test_the_latents_of_a_tail_are_where_it_says():
    lengths, tail_lens, rank, page_size = [40, 7, 0, 130], [3, 7, 0, 4], 32, 4
    pool = PagedPool.random(lengths, 1, rank + 16, page_size, torch.float32)
    _with_room(pool)
    q = torch.randn(len(lengths), 4, rank + 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    of_rows = pool.page_tables, pool.slots, pool.lengths, page_size, 0.3
    want = mla_decode_reference(q, pool.keys[:, 0].clone(), *of_rows, rank)
    tails = _scattered_tails(pool, tail_lens)
    workspace = mla_decode_workspace(8, 4, rank, DEVICE, torch.float32)
    plan_decode(pool.lengths, workspace)
    got = mla_decode(q, pool.keys[:, 0].contiguous(), *of_rows, workspace, tails=tails)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_penalties_count_the_tokens_of_a_branch():
    """As if they were the slot's own, and not what other branches have left there."""
    vocab_size, length = 60, 12
    params = SampleParams.allocate(2, max_total_len=40, max_biases=1, max_suppressed=1, device=DEVICE)
    params.repetition_S[:] = 1.3
    params.frequency_S[:], params.presence_S[:], params.prompt_len_S[:] = 0.5, 0.25, 5
    params.tokens_SL[:, :] = torch.arange(40, dtype=torch.int32, device=DEVICE) % 7
    branches = Branches(_ints([length] * 3), _ints([[50, 51, 9], [52, 9, 9], [9, 9, 9]]))
    depths = [2, 1, 0]
    logits = torch.randn(3, vocab_size, device=DEVICE)
    counts = torch.zeros(3, vocab_size, dtype=torch.int32, device=DEVICE)
    slots, positions = _ints([1, 1, 1]), _ints([length + depth for depth in depths])
    got = torch.zeros(3, vocab_size, device=DEVICE)
    adjust(logits, params, slots, positions, counts, got, branches)
    assert not counts.any()
    for row, depth in enumerate(depths):
        params.tokens_SL[1, length : length + depth] = branches.ids_TD[row, :depth]
        want = torch.zeros(1, vocab_size, device=DEVICE)
        adjust(logits[row : row + 1], params, slots[:1], positions[row : row + 1], counts[:1], want)
        assert torch.equal(got[row], want[0])
