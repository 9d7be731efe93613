"""The worker contract over real gRPC, on the simulated worker."""

import asyncio
import hashlib
from contextlib import asynccontextmanager

import grpc
import numpy as np
import pytest
from support.plans import admit, as_ints, chunk, grant
from support.running_daemon import running
from support.worker_client import WorkerClient

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.channel import check_health, open_channel
from radixmesh.daemons.runtime.rpc.hello import make_hello
from radixmesh.daemons.runtime.rpc.rpc_errors import mesh_error_from_rpc
from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.runtime.steps.result_codec import records_from_proto, result_from_proto
from radixmesh.daemons.runtime.steps.step import Release, StepPlan
from radixmesh.daemons.runtime.steps.step_codec import encode_plan, encode_plans, plan_to_proto
from radixmesh.daemons.scheduler.group.worker_stream import WorkerStream
from radixmesh.daemons.scheduler.group_service import GrpcRank
from radixmesh.daemons.worker.__main__ import WorkerDaemon
from radixmesh.daemons.worker.config import Backend, WorkerSettings
from radixmesh.daemons.worker.simulated.clock import ClockKind
from radixmesh.daemons.worker.simulated.token_source import Alphabet, simulated_continuation
from radixmesh.daemons.worker.stream.session import ExecuteSession
from radixmesh.worker.v1 import worker_pb2

ALPHABET = Alphabet.of(500, eos_ids=(7,))
PROMPT = [10, 11, 12, 13]


def _settings(tmp_path, **changes):
    defaults = {
        "backend": Backend.SIMULATED,
        "num_pages": 256,
        "num_slots": 8,
        "max_total_len": 64,
        "max_plans_in_flight": 4,
        "simulated_vocab_size": 500,
        "simulated_eos_ids": ("7",),
        "simulated_time": ClockKind.VIRTUAL,
        "dump_folder": tmp_path / "dumps",
    }
    return WorkerSettings(**(defaults | changes))


@asynccontextmanager
async def _worker(tmp_path, **changes):
    async with running(WorkerDaemon, _settings(tmp_path, **changes)) as worker:
        yield worker


def _first_plan(epoch=1, slot=0, pages=range(40)):
    """Admits PROMPT and computes it whole."""
    return StepPlan(
        epoch=epoch,
        step_id=1,
        admits=(admit(slot, PROMPT),),
        grants=(grant(slot, pages),),
        chunks=(chunk(slot, len(PROMPT)),),
    )


def _decode(step_id, epoch=1, slots=None):
    return StepPlan(epoch=epoch, step_id=step_id, decode_set=None if slots is None else as_ints(slots))


def _expected(num_tokens):
    return simulated_continuation(PROMPT, num_tokens, alphabet=ALPHABET)


async def test_hello_claim_plans_results(tmp_path):
    async with _worker(tmp_path) as worker, WorkerClient(worker.address, "a") as client:
        hello = await client.hold(1)
        assert (hello.highest_epoch, hello.holder_instance_id, hello.is_holder_connected) == (0, "", False)
        assert hello.capabilities.state == worker_pb2.WORKER_STATE_READY
        assert hello.capabilities.num_pages == 256
        assert hello.hello.model.vocab_size == 500
        await client.plan(_first_plan())
        await client.plan(_decode(2, slots=[0]))
        await client.plan(_decode(3))
        results = [await client.result() for _ in range(3)]
        assert [result.step_id for result in results] == [1, 2, 3]
        assert [int(result.ids[0]) for result in results] == _expected(3)
        # The device ran without a gap: the second and third plan were there before their turn.
        assert results[0].device_end_ns == results[1].device_start_ns


async def test_header_and_section_travel_as_two_merged_messages(tmp_path):
    async with _worker(tmp_path) as worker, WorkerClient(worker.address, "a") as client:
        await client.hold(1)
        await client.send(encode_plan(_first_plan()))
        assert (await client.result()).ids.tolist() == _expected(1)


async def test_more_plans_than_may_be_in_flight_wait_their_turn(tmp_path):
    async with _worker(tmp_path, max_plans_in_flight=2) as worker, WorkerClient(worker.address, "a") as client:
        await client.hold(1)
        await client.plan(_first_plan())
        await client.plan(_decode(2, slots=[0]))
        for step in range(3, 21):
            await client.plan(_decode(step))
        results = [await client.result() for _ in range(20)]
        assert [int(result.ids[0]) for result in results] == _expected(20)


@pytest.mark.parametrize("takes_result_batches", [True, False])
async def test_plans_of_one_message_run_in_order_and_are_answered_together_where_that_is_taken(
    tmp_path, takes_result_batches
):
    async with _worker(tmp_path) as worker, WorkerClient(worker.address, "a") as client:
        hello = await client.greet()
        assert hello.capabilities.takes_plan_batches
        await client.claim(1, takes_result_batches=takes_result_batches)
        await client.plan(_first_plan())
        await client.result()
        await client.send(encode_plans([_decode(2, slots=[0]), _decode(3), _decode(4)]))
        messages = [await client.read() for _ in range(1 if takes_result_batches else 3)]
        results = [result for message in messages for result in (message.result, *message.more_results)]
        assert [result.step_id for result in results] == [2, 3, 4]
        assert [int(result_from_proto(result).ids[0]) for result in results] == _expected(4)[1:]
        await client.plan(_decode(5))
        assert (await client.result()).ids.tolist() == _expected(5)[4:]


async def test_a_plan_that_is_refused_in_a_batch_comes_behind_the_results_of_those_before_it(tmp_path):
    async with _worker(tmp_path) as worker, WorkerClient(worker.address, "a") as client:
        await client.greet()
        await client.claim(1, takes_result_batches=True)
        await client.plan(_first_plan())
        await client.result()
        await client.send(encode_plans([_decode(2, slots=[0]), _decode(9), _decode(4)]))
        assert (await client.result()).step_id == 2
        refusal = await client.refusal()
        assert (refusal.step_id, ErrorReason.Name(refusal.error.reason)) == (9, "ERROR_REASON_STEP_GAP")


async def test_a_scheduler_that_reads_no_results_gets_no_plans_in(tmp_path):
    logprobs = Sampling(temperature=0.0, num_top_logprobs=64, prompt_logprobs=True)
    limits = {"max_plans_in_flight": 2, "max_total_len": 4096, "num_pages": 40_000, "max_tokens_per_step": 40_000}
    async with _worker(tmp_path, **limits) as worker, WorkerClient(worker.address, "a") as client:
        await client.hold(1)
        # Results of some megabytes: a few of them fill what the transport buffers.
        for step in range(1, 41):
            plan = StepPlan(
                epoch=1,
                step_id=step,
                releases=(Release(slot=0, generation=step - 1),) if step > 1 else (),
                admits=(admit(0, [5] * 4000, sampling=logprobs, generation=step, max_total_len=4096),),
                grants=(grant(0, range(4000)),),
                chunks=(chunk(0, 4000),),
            )
            await client.plan(plan)
        await asyncio.sleep(0.5)
        received = worker.daemon.core.ledger.last_received_step
        assert received < 20
        assert [(await client.result()).step_id for _ in range(40)] == list(range(1, 41))


async def test_of_two_claimants_one_wins_and_the_other_is_told(tmp_path):
    async with _worker(tmp_path) as worker:
        async with WorkerClient(worker.address, "a") as first, WorkerClient(worker.address, "b") as second:
            await first.greet()
            await second.greet()
            assert (await first.claim(1)).claimed.epoch == 1
            # The same epoch: the higher instance id wins, and the holder is fenced.
            assert (await second.claim(1)).claimed.epoch == 1
            assert (await first.ended()).reason_name == "EPOCH_FENCED"
        async with WorkerClient(worker.address, "a") as third:
            hello = await third.greet()
            assert (hello.highest_epoch, hello.holder_instance_id) == (1, "b")
            refusal = (await third.claim(1)).refusal
            assert (refusal.epoch, refusal.step_id) == (1, 0)
            assert MeshError.from_proto(refusal.error).reason_name == "EPOCH_FENCED"
            assert refusal.error.metadata["holder"] == "b"
            assert await third.read() is None


async def test_a_fenced_holders_plans_are_never_run(tmp_path):
    async with (
        _worker(tmp_path) as worker,
        WorkerClient(worker.address, "a") as first,
        WorkerClient(worker.address, "b") as second,
    ):
        await first.hold(1)
        await second.hold(2)
        await second.plan(_first_plan(epoch=2))
        assert (await second.result()).ids.tolist() == _expected(1)
        with pytest.raises((MeshError, grpc.RpcError, asyncio.InvalidStateError)):
            await first.plan(_first_plan(epoch=1))
            await first.result()
        await second.plan(_decode(2, epoch=2, slots=[0]))
        assert (await second.result()).ids.tolist() == _expected(2)[1:]


async def test_a_plan_that_waited_while_another_claimed_does_not_end_the_new_epoch(tmp_path):
    async with _worker(tmp_path) as worker, WorkerClient(worker.address, "b") as client:
        await client.hold(2)
        late = worker_pb2.ExecuteRequest.FromString(encode_plan(_first_plan(epoch=1))).plan
        former = ExecuteSession(worker.daemon.core)
        with pytest.raises(MeshError) as caught:
            await worker.daemon.core.submit(former, late)
        assert caught.value.reason_name == "EPOCH_FENCED"
        with pytest.raises(MeshError) as caught:
            await worker.daemon.core.submit(None, late)
        assert caught.value.reason_name == "EPOCH_FENCED"
        await client.plan(_first_plan(epoch=2))
        assert (await client.result()).ids.tolist() == _expected(1)


async def test_a_living_holder_is_seen_by_who_comes_after(tmp_path):
    async with (
        _worker(tmp_path) as worker,
        WorkerClient(worker.address, "a") as first,
        WorkerClient(worker.address, "b") as second,
    ):
        await first.hold(5)
        await first.plan(_first_plan(epoch=5))
        await first.result()
        hello = await second.greet()
        assert (hello.highest_epoch, hello.holder_instance_id, hello.is_holder_connected) == (5, "a", True)
        assert (hello.last_received_step, hello.last_completed_step) == (1, 1)
        assert hello.holder_silent_ms < 10_000


@pytest.mark.parametrize(
    ("step_id", "reason"), [(1, "STEP_GAP"), (3, "STEP_GAP"), (4_000_000_000, "STEP_GAP"), (0, "MISSING_FIELD")]
)
async def test_a_step_out_of_order_is_refused_and_ends_the_epoch(tmp_path, step_id, reason):
    async with _worker(tmp_path) as worker:
        async with WorkerClient(worker.address, "a") as client:
            await client.hold(1)
            await client.plan(_first_plan())
            await client.plan(_decode(step_id, slots=[0]))
            await client.plan(_decode(2, slots=[0]))
            assert (await client.result()).step_id == 1
            refusal = await client.refusal()
            assert (refusal.epoch, refusal.step_id) == (1, step_id)
            assert MeshError.from_proto(refusal.error).reason_name == reason
        # The worker serves on: a new epoch starts over on the same KV.
        async with WorkerClient(worker.address, "a") as client:
            hello = await client.hold(2)
            assert (hello.last_received_step, hello.last_completed_step) in ((1, 1), (2, 1))
            await client.plan(_first_plan(epoch=2))
            assert (await client.result()).ids.tolist() == _expected(1)


async def test_a_malformed_plan_is_refused(tmp_path):
    async with _worker(tmp_path) as worker, WorkerClient(worker.address, "a") as client:
        await client.hold(1)
        request = worker_pb2.ExecuteRequest.FromString(encode_plan(_first_plan()))
        request.plan.ranks[0].chunks.lengths = b"abc"
        await client.send(request)
        refusal = await client.refusal()
        assert MeshError.from_proto(refusal.error).reason_name == "MALFORMED_MESSAGE"


def _hello_bytes(**changes):
    hello = make_hello("x", "scheduler")
    for name, value in changes.items():
        setattr(hello, name, value)
    return worker_pb2.ExecuteRequest(hello=hello).SerializeToString()


_CLAIM = worker_pb2.ExecuteRequest(claim=worker_pb2.Claim(epoch=1)).SerializeToString()
_MORE_PLANS = worker_pb2.ExecuteRequest(more_plans=[plan_to_proto(_first_plan())]).SerializeToString()


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([b"\xff\xff\xff\xff"], "MALFORMED_MESSAGE"),
        ([b""], "PROTOCOL_VIOLATION"),
        ([_CLAIM], "PROTOCOL_VIOLATION"),
        ([encode_plan(_first_plan())], "PROTOCOL_VIOLATION"),
        ([_hello_bytes(), _hello_bytes()], "PROTOCOL_VIOLATION"),
        ([_hello_bytes(), encode_plan(_first_plan())], "PROTOCOL_VIOLATION"),
        ([_hello_bytes() + _CLAIM], "PROTOCOL_VIOLATION"),
        ([_hello_bytes(), _CLAIM, _CLAIM], "PROTOCOL_VIOLATION"),
        ([_hello_bytes(), _CLAIM, b"\x08"], "MALFORMED_MESSAGE"),
        ([_hello_bytes(), worker_pb2.ExecuteRequest(complete=b"\xff").SerializeToString()], "MALFORMED_MESSAGE"),
        (
            [_hello_bytes(), worker_pb2.ExecuteRequest(complete=encode_plan(_first_plan())).SerializeToString()],
            "PROTOCOL_VIOLATION",
        ),
        # Five plans at once where four may be in flight; plans that follow none.
        ([_hello_bytes(), _CLAIM, encode_plans([_first_plan()] * 5)], "PROTOCOL_VIOLATION"),
        ([_hello_bytes(), _CLAIM, _MORE_PLANS], "PROTOCOL_VIOLATION"),
        ([_hello_bytes() + _MORE_PLANS], "PROTOCOL_VIOLATION"),
        ([_hello_bytes(min_contract_version=8, max_contract_version=9)], "VERSION_MISMATCH"),
        ([_hello_bytes(instance_id="")], "MISSING_FIELD"),
    ],
)
async def test_a_broken_conversation_ends_with_a_reason_and_harms_nobody(tmp_path, messages, reason):
    async with _worker(tmp_path) as worker:
        async with WorkerClient(worker.address, "x") as client:
            for message in messages:
                await client.send(message)
            assert (await client.ended()).reason_name == reason
        async with WorkerClient(worker.address, "y") as client:
            await client.hold(2)
            await client.plan(_first_plan(epoch=2))
            assert (await client.result()).ids.tolist() == _expected(1)


async def test_another_vocabulary_is_refused(tmp_path):
    async with _worker(tmp_path) as worker, WorkerClient(worker.address, "a") as client:
        hello = make_hello("a", "scheduler")
        hello.model.vocab_size = 501
        await client.send(worker_pb2.ExecuteRequest(hello=hello))
        error = await client.ended()
        assert (error.reason_name, error.metadata) == ("TOKENIZER_MISMATCH", {"ours": "500", "theirs": "501"})


async def test_records_survive_the_scheduler_and_only_the_holder_sees_them(tmp_path):
    async with _worker(tmp_path) as worker:
        async with WorkerClient(worker.address, "a") as client:
            await client.hold(1)
            await client.plan(_first_plan(pages=range(100, 140)))
            await client.plan(_decode(2, slots=[0]))
            await client.plan(_decode(3))
            # Cut before reading a result: the plans that arrived complete all the same.
            while worker.daemon.core.ledger.last_received_step < 3:
                await asyncio.sleep(0.005)
            client.cut()
        async with WorkerClient(worker.address, "b") as client:
            with pytest.raises(MeshError) as caught:
                await client.snapshot(1)
            assert caught.value.reason_name == "EPOCH_FENCED"
            hello = await client.hold(2)
            assert (hello.highest_epoch, hello.last_received_step) == (1, 3)
            (message,) = await client.snapshot(2)
            assert message.is_last
            assert list(message.namespaces) == [""]
            records = records_from_proto(message)
            assert records.filled[100:107].tolist() == [1] * 6 + [0]
            assert records.ids.tolist() == PROMPT + _expected(2)
            assert records.previous_pages[100:106].tolist() == [-1, 100, 101, 102, 103, 104]
            # Adopt all of it: one token is left to compute, and the output goes on where it was.
            output = _expected(3)
            await client.plan(
                StepPlan(
                    epoch=2,
                    step_id=1,
                    admits=(
                        admit(
                            3,
                            PROMPT,
                            output_ids=output,
                            cached_len=6,
                            cached_pages=list(range(100, 106)),
                            cached_page_generations=records.generations[100:106].tolist(),
                        ),
                    ),
                    grants=(grant(3, range(200, 220)),),
                    chunks=(chunk(3, 1),),
                )
            )
            assert (await client.result()).ids.tolist() == _expected(4)[3:]


async def test_a_stream_cut_mid_step_completes_before_the_next_claim(tmp_path):
    slow = {"simulated_time": ClockKind.REAL, "simulated_base_us": 200_000.0}
    async with _worker(tmp_path, **slow) as worker:
        async with WorkerClient(worker.address, "a") as client:
            await client.hold(1)
            await client.plan(_first_plan())
            await client.plan(_decode(2, slots=[0]))
            while worker.daemon.core.ledger.last_received_step < 2:
                await asyncio.sleep(0.005)
        async with WorkerClient(worker.address, "b") as client:
            hello = await client.greet()
            assert not hello.is_holder_connected
            assert (hello.last_received_step, hello.last_completed_step) == (2, 0)
            retained = [worker_pb2.ExecuteRequest.FromString(data) for data in hello.retained_plans]
            assert [request.plan.header.step_id for request in retained] == [1, 2]
            assert retained[0].plan.ranks[0].admits[0].request_id == "r0.1"
            assert (await client.claim(2)).claimed.epoch == 2
            assert worker.daemon.core.ledger.last_received_step == 0
            (message,) = await client.snapshot(2)
            assert records_from_proto(message).ids.tolist() == PROMPT + _expected(1)


async def test_the_loop_answers_while_a_step_runs(tmp_path):
    slow = {"simulated_time": ClockKind.REAL, "simulated_base_us": 3_000_000.0}
    async with _worker(tmp_path, **slow) as worker, WorkerClient(worker.address, "a") as client:
        await client.hold(1)
        await client.plan(_first_plan())
        await client.stub.GetCapabilities(worker_pb2.GetCapabilitiesRequest())
        assert await check_health(worker.address, 60) == "SERVING"
        assert worker.daemon.core.ledger.last_completed_step == 0, "the step still runs"
        await client.result()


async def test_a_new_scheduler_completes_the_broadcast_of_a_dead_one(tmp_path):
    async with _worker(tmp_path) as worker:
        async with WorkerClient(worker.address, "a") as client:
            await client.hold(1)
            await client.plan(_first_plan())
            await client.result()
        async with WorkerClient(worker.address, "b") as client:
            assert (await client.greet()).last_received_step == 1
            missing = encode_plan(_decode(2, slots=[0]))
            await client.send(worker_pb2.ExecuteRequest(complete=missing))
            assert (await client.claim(2)).claimed.epoch == 2
            (message,) = await client.snapshot(2)
            assert records_from_proto(message).ids.tolist() == PROMPT + _expected(1)


async def test_a_loading_worker_says_so_and_takes_no_claim(tmp_path):
    async with (
        running(WorkerDaemon, _settings(tmp_path), load=False) as worker,
        WorkerClient(worker.address, "a") as client,
    ):
        answer = await client.stub.GetCapabilities(worker_pb2.GetCapabilitiesRequest())
        assert answer.capabilities.state == worker_pb2.WORKER_STATE_LOADING
        assert await check_health(worker.address) == "NOT_SERVING"
        await client.greet()
        refusal = (await client.claim(1)).refusal
        assert MeshError.from_proto(refusal.error).reason_name == "NOT_SERVING"


async def test_a_step_that_dies_dumps_its_plan_and_ends_the_process(tmp_path):
    async with _worker(tmp_path) as worker, WorkerClient(worker.address, "a") as client:
        await client.hold(1)
        worker.daemon.core.executor.runner.forward = None  # A bug or a lost device looks like this from above.
        await client.plan(_first_plan())
        refusal = await client.refusal()
        error = MeshError.from_proto(refusal.error)
        assert error.reason_name == "STEP_FAILED"
        dump = tmp_path / "dumps" / error.metadata["dump"].rpartition("/")[2]
        dumped = worker_pb2.StepPlan.FromString(dump.read_bytes())
        assert dumped.ranks[0].admits[0].request_id == "r0.1"
        assert "TypeError" in dump.with_suffix(".txt").read_text()
        answer = await client.stub.GetCapabilities(worker_pb2.GetCapabilitiesRequest())
        assert answer.capabilities.state == worker_pb2.WORKER_STATE_FAILED
        with pytest.raises(TypeError):
            await asyncio.wait_for(asyncio.shield(worker.runtime.failed), 60)


async def test_draining_answers_what_is_in_flight_then_ends_the_stream(tmp_path):
    slow = {"simulated_time": ClockKind.REAL, "simulated_base_us": 100_000.0}
    async with _worker(tmp_path, **slow) as worker, WorkerClient(worker.address, "a") as client:
        await client.hold(1)
        await client.plan(_first_plan())
        while worker.daemon.core.ledger.last_received_step < 1:
            await asyncio.sleep(0.005)
        worker.runtime.progress.drain()
        draining = asyncio.ensure_future(worker.daemon.drain())
        assert (await client.result()).ids.tolist() == _expected(1)
        await asyncio.wait_for(draining, 60)
        assert (await client.ended()).reason_name == "NOT_SERVING"


async def test_blobs_are_checked_and_bounded(tmp_path):
    limits = {"max_blob_bytes": 100, "blob_store_bytes": 150}
    async with _worker(tmp_path, **limits) as worker, WorkerClient(worker.address, "a") as client:

        async def put(data, blob_hash=None):
            blob_hash = blob_hash or hashlib.sha256(data).hexdigest()
            return await client.stub.PutBlob(worker_pb2.PutBlobRequest(hash=blob_hash, data=data))

        first = await put(b"a" * 100)
        assert not first.was_known and first.ttl_ms == 30_000
        assert (await put(b"a" * 100)).was_known
        for data, blob_hash, reason in (
            (b"b" * 100, None, "OVERLOADED"),  # The first is kept for its time.
            (b"x" * 101, None, "BLOB_TOO_LARGE"),
            (b"x", "00", "INVALID_ARGUMENT"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await put(data, blob_hash)
            assert mesh_error_from_rpc(caught.value).reason_name == reason
        await client.hold(1)
        assert not (await put(b"b" * 100)).was_known, "a new epoch"
        assert not (await put(b"a" * 50)).was_known


async def test_verbs_that_are_not_offered_say_so(tmp_path):
    async with _worker(tmp_path) as worker, WorkerClient(worker.address, "a") as client:
        stub = client.stub
        calls = {
            "weights_path": stub.Stage(worker_pb2.StageRequest(weights_path="/x")),
            "kv_transfer": stub.PrepareTransfer(worker_pb2.PrepareTransferRequest()),
            "nixl": stub.PutBlob(worker_pb2.PutBlobRequest(nixl=worker_pb2.NixlRegion())),
        }
        for feature, call in calls.items():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            error = mesh_error_from_rpc(caught.value)
            assert (error.reason_name, error.metadata) == ("UNSUPPORTED", {"feature": feature})
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.WatchTransfer(worker_pb2.WatchTransferRequest()).read()
        assert mesh_error_from_rpc(caught.value).reason_name == "UNSUPPORTED"


async def _three_steps(client):
    await client.hold(1)
    await client.plan(_first_plan())
    await client.plan(_decode(2, slots=[0]))
    await client.plan(_decode(3))


async def test_fault_refuse(tmp_path):
    async with _worker(tmp_path, faults=("refuse@2",)) as worker:
        async with WorkerClient(worker.address, "a") as client:
            await _three_steps(client)
            await client.result()
            refusal = await client.refusal()
            assert (refusal.step_id, MeshError.from_proto(refusal.error).reason_name) == (2, "INTERNAL")
        async with WorkerClient(worker.address, "a") as client:
            # Once a process: the second epoch passes step 2.
            await client.hold(2)
            await client.plan(_first_plan(epoch=2))
            await client.plan(_decode(2, epoch=2, slots=[0]))
            assert [(await client.result()).step_id for _ in range(2)] == [1, 2]


async def test_fault_delay(tmp_path):
    async with _worker(tmp_path, faults=("delay@2:150",)) as worker, WorkerClient(worker.address, "a") as client:
        await _three_steps(client)
        await client.result()
        start = asyncio.get_running_loop().time()
        assert (await client.result()).step_id == 2
        assert asyncio.get_running_loop().time() - start > 0.1


@pytest.mark.parametrize(
    ("fault", "steps"), [("duplicate@2", [1, 2, 2, 3]), ("reorder@2", [1, 3, 2]), ("reorder@3:50", [1, 2, 3])]
)
async def test_fault_duplicate_and_reorder(tmp_path, fault, steps):
    async with _worker(tmp_path, faults=(fault,)) as worker, WorkerClient(worker.address, "a") as client:
        await _three_steps(client)
        assert [(await client.result()).step_id for _ in steps] == steps


async def test_fault_vanish(tmp_path):
    async with _worker(tmp_path, faults=("vanish@2",)) as worker, WorkerClient(worker.address, "a") as client:
        await _three_steps(client)
        await client.result()
        assert (await client.ended()).status == "UNAVAILABLE"


async def test_fault_hang(tmp_path):
    async with _worker(tmp_path, faults=("hang@2",)) as worker, WorkerClient(worker.address, "a") as client:
        await _three_steps(client)
        await client.result()
        reading = asyncio.ensure_future(client.read())
        done, _ = await asyncio.wait((reading,), timeout=0.3)
        assert not done
        # The stream hangs, the worker does not: a new claim gets through.
        async with WorkerClient(worker.address, "b") as second:
            await second.hold(2)
        reading.cancel()


async def test_profile_is_unsupported_without_a_profiler(tmp_path):
    async with _worker(tmp_path) as worker, WorkerClient(worker.address, "a") as client:
        request = worker_pb2.ProfileRequest(action=worker_pb2.PROFILE_ACTION_START)
        worker.daemon.core.profiler = _no_profiler()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.stub.Profile(request)
        assert mesh_error_from_rpc(caught.value).metadata == {"feature": "profile"}


def _no_profiler():
    from radixmesh.daemons.worker.profile import NoProfiler

    return NoProfiler()


async def test_a_holder_that_waits_for_a_long_step_is_not_silent(tmp_path):
    changes = {"simulated_time": ClockKind.REAL, "simulated_base_us": 1_200_000.0}
    async with _worker(tmp_path, **changes) as worker, WorkerClient(worker.address, "a") as holder:

        async def silent_ms():
            async with WorkerClient(worker.address, "b") as other:
                return (await other.greet()).holder_silent_ms

        await holder.hold(1)
        await holder.plan(_first_plan())
        await asyncio.sleep(0.7)
        assert await silent_ms() == 0, "the step still runs"
        await holder.result()
        assert await silent_ms() < 600, "its turn began with the result"
        await asyncio.sleep(0.7)
        assert await silent_ms() >= 600


async def test_more_namespaces_than_a_message_holds_are_listed_in_several(tmp_path):
    num = 70_000
    async with _worker(tmp_path, num_pages=num) as worker, WorkerClient(worker.address, "a") as client:
        await client.hold(1)
        names = [f"{number:01000}" for number in range(num)]
        worker.daemon.core.executor.records.grant(
            as_ints(range(num)),
            np.ones(num, int),
            previous_pages=np.full(num, -1, np.int32),
            namespaces=names,
            weights_version=1,
        )
        async with open_channel(worker.address) as channel:
            stream = WorkerStream(GrpcRank(channel), make_hello("a", "scheduler"))
            stream.epoch = 1
            snapshot = await stream.snapshot(num)
        assert set(names) <= set(snapshot.names)
        assert [snapshot.names[i] for i in snapshot.records.namespace_indexes[[0, 5, num - 1]]] == [
            names[i] for i in (0, 5, num - 1)
        ]
