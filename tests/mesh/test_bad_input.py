"""Requests that cannot be right, over the wire against a whole mesh: a typed error each, and the mesh serves on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc
import pytest
import pytest_asyncio
from support.invariants import known_job, observed_mesh, serves_on, settled
from support.jobs import simulated_alphabet
from support.mesh import Mesh
from support.wire import Refusal, methods, raw_channel, refusal_from, refusal_of, send_raw

from radixmesh.common.v1 import common_pb2
from radixmesh.common.v1.common_pb2 import SamplingParams, StopParams
from radixmesh.daemons.runtime.arrays import pack_floats, pack_ints, unpack_ints
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.daemons.worker.simulated.token_source import simulated_continuation
from radixmesh.router.v1 import router_pb2, router_pb2_grpc
from radixmesh.tokenizer.v1 import tokenizer_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

VOCAB_SIZE = 768
CONTEXT = 2048
# Less than the context holds: some requests are too large for the memory and not for the model.
NUM_PAGES = 1800
IDS = pack_ints([10, 11, 12])
GENERATE = next(method for method in methods() if method.name == "RouterService/Generate")
# First field of a message with a text: field 3 with two bytes that are the UTF-8 of no character, a surrogate's.
LONE_SURROGATE = b"\x1a\x03\xed\xa0\x80"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[Mesh]:
    worker = {"num_pages": NUM_PAGES, "simulated_base_us": 1000}
    async with observed_mesh(worker=worker) as mesh:
        yield mesh


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def invariants_hold(mesh: Mesh) -> AsyncIterator[None]:
    """After every test the mesh gives a known answer, nothing is left behind and nobody has died."""
    pids = mesh.cluster.pids
    yield
    await serves_on(mesh, known_job())
    await settled(mesh)
    assert mesh.cluster.pids == pids, "a daemon died"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bad:
    """fields: of GenerateRequest, beside good ones. says: words of the message, which tell what to do."""

    name: str
    reason: str
    fields: dict[str, object]
    says: str
    metadata: dict[str, str] = field(default_factory=dict)
    status: str = "INVALID_ARGUMENT"


def out_of_range(name: str, field: str, says: str, **fields: object) -> Bad:
    return Bad(name=name, reason="INVALID_ARGUMENT", fields=fields, says=says, metadata={"field": field})


def outside(name: str, token: int, **fields: object) -> Bad:
    metadata = {"id": str(token), "vocab_size": str(VOCAB_SIZE)}
    return Bad(name=name, reason="TOKEN_OUT_OF_VOCABULARY", fields=fields, says="ids are 0 to 767", metadata=metadata)


def broken_array(name: str, **fields: object) -> Bad:
    return Bad(
        name=f"{name} of 3 bytes",
        reason="MALFORMED_MESSAGE",
        fields=fields,
        says="multiple of 4",
        metadata={"field": name},
    )


def chat(*messages: tuple[str, str, str], **fields: object) -> dict[str, object]:
    built = tokenizer_pb2.ChatInput(**fields)  # type: ignore[arg-type]
    for role, content, extra_json in messages:
        built.messages.add(role=role, content=content, extra_json=extra_json)
    return {"chat": built}


def bad_chat(name: str, says: str, fields: dict[str, object]) -> Bad:
    return Bad(name=name, reason="INVALID_CHAT", fields=fields, says=says)


NAN, INFINITY = float("nan"), float("inf")
BAD = [
    out_of_range("temperature below 0", "temperature", "[0, 100]", sampling=SamplingParams(temperature=-0.5)),
    out_of_range("temperature NaN", "temperature", "[0, 100]", sampling=SamplingParams(temperature=NAN)),
    out_of_range("temperature infinite", "temperature", "[0, 100]", sampling=SamplingParams(temperature=INFINITY)),
    out_of_range("top_p above 1", "top_p", "choose", sampling=SamplingParams(top_p=1.5)),
    out_of_range("top_p 0", "top_p", "choose", sampling=SamplingParams(top_p=0.0)),
    out_of_range("top_p NaN", "top_p", "choose", sampling=SamplingParams(top_p=NAN)),
    out_of_range("min_p below 0", "min_p", "[0, 1]", sampling=SamplingParams(min_p=-0.1)),
    out_of_range("top_k beyond int32", "top_k", "choose", sampling=SamplingParams(top_k=2**32 - 1)),
    out_of_range(
        "repetition_penalty 0", "repetition_penalty", "choose", sampling=SamplingParams(repetition_penalty=0.0)
    ),
    out_of_range("frequency_penalty 3", "frequency_penalty", "[-2, 2]", sampling=SamplingParams(frequency_penalty=3)),
    out_of_range("presence_penalty NaN", "presence_penalty", "choose", sampling=SamplingParams(presence_penalty=NAN)),
    out_of_range("65 logprobs", "num_top_logprobs", "[0, 64]", sampling=SamplingParams(num_top_logprobs=65)),
    out_of_range(
        "a bias of NaN",
        "logit_bias",
        "[-100, 100]",
        sampling=SamplingParams(logit_bias_ids=pack_ints([1]), logit_bias_values=pack_floats([NAN])),
    ),
    out_of_range(
        "more biases than values",
        "logit_bias",
        "one value per id",
        sampling=SamplingParams(logit_bias_ids=pack_ints([1, 2]), logit_bias_values=pack_floats([1.0])),
    ),
    out_of_range("n 0", "n", "[1, 128]", n=0),
    out_of_range("n 1000", "n", "[1, 128]", n=1000),
    out_of_range("max_tokens 0", "max_tokens", "choose", stop=StopParams(max_tokens=0)),
    out_of_range("min_tokens above max_tokens", "min_tokens", "[0, 4]", stop=StopParams(max_tokens=4, min_tokens=5)),
    out_of_range("an empty stop string", "stop", "leave it out", stop=StopParams(stop=["a", ""])),
    out_of_range("stop strings without text", "stop.stop", "drop one", ids_only=True, stop=StopParams(stop=["a"])),
    out_of_range("a request id of 1 KB", "request_id", "1 to 256 of printable ASCII", request_id="x" * 1024),
    out_of_range("a request id of two lines", "request_id", "1 to 256 of printable ASCII", request_id="a\nb"),
    out_of_range("a tenant that clears a terminal", "tenant", "leave them out", tenant="\x1b[2J"),
    Bad(
        name="10,000 stop strings",
        reason="TOO_MANY_STOPS",
        fields={"stop": StopParams(stop=[f"s{i}" for i in range(10_000)])},
        says="at most 64",
        metadata={"max": "64"},
    ),
    Bad(
        name="a stop string of 2 KB",
        reason="TOO_MANY_STOPS",
        fields={"stop": StopParams(stop=["x" * 2048])},
        says="at most 1024",
        metadata={"max": "1024"},
    ),
    Bad(
        name="300 stop ids",
        reason="TOO_MANY_STOPS",
        fields={"stop": StopParams(stop_ids=pack_ints(range(300)))},
        says="at most 256",
        metadata={"max": "256"},
    ),
    Bad(
        name="no input",
        reason="MISSING_FIELD",
        fields={"prompt_ids": None},
        says="set text",
        metadata={"field": "input"},
    ),
    Bad(name="no prompt ids", reason="EMPTY_PROMPT", fields={"prompt_ids": b""}, says="at least one"),
    Bad(
        name="a prompt as long as the context",
        reason="PROMPT_TOO_LONG",
        fields={"prompt_ids": pack_ints([7] * CONTEXT)},
        says="shorten",
        metadata={"prompt_tokens": str(CONTEXT), "max_total_len": str(CONTEXT)},
    ),
    Bad(
        name="a text longer than the context",
        reason="PROMPT_TOO_LONG",
        fields={"text": "Wombat, " * 3000},
        says="shorten",
        metadata={"max_total_len": str(CONTEXT)},
    ),
    Bad(
        name="a text of 5 MB",
        reason="TOO_LARGE",
        status="RESOURCE_EXHAUSTED",
        fields={"text": "x" * 5_000_000},
        says="send less",
        metadata={"max": str(4 << 20)},
    ),
    outside("an id beyond the vocabulary", VOCAB_SIZE, prompt_ids=pack_ints([1, VOCAB_SIZE])),
    outside("a negative id", -1, prompt_ids=pack_ints([1, -1])),
    outside("a stop id beyond the vocabulary", VOCAB_SIZE, stop=StopParams(stop_ids=pack_ints([VOCAB_SIZE]))),
    outside(
        "a biased id beyond the vocabulary",
        -5,
        sampling=SamplingParams(logit_bias_ids=pack_ints([-5]), logit_bias_values=pack_floats([1.0])),
    ),
    broken_array("prompt_ids", prompt_ids=b"123"),
    broken_array("stop_ids", stop=StopParams(stop_ids=b"123")),
    broken_array("logit_bias_ids", sampling=SamplingParams(logit_bias_ids=b"123")),
    broken_array("logit_bias_values", sampling=SamplingParams(logit_bias_values=b"123")),
    Bad(
        name="an unknown model",
        reason="UNKNOWN_MODEL",
        status="NOT_FOUND",
        fields={"model": "gpt-17"},
        says="choose one of tiny-llama",
        metadata={"model": "gpt-17"},
    ),
    Bad(
        name="a grammar",
        reason="UNSUPPORTED",
        status="UNIMPLEMENTED",
        fields={"grammar": common_pb2.Grammar(regex="a+")},
        says="leave it out",
        metadata={"feature": "grammar"},
    ),
    Bad(
        name="a task of a newer version",
        reason="UNSUPPORTED",
        status="UNIMPLEMENTED",
        fields={"task": 99},
        says="generate, embed or score",
        metadata={"feature": "task"},
    ),
    bad_chat("a chat without messages", "message", chat()),
    bad_chat("a role that the template refuses", "the roles are", chat(("wizard", "hi", ""))),
    bad_chat("a message without a role", "role", chat(("", "hi", ""))),
    bad_chat("extra_json that is no JSON", "JSON", chat(("user", "hi", "{"))),
    bad_chat("extra_json that is no object", "JSON object", chat(("user", "hi", "[1]"))),
    bad_chat("extra_json with a role", "role", chat(("user", "hi", '{"role": "system"}'))),
    bad_chat("tools that are no array", "JSON array", chat(("user", "hi", ""), tools_json="{}")),
    bad_chat("template arguments that are no object", "JSON object", chat(("user", "hi", ""), template_args_json="3")),
    bad_chat(
        "a chat that is both continued and answered",
        "leave one",
        chat(("user", "hi", ""), continue_final_message=True, add_generation_prompt=True),
    ),
    Bad(
        name="a resume of nothing",
        reason="INVALID_RESUME",
        fields={"resume": router_pb2.Resume(resumption=1)},
        says="send the first message",
    ),
]


def request_of(bad: Bad) -> router_pb2.GenerateRequest:
    is_input_given = bad.fields.keys() & {"text", "chat", "prompt_ids"}
    fields: dict[str, object] = {**({} if is_input_given else {"prompt_ids": IDS}), **bad.fields}
    return router_pb2.GenerateRequest(**fields)  # type: ignore[arg-type]


async def refusal_to(mesh: Mesh, request: router_pb2.GenerateRequest) -> Refusal | None:
    async with open_channel(mesh.routers[0]) as channel:
        return await refusal_of(router_pb2_grpc.RouterServiceStub(channel).Generate(request))


async def responses_to(mesh: Mesh, request: router_pb2.GenerateRequest) -> list[router_pb2.GenerateResponse]:
    async with open_channel(mesh.routers[0]) as channel:
        return [response async for response in router_pb2_grpc.RouterServiceStub(channel).Generate(request)]


def finishes_of(responses: list[router_pb2.GenerateResponse]) -> list[router_pb2.OutputFinished]:
    return [finished for response in responses for finished in response.finished]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
async def test_a_bad_request_is_refused_with_its_own_reason(mesh: Mesh, bad: Bad) -> None:
    refusal = await refusal_to(mesh, request_of(bad))
    assert refusal is not None, "it was answered"
    assert (refusal.status, refusal.reason) == (bad.status, bad.reason), refusal
    assert bad.says in refusal.message
    assert bad.metadata.items() <= refusal.metadata.items(), refusal


@pytest.mark.parametrize(
    "raw",
    [
        b"\xff\xff\xff",
        b"\x0a\xff\xff\xff\xff\x0f",
        LONE_SURROGATE,
        b"\x42\x05\x1a\x03\xed\xa0\x80",
        bytes(range(256)) * 64,
    ],
    ids=["no field", "a length beyond the end", "a lone surrogate as text", "and as stop string", "16 KB of noise"],
)
async def test_bytes_that_are_no_request_are_refused(mesh: Mesh, raw: bytes) -> None:
    async with raw_channel(mesh.routers[0]) as channel:
        refusal = await send_raw(channel, GENERATE, [raw])
    assert refusal is not None
    assert (refusal.status, refusal.reason) == ("INVALID_ARGUMENT", "MALFORMED_MESSAGE")
    assert "check the versions" in refusal.message


async def test_a_lone_surrogate_in_json_does_not_reach_the_tokenizer(mesh: Mesh) -> None:
    """JSON can spell what UTF-8 cannot; the template may write it into the prompt."""
    for fields in (
        chat(("user", "hi", '{"name": "\\ud800"}')),
        chat(("user", "hi", ""), tools_json='[{"name": "\\udfff"}]'),
        chat(("user", "hi", ""), template_args_json='{"bos_token": "\\ud800"}'),
    ):
        request = router_pb2.GenerateRequest(**fields, stop=StopParams(max_tokens=4))  # type: ignore[arg-type]
        refusal = await refusal_to(mesh, request)
        # Refused, unless the template does not look at it.
        assert refusal is None or (refusal.status, refusal.reason) == ("INVALID_ARGUMENT", "INVALID_CHAT"), refusal


async def test_an_empty_text_is_no_prompt_unless_the_tokenizer_makes_it_one(mesh: Mesh) -> None:
    """This vocabulary begins every text with <|begin_of_text|>, so that an empty one has a token."""
    tokens = await mesh.client.tokenize("")
    refusal = await refusal_to(mesh, router_pb2.GenerateRequest(text="", stop=StopParams(max_tokens=2)))
    if tokens:
        assert refusal is None
    else:
        assert refusal is not None and refusal.reason == "EMPTY_PROMPT", refusal


async def test_more_min_tokens_than_the_context_holds_end_where_the_context_does(mesh: Mesh) -> None:
    prompt = [7] * 1780
    stop = StopParams(min_tokens=5000, max_tokens=20)
    refusal = await refusal_to(mesh, router_pb2.GenerateRequest(prompt_ids=pack_ints(prompt), stop=stop))
    assert refusal is not None and refusal.metadata["field"] == "min_tokens"
    near = pack_ints([7] * (CONTEXT - 300))
    responses = await responses_to(
        mesh, router_pb2.GenerateRequest(prompt_ids=near, stop=StopParams(max_tokens=40, min_tokens=40))
    )
    (finished,) = finishes_of(responses)
    assert (finished.reason, finished.num_output) == (common_pb2.FINISH_REASON_LENGTH, 40)


async def test_a_request_that_memory_can_never_hold_is_told_so(mesh: Mesh) -> None:
    request = router_pb2.GenerateRequest(prompt_ids=pack_ints([7] * 1700), stop=StopParams(max_tokens=300))
    (finished,) = finishes_of(await responses_to(mesh, request))
    assert finished.reason == common_pb2.FINISH_REASON_ERROR
    assert finished.error.reason == common_pb2.ERROR_REASON_NEVER_FITS
    assert "ask for fewer tokens" in finished.error.message
    assert finished.error.metadata == {"needed_pages": "1999", "total_pages": str(NUM_PAGES)}


async def test_without_max_tokens_an_output_ends_where_memory_does(mesh: Mesh) -> None:
    request = router_pb2.GenerateRequest(prompt_ids=pack_ints([7] * 1700), stop=StopParams(ignore_eos=True))
    (finished,) = finishes_of(await responses_to(mesh, request))
    assert (finished.reason, finished.num_output) == (common_pb2.FINISH_REASON_LENGTH, NUM_PAGES + 1 - 1700)


@pytest.mark.parametrize("form", ["text", "ids"])
async def test_a_deadline_of_zero_is_over_already(mesh: Mesh, form: str) -> None:
    request = router_pb2.GenerateRequest(deadline_ms=0, stop=StopParams(max_tokens=100))
    if form == "text":
        request.text = "The"
    else:
        request.prompt_ids = IDS
    refusal = await refusal_to(mesh, request)
    assert refusal is not None
    assert (refusal.status, refusal.reason) == ("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED")
    assert "deadline_ms" in refusal.message


async def test_a_deadline_in_the_middle_delivers_what_there_is(mesh: Mesh) -> None:
    request = router_pb2.GenerateRequest(prompt_ids=IDS, deadline_ms=300, stop=StopParams(max_tokens=1500))
    responses = await responses_to(mesh, request)
    (finished,) = finishes_of(responses)
    assert finished.error.reason == common_pb2.ERROR_REASON_DEADLINE_EXCEEDED
    ids = [id for response in responses for delta in response.deltas for id in unpack_ints(delta.ids, "ids").tolist()]
    assert 0 < finished.num_output == len(ids) < 1500
    assert ids == simulated_continuation([10, 11, 12], len(ids), alphabet=simulated_alphabet(), temperature=1.0,
                                         seed=responses[0].resolved.seeds[0])  # fmt: skip


async def test_extremes_that_are_legal_are_served(mesh: Mesh) -> None:
    """The ends of every range."""
    for fields in (
        {"n": 128, "stop": StopParams(max_tokens=2)},
        {"sampling": SamplingParams(temperature=100, top_p=1e-6, min_p=1, top_k=2**31 - 1, seed=2**64 - 1)},
        {"sampling": SamplingParams(temperature=1e-30, repetition_penalty=1e6, frequency_penalty=-2)},
        {"stop": StopParams(max_tokens=3, stop=["x" * 1024] * 64, stop_ids=pack_ints(range(256)))},
        {"priority": -(2**31), "deadline_ms": 2**64 - 1, "tenant": "é" * 128, "cache_salt": "\0", "request_id": "~"},
    ):
        request = router_pb2.GenerateRequest(prompt_ids=IDS, **fields)  # type: ignore[arg-type]
        if not request.stop.HasField("max_tokens"):
            request.stop.max_tokens = 3
        finishes = finishes_of(await responses_to(mesh, request))
        assert len(finishes) == max(1, request.n)
        assert all(f.reason in (common_pb2.FINISH_REASON_LENGTH, common_pb2.FINISH_REASON_STOP) for f in finishes)


async def test_a_message_beyond_64_mib_is_refused_by_the_transport(mesh: Mesh) -> None:
    """grpc's own answer carries no ErrorInfo; clients make TOO_LARGE of its status."""
    too_large = router_pb2.GenerateRequest(prompt_ids=bytes(64 << 20)).SerializeToString()
    async with raw_channel(mesh.routers[0]) as channel:
        refusal = await send_raw(channel, GENERATE, [too_large])
    assert refusal is not None
    assert (refusal.status, refusal.reason) == ("RESOURCE_EXHAUSTED", "TOO_LARGE")


async def test_one_id_names_one_living_request(mesh: Mesh) -> None:
    request = router_pb2.GenerateRequest(request_id="twin", prompt_ids=IDS, stop=StopParams(max_tokens=600))
    async with open_channel(mesh.routers[0]) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        first = stub.Generate(request)
        stream = aiter(first)
        resolved = (await anext(stream)).resolved
        refusal = await refusal_of(stub.Generate(request))
        assert refusal is not None
        assert (refusal.status, refusal.reason) == ("ALREADY_EXISTS", "DUPLICATE_REQUEST")
        assert "choose another id, or resume" in refusal.message
        # A resumption that does not count up changes nothing, a broken one neither.
        for resume in (
            router_pb2.Resume(resolved=resolved, outputs=[router_pb2.OutputProgress()], resumption=0),
            router_pb2.Resume(resolved=resolved, resumption=1),
        ):
            refusal = await refusal_of(stub.Generate(router_pb2.GenerateRequest(resume=resume)))
            assert refusal is not None and refusal.reason in ("INVALID_RESUME", "DUPLICATE_REQUEST"), refusal
        ids = [
            id async for response in first for delta in response.deltas for id in unpack_ints(delta.ids, "ids").tolist()
        ]
        seed = resolved.seeds[0]
        alphabet = simulated_alphabet()
        assert ids == simulated_continuation([10, 11, 12], 600, alphabet=alphabet, temperature=1.0, seed=seed)


async def good_resume(mesh: Mesh) -> router_pb2.Resume:
    responses = await responses_to(mesh, router_pb2.GenerateRequest(prompt_ids=IDS, n=2, stop=StopParams(max_tokens=4)))
    resume = router_pb2.Resume(resolved=responses[0].resolved, resumption=1)
    resume.outputs.add()
    resume.outputs.add()
    return resume


RESUMES = {
    "resumption 0": ("INVALID_RESUME", lambda r: setattr(r, "resumption", 0)),
    "resumption 40,000": ("INVALID_RESUME", lambda r: setattr(r, "resumption", 40_000)),
    "one output too many": ("INVALID_RESUME", lambda r: r.outputs.add()),
    "one output too few": ("INVALID_RESUME", lambda r: r.outputs.pop()),
    "text that no id made": ("INVALID_RESUME", lambda r: setattr(r.outputs[0], "text_bytes", 7)),
    "more ids than max_tokens": ("INVALID_RESUME", lambda r: setattr(r.outputs[1], "output_ids", pack_ints([9] * 5))),
    "an id that is none": ("TOKEN_OUT_OF_VOCABULARY", lambda r: setattr(r.outputs[0], "output_ids", pack_ints([-2]))),
    "ids of 3 bytes": ("MALFORMED_MESSAGE", lambda r: setattr(r.outputs[0], "output_ids", b"123")),
    "no prompt": ("EMPTY_PROMPT", lambda r: setattr(r.resolved, "prompt_ids", b"")),
    "no seeds": ("INVALID_RESUME", lambda r: r.resolved.ClearField("seeds")),
    "no request id": ("INVALID_RESUME", lambda r: setattr(r.resolved, "request_id", "")),
    "a grammar": ("UNSUPPORTED", lambda r: setattr(r.resolved.grammar, "regex", "a")),
    "temperature NaN": ("INVALID_ARGUMENT", lambda r: setattr(r.resolved.sampling, "temperature", NAN)),
    "an endless output": ("INVALID_RESUME", lambda r: setattr(r.resolved.stop, "max_tokens", 2**31 - 1)),
    "another model": ("UNKNOWN_MODEL", lambda r: setattr(r.resolved, "model", "gpt-17")),
    "other weights": ("MODEL_MISMATCH", lambda r: setattr(r.resolved.model_identity, "model_fingerprint", "ab")),
    "another tokenizer": ("MODEL_MISMATCH", lambda r: setattr(r.resolved.model_identity, "tokenizer_fingerprint", "a")),
    "another sampler": ("MODEL_MISMATCH", lambda r: setattr(r.resolved.model_identity, "sampler_version", 9)),
    "another vocabulary": ("MODEL_MISMATCH", lambda r: setattr(r.resolved.model_identity, "vocab_size", 900)),
}


@pytest.mark.parametrize("name", RESUMES)
async def test_a_resume_that_contradicts_itself_is_refused(mesh: Mesh, name: str) -> None:
    reason, spoil = RESUMES[name]
    resume = await good_resume(mesh)
    spoil(resume)  # type: ignore[no-untyped-call]
    refusal = await refusal_to(mesh, router_pb2.GenerateRequest(resume=resume))
    assert refusal is not None and refusal.reason == reason, refusal
    assert refusal.message


async def test_a_context_that_a_resume_invents_is_no_replicas(mesh: Mesh) -> None:
    """It may have been that of a larger replica, which may come back: the answer is one that can be retried."""
    resume = await good_resume(mesh)
    resume.resolved.model_identity.max_total_len = 2**31 - 1
    resume.resolved.prompt_ids = pack_ints([7] * (CONTEXT + 5))
    refusal = await refusal_to(mesh, router_pb2.GenerateRequest(resume=resume))
    assert refusal is not None and (refusal.status, refusal.reason) == ("UNAVAILABLE", "NO_REPLICA"), refusal


async def test_eos_ids_that_a_resume_invents_end_nothing(mesh: Mesh) -> None:
    resume = await good_resume(mesh)
    resume.resolved.model_identity.eos_ids = b"123"
    finishes = finishes_of(await responses_to(mesh, router_pb2.GenerateRequest(resume=resume)))
    assert [f.error.reason for f in finishes] == [0, 0]


@pytest.mark.parametrize("text_bytes", [5000, 1], ids=["beyond the text", "within a character"])
async def test_a_text_position_that_the_ids_do_not_have_ends_that_output(mesh: Mesh, text_bytes: int) -> None:
    """Only the detokenizer can know; its refusal is the output's, and the other output goes on."""
    resume = await good_resume(mesh)
    umlaut = await mesh.client.tokenize("ü")
    resume.outputs[0].output_ids = pack_ints(umlaut[-2:] if len(umlaut) > 2 else umlaut)
    resume.outputs[0].text_bytes = text_bytes
    finishes = finishes_of(await responses_to(mesh, router_pb2.GenerateRequest(resume=resume)))
    by_index = {f.index: f for f in finishes}
    assert by_index[0].error.reason == common_pb2.ERROR_REASON_INVALID_RESUME
    assert by_index[1].reason == common_pb2.FINISH_REASON_LENGTH


async def test_the_unary_verbs_refuse_too(mesh: Mesh) -> None:
    async with open_channel(mesh.routers[0]) as channel:
        router = router_pb2_grpc.RouterServiceStub(channel)
        admin = router_pb2_grpc.RouterAdminServiceStub(channel)
        many = router_pb2.TokenizeRequest(items=[tokenizer_pb2.EncodeItem(text="a")] * 5000)
        for call, status, reason in (
            (router.Abort(router_pb2.AbortRequest()), "INVALID_ARGUMENT", "MISSING_FIELD"),
            (router.Tokenize(router_pb2.TokenizeRequest(model="gpt-17")), "NOT_FOUND", "UNKNOWN_MODEL"),
            (router.Tokenize(many), "RESOURCE_EXHAUSTED", "TOO_LARGE"),
            (admin.AddScheduler(router_pb2.AddSchedulerRequest()), "INVALID_ARGUMENT", "MISSING_FIELD"),
            (
                admin.AddScheduler(router_pb2.AddSchedulerRequest(address="nowhere")),
                "INVALID_ARGUMENT",
                "INVALID_ARGUMENT",
            ),
            (admin.RemoveScheduler(router_pb2.RemoveSchedulerRequest(address="x:1")), "INVALID_ARGUMENT",
             "INVALID_ARGUMENT"),
            (admin.DrainScheduler(router_pb2.DrainSchedulerRequest()), "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
        ):  # fmt: skip
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call
            refusal = refusal_from(raised.value)
            assert (refusal.status, refusal.reason) == (status, reason), refusal
            assert refusal.message
        unknown = await router.Abort(router_pb2.AbortRequest(request_id="never-seen"))
        assert unknown.outcome == router_pb2.ABORT_OUTCOME_UNKNOWN
        tokenized = await router.Tokenize(
            router_pb2.TokenizeRequest(items=[tokenizer_pb2.EncodeItem(), tokenizer_pb2.EncodeItem(text="The")])
        )
        assert tokenized.items[0].error.reason == common_pb2.ERROR_REASON_MISSING_FIELD
        assert tokenized.items[1].ids


async def test_a_flood_of_bad_requests_among_good_ones(mesh: Mesh) -> None:
    """Everything at once: each is refused for itself, and a stream between them gets its answer."""
    job = known_job(200)
    answers = asyncio.create_task(job.run(mesh.client))
    refusals = await asyncio.gather(*(refusal_to(mesh, request_of(bad)) for bad in BAD if bad.name != "a text of 5 MB"))
    assert all(refusal is not None for refusal in refusals)
    assert await answers == job.answers
