"""Daemons that break the contracts, over the wire against a whole mesh: a typed error each, and the mesh serves on."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from support.invariants import known_job, observed_mesh, serves_on, settled
from support.jobs import MODEL, simulated_alphabet
from support.mesh import Mesh
from support.serve_client import Seen, serve_client
from support.wire import Method, Refusal, methods, raw_channel, refusal_from, refusal_of, send_raw
from support.worker_client import WorkerClient

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.arrays import pack_ints
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.daemons.runtime.rpc.hello import make_hello
from radixmesh.daemons.worker.simulated.token_source import simulated_continuation
from radixmesh.detokenizer.v1 import detokenizer_pb2, detokenizer_pb2_grpc
from radixmesh.router.v1 import router_pb2, router_pb2_grpc
from radixmesh.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from radixmesh.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from radixmesh.worker.v1 import worker_pb2, worker_pb2_grpc

pytestmark = pytest.mark.asyncio(loop_scope="module")

METHODS = list(methods())
STREAMS = {
    "scheduler": (scheduler_pb2.ServeRequest, "SchedulerService/Serve"),
    "detokenizer": (detokenizer_pb2.DetokenizeRequest, "DetokenizerService/Detokenize"),
    "worker": (worker_pb2.ExecuteRequest, "WorkerService/Execute"),
}
GARBAGE = b"\xff\xff\xff"
PROMPT = [10, 11, 12]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[Mesh]:
    async with observed_mesh(worker={"simulated_base_us": 1000}) as mesh:
        yield mesh


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def invariants_hold(mesh: Mesh) -> AsyncIterator[None]:
    """After every test the mesh gives a known answer, nothing is left behind and nobody has died."""
    pids = mesh.cluster.pids
    yield
    await serves_on(mesh, known_job())
    await settled(mesh)
    assert mesh.cluster.pids == pids, "a daemon died"


def stream_of(daemon: str) -> Method:
    return next(method for method in METHODS if method.name == STREAMS[daemon][1])


def hello_frame(daemon: str, **changes: object) -> bytes:
    """A first frame of the stream that this daemon serves."""
    hello = make_hello("a stranger", "scheduler" if daemon == "worker" else "router")
    for name, value in changes.items():
        if name == "model":
            hello.model.CopyFrom(value)  # type: ignore[arg-type]
        else:
            setattr(hello, name, value)
    return STREAMS[daemon][0](hello=hello).SerializeToString()


async def said_to(mesh: Mesh, method: Method, *messages: bytes) -> Refusal | None:
    async with raw_channel(mesh.cluster.address(method.daemon)) as channel:
        return await send_raw(channel, method, messages)


async def refused(call: Awaitable[object]) -> Refusal:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return refusal_from(raised.value)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
async def test_bytes_that_are_no_message_are_refused_by_every_method(mesh: Mesh, method: Method) -> None:
    refusal = await said_to(mesh, method, GARBAGE)
    assert refusal is not None
    assert (refusal.status, refusal.reason) == ("INVALID_ARGUMENT", "MALFORMED_MESSAGE"), refusal
    assert "check the versions of both ends" in refusal.message


@pytest.mark.parametrize("daemon", STREAMS)
@pytest.mark.parametrize(
    ("frames", "status", "reason"),
    [
        (["nothing"], "FAILED_PRECONDITION", "PROTOCOL_VIOLATION"),
        (["hello", "hello"], "FAILED_PRECONDITION", "PROTOCOL_VIOLATION"),
        (["hello", "garbage"], "INVALID_ARGUMENT", "MALFORMED_MESSAGE"),
        (["nameless"], "INVALID_ARGUMENT", "MISSING_FIELD"),
        (["versionless"], "INVALID_ARGUMENT", "MISSING_FIELD"),
        (["newer"], "FAILED_PRECONDITION", "VERSION_MISMATCH"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
async def test_a_stream_that_begins_wrongly_ends_with_its_reason(
    mesh: Mesh, daemon: str, frames: list[str], status: str, reason: str
) -> None:
    known = {
        "nothing": b"",
        "garbage": GARBAGE,
        "hello": hello_frame(daemon),
        "nameless": hello_frame(daemon, instance_id=""),
        "versionless": hello_frame(daemon, min_contract_version=0),
        "newer": hello_frame(daemon, min_contract_version=98, max_contract_version=99),
    }
    refusal = await said_to(mesh, stream_of(daemon), *(known[frame] for frame in frames))
    assert refusal is not None
    assert (refusal.status, refusal.reason) == (status, reason), refusal
    assert refusal.message
    if reason == "VERSION_MISMATCH":
        assert refusal.metadata["theirs"] == "98-99" and refusal.metadata["ours"]


async def identity_at(mesh: Mesh, daemon: str) -> common_pb2.ModelIdentity:
    """Model identity in a daemon's hello."""
    if daemon == "scheduler":
        return (await mesh.scheduler_state()).hello.hello.model
    async with open_channel(mesh.cluster.address(daemon)) as channel:
        if daemon == "worker":
            request = worker_pb2.GetCapabilitiesRequest()
            return (await worker_pb2_grpc.WorkerServiceStub(channel).GetCapabilities(request)).hello.model
        call = detokenizer_pb2_grpc.DetokenizerServiceStub(channel).Detokenize()
        await call.write(detokenizer_pb2.DetokenizeRequest.FromString(hello_frame("detokenizer")))
        hello = (await call.read()).hello
        call.cancel()
        return hello.model


MISMATCHES = {
    "model_fingerprint": ("MODEL_MISMATCH", "another"),
    "tokenizer_fingerprint": ("TOKENIZER_MISMATCH", "another"),
    "vocab_size": ("TOKENIZER_MISMATCH", 99),
    "sampler_version": ("SAMPLER_MISMATCH", 99),
}


@pytest.mark.parametrize("field", MISMATCHES)
@pytest.mark.parametrize("daemon", STREAMS)
async def test_a_peer_of_another_model_is_refused_by_every_stream(mesh: Mesh, daemon: str, field: str) -> None:
    identity = await identity_at(mesh, daemon)
    if daemon == "detokenizer" and field in ("model_fingerprint", "sampler_version"):
        assert not getattr(identity, field), "a detokenizer knows neither weights nor sampler, and compares neither"
        return
    assert getattr(identity, field), f"the {daemon} does not say its {field}"
    reason, value = MISMATCHES[field]
    setattr(identity, field, value)
    refusal = await said_to(mesh, stream_of(daemon), hello_frame(daemon, model=identity))
    assert refusal is not None
    assert (refusal.status, refusal.reason) == ("FAILED_PRECONDITION", reason), refusal
    assert refusal.metadata["theirs"] == str(value)
    assert "run the same release on the same model folder" in refusal.message


async def test_a_message_beyond_64_mib_is_refused_by_every_daemon(mesh: Mesh) -> None:
    # Field 15, length-delimited: unknown to most messages, and far too long for all.
    too_large = b"\x7a\x80\x80\x80\x21" + bytes(66 << 20)
    for name in ("TokenizerService/Encode", "WorkerService/PutBlob", "DetokenizerService/Detokenize",
                 "SchedulerService/Serve", "RouterAdminService/ListSchedulers"):  # fmt: skip
        method = next(m for m in METHODS if m.name == name)
        refusal = await said_to(mesh, method, too_large)
        assert refusal is not None
        assert (refusal.status, refusal.reason) == ("RESOURCE_EXHAUSTED", "TOO_LARGE"), (name, refusal)


# -- scheduler


async def test_submits_that_cannot_run_are_rejected_one_by_one(mesh: Mesh) -> None:
    rows: list[tuple[dict[str, object], str]] = [
        ({"prompt_ids": b"123"}, "MALFORMED_MESSAGE"),
        ({"resumed_output_ids": b"123"}, "MALFORMED_MESSAGE"),
        ({"stop": common_pb2.StopParams(stop_ids=b"123")}, "MALFORMED_MESSAGE"),
        ({"prompt_ids": b""}, "EMPTY_PROMPT"),
        ({"prompt_ids": pack_ints([768])}, "TOKEN_OUT_OF_VOCABULARY"),
        ({"resumed_output_ids": pack_ints([-1])}, "TOKEN_OUT_OF_VOCABULARY"),
        ({"prompt_ids": pack_ints([1] * 2048)}, "PROMPT_TOO_LONG"),
        ({"request_id": ""}, "MISSING_FIELD"),
        ({"task": common_pb2.TASK_UNSPECIFIED}, "MISSING_FIELD"),
        ({"task": 77}, "MISSING_FIELD"),
        ({"task": common_pb2.TASK_EMBED}, "UNSUPPORTED"),
        ({"grammar_hash": "ab"}, "UNKNOWN_BLOB"),
        ({"transfer_id": "t" * 65}, "INVALID_ARGUMENT"),
        ({"embeddings": [common_pb2.EmbeddingSpan(blob_hash="x")]}, "UNSUPPORTED"),
        ({"model": "gpt-17"}, "UNKNOWN_MODEL"),
        ({"attempt": -1}, "INVALID_ARGUMENT"),
        ({"index": 2**32 - 1}, "INVALID_ARGUMENT"),
        ({"sampling": common_pb2.SamplingParams(temperature=float("nan"))}, "INVALID_ARGUMENT"),
        ({"sampling": common_pb2.SamplingParams(temperature=1.0)}, "MISSING_FIELD"),
        ({"deadline_ms": 0}, "DEADLINE_EXCEEDED"),
    ]
    async with serve_client(mesh.cluster.address("scheduler"), "a stranger") as client:
        running = await client.submit(PROMPT, max_tokens=200)
        for number, (changes, reason) in enumerate(rows, start=100):
            fields: dict[str, object] = {
                "request_id": f"bad-{number}",
                "task": common_pb2.TASK_GENERATE,
                "prompt_ids": pack_ints(PROMPT),
                "sampling": common_pb2.SamplingParams(temperature=0),
            }
            client.seen[number] = Seen(int(changes.get("attempt", 0)), 0)  # type: ignore[call-overload]
            submit = scheduler_pb2.Submit(handle=number, **{**fields, **changes})  # type: ignore[arg-type]
            await client.write(scheduler_pb2.ServeRequest(submits=[submit]))
            (seen,) = await client.over(number)
            answer = seen.rejected or seen.finished
            assert answer is not None
            assert common_pb2.ErrorReason.Name(answer.error.reason) == f"ERROR_REASON_{reason}", (changes, answer)
            assert answer.error.message
        (seen,) = await client.over(running)
        assert seen.tokens == simulated_continuation(PROMPT, 200, alphabet=simulated_alphabet())


async def test_handles_and_ids_that_nobody_knows_change_nothing(mesh: Mesh) -> None:
    async with serve_client(mesh.cluster.address("scheduler"), "a stranger") as client:
        running = await client.submit(PROMPT, max_tokens=300, request_id="a stranger's")
        stops = [scheduler_pb2.FinishedByStop(handle=h, num_output=2**32 - 1) for h in (-(2**31), 0, 77, 2**31 - 1)]
        aborts = [
            scheduler_pb2.Abort(abort_id=5, request_id=""),
            scheduler_pb2.Abort(abort_id=6, request_id="\0never"),
            scheduler_pb2.Abort(abort_id=7, request_id="a stranger's", index=2**32 - 1),
            scheduler_pb2.Abort(abort_id=8, request_id="a stranger's", below_attempt=-(2**31)),
        ]
        reservations = [scheduler_pb2.Reservation(transfer_id="t", prompt_ids=b"1234", lease_ms=2**64 - 1)]
        await client.write(scheduler_pb2.ServeRequest(stops=stops, aborts=aborts, reservations=reservations))
        await client.until(lambda: set(client.aborts) >= {5, 6, 7, 8})
        unknown = scheduler_pb2.ABORT_OUTCOME_UNKNOWN
        assert [client.aborts[i] for i in (5, 6, 7, 8)] == [unknown] * 4
        (seen,) = await client.over(running)
        assert seen.tokens == simulated_continuation(PROMPT, 300, alphabet=simulated_alphabet())


async def test_a_handle_that_is_used_twice_is_rejected(mesh: Mesh) -> None:
    """Rows name outputs by handle alone: of two outputs with one handle, no row could be told from the other's."""
    async with serve_client(mesh.cluster.address("scheduler"), "a stranger") as client:
        first = await client.submit(PROMPT, max_tokens=200)
        submit = scheduler_pb2.Submit(
            handle=first,
            request_id="another",
            attempt=3,
            task=common_pb2.TASK_GENERATE,
            prompt_ids=pack_ints([20, 21]),
            sampling=common_pb2.SamplingParams(temperature=0),
            stop=common_pb2.StopParams(max_tokens=20),
        )
        await client.write(scheduler_pb2.ServeRequest(submits=[submit]))
        await client.until(lambda: client.seen[first].rejected is not None or client.error is not None)
        assert client.error is None
        rejected = client.seen[first].rejected
        assert rejected is not None and rejected.attempt == 3
        assert rejected.error.reason == common_pb2.ERROR_REASON_PROTOCOL_VIOLATION
        client.seen[first].rejected = None  # Of the second one: rows of the first go on.
        (seen,) = await client.over(first)
        assert seen.tokens == simulated_continuation(PROMPT, 200, alphabet=simulated_alphabet())


async def test_strangers_form_no_group_and_take_none_apart(mesh: Mesh) -> None:
    async with open_channel(mesh.cluster.address("worker")) as channel:
        worker = worker_pb2_grpc.WorkerServiceStub(channel)
        for epoch in (0, 1, 2**63):
            form = worker_pb2.FormGroupRequest(epoch=epoch, instance_id="x", generation=9)
            leave = worker_pb2.LeaveGroupRequest(epoch=epoch, instance_id="x")
            for call in (worker.FormGroup(form, timeout=5), worker.LeaveGroup(leave, timeout=5)):
                refusal = await refused(call)
                assert refusal.reason == "EPOCH_FENCED", refusal
    async with open_channel(mesh.cluster.address("scheduler")) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        call = stub.WatchCache(scheduler_pb2.WatchCacheRequest(after_revision=2**64 - 1))
        refusal_of_watch = await refusal_of(call)
        assert refusal_of_watch is not None and refusal_of_watch.message


# -- detokenizer


async def detokenize(mesh: Mesh, *frames: detokenizer_pb2.DetokenizeRequest) -> list[object]:
    """Responses after the hello, then how the stream was refused, if it was."""
    async with open_channel(mesh.cluster.address("detokenizer")) as channel:
        call = detokenizer_pb2_grpc.DetokenizerServiceStub(channel).Detokenize()
        await call.write(detokenizer_pb2.DetokenizeRequest.FromString(hello_frame("detokenizer")))
        assert (await call.read()).HasField("hello")
        for frame in frames:
            await call.write(frame)
        await call.done_writing()
        answers: list[object] = []
        try:
            async with asyncio.timeout(60):
                while (answer := await call.read()) is not grpc.aio.EOF:
                    answers.append(answer)
                code = await call.code()
                assert code is grpc.StatusCode.OK, code
        except grpc.aio.AioRpcError as error:
            answers.append(refusal_from(error))
        return answers


def rows(handles: list[int], ids: list[int], /, **changes: bytes) -> detokenizer_pb2.DetokenizeRequest:
    """One token per handle."""
    fields = {
        "handles": pack_ints(handles),
        "first_output_indexes": pack_ints([0] * len(handles)),
        "counts": pack_ints([1] * len(handles)),
        "ids": pack_ints(ids),
        **changes,
    }
    return detokenizer_pb2.DetokenizeRequest(tokens=detokenizer_pb2.TokenRows(**fields))


async def test_tokens_of_unknown_entries_are_lost_and_the_stream_lives(mesh: Mesh) -> None:
    opened = detokenizer_pb2.DetokenizeRequest(opens=[detokenizer_pb2.Open(handle=1)])
    answers = await detokenize(mesh, rows([7, -1], [10, 11]), opened, rows([1], [50]))
    failures = [failure for answer in answers for failure in answer.failures]  # type: ignore[attr-defined]
    assert [(f.handle, f.is_lost, f.error.reason) for f in failures] == [
        (7, True, common_pb2.ERROR_REASON_UNKNOWN_REQUEST),
        (-1, True, common_pb2.ERROR_REASON_UNKNOWN_REQUEST),
    ]
    assert "open it" in failures[0].error.message
    texts = [row.handle for answer in answers for row in answer.rows]  # type: ignore[attr-defined]
    assert texts == [1]


@pytest.mark.parametrize(
    "frame",
    [
        rows([1], [5], ids=b"123"),
        rows([1], [5], handles=b"12345"),
        rows([1], [5], counts=pack_ints([2])),
        rows([1], [5], counts=pack_ints([-1])),
        rows([1], [5], finals=b"\1\1\1"),
        detokenizer_pb2.DetokenizeRequest(close_handles=b"1"),
        detokenizer_pb2.DetokenizeRequest(opens=[detokenizer_pb2.Open(handle=1, output_ids=b"123")]),
        detokenizer_pb2.DetokenizeRequest(opens=[detokenizer_pb2.Open(handle=1, eos_ids=b"123")]),
    ],
    ids=["ids", "handles", "counts too high", "counts negative", "finals", "closes", "output ids", "eos ids"],
)
async def test_arrays_that_do_not_fit_end_the_detokenizers_stream(
    mesh: Mesh, frame: detokenizer_pb2.DetokenizeRequest
) -> None:
    refusal = (await detokenize(mesh, frame))[-1]
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.reason) == ("INVALID_ARGUMENT", "MALFORMED_MESSAGE"), refusal


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (detokenizer_pb2.Open(handle=1, output_ids=pack_ints([768])), "TOKEN_OUT_OF_VOCABULARY"),
        (detokenizer_pb2.Open(handle=1, emitted_text_bytes=9), "INVALID_RESUME"),
        (detokenizer_pb2.Open(handle=1, output_ids=pack_ints([50] * 2049)), "TOO_LARGE"),
        (detokenizer_pb2.Open(handle=1, stop=common_pb2.StopParams(stop=["a"] * 10_000)), "TOO_MANY_STOPS"),
        (detokenizer_pb2.Open(handle=1, stop=common_pb2.StopParams(stop=["a" * 1025])), "TOO_MANY_STOPS"),
        (detokenizer_pb2.Open(handle=1, stop=common_pb2.StopParams(stop=[""])), "INVALID_ARGUMENT"),
    ],
    ids=["id", "text", "length", "10,000 stops", "long stop", "empty stop"],
)
async def test_an_entry_that_cannot_be_opened_fails_alone(mesh: Mesh, entry: detokenizer_pb2.Open, reason: str) -> None:
    good = detokenizer_pb2.Open(handle=2, output_ids=pack_ints([50]))
    answers = await detokenize(mesh, detokenizer_pb2.DetokenizeRequest(opens=[entry, good]))
    (failure,) = [f for answer in answers for f in answer.failures]  # type: ignore[attr-defined]
    assert not failure.is_lost
    assert common_pb2.ErrorReason.Name(failure.error.reason) == f"ERROR_REASON_{reason}", failure
    assert [row.handle for answer in answers for row in answer.rows] == [2]  # type: ignore[attr-defined]


# -- tokenizer and worker


async def test_the_tokenizers_verbs_refuse(mesh: Mesh) -> None:
    async with open_channel(mesh.cluster.address("tokenizer")) as channel:
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        item = tokenizer_pb2.EncodeItem(text="a")
        for call, status, reason in (
            (stub.Encode(tokenizer_pb2.EncodeRequest(items=[item] * 4097)), "RESOURCE_EXHAUSTED", "TOO_LARGE"),
            (stub.Decode(tokenizer_pb2.DecodeRequest(ids=[b"123"])), "INVALID_ARGUMENT", "MALFORMED_MESSAGE"),
            (stub.Decode(tokenizer_pb2.DecodeRequest(ids=[pack_ints([-1])])), "INVALID_ARGUMENT",
             "TOKEN_OUT_OF_VOCABULARY"),
            (stub.CompileGrammar(tokenizer_pb2.CompileGrammarRequest()), "INVALID_ARGUMENT", "MISSING_FIELD"),
        ):  # fmt: skip
            refusal = await refused(call)
            assert (refusal.status, refusal.reason) == (status, reason), refusal


async def test_blobs_are_checked_and_bounded(mesh: Mesh) -> None:
    async with open_channel(mesh.cluster.address("worker")) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        nixl = worker_pb2.NixlRegion(length=2**40)
        too_large = bytes((32 << 20) + 1)
        for request, status, reason, says in (
            (worker_pb2.PutBlobRequest(hash="00", data=b"x"), "INVALID_ARGUMENT", "INVALID_ARGUMENT", "SHA-256 is"),
            (worker_pb2.PutBlobRequest(hash="00"), "INVALID_ARGUMENT", "MISSING_FIELD", "send data"),
            (worker_pb2.PutBlobRequest(hash="00", nixl=nixl), "UNIMPLEMENTED", "UNSUPPORTED", "NIXL"),
            (worker_pb2.PutBlobRequest(hash="00", data=too_large), "RESOURCE_EXHAUSTED", "BLOB_TOO_LARGE", "at most"),
        ):
            refusal = await refused(stub.PutBlob(request))
            assert (refusal.status, refusal.reason) == (status, reason), refusal
            assert says in refusal.message
        # The store keeps eight of these, each for its TTL: what was put is not lost to a stranger's later puts.
        for number in range(9):
            data = bytes([number]) * (32 << 20)
            call = stub.PutBlob(worker_pb2.PutBlobRequest(hash=hashlib.sha256(data).hexdigest(), data=data))
            if number < 8:
                await call
        refusal = await refused(call)
        assert (refusal.status, refusal.reason) == ("RESOURCE_EXHAUSTED", "OVERLOADED"), refusal
        assert "--blob-store-bytes" in refusal.message


async def test_a_stranger_that_holds_no_claim_moves_nothing(mesh: Mesh) -> None:
    address = mesh.cluster.address("worker")
    async with WorkerClient(address, "a stranger") as stranger:
        await stranger.greet()
        await stranger.send(worker_pb2.ExecuteRequest(plan=worker_pb2.StepPlan()))
        assert (await stranger.ended()).reason == common_pb2.ERROR_REASON_PROTOCOL_VIOLATION
    async with WorkerClient(address, "!") as stranger:  # The lowest of names: equal epochs go by name.
        await stranger.greet()
        refused_claim = await stranger.claim(1)
        assert refused_claim.refusal.error.reason == common_pb2.ERROR_REASON_EPOCH_FENCED
    async with WorkerClient(address, "a stranger") as stranger:
        # Accepted, it would leave no higher epoch for any scheduler to claim.
        await stranger.greet()
        error = (await stranger.claim(2**64 - 1)).refusal.error
        assert error.reason == common_pb2.ERROR_REASON_INVALID_ARGUMENT
        assert "claim the next one" in error.message
    async with WorkerClient(address, "a stranger") as stranger:
        refusal = await refused(_snapshot(stranger))
        assert (refusal.status, refusal.reason) == ("FAILED_PRECONDITION", "EPOCH_FENCED")


async def _snapshot(stranger: WorkerClient) -> None:
    async for _ in stranger.stub.SnapshotCache(worker_pb2.SnapshotCacheRequest(epoch=1, instance_id="x")):
        pass


async def test_a_usurper_that_sends_garbage_and_leaves_costs_no_request(mesh: Mesh) -> None:
    """It claims the worker in the middle of an answer; the scheduler takes the group back and replays."""
    job = known_job(600)
    answer = asyncio.create_task(job.run(mesh.client))
    await asyncio.sleep(0.3)
    async with WorkerClient(mesh.cluster.address("worker"), "a usurper") as usurper:
        hello = await usurper.greet()
        assert (await usurper.claim(hello.highest_epoch + 1)).HasField("claimed")
        plan = worker_pb2.StepPlan(header=worker_pb2.PlanHeader(epoch=hello.highest_epoch + 1, step_id=1))
        plan.ranks.add(release_slots=b"123")
        await usurper.send(worker_pb2.ExecuteRequest(plan=plan))
        response = await usurper.read()
        assert response is not None and response.HasField("refusal"), response
        assert response.refusal.error.reason == common_pb2.ERROR_REASON_MALFORMED_MESSAGE, response
    async with asyncio.timeout(30):
        assert await answer == job.answers


# -- router


async def test_a_scheduler_that_is_none_takes_nothing(mesh: Mesh) -> None:
    """A worker's address and one where nothing answers: the router tries, and routes to who serves."""

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    addresses = [mesh.cluster.address("worker"), f"127.0.0.1:{port}", "127.0.0.1:1"]
    async with open_channel(mesh.routers[0]) as channel:
        admin = router_pb2_grpc.RouterAdminServiceStub(channel)
        for address in addresses:
            await admin.AddScheduler(router_pb2.AddSchedulerRequest(address=address))
        for _ in range(4):
            await serves_on(mesh, known_job())
        listed = await admin.ListSchedulers(router_pb2.ListSchedulersRequest())
        assert [s.is_connected for s in listed.schedulers] == [True, False, False, False]
        for address in addresses:
            await admin.RemoveScheduler(router_pb2.RemoveSchedulerRequest(address=address))
    server.close()


@pytest.mark.timeout(60)
async def test_tokenizer_and_detokenizer_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    """Two ids have changed places: nothing would crash, every answer would be wrong."""
    folder = tmp_path / "other"
    shutil.copytree(MODEL, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, two = (token for token, id in vocabulary.items() if id in (40, 41))
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    other = {"model": folder}
    async with observed_mesh(tokenizer=other, detokenizer=other, router={"detokenizer_wait_s": 0.5}) as mesh:  # noqa: SIM117
        async with open_channel(mesh.routers[0]) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            stop = common_pb2.StopParams(max_tokens=8)
            chat = tokenizer_pb2.ChatInput(messages=[tokenizer_pb2.ChatMessage(role="user", content="hi")])
            for request in (
                router_pb2.GenerateRequest(text="The", stop=stop),
                router_pb2.GenerateRequest(chat=chat, stop=stop),
            ):
                refusal = await refusal_of(stub.Generate(request))
                assert refusal is not None
                assert (refusal.status, refusal.reason) == ("FAILED_PRECONDITION", "TOKENIZER_MISMATCH")
                assert "start both on one folder" in refusal.message
                assert refusal.metadata["ours"] != refusal.metadata["theirs"]
            item = tokenizer_pb2.EncodeItem(text="The")
            refusal = await refused(stub.Tokenize(router_pb2.TokenizeRequest(items=[item])))
            assert (refusal.status, refusal.reason) == ("FAILED_PRECONDITION", "TOKENIZER_MISMATCH")
            sampling = common_pb2.SamplingParams(temperature=0)
            by_ids = router_pb2.GenerateRequest(prompt_ids=pack_ints(PROMPT), stop=stop, sampling=sampling)
            responses = [response async for response in stub.Generate(by_ids)]
            (finished,) = [f for response in responses for f in response.finished]
            assert finished.error.reason == common_pb2.ERROR_REASON_TOKENIZER_MISMATCH
            assert not any(delta.text for response in responses for delta in response.deltas)
            by_ids.ids_only = True
            ids = b"".join([d.ids async for response in stub.Generate(by_ids) for d in response.deltas])
            assert ids == pack_ints(simulated_continuation(PROMPT, 8, alphabet=simulated_alphabet()))
