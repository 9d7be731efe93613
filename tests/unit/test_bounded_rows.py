"""Rows with bounds settle, and are told, as one by one: one alone, several, slots that moved on, rows of nothing."""

import random

import numpy as np
import pytest

from radixmesh.daemons.runtime.steps.step import NoToken, StepPlan
from radixmesh.daemons.worker.limits import Limits
from radixmesh.daemons.worker.plans.page_records import PageRecordTable
from radixmesh.daemons.worker.plans.rows.forward_batch import ForwardBatch
from radixmesh.daemons.worker.plans.rows.result_builder import ResultBuilder
from radixmesh.daemons.worker.plans.rows.uneven_rows import settle_bounded
from radixmesh.daemons.worker.plans.slots.slot_table import SlotTable
from radixmesh.daemons.worker.runner import DecodeRows, RowBounds, StepOutput

SLOTS, MAX_LEN, MOST = 8, 64, 5


def _limits(page_size: int) -> Limits:
    return Limits(
        page_size=page_size,
        num_pages=SLOTS * MAX_LEN // page_size,
        num_slots=SLOTS,
        vocab_size=1000,
        max_total_len=MAX_LEN,
        max_tokens_per_step=64,
        max_tokens_per_row=MOST,
    )


def _decoding(rng: random.Random, page_size: int) -> tuple[SlotTable, PageRecordTable]:
    """All slots decode, with tokens of their own and pages for all of their length."""
    limits = _limits(page_size)
    table, records = SlotTable(limits), PageRecordTable(limits)
    pages = list(range(limits.num_pages))
    rng.shuffle(pages)
    per_slot = MAX_LEN // page_size
    for slot in range(SLOTS):
        length = rng.randrange(1, 40)
        table.is_occupied[slot], table.generations[slot] = True, 1 + slot
        table.tokens[slot, :length] = [rng.randrange(1000) for _ in range(length)]
        table.total_len[slot] = table.known_len[slot] = length
        table.computed_len[slot], table.max_total_len[slot] = length - 1, MAX_LEN
        table.page_tables[slot, :per_slot] = pages[slot * per_slot : (slot + 1) * per_slot]
        table.num_pages[slot] = per_slot
    return table, records


def _batch(table: SlotTable, slots: list[int]) -> ForwardBatch:
    of_rows = np.array(slots, np.int32)
    positions = table.total_len[of_rows] - 1
    rows = DecodeRows(
        slots=of_rows,
        ids=table.tokens[of_rows, positions],
        positions=positions,
        page_tables=table.page_tables,
        num_pages=table.num_pages,
        seeds=table.seeds[of_rows],
        is_sampled=table.is_sampled[of_rows],
        bounds=RowBounds(
            max_lens=np.full(len(slots), MAX_LEN, np.int32), known_lens=positions + 1, tokens=table.tokens
        ),
    )
    return ForwardBatch(
        rows=rows,
        row_indexes=np.arange(len(slots), dtype=np.int32),
        row_generations=table.generations[of_rows],
        row_logprobs_starts=table.logprobs_start[of_rows],
        segments=(),
        segment_rows=(),
        num_results=len(slots),
    )


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(30))
def test_rows_settle_as_one_by_one(page_size: int, seed: int) -> None:
    rng = random.Random(seed)
    table, records = _decoding(rng, page_size)
    slots = rng.sample(range(SLOTS), rng.choice((1, 1, 2, SLOTS)))
    batch = _batch(table, slots)
    drafted = [rng.randrange(MOST) for _ in slots]
    # With none in one of four steps: a row that yields nothing takes another way.
    least = 0 if rng.random() < 0.25 else 1
    tokens = [[rng.randrange(1000) for _ in range(rng.randrange(least, 2 + most))] for most in drafted]
    gone = [slot for slot in slots if rng.random() < 0.15]
    table.generations[gone] += 100
    wanted_tokens, wanted_len = table.tokens.copy(), table.total_len.copy()
    wanted_ids, wanted_filled = records.ids.copy(), records.filled.copy()
    for slot, of_row in zip(slots, tokens, strict=True):
        for token in of_row if slot not in gone else ():
            at = wanted_len[slot]
            page, offset = table.page_tables[slot, (at - 1) // page_size], (at - 1) % page_size
            wanted_ids[page, offset], wanted_filled[page] = wanted_tokens[slot, at - 1], offset + 1
            wanted_tokens[slot, at] = token
            wanted_len[slot] += 1
    output = StepOutput(
        tokens=np.array([token for of_row in tokens for token in of_row], np.int32),
        counts=np.array([len(of_row) for of_row in tokens], np.int32),
        num_drafts=np.array(drafted, np.int32),
        segments=[],
        start_ns=1,
        end_ns=2,
    )
    batch = settle_bounded(batch, output, table, records, page_size)
    assert (table.tokens == wanted_tokens).all()
    assert (table.total_len == wanted_len).all() and (table.known_len == wanted_len).all()
    assert (table.computed_len == wanted_len - 1).all()
    assert (records.ids == wanted_ids).all() and (records.filled == wanted_filled).all()
    result = ResultBuilder(StepPlan(epoch=1, step_id=1), 1).build_forward(batch, output)
    assert result.counts.tolist() == [len(of_row) for of_row in tokens]
    assert result.ids.tolist() == [token for of_row in tokens for token in of_row]
    if any(drafted):
        assert result.drafted.tolist() == drafted
        is_drafted = zip(drafted, tokens, strict=True)
        assert result.accepted.tolist() == [max(len(of_row) - 1, 0) if most else 0 for most, of_row in is_drafted]
    else:
        assert not len(result.drafted) and not len(result.accepted)
    arrays = result.counts, result.ids, result.drafted, result.accepted
    assert all(array.dtype == np.int32 for array in arrays)


def test_a_slot_that_failed_says_nothing_of_its_neighbours() -> None:
    table, _ = _decoding(random.Random(1), 4)
    batch = _batch(table, [2, 5, 7])
    # Beside it a row without room.
    batch.rows.bounds.max_lens[2] = batch.rows.positions[2] + 1
    tokens, counts = np.array([11, 12, 13], np.int32), np.array([1, 2, 0], np.int32)
    output = StepOutput(tokens=tokens, counts=counts, segments=[], start_ns=1, end_ns=2)
    result = ResultBuilder(StepPlan(epoch=1, step_id=1), 1, failed_slots=(5,)).build_forward(batch, output)
    assert result.ids.tolist() == [11] and result.counts.tolist() == [1, 0, 0]
    assert result.no_token_reasons.tolist() == [NoToken.HAS_TOKENS, NoToken.SLOT_ERROR, NoToken.NO_ROOM]
