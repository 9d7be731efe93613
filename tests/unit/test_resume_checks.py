"""Every claim of a resume at its bound and beyond it: what the cheap check takes, refuses, and hands on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from radixmesh.daemons.router.requests.intake.resolver import MAX_N, MAX_NAME_BYTES
from radixmesh.daemons.router.requests.intake.resume import MAX_RESUMPTION, check_resume, rebuild
from radixmesh.daemons.router.served_identity import ServedIdentity
from radixmesh.daemons.runtime.arrays import pack_ints
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.daemons.runtime.steps.step import Task
from radixmesh.router.v1 import router_pb2

CONTEXT, PROMPT = 64, (5, 6, 7)
IDENTITY = ServedIdentity(name="m", vocab_size=100, max_total_len=CONTEXT, eos_ids=pack_ints([2]))
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
Change = Callable[[router_pb2.GenerateRequest], object]


def good(num_outputs: int = 2) -> router_pb2.GenerateRequest:
    resolved = router_pb2.Resolved(
        request_id="r-1", model="m", prompt_ids=pack_ints(PROMPT), seeds=range(num_outputs), cache_salt="s",
        priority=3, tenant="t", session="a", trace_context=TRACE,
    )  # fmt: skip
    resolved.model_identity.vocab_size, resolved.model_identity.max_total_len = 100, CONTEXT
    resolved.sampling.temperature, resolved.sampling.seed = 1.0, 9
    resolved.stop.max_tokens = CONTEXT - len(PROMPT)
    outputs = [router_pb2.OutputProgress(output_ids=pack_ints([8, 9]), text_bytes=4) for _ in range(num_outputs)]
    return router_pb2.GenerateRequest(resume=router_pb2.Resume(resolved=resolved, resumption=1, outputs=outputs))


def changed(change: Change, num_outputs: int = 2) -> router_pb2.GenerateRequest:
    request = good(num_outputs)
    change(request)
    return request


def set_in(path: str, value: object) -> Change:
    """Sets `resume.<path>`; an index is a number between dots."""

    def change(request: router_pb2.GenerateRequest) -> None:
        target, *names = request.resume, *path.split(".")
        for name in names[:-1]:
            target = target[int(name)] if name.isdigit() else getattr(target, name)
        setattr(target, names[-1], value)

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda request: None,
        lambda request: setattr(request, "request_id", "r-1"),
        set_in("resumption", MAX_RESUMPTION),
        set_in("resolved.model_identity.model_fingerprint", "f" * MAX_NAME_BYTES),
        set_in("resolved.model_identity.tokenizer_fingerprint", "f" * MAX_NAME_BYTES),
        set_in("resolved.stop.max_tokens", 1 + 1),
        set_in("outputs.1.output_ids", pack_ints([8] * (CONTEXT - len(PROMPT)))),
        set_in("outputs.0.output_ids", b""),
        set_in("resolved.model_identity.max_total_len", CONTEXT + 1),
    ],
)
def test_what_is_in_bounds_passes(change: Change) -> None:
    check_resume(changed(change))


def test_as_many_outputs_as_a_request_may_have() -> None:
    check_resume(good(MAX_N))


def test_one_token_is_enough() -> None:
    request = changed(set_in("resolved.stop.max_tokens", 1))
    for output in request.resume.outputs:
        output.output_ids = pack_ints([8])
    check_resume(request)


def test_a_task_is_one_that_is_offered_and_a_pooled_one_has_one_output() -> None:
    with pytest.raises(MeshError, match="task 99 is none"):
        check_resume(changed(set_in("resolved.task", 99)))
    pooled = changed(set_in("resolved.task", Task.EMBED.value), num_outputs=2)
    for output in pooled.resume.outputs:
        output.output_ids, output.text_bytes = b"", 0
    pooled.resume.resolved.stop.max_tokens = 1
    check_resume(pooled)
    with pytest.raises(MeshError) as caught:
        rebuild(pooled, IDENTITY)
    assert caught.value.metadata["field"] == "n"
    del pooled.resume.outputs[1:], pooled.resume.resolved.seeds[1:]
    resolved, _ = rebuild(pooled, IDENTITY)
    assert (resolved.task, resolved.ids_only) == (Task.EMBED, True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda request: request.resume.ClearField("resolved"), "first message"),
        (set_in("resolved.request_id", ""), "first message"),
        (set_in("resolved.model", ""), "first message"),
        (lambda request: setattr(request, "request_id", "other"), "request_id is not 'r-1'"),
        (set_in("resolved.model_identity.model_fingerprint", "f" * (MAX_NAME_BYTES + 1)), "model_fingerprint"),
        (set_in("resolved.model_identity.tokenizer_fingerprint", "f" * (MAX_NAME_BYTES + 1)), "tokenizer_fingerprint"),
        (set_in("resumption", 0), "resumption is 0"),
        (set_in("resumption", MAX_RESUMPTION + 1), "count from 1"),
        (lambda request: request.resume.outputs.pop(), "1 outputs for 2 seeds"),
        (lambda request: request.resume.resolved.seeds.pop(), "2 outputs for 1 seeds"),
        (set_in("resolved.model_identity.vocab_size", 0), "lacks vocab_size"),
        (set_in("resolved.model_identity.max_total_len", 0), "lacks vocab_size"),
        (set_in("resolved.stop.max_tokens", 0), "stop.max_tokens"),
        (set_in("resolved.stop.max_tokens", CONTEXT - len(PROMPT) + 1), "stop.max_tokens"),
        (set_in("outputs.1.output_ids", pack_ints([8] * (CONTEXT - len(PROMPT) + 1))), "output 1 has 62 ids"),
    ],
)
def test_each_claim_beyond_its_bound_is_named(change: Change, said: str) -> None:
    with pytest.raises(MeshError, match=said) as caught:
        check_resume(changed(change))
    assert caught.value.reason == ErrorReason.ERROR_REASON_INVALID_RESUME


@pytest.mark.parametrize("num", [0, MAX_N + 1])
def test_numbers_of_outputs_that_no_request_has(num: int) -> None:
    with pytest.raises(MeshError, match=f"{num} outputs for {num} seeds"):
        check_resume(good(num))


@pytest.mark.parametrize("name", ["cache_salt", "session", "tenant", "model"])
def test_names_are_checked_as_those_of_a_new_request(name: str) -> None:
    with pytest.raises(MeshError, match=name) as caught:
        check_resume(changed(set_in(f"resolved.{name}", "x" * (MAX_NAME_BYTES + 1))))
    assert caught.value.reason == ErrorReason.ERROR_REASON_INVALID_ARGUMENT


def test_a_request_is_rebuilt_with_all_that_was_claimed() -> None:
    request = good()
    request.resume.outputs[1].is_finished = True
    resolved, (first, second) = rebuild(request, IDENTITY)
    assert (resolved.request_id, resolved.model, resolved.seeds) == ("r-1", "m", (0, 1))
    assert (resolved.cache_salt, resolved.priority, resolved.tenant, resolved.session) == ("s", 3, "t", "a")
    assert resolved.model_identity is IDENTITY and resolved.prompt_ids == pack_ints(PROMPT)
    assert (resolved.sampling.seed, resolved.sampling.temperature) == (None, 1.0), "seeds are those of the outputs"
    assert (resolved.task, resolved.ids_only, resolved.grammar) == (Task.GENERATE, False, None)
    assert resolved.trace_context == TRACE
    assert (first.ids.tolist(), first.text_bytes, first.is_finished) == ([8, 9], 4, False)
    assert second.is_finished


def test_a_trace_that_is_none_is_left_out() -> None:
    resolved, _ = rebuild(changed(set_in("resolved.trace_context", "no trace")), IDENTITY)
    assert resolved.trace_context == ""


def test_the_last_id_alone_may_be_one_that_ends() -> None:
    def ids(*values: int) -> Change:
        return set_in("outputs.0.output_ids", np.array(values, "<i4").tobytes())

    rebuild(changed(ids(8, 2)), IDENTITY)
    with pytest.raises(MeshError, match="output 0 goes on after an id that ended it"):
        rebuild(changed(ids(2, 8)), IDENTITY)


@pytest.mark.parametrize(
    "change", [set_in("outputs.0.output_ids", b""), set_in("resolved.ids_only", True)], ids=["no ids", "ids only"]
)
def test_text_that_no_id_made_is_refused(change: Change) -> None:
    with pytest.raises(MeshError, match="output 0 has 4 bytes of text that no id made"):
        rebuild(changed(change), IDENTITY)


def test_ids_alone_have_no_stop_strings() -> None:
    def change(request: router_pb2.GenerateRequest) -> None:
        request.resume.resolved.ids_only = True
        request.resume.resolved.stop.stop.append("x")
        for output in request.resume.outputs:
            output.text_bytes = 0

    with pytest.raises(MeshError, match="ids_only with stop strings"):
        rebuild(changed(change), IDENTITY)
