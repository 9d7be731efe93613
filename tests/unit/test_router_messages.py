"""Models and requests as routers keep them, and as clients and peers are told of them: nothing is lost between."""

from __future__ import annotations

from google.protobuf.message import Message

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.router.messages import identity_from_proto, identity_to_proto, resolved_to_proto
from radixmesh.daemons.router.requests.intake.resolver import check_request, resolve
from radixmesh.daemons.router.requests.intake.resume import check_resume, rebuild
from radixmesh.daemons.runtime.arrays import pack_floats, pack_ints
from radixmesh.router.v1 import router_pb2

IDENTITY = common_pb2.ModelIdentity(
    name="m",
    model_fingerprint="f00d",
    tokenizer_fingerprint="beef",
    grammar_format="xgrammar/1",
    sampler_version=1,
    vocab_size=1000,
    max_total_len=64,
    eos_ids=pack_ints([2, 7]),
    default_sampling=common_pb2.SamplingDefaults(
        temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.5
    ),
)
REQUEST = router_pb2.GenerateRequest(
    prompt_ids=pack_ints([1, 2, 3]),
    n=2,
    sampling=common_pb2.SamplingParams(
        seed=5,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        logit_bias_ids=pack_ints([9]),
        logit_bias_values=pack_floats([1.5]),
        num_top_logprobs=3,
        prompt_logprobs=True,
        prompt_logprobs_start=2,
    ),
    stop=common_pb2.StopParams(
        max_tokens=20,
        min_tokens=4,
        stop=["end"],
        stop_ids=pack_ints([11]),
        include_stop=True,
        skip_special_tokens=False,
    ),
    grammar=common_pb2.Grammar(regex="a+"),
    cache_salt="s",
    priority=-3,
    tenant="t",
    session="chat",
)
# Of two that exclude each other, and of a request that has begun.
NOT_RESOLVED = {"ids_only", "trace_context"}


def unset(message: Message) -> set[str]:
    """Names of fields that say nothing."""
    return {field.name for field in message.DESCRIPTOR.fields} - {field.name for field, _ in message.ListFields()}


def test_an_identity_survives_both_ways_in_every_field() -> None:
    assert not unset(IDENTITY), "a field that this test does not know"
    assert identity_to_proto(identity_from_proto(IDENTITY)) == IDENTITY
    bare = common_pb2.ModelIdentity(name="m")
    assert identity_to_proto(identity_from_proto(bare)) == bare


def test_a_resolved_request_is_told_with_every_field_and_comes_back_the_same() -> None:
    identity = identity_from_proto(IDENTITY)
    resolved = resolve(
        REQUEST, check_request(REQUEST), request_id="r", prompt_ids=REQUEST.prompt_ids, identity=identity
    )
    message = resolved_to_proto(resolved)
    assert unset(message) == NOT_RESOLVED, "a field that messages.py or this test does not know"
    assert unset(message.sampling) == {"seed"}, (
        "each output has a seed; another field: one that this test does not know"
    )
    assert abs(message.sampling.temperature - 0.6) < 1e-6 and message.sampling.top_k == 20, "the model's own defaults"
    assert unset(message.stop) == {"ignore_eos"} - {field.name for field, _ in message.stop.ListFields()}
    resume = router_pb2.GenerateRequest(
        resume=router_pb2.Resume(resolved=message, resumption=1, outputs=[router_pb2.OutputProgress()] * 2)
    )
    check_resume(resume)
    again, _ = rebuild(resume, identity)
    assert again == resolved
