"""A resume is a client's claim: nothing of it reaches a peer but what the router has checked and rebuilt."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest
from support.router_mesh import MODEL, RouterMesh, oracle_ids, router_mesh
from support.router_mesh import PROMPT_OF_TESTS as PROMPT

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.arrays import pack_floats, pack_ints, unpack_ints
from radixmesh.daemons.runtime.rpc.rpc_errors import mesh_error_from_rpc
from radixmesh.router.v1 import router_pb2

# A field that no message has: number 1000, of bytes.
PADDING = b"\xc2\x3e"


def resume_of(n: int = 1, max_tokens: int = 12) -> router_pb2.GenerateRequest:
    resolved = router_pb2.Resolved(
        request_id="r",
        model=MODEL.name,
        model_identity=MODEL,
        prompt_ids=pack_ints(PROMPT),
        seeds=range(n),
        stop=common_pb2.StopParams(max_tokens=max_tokens),
    )
    outputs = [router_pb2.OutputProgress() for _ in range(n)]
    resume = router_pb2.Resume(resolved=resolved, outputs=outputs, resumption=1)
    return router_pb2.GenerateRequest(resume=resume)


def padded(message: router_pb2.GenerateRequest, num_bytes: int) -> router_pb2.GenerateRequest:
    """The message with unknown fields in everything that a peer would get of it."""
    resolved = message.resume.resolved
    field = PADDING + varint(num_bytes) + bytes(num_bytes)
    for part in (resolved.sampling, resolved.stop, resolved.model_identity, resolved, message):
        part.MergeFromString(field)
    return message


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


async def read(mesh: RouterMesh, message: router_pb2.GenerateRequest) -> dict[int, list[int]]:
    """Ids by output."""
    ids: dict[int, list[int]] = {}
    async with mesh.stub() as stub:
        async for response in stub.Generate(message):
            for delta in response.deltas:
                ids.setdefault(delta.index, []).extend(unpack_ints(delta.ids, "ids").tolist())
    return ids


async def refused(mesh: RouterMesh, message: router_pb2.GenerateRequest) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await read(mesh, message)
    return mesh_error_from_rpc(raised.value).reason_name


async def test_nothing_that_a_client_pads_reaches_a_scheduler() -> None:
    async with router_mesh() as mesh:
        message = padded(resume_of(), 1000)
        identity = message.resume.resolved.model_identity
        identity.eos_ids = pack_ints(range(MODEL.vocab_size))
        identity.grammar_format = "x" * 60_000
        message.resume.resolved.trace_context = "y" * 60_000
        assert await read(mesh, message) == {0: oracle_ids(PROMPT, 0, 12)}, "EOS ids are the served model's"
        (submit,) = mesh.fakes[0].submits
        assert submit.ByteSize() < 300
        before = submit.ByteSize()
        submit.DiscardUnknownFields()
        assert submit.ByteSize() == before
        await mesh.settle()


async def test_megabytes_of_nothing_are_refused() -> None:
    async with router_mesh() as mesh:
        assert await refused(mesh, padded(resume_of(), 4 << 20)) == "INVALID_ARGUMENT"
        fresh = router_pb2.GenerateRequest(prompt_ids=pack_ints(PROMPT))
        fresh.sampling.MergeFromString(PADDING + varint(4 << 20) + bytes(4 << 20))
        assert await refused(mesh, fresh) == "INVALID_ARGUMENT"
        assert not mesh.fakes[0].submits
        assert mesh.router().journal.num_bytes == 0


def claims() -> dict[str, router_pb2.GenerateRequest]:
    """Sizes that would cost work before anybody says no."""
    eos = resume_of(n=128)
    eos.resume.resolved.model_identity.eos_ids = pack_ints([MODEL.vocab_size - 1] * 300_000)
    for output in eos.resume.outputs:
        output.output_ids = pack_ints([50] * 13)
    stops = resume_of()
    stops.resume.resolved.stop.stop.extend(["s"] * 500_000)
    biases = resume_of()
    biases.resume.resolved.sampling.logit_bias_ids = pack_ints([1] * 500_000)
    biases.resume.resolved.sampling.logit_bias_values = pack_floats([1.0] * 500_000)
    ids = resume_of()
    ids.resume.outputs[0].output_ids = bytes(8 << 20)
    seeds = resume_of()
    seeds.resume.resolved.seeds.extend(range(500_000))
    outputs = resume_of()
    outputs.resume.outputs.extend([router_pb2.OutputProgress()] * 200_000)
    prompt = resume_of()
    prompt.resume.resolved.prompt_ids = bytes(16 << 20)
    fingerprint = resume_of()
    fingerprint.resume.resolved.model_identity.model_fingerprint = "f" * (4 << 20)
    tenant = resume_of()
    tenant.resume.resolved.tenant = "t" * (4 << 20)
    return locals()


async def test_large_claims_are_refused_before_work_is_done() -> None:
    """Timed beside what parsing alone costs, and with much to spare: before, 300,000 EOS ids took 128 times as long."""
    async with router_mesh() as mesh:
        for name, message in claims().items():
            began = time.monotonic()
            reason = await refused(mesh, message)
            assert reason in ("INVALID_RESUME", "INVALID_ARGUMENT", "TOO_MANY_STOPS", "TOO_LARGE"), (name, reason)
            assert time.monotonic() - began < 5, name
        assert not mesh.fakes[0].submits
        await mesh.settle()


async def test_a_message_counts_for_the_journal_as_long_as_its_call_lives() -> None:
    async with router_mesh() as mesh, mesh.stub() as stub:
        mesh.fakes[0].is_paused = True
        message = padded(resume_of(), 1)
        message.chat.messages.add(role="user", content="x" * 100_000)  # A resume needs no input, and may carry one.
        call = stub.Generate(message)
        assert (await call.read()).HasField("resolved")
        assert mesh.router().journal.num_bytes > 100_000
        call.cancel()
        await mesh.settle()


@pytest.mark.parametrize("changed", ["prompt", "seed", "ids"])
async def test_a_resume_of_another_request_does_not_end_the_stream_that_lives(changed: str) -> None:
    async with router_mesh() as mesh, mesh.stub() as stub:
        mesh.fakes[0].is_paused = True
        fresh = router_pb2.GenerateRequest(request_id="r", prompt_ids=pack_ints(PROMPT))
        fresh.sampling.seed = 0
        fresh.stop.max_tokens = 12
        call = stub.Generate(fresh)
        assert (await call.read()).HasField("resolved")
        message = resume_of()
        if changed == "prompt":
            message.resume.resolved.prompt_ids = pack_ints([9, 9])
        elif changed == "seed":
            message.resume.resolved.seeds[0] = 77
        else:
            message.resume.outputs[0].output_ids = pack_ints([MODEL.vocab_size])
        expected = "TOKEN_OUT_OF_VOCABULARY" if changed == "ids" else "DUPLICATE_REQUEST"
        assert await refused(mesh, message) == expected
        mesh.fakes[0].is_paused = False
        ids: list[int] = []
        async with asyncio.timeout(60):
            while (response := await call.read()) is not grpc.aio.EOF:
                ids += [i for delta in response.deltas for i in unpack_ints(delta.ids, "ids").tolist()]
        assert ids == oracle_ids(PROMPT, 0, 12)
        await mesh.settle()
