"""Plans, results and records survive the way through bytes; broken bytes are typed errors."""

from dataclasses import fields, is_dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.arrays import as_ints, pack_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.runtime.steps.result_codec import (
    pinned_from_proto,
    records_from_proto,
    records_to_proto,
    refusal_from_proto,
    refusal_to_proto,
    result_from_proto,
    result_to_proto,
)
from radixmesh.daemons.runtime.steps.step import (
    Admit,
    Chunk,
    Draft,
    Grant,
    Grants,
    PageCopy,
    PageRecords,
    Refusal,
    Release,
    SlotError,
    SlotLogprobs,
    SlotVector,
    StepPlan,
    StepResult,
    Task,
    TokenLogprobs,
)
from radixmesh.daemons.runtime.steps.step_codec import (
    encode_plan,
    plan_from_proto,
    plan_to_proto,
)
from radixmesh.worker.v1 import worker_pb2

_INT = st.integers(0, 2**31 - 1)
_POSITIVE = st.integers(1, 2**31 - 1)
_ERRORS = st.just(MeshError(common_pb2.ERROR_REASON_UNKNOWN_BLOB, "put it again", {"hash": "ab"}))
_UINT64 = st.integers(0, 2**64 - 1)
_FLOAT = st.floats(-100, 100, width=32)


def _ints(least=0, min_size=0, max_size=8):
    return st.lists(st.integers(least, 2**31 - 1), min_size=min_size, max_size=max_size).map(as_ints)


def _floats(size):
    return st.lists(_FLOAT, min_size=size, max_size=size).map(lambda values: np.array(values, np.float32))


_SAMPLINGS = st.builds(
    Sampling,
    repetition_penalty=st.floats(0.5, 2, width=32),
    frequency_penalty=st.floats(-2, 2, width=32),
    presence_penalty=st.floats(-2, 2, width=32),
    logit_bias=st.lists(st.tuples(_INT, _FLOAT), max_size=3, unique_by=lambda pair: pair[0]).map(tuple),
    temperature=st.floats(0, 100, width=32),
    top_k=_INT,
    top_p=st.floats(0.5, 1, width=32),
    min_p=st.floats(0, 1, width=32),
    seed=_UINT64,
    num_top_logprobs=st.none() | st.integers(0, 64),
    prompt_logprobs=st.booleans(),
)


@st.composite
def _admits(draw):
    num_cached = draw(st.integers(0, 5))
    return Admit(
        slot=draw(_INT),
        generation=draw(_POSITIVE),
        request_id=draw(st.text(max_size=5)),
        index=draw(st.integers(0, 2**32 - 1)),
        task=draw(st.sampled_from(Task)),
        prompt_ids=draw(_ints()),
        output_ids=draw(_ints()),
        cached_len=draw(_INT),
        cached_pages=draw(_ints(min_size=num_cached, max_size=num_cached)),
        cached_page_generations=draw(_ints(min_size=num_cached, max_size=num_cached)),
        max_total_len=draw(_INT),
        sampling=draw(_SAMPLINGS),
        min_tokens=draw(_INT),
        suppressed_ids=draw(_ints()),
        logprobs_start=draw(_INT),
        cache_namespace=draw(st.text(max_size=3)),
        grammar_hash=draw(st.text(max_size=3)),
        adapter=draw(st.text(max_size=3)),
        trace_context=draw(st.text(max_size=3)),
    )


def _tuples(builder, max_size=4):
    return st.lists(builder, max_size=max_size).map(tuple)


_PLANS = st.builds(
    StepPlan,
    epoch=_UINT64,
    step_id=st.integers(1, 2**64 - 1),
    group_generation=_UINT64,
    barrier_ops=st.sampled_from(((), (worker_pb2.BarrierOp(flush_cache=worker_pb2.FlushCache()),))),
    expected_us=_UINT64,
    releases=_tuples(st.builds(Release, slot=_INT, generation=_POSITIVE)),
    admits=_tuples(_admits(), max_size=2),
    grants=_tuples(st.builds(Grant, slot=_INT, pages=_ints(min_size=1))),
    page_copies=_tuples(st.builds(PageCopy, source_page=_INT, target_page=_INT, num_tokens=_POSITIVE)),
    chunks=_tuples(st.builds(Chunk, slot=_INT, length=_POSITIVE)),
    decode_set=st.none() | _ints(),
    drafts=_tuples(st.builds(Draft, slot=_INT, generation=_POSITIVE, start=_POSITIVE, ids=_ints(min_size=1))),
)


@st.composite
def _token_logprobs(draw):
    size, num_top = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    cells = size * num_top
    return TokenLogprobs(
        own=draw(_floats(size)),
        num_top=num_top,
        top_ids=draw(_ints(min_size=cells, max_size=cells)).reshape(size, num_top),
        top=draw(_floats(cells)).reshape(size, num_top),
    )


@st.composite
def _results(draw):
    counts = as_ints(draw(st.lists(st.integers(0, 4), max_size=6)))
    total = int(counts.sum())
    slot_logprobs = st.builds(
        SlotLogprobs, slot=_INT, generation=_POSITIVE, first_position=_INT, logprobs=_token_logprobs()
    )
    return StepResult(
        epoch=draw(_UINT64),
        step_id=draw(st.integers(1, 2**64 - 1)),
        counts=counts,
        ids=draw(_ints(min_size=total, max_size=total)),
        logprobs=draw(_tuples(slot_logprobs, 2)),
        prompt_logprobs=draw(_tuples(slot_logprobs, 2)),
        vectors=draw(_tuples(st.builds(SlotVector, slot=_INT, generation=_POSITIVE, values=_floats(3)), 2)),
        device_start_ns=draw(_UINT64),
        device_end_ns=draw(_UINT64),
        weights_version=draw(_UINT64),
        slot_errors=draw(_tuples(st.builds(SlotError, slot=_INT, generation=_POSITIVE, error=_ERRORS), 2)),
        no_token_reasons=draw(st.just(as_ints([])) | _ints(min_size=len(counts), max_size=len(counts))),
        drafted=draw(st.just(as_ints([])) | _ints(min_size=len(counts), max_size=len(counts))),
        accepted=draw(st.just(as_ints([])) | _ints(min_size=len(counts), max_size=len(counts))),
        released_transfers=draw(_tuples(st.text(max_size=3), 2)),
        expert_rows=draw(st.sampled_from([(), (0,), (1 << 40,)])),
    )


@given(_PLANS)
@settings(deadline=None)
def test_a_plan_survives_both_ways_through_bytes(plan):
    whole = worker_pb2.ExecuteRequest.FromString(encode_plan(plan))
    one = worker_pb2.StepPlan.FromString(plan_to_proto(plan).SerializeToString())
    assert whole.plan == one
    assert _plain(plan_from_proto(one)) == _plain(plan)


@given(_PLANS, _PLANS)
@settings(deadline=None, max_examples=20)
def test_a_rank_takes_the_section_of_its_dp_rank(first, second):
    message = plan_to_proto(first)
    message.ranks.append(plan_to_proto(second).ranks[0])
    message.header.shape.mode = worker_pb2.FORWARD_MODE_MIXED
    for dp_rank, plan in enumerate((first, second)):
        theirs = plan_from_proto(message, dp_rank)
        assert (theirs.epoch, theirs.step_id) == (first.epoch, first.step_id)
        assert _plain(theirs.admits) == _plain(plan.admits) and _plain(theirs.decode_set) == _plain(plan.decode_set)
        # Also that of a rank without chunks.
        assert theirs.may_have_chunks
    with pytest.raises(MeshError, match=r"ranks\[2\] is missing"):
        plan_from_proto(message, 2)


def test_grants_are_the_same_as_columns():
    apart = (
        Grant(slot=4, pages=as_ints([7, 9])),
        Grant(slot=1, pages=as_ints([3])),
        Grant(slot=2, pages=as_ints([5, 6, 8])),
    )
    columns = Grants.of(apart)
    assert Grants.of(columns) is columns and len(columns) == 3
    assert [(g.slot, g.pages.tolist()) for g in columns] == [(4, [7, 9]), (1, [3]), (2, [5, 6, 8])]
    assert columns[-1].pages.tolist() == [5, 6, 8] and [g.slot for g in columns[:2]] == [4, 1]
    plans = [StepPlan(epoch=1, step_id=1, grants=grants) for grants in (apart, columns)]
    assert encode_plan(plans[0]) == encode_plan(plans[1])
    assert not len(Grants.of(())) and not plan_from_proto(plan_to_proto(StepPlan(epoch=1, step_id=1))).grants


def test_a_plan_that_only_changes_state_has_no_forward():
    plan = StepPlan(epoch=1, step_id=1, has_forward=False, releases=(Release(slot=1, generation=1),))
    message = plan_to_proto(plan)
    assert not message.header.HasField("shape")
    assert not plan_from_proto(message).has_forward


def test_an_empty_decode_set_is_not_an_unchanged_one():
    empty = StepPlan(epoch=1, step_id=1, decode_set=as_ints([]))
    unchanged = StepPlan(epoch=1, step_id=1)
    assert len(_through_bytes(empty).decode_set) == 0
    assert _through_bytes(unchanged).decode_set is None


@given(_results())
@settings(deadline=None)
def test_a_result_survives_both_ways_through_bytes(result):
    message = worker_pb2.StepResult.FromString(result_to_proto(result).SerializeToString())
    assert _plain(result_from_proto(message)) == _plain(result)


def test_a_refusal_survives_both_ways_through_bytes():
    error = MeshError(common_pb2.ERROR_REASON_SLOT_CONFLICT, "slot 3 is taken", {"slot": "3"})
    message = refusal_to_proto(Refusal(epoch=4, step_id=7, error=error))
    refusal = refusal_from_proto(worker_pb2.Refusal.FromString(message.SerializeToString()))
    assert (refusal.epoch, refusal.step_id) == (4, 7)
    assert (refusal.error.reason, refusal.error.metadata) == (error.reason, {"slot": "3"})


@given(st.lists(st.tuples(_INT, st.integers(0, 3), st.integers(-1, 9), _INT, _INT, _INT), max_size=6), st.data())
@settings(deadline=None)
def test_records_survive_both_ways_through_bytes(rows, data):
    columns = [as_ints(list(column)) for column in zip(*rows, strict=True)] if rows else [as_ints([])] * 6
    total = int(columns[1].sum())
    records = PageRecords(
        first_page=data.draw(st.integers(0, 2**31)),
        generations=columns[0],
        filled=columns[1],
        previous_pages=columns[2],
        previous_generations=columns[3],
        namespace_indexes=columns[4],
        weights_versions=columns[5],
        ids=data.draw(_ints(min_size=total, max_size=total)),
    )
    message = records_to_proto(records, is_last=True, namespaces=("", "a"), pinned={"t": as_ints([3, 9])})
    message = worker_pb2.SnapshotCacheResponse.FromString(message.SerializeToString())
    assert _plain(records_from_proto(message)) == _plain(records)
    assert (list(message.namespaces), message.is_last) == (["", "a"], True)
    assert pinned_from_proto(message) == ((3, 9), {"t": (3, 9)})


def _break(**changes):
    def change(message):
        for path, value in changes.items():
            *parents, name = path.split("__")
            target = message
            for parent in parents:
                target = target[int(parent)] if parent.isdigit() else getattr(target, parent)
            setattr(target, name, value)

    return change


_MALFORMED, _MISSING, _INVALID = "MALFORMED_MESSAGE", "MISSING_FIELD", "INVALID_ARGUMENT"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.ClearField("header"), _MISSING),
        (lambda m: m.ClearField("ranks"), _MISSING),
        (_break(header__step_id=0), _MISSING),
        (_break(header__shape__mode=0), _MISSING),
        (_break(header__shape__mode=77), _MISSING),
        (_break(header__shape__mode=worker_pb2.FORWARD_MODE_DECODE), _INVALID),
        (lambda m: m.header.ClearField("shape"), _MISSING),
        (lambda m: m.header.barrier_ops.add(), _MISSING),
        (_break(ranks__0__release_slots=b"abc"), _MALFORMED),
        (_break(ranks__0__release_slots=pack_ints([1, 2])), _MALFORMED),
        (_break(ranks__0__release_slots=pack_ints([-1])), _INVALID),
        (_break(ranks__0__release_generations=pack_ints([0])), _INVALID),
        (_break(ranks__0__grants__counts=pack_ints([2])), _MALFORMED),
        (_break(ranks__0__grants__counts=pack_ints([0])), _INVALID),
        (_break(ranks__0__grants__counts=pack_ints([2**31 - 1])), _MALFORMED),
        (_break(ranks__0__grants__slots=pack_ints([1, 2])), _MALFORMED),
        (_break(ranks__0__grants__pages=pack_ints([-4, 1, 2])), _INVALID),
        (_break(ranks__0__page_copies__num_tokens=pack_ints([0])), _INVALID),
        (_break(ranks__0__page_copies__target_pages=b""), _MALFORMED),
        (_break(ranks__0__chunks__lengths=pack_ints([0])), _INVALID),
        (_break(ranks__0__chunks__lengths=b"\0"), _MALFORMED),
        (_break(ranks__0__decode_set__slots=pack_ints([-2])), _INVALID),
        (_break(ranks__0__admits__0__task=0), _MISSING),
        (_break(ranks__0__admits__0__task=9), _MISSING),
        (_break(ranks__0__admits__0__slot=-1), _INVALID),
        (_break(ranks__0__admits__0__generation=0), _INVALID),
        (_break(ranks__0__admits__0__cached_len=2**31), _INVALID),
        (_break(ranks__0__admits__0__prompt_ids=pack_ints([-1])), _INVALID),
        (_break(ranks__0__admits__0__output_ids=b"123"), _MALFORMED),
        (_break(ranks__0__admits__0__cached_pages=pack_ints([1, 2])), _MALFORMED),
        (lambda m: m.ranks[0].admits[0].ClearField("sampling"), _MISSING),
        (lambda m: m.ranks[0].admits[0].sampling.ClearField("seed"), _MISSING),
        (_break(ranks__0__admits__0__sampling__top_p=1.5), _INVALID),
        (_break(ranks__0__admits__0__sampling__temperature=-1.0), _INVALID),
        (lambda m: m.ranks[0].admits[0].embeddings.add(), "UNSUPPORTED"),
    ],
)
def test_a_broken_plan_is_a_typed_error(change, reason):
    message = plan_to_proto(_full_plan())
    plan_from_proto(message)
    change(message)
    with pytest.raises(MeshError) as caught:
        plan_from_proto(message)
    assert caught.value.reason_name == reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_break(step_id=0), _MISSING),
        (_break(ids=pack_ints([1])), _MALFORMED),
        (_break(ids=pack_ints([1, -1])), _INVALID),
        (_break(counts=pack_ints([3, -1])), _INVALID),
        (_break(logprobs__0__logprobs__num_top=2), _MALFORMED),
        (_break(logprobs__0__logprobs__token_logprobs=b"12"), _MALFORMED),
    ],
)
def test_a_broken_result_is_a_typed_error(change, reason):
    logprobs = TokenLogprobs(
        own=np.zeros(1, np.float32), num_top=1, top_ids=as_ints([5]).reshape(1, 1), top=np.zeros((1, 1), np.float32)
    )
    entry = SlotLogprobs(slot=1, generation=1, first_position=3, logprobs=logprobs)
    message = result_to_proto(
        StepResult(epoch=1, step_id=1, counts=as_ints([1, 1]), ids=as_ints([7, 8]), logprobs=(entry,))
    )
    result_from_proto(message)
    change(message)
    with pytest.raises(MeshError) as caught:
        result_from_proto(message)
    assert caught.value.reason_name == reason


def test_records_of_unequal_length_are_a_typed_error():
    message = worker_pb2.SnapshotCacheResponse(generations=pack_ints([1]), filled=pack_ints([1, 2]))
    with pytest.raises(MeshError) as caught:
        records_from_proto(message)
    assert caught.value.reason_name == _MALFORMED


def test_a_refusal_without_a_reason_is_a_typed_error():
    with pytest.raises(MeshError) as caught:
        refusal_from_proto(worker_pb2.Refusal(epoch=1))
    assert caught.value.reason_name == _MISSING


def _full_plan():
    return StepPlan(
        epoch=1,
        step_id=2,
        releases=(Release(slot=0, generation=1),),
        admits=(
            Admit(
                slot=1,
                generation=1,
                request_id="r",
                prompt_ids=as_ints([1, 2, 3]),
                cached_len=1,
                cached_pages=as_ints([9]),
                cached_page_generations=as_ints([1]),
                max_total_len=9,
                sampling=Sampling(seed=3),
            ),
        ),
        grants=(Grant(slot=1, pages=as_ints([4, 5, 6])),),
        page_copies=(PageCopy(source_page=9, target_page=4, num_tokens=1),),
        chunks=(Chunk(slot=1, length=2),),
        decode_set=as_ints([2]),
    )


def _through_bytes(plan):
    return plan_from_proto(worker_pb2.ExecuteRequest.FromString(encode_plan(plan)).plan)


def _plain(value):
    """Nested lists and tuples of `value`, arrays with their shape and type, so that == compares contents."""
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tolist())
    if isinstance(value, MeshError):
        return (value.reason, value.message, dict(value.metadata))
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value) if field.compare}
    return value
