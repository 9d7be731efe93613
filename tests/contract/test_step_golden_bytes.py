"""Bytes of the step contract as versions 1 and 2 write them, and 3 for one rank: peers of those read exactly these."""

import numpy as np
import pytest

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.arrays import as_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.runtime.steps.result_codec import (
    records_to_proto,
    refusal_to_proto,
    result_from_proto,
    result_to_proto,
)
from radixmesh.daemons.runtime.steps.step import (
    Admit,
    Chunk,
    Grant,
    PageCopy,
    PageRecords,
    Refusal,
    Release,
    SlotLogprobs,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from radixmesh.daemons.runtime.steps.step_codec import encode_plan, plan_from_proto
from radixmesh.worker.v1 import worker_pb2

PLAN = (
    "22e2010a0b080310092a02080330c41312d2010a04020000001204040000001a7e080110051a02723720012801320c0b0000"
    "000c0000000d0000003a040e00000040024a04070000005204030000005840623b0d0000803f15000000001d000000002204"
    "030000002a040000c0bf350000003f3828450000403f4d0000803e5080808080808080808001580060006802720401000000"
    "780382010473616c7422160a04010000001204020000001a0814000000150000002a120a04080000001204140000001a0401"
    "000000320c0a04010000001204020000003a0a0a080000000005000000"
)
# Header and rank section apart, as for several ranks.
PLAN_IN_PARTS = (
    "220d0a0b080310092a02080330c41322d50112d2010a04020000001204040000001a7e080110051a02723720012801320c0b"
    "0000000c0000000d0000003a040e00000040024a04070000005204030000005840623b0d0000803f15000000001d00000000"
    "2204030000002a040000c0bf350000003f3828450000403f4d0000803e508080808080808080800158006000680272040100"
    "0000780382010473616c7422160a04010000001204020000001a0814000000150000002a120a04080000001204140000001a"
    "0401000000320c0a04010000001204020000003a0a0a080000000005000000"
)
RESULT = (
    "080310091a0c010000000000000001000000220846000000470000002a24080510021803221c0a04000000bf10021a084600"
    "0000030000002208000000bf000080bf40e80748d00f5001"
)
REFUSAL = "0803100a1a1d0815120a657870656374656420391a0d0a086578706563746564120139"
RECORDS = (
    "088002120801000000020000001a0802000000000000002208ffffffff000100002a08000000000100000032080100000000"
    "0000003a080100000001000000420805000000060000004a004a0473616c745204010100005801"
)


def test_plan_bytes():
    assert encode_plan(_plan()).hex() == PLAN


@pytest.mark.parametrize("golden", [PLAN, PLAN_IN_PARTS], ids=["whole", "in parts"])
def test_plan_is_read_from_golden_bytes(golden: str):
    plan = plan_from_proto(worker_pb2.ExecuteRequest.FromString(bytes.fromhex(golden)).plan)
    assert (plan.epoch, plan.step_id, plan.expected_us, plan.has_forward) == (3, 9, 2500, True)
    assert plan.releases == (Release(slot=2, generation=4),)
    assert plan.admits[0].prompt_ids.tolist() == [11, 12, 13]
    assert plan.admits[0].sampling == _plan().admits[0].sampling
    assert [(grant.slot, grant.pages.tolist()) for grant in plan.grants] == [(1, [20, 21])]
    assert plan.page_copies == (PageCopy(source_page=8, target_page=20, num_tokens=1),)
    assert plan.chunks == (Chunk(slot=1, length=2),)
    assert plan.decode_set.tolist() == [0, 5]


def test_result_bytes():
    assert result_to_proto(_result()).SerializeToString().hex() == RESULT


def test_result_is_read_from_golden_bytes():
    result = result_from_proto(worker_pb2.StepResult.FromString(bytes.fromhex(RESULT)))
    assert (result.counts.tolist(), result.ids.tolist()) == ([1, 0, 1], [70, 71])
    assert result.logprobs[0].logprobs.top_ids.tolist() == [[70, 3]]


def test_refusal_bytes():
    error = MeshError(common_pb2.ERROR_REASON_STEP_GAP, "expected 9", {"expected": "9"})
    assert refusal_to_proto(Refusal(epoch=3, step_id=10, error=error)).SerializeToString().hex() == REFUSAL


def test_record_bytes():
    records = PageRecords(
        first_page=256,
        generations=as_ints([1, 2]),
        filled=as_ints([2, 0]),
        previous_pages=as_ints([-1, 256]),
        previous_generations=as_ints([0, 1]),
        namespace_indexes=as_ints([1, 0]),
        weights_versions=as_ints([1, 1]),
        ids=as_ints([5, 6]),
    )
    message = records_to_proto(records, is_last=True, namespaces=("", "salt"), pinned={"t1": as_ints([257])})
    transfer = message.pinned_transfers.pop()  # Came later than the bytes.
    assert transfer.SerializeToString().hex() == "0a027431120401010000"
    assert message.SerializeToString().hex() == RECORDS


def _plan():
    admit = Admit(
        slot=1,
        generation=5,
        request_id="r7",
        index=1,
        prompt_ids=as_ints([11, 12, 13]),
        output_ids=as_ints([14]),
        cached_len=2,
        cached_pages=as_ints([7]),
        cached_page_generations=as_ints([3]),
        max_total_len=64,
        sampling=Sampling(
            temperature=0.5, top_k=40, top_p=0.75, min_p=0.25, seed=2**63, num_top_logprobs=0, logit_bias=((3, -1.5),)
        ),
        min_tokens=2,
        suppressed_ids=as_ints([1]),
        logprobs_start=3,
        cache_namespace="salt",
    )
    return StepPlan(
        epoch=3,
        step_id=9,
        expected_us=2500,
        releases=(Release(slot=2, generation=4),),
        admits=(admit,),
        grants=(Grant(slot=1, pages=as_ints([20, 21])),),
        page_copies=(PageCopy(source_page=8, target_page=20, num_tokens=1),),
        chunks=(Chunk(slot=1, length=2),),
        decode_set=as_ints([0, 5]),
    )


def _result():
    logprobs = TokenLogprobs(
        own=np.array([-0.5], np.float32),
        num_top=2,
        top_ids=as_ints([70, 3]).reshape(1, 2),
        top=np.array([[-0.5, -1.0]], np.float32),
    )
    return StepResult(
        epoch=3,
        step_id=9,
        counts=as_ints([1, 0, 1]),
        ids=as_ints([70, 71]),
        logprobs=(SlotLogprobs(slot=5, generation=2, first_position=3, logprobs=logprobs),),
        device_start_ns=1000,
        device_end_ns=2000,
        weights_version=1,
    )
