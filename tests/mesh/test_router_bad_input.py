"""Bad input over the wire: a typed error each, and the router serves on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import NamedTuple

import grpc
import pytest
from support.router_mesh import CONTEXT, MODEL, oracle_ids, router_mesh
from support.router_mesh import PROMPT_OF_TESTS as PROMPT

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.arrays import pack_floats, pack_ints, unpack_ints
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.daemons.runtime.rpc.rpc_errors import mesh_error_from_rpc
from radixmesh.router.v1 import router_pb2
from radixmesh.tokenizer.v1 import tokenizer_pb2

Sampling = common_pb2.SamplingParams
Stop = common_pb2.StopParams


class Bad(NamedTuple):
    name: str
    reason: str
    fields: dict[str, object]
    field: str = ""


IDS = pack_ints(PROMPT)
LAST = MODEL.vocab_size
BAD = [
    Bad("temperature below 0", "INVALID_ARGUMENT", {"sampling": Sampling(temperature=-0.1)}, "temperature"),
    Bad(
        "temperature is no number", "INVALID_ARGUMENT", {"sampling": Sampling(temperature=float("nan"))}, "temperature"
    ),
    Bad("temperature is infinite", "INVALID_ARGUMENT", {"sampling": Sampling(temperature=float("inf"))}, "temperature"),
    Bad("top_p above 1", "INVALID_ARGUMENT", {"sampling": Sampling(top_p=1.01)}, "top_p"),
    Bad("top_p of 0", "INVALID_ARGUMENT", {"sampling": Sampling(top_p=0)}, "top_p"),
    Bad("top_k beyond int32", "INVALID_ARGUMENT", {"sampling": Sampling(top_k=2**32 - 1)}, "top_k"),
    Bad("min_p above 1", "INVALID_ARGUMENT", {"sampling": Sampling(min_p=1.5)}, "min_p"),
    Bad("penalty of 0", "INVALID_ARGUMENT", {"sampling": Sampling(repetition_penalty=0)}, "repetition_penalty"),
    Bad("penalty above 2", "INVALID_ARGUMENT", {"sampling": Sampling(frequency_penalty=2.1)}, "frequency_penalty"),
    Bad("too many logprobs", "INVALID_ARGUMENT", {"sampling": Sampling(num_top_logprobs=65)}, "num_top_logprobs"),
    Bad("n of 0", "INVALID_ARGUMENT", {"n": 0}, "n"),
    Bad("n of 129", "INVALID_ARGUMENT", {"n": 129}, "n"),
    Bad("no input", "MISSING_FIELD", {"prompt_ids": None}, "input"),
    Bad("empty prompt", "EMPTY_PROMPT", {"prompt_ids": b""}),
    Bad("three bytes of ids", "MALFORMED_MESSAGE", {"prompt_ids": b"\1\0\0"}, "prompt_ids"),
    Bad("over-long prompt", "PROMPT_TOO_LONG", {"prompt_ids": pack_ints([1] * CONTEXT)}),
    Bad("id beyond the vocabulary", "TOKEN_OUT_OF_VOCABULARY", {"prompt_ids": pack_ints([1, LAST])}),
    Bad("negative id", "TOKEN_OUT_OF_VOCABULARY", {"prompt_ids": pack_ints([1, 2, -1])}),
    Bad(
        "biased id beyond the vocabulary",
        "TOKEN_OUT_OF_VOCABULARY",
        {"sampling": Sampling(logit_bias_ids=pack_ints([LAST]), logit_bias_values=pack_floats([1.0]))},
    ),
    Bad("more biases than values", "INVALID_ARGUMENT", {"sampling": Sampling(logit_bias_ids=pack_ints([1]))}),
    Bad("stop id beyond the vocabulary", "TOKEN_OUT_OF_VOCABULARY", {"stop": Stop(stop_ids=pack_ints([LAST]))}),
    Bad("max_tokens of 0", "INVALID_ARGUMENT", {"stop": Stop(max_tokens=0)}, "max_tokens"),
    Bad("min_tokens above max_tokens", "INVALID_ARGUMENT", {"stop": Stop(max_tokens=2, min_tokens=3)}, "min_tokens"),
    Bad("10,000 stop strings", "TOO_MANY_STOPS", {"stop": Stop(stop=[f"s{i}" for i in range(10_000)])}),
    Bad("a stop string of 2 KB", "TOO_MANY_STOPS", {"stop": Stop(stop=["x" * 2048])}),
    Bad("an empty stop string", "INVALID_ARGUMENT", {"stop": Stop(stop=[""])}, "stop"),
    Bad("stop strings without text", "INVALID_ARGUMENT", {"ids_only": True, "stop": Stop(stop=["x"])}, "stop.stop"),
    Bad("unknown model", "UNKNOWN_MODEL", {"model": "gpt-17"}),
    Bad("another task", "UNSUPPORTED", {"task": 99}),
    Bad("several embeddings of one prompt", "INVALID_ARGUMENT", {"task": common_pb2.TASK_EMBED, "n": 2}),
    Bad("a grammar", "UNSUPPORTED", {"grammar": common_pb2.Grammar(regex="a+")}),
    Bad("a request id of 1 KB", "INVALID_ARGUMENT", {"request_id": "x" * 1024}, "request_id"),
    Bad("a request id for a terminal", "INVALID_ARGUMENT", {"request_id": "\x1b[2J"}, "request_id"),
    Bad("a tenant of two lines", "INVALID_ARGUMENT", {"tenant": "a\nb"}, "tenant"),
    Bad("a model for a terminal", "INVALID_ARGUMENT", {"model": "\x1b[2J"}, "model"),
    Bad("a chat without messages", "INVALID_CHAT", {"prompt_ids": None, "chat": tokenizer_pb2.ChatInput()}),
    Bad("a resume of nothing", "INVALID_RESUME", {"resume": router_pb2.Resume(resumption=1)}),
]


def request_of(bad: Bad) -> router_pb2.GenerateRequest:
    fields: dict[str, object] = {"prompt_ids": IDS, **bad.fields}
    return router_pb2.GenerateRequest(**fields)  # type: ignore[arg-type]


async def refusal(call: grpc.aio.UnaryStreamCall) -> tuple[str, str]:  # type: ignore[type-arg]
    """Reason and field of the error that ends the call."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for _ in call:
            pass
    error = mesh_error_from_rpc(raised.value)
    assert error.message
    return error.reason_name, error.metadata.get("field", "")


async def test_every_bad_request_gets_its_own_reason_and_the_router_serves_on() -> None:
    async with router_mesh() as mesh, mesh.stub() as stub, mesh.client() as client:
        for bad in BAD:
            reason, field = await refusal(stub.Generate(request_of(bad)))
            assert reason == bad.reason, bad.name
            assert not bad.field or field == bad.field, bad.name
        assert not mesh.fakes[0].submits
        assert (await client.complete(PROMPT, seed=1, max_tokens=8)).outputs[0].ids == oracle_ids(PROMPT, 1, 8)
        await mesh.settle()


async def test_bytes_that_are_no_message_are_refused() -> None:
    async with router_mesh() as mesh, open_channel(mesh.routers[0].address) as channel, mesh.client() as client:
        for method in ("Generate", "Abort", "Tokenize", "GetModelInfo"):
            path = f"/radixmesh.router.v1.RouterService/{method}"
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                if method == "Generate":
                    async for _ in channel.unary_stream(path)(b"\xff\xff\xff"):
                        pass
                else:
                    await channel.unary_unary(path)(b"\xff\xff\xff")
            assert mesh_error_from_rpc(raised.value).reason_name == "MALFORMED_MESSAGE"
        await client.complete(PROMPT, max_tokens=4)


async def broken_resumes() -> AsyncIterator[tuple[str, router_pb2.Resume]]:
    resolved = router_pb2.Resolved(
        request_id="r",
        model=MODEL.name,
        model_identity=MODEL,
        prompt_ids=IDS,
        seeds=[1],
        stop=common_pb2.StopParams(max_tokens=4),
    )
    good = router_pb2.Resume(resolved=resolved, outputs=[router_pb2.OutputProgress()], resumption=1)

    def changed() -> router_pb2.Resume:
        copy = router_pb2.Resume()
        copy.CopyFrom(good)
        return copy

    resume = changed()
    resume.resumption = 0
    yield "INVALID_RESUME", resume
    resume = changed()
    resume.resumption = 40_000
    yield "INVALID_RESUME", resume
    resume = changed()
    resume.outputs.add()
    yield "INVALID_RESUME", resume
    resume = changed()
    resume.outputs[0].text_bytes = 5
    yield "INVALID_RESUME", resume
    resume = changed()
    resume.outputs[0].output_ids = pack_ints([1] * 5)
    yield "INVALID_RESUME", resume
    resume = changed()
    resume.resolved.stop.stop.append("never")
    resume.outputs[0].output_ids = pack_ints([50, *unpack_ints(MODEL.eos_ids, "eos_ids")[:1], 51])
    yield "INVALID_RESUME", resume
    resume = changed()
    resume.outputs[0].output_ids = pack_ints([LAST])
    yield "TOKEN_OUT_OF_VOCABULARY", resume
    resume = changed()
    resume.resolved.model_identity.model_fingerprint = "other"
    yield "MODEL_MISMATCH", resume
    resume = changed()
    resume.resolved.model_identity.sampler_version = 9
    yield "MODEL_MISMATCH", resume
    resume = changed()
    resume.resolved.model = "gone"
    yield "UNKNOWN_MODEL", resume
    resume = changed()
    resume.resolved.stop.max_tokens = CONTEXT
    yield "INVALID_RESUME", resume
    resume = changed()
    resume.resolved.prompt_ids = b""
    yield "EMPTY_PROMPT", resume
    resume = changed()
    resume.resolved.sampling.temperature = -1
    yield "INVALID_ARGUMENT", resume


async def test_a_broken_resume_is_refused() -> None:
    async with router_mesh() as mesh, mesh.stub() as stub:
        async for expected, resume in broken_resumes():
            reason, _ = await refusal(stub.Generate(router_pb2.GenerateRequest(resume=resume)))
            assert reason == expected, resume
        await mesh.settle()


async def test_more_text_than_the_ids_make_is_an_invalid_resume() -> None:
    """Only the detokenizer can know; its refusal is the output's."""
    async with router_mesh() as mesh, mesh.stub() as stub:
        resolved = router_pb2.Resolved(
            request_id="r",
            model=MODEL.name,
            model_identity=MODEL,
            prompt_ids=IDS,
            seeds=[1],
            stop=common_pb2.StopParams(max_tokens=9),
        )
        resume = router_pb2.Resume(resolved=resolved, resumption=1)
        resume.outputs.add(output_ids=pack_ints([50]), text_bytes=5000)
        finished = [
            f async for response in stub.Generate(router_pb2.GenerateRequest(resume=resume)) for f in response.finished
        ]
        assert [f.error.reason for f in finished] == [common_pb2.ERROR_REASON_INVALID_RESUME]
        await mesh.settle()


async def test_clients_that_vanish_leave_nothing_behind() -> None:
    async with router_mesh() as mesh, mesh.client() as client:
        mesh.fakes[0].step_s = 0.005
        channels = [open_channel(mesh.routers[0].address) for _ in range(8)]
        request = router_pb2.GenerateRequest(prompt_ids=IDS, n=2, stop=Stop(max_tokens=400, ignore_eos=True))
        method = "/radixmesh.router.v1.RouterService/Generate"
        calls = [channel.unary_stream(method)(request.SerializeToString()) for channel in channels]
        await asyncio.gather(*(call.read() for call in calls[:4]))
        for channel in channels:
            await channel.close()
        await mesh.settle()
        await client.complete(PROMPT, max_tokens=4)


@pytest.mark.parametrize("peer", ["tokenizer", "detokenizer", "scheduler"])
async def test_a_peer_with_another_vocabulary_is_refused(peer: str) -> None:
    """The scheduler's vocabulary is the model's: a tokenizer or detokenizer of another one must not touch it."""
    async with router_mesh(detokenizer_wait_s=0.3) as mesh, mesh.stub() as stub:
        mesh.fakes[0].model = common_pb2.ModelIdentity()
        mesh.fakes[0].model.CopyFrom(MODEL)
        mesh.fakes[0].model.tokenizer_fingerprint = "another"
        await mesh.schedulers[0].restart()
        link = mesh.router().schedulers.links[0]
        async with asyncio.timeout(60):
            while link.identity is None or link.identity.tokenizer_fingerprint != "another":
                await asyncio.sleep(0.01)
        if peer == "tokenizer":
            reason, _ = await refusal(stub.Generate(router_pb2.GenerateRequest(text="x")))
            assert reason == "TOKENIZER_MISMATCH"
        elif peer == "detokenizer":
            call = stub.Generate(router_pb2.GenerateRequest(prompt_ids=IDS, stop=Stop(max_tokens=3)))
            finished = [f async for response in call for f in response.finished]
            assert [f.error.reason for f in finished] == [common_pb2.ERROR_REASON_TOKENIZER_MISMATCH]
        else:
            request = router_pb2.GenerateRequest(prompt_ids=IDS, ids_only=True, stop=Stop(max_tokens=3))
            assert [f.num_output async for response in stub.Generate(request) for f in response.finished]
