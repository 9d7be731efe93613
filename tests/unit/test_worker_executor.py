"""Plans run on the simulated model: every token is what the whole prefix says it must be."""

import dataclasses

import numpy as np
import pytest
from support.plans import (
    ALPHABET,
    VOCAB_SIZE,
    Steps,
    admit,
    as_ints,
    chunk,
    fingerprint,
    grant,
    simulated_executor,
)

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.runtime.steps.step import DispatchMode, PageCopy, Release, Task
from radixmesh.daemons.worker.simulated.token_source import simulated_continuation
from radixmesh.worker.v1 import worker_pb2

FLUSH = worker_pb2.BarrierOp(flush_cache=worker_pb2.FlushCache())


def _expected(ids, num_tokens, **options):
    return simulated_continuation(ids, num_tokens, alphabet=ALPHABET, **options)


def _pages(start, num_tokens, page_size):
    return range(start, start + -(-num_tokens // page_size))


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_chunks_and_decodes_mix_in_one_step(page_size):
    steps = Steps(simulated_executor(page_size=page_size))
    first, second = [5, 6, 7, 8, 9], [11, 12, 13, 14, 15, 16, 17]
    got = {0: [], 1: []}
    result = steps.run(admits=[admit(0, first)], grants=[grant(0, _pages(0, 32, page_size))], chunks=[chunk(0, 5)])
    assert result.counts.tolist() == [1]
    got[0] += result.ids.tolist()
    # Slot 0 decodes while slot 1 prefills in chunks of 3, 3 and 1; only the last of them makes a row.
    plans = [
        {"decodes": [0], "admits": [admit(1, second)], "grants": [grant(1, _pages(100, 32, page_size))]},
        {},
        {},
    ]
    for parts, length, is_last in zip(plans, (3, 3, 1), (False, False, True), strict=True):
        result = steps.run(**parts, chunks=[chunk(1, length)])
        assert result.counts.tolist() == [1, 1][: 1 + is_last]
        got[0].append(int(result.ids[0]))
        if is_last:
            got[1].append(int(result.ids[1]))
    result = steps.run(decodes=[1, 0])
    got[1].append(int(result.ids[0]))
    got[0].append(int(result.ids[1]))
    for _ in range(5):
        for slot, token in zip((1, 0), steps.run().ids.tolist(), strict=True):
            got[slot].append(token)
    assert got[0] == _expected(first, len(got[0]))
    assert got[1] == _expected(second, len(got[1]))


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_chunking_does_not_change_tokens(page_size):
    prompt = list(range(3, 40))
    outputs = set()
    for size in (1, 7, 37):
        steps = Steps(simulated_executor(page_size=page_size))
        parts = {"admits": [admit(2, prompt)], "grants": [grant(2, _pages(7, 64, page_size))]}
        left, result = len(prompt), None
        while left:
            length = min(size, left)
            result = steps.run(**parts, chunks=[chunk(2, length)])
            parts, left = {}, left - length
        tokens = [*result.ids.tolist(), *steps.run(decodes=[2]).ids.tolist()]
        outputs.add(tuple(tokens))
    assert outputs == {tuple(_expected(prompt, 2))}


def test_a_row_without_a_page_reports_zero_and_goes_on_when_granted():
    steps = Steps(simulated_executor(page_size=4))
    steps.run(admits=[admit(0, [5, 6, 7])], grants=[grant(0, [9])], chunks=[chunk(0, 3)])
    assert steps.run(decodes=[0]).counts.tolist() == [1]
    before = fingerprint(steps.executor)[2:]
    result = steps.run()
    assert (result.counts.tolist(), result.ids.tolist()) == ([0], [])
    assert fingerprint(steps.executor)[2:] == before
    result = steps.run(grants=[grant(0, [3])])
    assert result.ids.tolist() == _expected([5, 6, 7], 3)[2:]


def test_a_row_ends_at_max_total_len():
    steps = Steps(simulated_executor())
    steps.run(admits=[admit(0, [5, 6], max_total_len=4)], grants=[grant(0, range(8))], chunks=[chunk(0, 2)])
    assert [steps.run(decodes=[0]).counts.tolist(), steps.run().counts.tolist()] == [[1], [0]]
    assert steps.run().counts.tolist() == [0]
    assert steps.executor.table.total_len[0] == 4


def test_output_of_earlier_attempts_counts_as_output():
    prompt, output = [5, 6, 7], _expected([5, 6, 7], 4)
    steps = Steps(simulated_executor())
    result = steps.run(admits=[admit(0, prompt, output_ids=output)], grants=[grant(0, range(20))], chunks=[chunk(0, 7)])
    assert result.ids.tolist() == _expected(prompt, 5)[4:]


def test_sampled_rows_follow_their_seed_alone_and_in_a_batch():
    sampling = Sampling(temperature=0.7, seed=2**63 + 5)
    other = Sampling(temperature=0.7, seed=6)
    steps = Steps(simulated_executor())
    result = steps.run(
        admits=[admit(0, [5, 6], sampling=sampling), admit(1, [5, 6], sampling=other), admit(2, [5, 6])],
        grants=[grant(slot, range(20 * slot, 20 * slot + 20)) for slot in range(3)],
        chunks=[chunk(slot, 2) for slot in range(3)],
    )
    rows = [result.ids.tolist(), steps.run(decodes=[0, 1, 2]).ids.tolist(), steps.run().ids.tolist()]
    by_slot = [list(row) for row in zip(*rows, strict=True)]
    assert by_slot[0] == _expected([5, 6], 3, temperature=0.7, seed=2**63 + 5)
    assert by_slot[1] == _expected([5, 6], 3, temperature=0.7, seed=6)
    assert by_slot[2] == _expected([5, 6], 3)
    assert len({tuple(tokens) for tokens in by_slot}) == 3


def test_min_tokens_suppresses_ids_for_that_many_tokens_only():
    prompt = [5, 6, 7]
    free = _expected(prompt, 4)
    steps = Steps(simulated_executor())
    result = steps.run(
        admits=[admit(0, prompt, min_tokens=2, suppressed_ids=free)], grants=[grant(0, range(20))], chunks=[chunk(0, 3)]
    )
    got = [*result.ids.tolist(), *(int(steps.run(decodes=[0]).ids[0]) for _ in range(3))]
    assert got == _expected(prompt, 4, suppressed_ids=free, num_suppressed=2)
    assert not set(got[:2]) & set(free)


def test_logprobs_start_at_the_first_undelivered_position():
    sampling = Sampling(temperature=0.0, num_top_logprobs=2, prompt_logprobs=True)
    prompt = list(range(10, 16))
    steps = Steps(simulated_executor())
    parts = {
        "admits": [admit(3, prompt, sampling=sampling, logprobs_start=2)],
        "grants": [grant(3, range(20))],
    }
    first = steps.run(**parts, chunks=[chunk(3, 4)])
    second = steps.run(chunks=[chunk(3, 2)])
    third = steps.run(decodes=[3])
    assert [(e.first_position, len(e.logprobs.own)) for e in first.prompt_logprobs] == [(2, 3)]
    assert [(e.first_position, len(e.logprobs.own)) for e in second.prompt_logprobs] == [(5, 1)]
    assert first.prompt_logprobs[0].logprobs.top_ids[:, 0].tolist() == prompt[2:5]
    assert first.logprobs == ()
    for result, position in ((second, 6), (third, 7)):
        (entry,) = result.logprobs
        assert (entry.slot, entry.generation, entry.first_position) == (3, 1, position)
        assert entry.logprobs.top_ids.shape == (1, 2)
        assert entry.logprobs.top_ids[0, 0] == result.ids[0]
    assert third.prompt_logprobs == ()


def test_delivered_logprobs_are_not_repeated():
    sampling = Sampling(temperature=0.0, num_top_logprobs=0)
    steps = Steps(simulated_executor())
    result = steps.run(
        admits=[admit(0, [5, 6], sampling=sampling, logprobs_start=3)],
        grants=[grant(0, range(9))],
        chunks=[chunk(0, 2)],
    )
    assert result.logprobs == ()
    assert [entry.first_position for entry in steps.run(decodes=[0]).logprobs] == [3]


def test_slot_and_pages_are_reused_in_the_plan_that_frees_them():
    steps = Steps(simulated_executor())
    steps.run(admits=[admit(0, [5, 6])], grants=[grant(0, range(8))], chunks=[chunk(0, 2)])
    steps.run(decodes=[0])
    result = steps.run(
        decodes=[],
        releases=[Release(slot=0, generation=1)],
        admits=[admit(0, [7, 8, 9], generation=2)],
        grants=[grant(0, range(8))],
        chunks=[chunk(0, 3)],
    )
    assert result.ids.tolist() == _expected([7, 8, 9], 1)
    assert steps.executor.records.generations[:8].tolist() == [2] * 8


def test_a_stale_release_is_ignored():
    steps = Steps(simulated_executor())
    steps.run(admits=[admit(0, [5, 6], generation=7)], grants=[grant(0, range(8))], chunks=[chunk(0, 2)])
    stale = [Release(slot=0, generation=6), Release(slot=0, generation=8), Release(slot=5, generation=1)]
    result = steps.run(decodes=[0], releases=stale)
    assert result.ids.tolist() == _expected([5, 6], 2)[1:]


def test_a_plan_without_a_forward_only_changes_state():
    steps = Steps(simulated_executor())
    result = steps.run(has_forward=False, admits=[admit(0, [5, 6])], grants=[grant(0, range(8))])
    assert (len(result.counts), len(result.ids)) == (0, 0)
    assert steps.run(chunks=[chunk(0, 2)]).ids.tolist() == _expected([5, 6], 1)


def test_flush_empties_all_records_and_bumps_their_generations():
    steps = Steps(simulated_executor(page_size=4, num_pages=8))
    steps.run(admits=[admit(0, [5, 6, 7, 8, 9])], grants=[grant(0, [0, 1])], chunks=[chunk(0, 5)])
    steps.run(has_forward=False, decodes=[], releases=[Release(slot=0, generation=1)])
    before = steps.executor.records.generations.copy()
    steps.run(has_forward=False, barrier_ops=[FLUSH])
    assert (steps.executor.records.generations == before + 1).all()
    assert not steps.executor.records.filled.any()


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_new_scheduler_adopts_what_the_records_say(page_size):
    prompt = list(range(20, 53))
    steps = Steps(simulated_executor(page_size=page_size))
    result = steps.run(admits=[admit(0, prompt)], grants=[grant(0, _pages(3, 48, page_size))], chunks=[chunk(0, 33)])
    output = [*result.ids.tolist(), *(int(steps.run(decodes=[0]).ids[0]) for _ in range(5))]
    executor = steps.executor
    executor.begin_epoch(2)
    chain, ids = _adopt(executor, num_tokens=33 + 5)
    assert ids == prompt + output[:5]
    # All whole pages are shared, the partly filled last one comes by a copy.
    cached_len = len(ids)
    full, rest = divmod(cached_len, page_size)
    second = Steps(executor, epoch=2)
    result = second.run(
        admits=[
            admit(
                4,
                prompt,
                output_ids=output,
                cached_len=cached_len,
                cached_pages=chain[:full],
                cached_page_generations=executor.records.generations[chain[:full]].tolist(),
            )
        ],
        grants=[grant(4, _pages(150, 20, page_size))],
        page_copies=[PageCopy(source_page=chain[-1], target_page=150, num_tokens=rest)] if rest else [],
        chunks=[chunk(4, 1)],
    )
    tokens = [*result.ids.tolist(), *(int(second.run(decodes=[4]).ids[0]) for _ in range(4))]
    assert tokens == _expected(prompt, 11)[6:]


def test_a_chain_breaks_where_a_page_was_granted_anew():
    steps = Steps(simulated_executor())
    steps.run(admits=[admit(0, [5, 6, 7])], grants=[grant(0, [10, 11, 12])], chunks=[chunk(0, 3)])
    steps.run(has_forward=False, releases=[Release(slot=0, generation=1)])
    steps.run(admits=[admit(1, [8])], grants=[grant(1, [11])], chunks=[chunk(1, 1)])
    records = steps.executor.records
    assert records.previous_pages[[10, 11, 12]].tolist() == [-1, -1, 11]
    assert records.previous_generations[12] != records.generations[11]
    assert records.previous_generations[10] == 0


def test_records_grow_by_completed_steps_only():
    steps = Steps(simulated_executor(page_size=4))
    steps.run(admits=[admit(0, [5, 6, 7, 8, 9])], grants=[grant(0, [0, 1, 2])], chunks=[chunk(0, 3)])
    assert steps.executor.records.filled[:3].tolist() == [3, 0, 0]
    steps.run(chunks=[chunk(0, 2)])
    assert steps.executor.records.filled[:3].tolist() == [4, 1, 0]
    steps.run(decodes=[0])
    assert steps.executor.records.filled[:3].tolist() == [4, 2, 0]
    assert steps.executor.records.ids[1, 1] == _expected([5, 6, 7, 8, 9], 1)[0]


def test_damaged_kv_shows_in_the_tokens():
    expected = _expected([5, 6, 7, 8], 30)
    for token in range(4):
        steps = Steps(simulated_executor())
        result = steps.run(admits=[admit(0, [5, 6, 7, 8])], grants=[grant(0, range(40))], chunks=[chunk(0, 4)])
        steps.executor.runner.kv[token] += np.uint64(1)
        tokens = [*result.ids.tolist(), *(int(steps.run(decodes=[0]).ids[0]) for _ in range(29))]
        assert tokens != expected, f"nobody noticed that page {token} was damaged"


def test_virtual_time_adds_up_step_durations():
    steps = Steps(simulated_executor())
    result = steps.run(admits=[admit(0, [5] * 10)], grants=[grant(0, range(20))], chunks=[chunk(0, 10)])
    assert result.device_start_ns == 0
    assert result.device_end_ns == int((2000.0 + 9.0 * 10 + 0.0005 * 55) * 1000)
    following = steps.run(decodes=[0])
    assert following.device_start_ns == result.device_end_ns
    assert following.device_end_ns - following.device_start_ns == int((2000.0 + 10.0 + 0.027 * 11) * 1000)


# Refusals. The world: slot 0 decodes on pages 0-3 (3 full, 1 partly), slot 1 prefills on pages 4-5, 2 and 3 are free.


def _world():
    steps = Steps(simulated_executor(page_size=4, num_pages=32, num_slots=4, max_total_len=40, max_tokens_per_step=20))
    steps.run(
        admits=[admit(0, range(10, 22), max_total_len=40, generation=3), admit(1, range(30, 37), max_total_len=40)],
        grants=[grant(0, [0, 1, 2, 3]), grant(1, [4, 5])],
        chunks=[chunk(0, 12), chunk(1, 3)],
    )
    steps.run(decodes=[0])
    return steps


def _cached(**changes):
    fields = {"cached_len": 4, "cached_pages": [0], "cached_page_generations": [1], "max_total_len": 40} | changes
    return admit(2, [10, 11, 12, 13, 14], **fields)


SAMPLED = Sampling(temperature=0.0, prompt_logprobs=True)

REFUSED = {
    "the step id leaves a gap": (lambda s: {"step_id": 9}, "STEP_GAP"),
    "the step id repeats": (lambda s: {"step_id": s.next_step - 1}, "STEP_GAP"),
    "another epoch": (lambda s: {"epoch": 2}, "EPOCH_FENCED"),
    "another group generation": (lambda s: {"group_generation": 1}, "GROUP_GENERATION"),
    "an unknown barrier op": (
        lambda s: {"barrier_ops": (worker_pb2.BarrierOp(commit_weights=worker_pb2.CommitStaged(stage_id="x")),)},
        "UNSUPPORTED",
    ),
    "a flush while slots are held": (lambda s: {"barrier_ops": (FLUSH,)}, "SLOT_CONFLICT"),
    "a release outside the slots": (lambda s: {"releases": (Release(slot=4, generation=1),)}, "SLOT_CONFLICT"),
    "an admit outside the slots": (lambda s: {"admits": (admit(4, [5], max_total_len=9),)}, "SLOT_CONFLICT"),
    "an admit into a taken slot": (
        lambda s: {"admits": (admit(0, [5], generation=4, max_total_len=9),)},
        "SLOT_CONFLICT",
    ),
    "an admit with a generation that was": (
        lambda s: {
            "releases": (Release(slot=0, generation=3),),
            "admits": (admit(0, [5], generation=3, max_total_len=9),),
            "decode_set": as_ints([]),
        },
        "SLOT_CONFLICT",
    ),
    "two admits into one slot": (
        lambda s: {"admits": (admit(2, [5], max_total_len=9), admit(2, [5], generation=2, max_total_len=9))},
        "SLOT_CONFLICT",
    ),
    "no prompt": (lambda s: {"admits": (admit(2, [], max_total_len=9),)}, "EMPTY_PROMPT"),
    "an id outside the vocabulary": (
        lambda s: {"admits": (admit(2, [5, VOCAB_SIZE], max_total_len=9),)},
        "TOKEN_OUT_OF_VOCABULARY",
    ),
    "an output id outside the vocabulary": (
        lambda s: {"admits": (admit(2, [5], output_ids=[VOCAB_SIZE], max_total_len=9),)},
        "TOKEN_OUT_OF_VOCABULARY",
    ),
    "a bias outside the vocabulary": (
        lambda s: {"admits": (admit(2, [5], sampling=Sampling(seed=1, logit_bias=((100, 1.0),)), max_total_len=9),)},
        "TOKEN_OUT_OF_VOCABULARY",
    ),
    "no room for an output": (lambda s: {"admits": (admit(2, [5, 6], max_total_len=2),)}, "PROMPT_TOO_LONG"),
    "longer than the model": (lambda s: {"admits": (admit(2, [5], max_total_len=41),)}, "INVALID_ARGUMENT"),
    "a task that is not offered": (lambda s: {"admits": (admit(2, [5], task=Task.EMBED),)}, "UNSUPPORTED"),
    "a grammar": (lambda s: {"admits": (admit(2, [5], grammar_hash="x", max_total_len=9),)}, "UNSUPPORTED"),
    "an adapter": (lambda s: {"admits": (admit(2, [5], adapter="x", max_total_len=9),)}, "UNSUPPORTED"),
    "everything cached": (
        lambda s: {"admits": (_cached(cached_len=5),)},
        "INVALID_ARGUMENT",
    ),
    "prompt logprobs of cached tokens": (lambda s: {"admits": (_cached(sampling=SAMPLED),)}, "INVALID_ARGUMENT"),
    "fewer cached pages than tokens": (
        lambda s: {"admits": (_cached(cached_pages=[], cached_page_generations=[]),)},
        "INVALID_ARGUMENT",
    ),
    "a cached page of another generation": (
        lambda s: {"admits": (_cached(cached_page_generations=[2]),)},
        "PAGE_CONFLICT",
    ),
    "a cached page that is no page": (lambda s: {"admits": (_cached(cached_pages=[32]),)}, "PAGE_CONFLICT"),
    "a cached page of other tokens": (lambda s: {"admits": (_cached(cached_pages=[1]),)}, "PAGE_CONFLICT"),
    "a cached page that is partly filled": (lambda s: {"admits": (_cached(cached_pages=[3]),)}, "PAGE_CONFLICT"),
    "a cached page of another namespace": (
        lambda s: {"admits": (_cached(cache_namespace="salt"),)},
        "PAGE_CONFLICT",
    ),
    "a cached page granted by the same plan": (
        lambda s: {
            "releases": (Release(slot=0, generation=3),),
            "admits": (_cached(),),
            "grants": (grant(1, [0]),),
            "decode_set": as_ints([]),
        },
        "PAGE_CONFLICT",
    ),
    "a partial page without its copy": (
        lambda s: {"admits": (_cached(cached_len=2, cached_pages=[], cached_page_generations=[]),)},
        "INVALID_ARGUMENT",
    ),
    "a grant to a free slot": (lambda s: {"grants": (grant(2, [9]),)}, "SLOT_CONFLICT"),
    "two grants to a slot": (lambda s: {"grants": (grant(0, [9]), grant(0, [10]))}, "SLOT_CONFLICT"),
    "a page granted twice": (lambda s: {"grants": (grant(0, [9]), grant(1, [9]))}, "PAGE_CONFLICT"),
    "a page that another slot holds": (lambda s: {"grants": (grant(1, [3]),)}, "PAGE_CONFLICT"),
    "a page that the slot holds itself": (lambda s: {"grants": (grant(0, [3]),)}, "PAGE_CONFLICT"),
    "a page that is none": (lambda s: {"grants": (grant(0, [32]),)}, "PAGE_CONFLICT"),
    "more pages than a request can fill": (lambda s: {"grants": (grant(0, range(8, 16)),)}, "INVALID_ARGUMENT"),
    "a copy into a page that is not granted": (
        lambda s: {"page_copies": (PageCopy(source_page=0, target_page=9, num_tokens=1),)},
        "PAGE_CONFLICT",
    ),
    "a copy of tokens that are not there": (
        lambda s: {
            "grants": (grant(0, [9]),),
            "page_copies": (PageCopy(source_page=3, target_page=9, num_tokens=2),),
        },
        "PAGE_CONFLICT",
    ),
    "a copy out of a page that is granted": (
        lambda s: {
            "grants": (grant(0, [9, 10]),),
            "page_copies": (PageCopy(source_page=10, target_page=9, num_tokens=1),),
        },
        "PAGE_CONFLICT",
    ),
    "a chunk of a free slot": (lambda s: {"chunks": (chunk(2, 1),)}, "SLOT_CONFLICT"),
    "two chunks of a slot": (lambda s: {"chunks": (chunk(1, 1), chunk(1, 1))}, "SLOT_CONFLICT"),
    "a chunk of a slot that decodes": (lambda s: {"chunks": (chunk(0, 1),)}, "SLOT_CONFLICT"),
    "a chunk beyond the tokens": (lambda s: {"chunks": (chunk(1, 5),)}, "INVALID_ARGUMENT"),
    "a chunk beyond the pages": (
        lambda s: {
            "admits": (admit(2, range(5), max_total_len=9),),
            "grants": (grant(2, [9]),),
            "chunks": (chunk(2, 5),),
        },
        "PAGE_CONFLICT",
    ),
    "more tokens than a step takes": (
        lambda s: {
            "admits": (admit(2, [5] * 20, max_total_len=40),),
            "grants": (grant(2, range(8, 13)),),
            "chunks": (chunk(2, 20),),
        },
        "INVALID_ARGUMENT",
    ),
    "chunks without a forward": (lambda s: {"chunks": (chunk(1, 1),), "has_forward": False}, "INVALID_ARGUMENT"),
    "a decode of a free slot": (lambda s: {"decode_set": as_ints([2])}, "SLOT_CONFLICT"),
    "a decode of no slot": (lambda s: {"decode_set": as_ints([4])}, "SLOT_CONFLICT"),
    "a decode twice": (lambda s: {"decode_set": as_ints([0, 0])}, "SLOT_CONFLICT"),
    "a decode before the prefill is done": (lambda s: {"decode_set": as_ints([0, 1])}, "SLOT_CONFLICT"),
    "a shape with fewer tokens than this rank has": (lambda s: {"max_tokens_per_rank": 2}, "INVALID_ARGUMENT"),
    "a shape with more tokens than a step takes": (lambda s: {"max_tokens_per_rank": 1 << 31}, "INVALID_ARGUMENT"),
    "low latency without a number of tokens": (lambda s: {"dispatch": DispatchMode.LOW_LATENCY}, "INVALID_ARGUMENT"),
    "a decode of a released slot": (lambda s: {"releases": (Release(slot=0, generation=3),)}, "SLOT_CONFLICT"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_plan_leaves_no_trace(case):
    change, reason = REFUSED[case]
    steps = _world()
    before = fingerprint(steps.executor)
    good = steps.plan(
        releases=[Release(slot=3, generation=1)],
        admits=[admit(3, [40, 41], max_total_len=40)],
        grants=[grant(3, [20])],
        chunks=[chunk(3, 2)],
    )
    parts = change(steps)
    merged = {
        name: (getattr(good, name) + value if isinstance(value, tuple) and name != "barrier_ops" else value)
        for name, value in parts.items()
    }
    bad = dataclasses.replace(good, **merged)
    if not bad.has_forward:
        bad = dataclasses.replace(bad, chunks=parts["chunks"])
    with pytest.raises(MeshError) as caught:
        steps.executor.run(bad)
    assert caught.value.reason_name == reason, caught.value
    assert fingerprint(steps.executor) == before
    # The good plan runs after it: the refused parts were the only reason.
    assert steps.executor.run(good).counts.tolist() == [1, 1]


def test_refusals_name_what_is_wrong():
    steps = _world()
    with pytest.raises(MeshError) as caught:
        steps.run(grants=[grant(1, [3])])
    assert caught.value.reason == common_pb2.ERROR_REASON_PAGE_CONFLICT
    assert caught.value.metadata == {"page": "3"}


def test_a_new_epoch_frees_slots_and_keeps_pages():
    steps = _world()
    records = steps.executor.records
    before = (records.generations.copy(), records.filled.copy(), records.ids.copy())
    steps.executor.begin_epoch(2)
    assert steps.executor.table.num_occupied == 0
    assert not steps.executor.table.page_users.any()
    for array, kept in zip((records.generations, records.filled, records.ids), before, strict=True):
        assert (array == kept).all()
    # Generations of slots start anew, and the same pages may be granted at once.
    second = Steps(steps.executor, epoch=2)
    result = second.run(admits=[admit(0, [5, 6], max_total_len=40)], grants=[grant(0, [0])], chunks=[chunk(0, 2)])
    assert result.ids.tolist() == _expected([5, 6], 1)


def _adopt(executor, num_tokens):
    """The longest chain of pages that a new scheduler can rely on, by brute force over the snapshot."""
    ranges, _ = executor.snapshot()
    page_ids, at = {}, 0
    (records,) = ranges
    for page, filled in enumerate(records.filled.tolist()):
        page_ids[page] = records.ids[at : at + filled].tolist()
        at += filled
    chains = {}
    for page in page_ids:
        chain, current = [], page
        while current >= 0 and page_ids[current]:
            chain.insert(0, current)
            previous = int(records.previous_pages[current])
            if previous >= 0 and records.generations[previous] != records.previous_generations[current]:
                break
            current = previous
        else:
            if current < 0:
                chains[page] = chain
    longest = max(chains.values(), key=lambda chain: sum(len(page_ids[page]) for page in chain))
    ids = [token for page in longest for token in page_ids[page]]
    assert len(ids) == num_tokens
    return longest, ids
